"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008), one for each thing."""

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
DASHES = ["-", "--", ":", "-."]
MEASURED, PREDICTED = COLOURS[0], "#999999"
