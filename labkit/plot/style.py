"""Colors shared by all plots, one per concept. Color-blind readers can distinguish the hues, which
are from Okabe and Ito (2008). A phase has the color of its output; transfers are purple, blue,
yellow, gray or brown by operation; vermilion marks lost time."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.colors import to_hex, to_rgb

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
GRAY, BROWN = "#5E6670", "#A6761D"

INK, MUTED, FAINT, PAPER = "#1F2933", "#525C68", "#E3E6EA", "#FFFFFF"  # text, lines, background

COLORS = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, BLACK]  # for strategies, in order
DASHES = ["-", "--", ":", "-."]

PHASES = {
    "forward": SKY,
    "backward": ORANGE,
    "input": YELLOW,  # in a pipeline: the halves of a backward
    "weight": BROWN,
    "update": GREEN,
    "optimizer": GREEN,
    "user": "#C9CED6",
}
CATEGORIES = {
    "parameters": BLUE,
    "gradients": PHASES["backward"],
    "optimizer state": PHASES["optimizer"],
    "activations": PHASES["forward"],
    "communication buffers": PURPLE,
    "other": "#D5D8DC",
}

# Two shades per operation alternate by sequence number: neighbors differ, all ranks agree.
OPERATIONS = {
    "all_reduce": (PURPLE, "#A34F7E"),
    "all_gather": (BLUE, "#004C77"),
    "reduce_scatter": (YELLOW, "#BFB419"),
    "send": (GRAY, "#2B323A"),
    "recv": (GRAY, "#2B323A"),
}
OTHER_OPERATIONS = (BROWN, "#7A5512")  # broadcast, barrier and so on

# Color and marker per algorithm; the algorithms of an operation differ in color.
ALGORITHMS = {
    "default": ("#C9CED6", ""),  # a broad line behind the other lines
    "ring": (BLUE, "o"),
    "tree": (ORANGE, "^"),
    "recursive_doubling": (GREEN, "s"),
    "halving_doubling": (VERMILION, "D"),
    "recursive_halving": (VERMILION, "D"),
    "double_tree": (PURPLE, "v"),
    "naive": (SKY, "*"),
    "flat": (SKY, "*"),
    "chain": (BROWN, "P"),
    "bruck": (BROWN, "P"),
    "hierarchical": ("#BFB419", "h"),
    "pairwise": (BLUE, "o"),
    "next": (BLUE, "o"),
}
OTHER_ALGORITHM = (GRAY, "p")
BACKENDS_OWN = (BLACK, "x")

WAITING, UNFINISHED = "#FBE3D5", VERMILION  # waits, outlined in vermilion; unfinished records
COMPUTING, HIDDEN = "#4A5560", PURPLE  # all phases together; computing during a transfer
IDLE = "#C9CED6"  # neither computing nor waiting
MEASURED, PREDICTED = "#4A5560", "#B4BAC2"

TEXT_PT, SMALL_PT, TITLE_PT = 9.0, 8.0, 10.5
WIDTH_IN, DPI = 10.0, 100  # 1000 pixels, which fit on a laptop's screen

# Independent of the style that a notebook sets for its own plots.
SETTINGS: Any = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT_PT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": TITLE_PT,
    "figure.edgecolor": PAPER,
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],  # included in matplotlib
    "font.size": TEXT_PT,
    "grid.color": FAINT,
    "hatch.color": VERMILION,
    "hatch.linewidth": 0.8,
    "legend.fontsize": TEXT_PT,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.bbox": None,
    "savefig.edgecolor": "auto",
    "savefig.facecolor": "auto",
    "savefig.transparent": False,
    "text.color": INK,
    "text.usetex": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": SMALL_PT,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": SMALL_PT,
}


def shade(op: str, number: int) -> str:
    """The shade of operation `op` for `number`, such as its sequence number."""
    return OPERATIONS.get(op, OTHER_OPERATIONS)[number % 2]


def tint(color: str, white: float) -> str:
    """`color` mixed with white; `white` is the fraction of white, from 0 to 1."""
    red, green, blue = (x + (1 - x) * white for x in to_rgb(color))
    return to_hex((red, green, blue)).upper()


def in_order(ops: Iterable[str]) -> list[str]:
    """Distinct operations, in the order of OPERATIONS, then by name."""
    present = set(ops)
    return [op for op in OPERATIONS if op in present] + sorted(present - OPERATIONS.keys())


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colors, 1 to 21; text needs 4.5 (WCAG 2.1, AA)."""
    srgb = np.array([to_rgb(first), to_rgb(second)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


def text_on(color: str) -> str:
    """Black or white, whichever has more contrast."""
    return max((BLACK, PAPER), key=lambda text: contrast(text, color))


def byte_unit(most_bytes: float) -> tuple[float, str]:
    """A readable unit for `most_bytes`, as its size in bytes and its name: (1e6, "MB")."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most_bytes >= scale:
            return scale, unit
    return 1.0, "bytes"
