"""Measured step times beside those predicted with the fitted constants: every row."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from labkit.plot.figure import Picture, styled
from labkit.plot.style import BLUE, FAINT, GREEN, IDLE, INK, MUTED, ORANGE, PURPLE, SKY, VERMILION
from labkit.replaying.planning.published import Calibration
from labkit.replaying.planning.published import calibration as stored

COLOURS = (SKY, BLUE, ORANGE, PURPLE, GREEN, VERMILION)  # of models, as they grow wider
MARKERS = "os^Dv*"
SHADED = {0.2: FAINT, 0.05: IDLE}  # so far off, and its grey
TICKS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@styled
def calibration(found: Calibration | None = None, figure: Figure | None = None) -> Figure:
    """Predicted over measured, and the error of each row with its interval of nine in ten; a hollow
    mark is the error where the constants were fitted to the other widths alone.

    Args:
        found: a `Calibration`; None for the one that labkit has.
    """
    fitted = stored() if found is None else found
    figure = Picture(4.4, layout="constrained") if figure is None else figure
    both, errors = figure.subplots(1, 2, width_ratios=[1, 1.7])
    _draw_both(both, fitted)
    _draw_errors(errors, fitted)
    off = np.abs(fitted.errors())
    out = np.abs(fitted.errors(fitted.without_model_s))
    figure.suptitle(
        f"{len(fitted.rows)} steps on A100s: off by {off.mean():.1%} in the mean, half of them by "
        f"less than {np.median(off):.1%}; models not fitted on: {out.mean():.1%}, "
        f"{np.median(out):.1%}",
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _models(fitted: Calibration) -> Iterator[tuple[str, np.ndarray, str, str]]:
    """The name of each model, its rows, its colour and its mark."""
    widths = np.array([row.sizes.width for row in fitted.rows])
    for width, colour, marker in zip(np.unique(widths), cycle(COLOURS), cycle(MARKERS)):
        yield f"width {width:,}", np.flatnonzero(widths == width), colour, marker


def _draw_both(axes: Axes, fitted: Calibration) -> None:
    measured, predicted = fitted.measured_s, fitted.predicted_s
    every = np.concatenate([measured, predicted])
    ends = np.array([0.8 * every.min(), 1.25 * every.max()])
    for part, grey in SHADED.items():
        axes.fill_between(ends, ends * (1 - part), ends * (1 + part), color=grey, lw=0)
    axes.plot(ends, ends, color=MUTED, lw=0.8)
    for name, rows, colour, marker in _models(fitted):
        x, y = measured[rows], predicted[rows]
        interval = np.maximum([y - fitted.low_s[rows], fitted.high_s[rows] - y], 0)
        axes.errorbar(x, y, interval, fmt="none", ecolor=colour, lw=0.6, alpha=0.5)
        axes.plot(x, y, marker, color=colour, ms=4, mec=INK, mew=0.3, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(TICKS_S))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g} s")
    axes.set(xlabel="measured", ylabel="predicted")
    axes.legend(loc="upper left")


def _draw_errors(axes: Axes, fitted: Calibration) -> None:
    """By width, and by what was measured: short steps first."""
    place = 0
    errors, out = fitted.errors(), fitted.errors(fitted.without_model_s)
    low, high = fitted.errors(fitted.low_s), fitted.errors(fitted.high_s)
    for part, grey in SHADED.items():
        axes.axhspan(-part, part, color=grey, lw=0)
    axes.axhline(0, color=MUTED, lw=0.8)
    middles = {}
    for name, rows, colour, marker in _models(fitted):
        rows = rows[np.argsort(fitted.measured_s[rows], kind="stable")]
        x = place + np.arange(len(rows))
        axes.vlines(x, low[rows], high[rows], color=colour, lw=0.8, alpha=0.45)
        axes.plot(x, out[rows], marker, mfc="none", mec=colour, ms=3.5, mew=0.7, alpha=0.8)
        axes.plot(x, errors[rows], marker, color=colour, ms=3.5, mec=INK, mew=0.3)
        middles[float(x.mean())] = f"{name}\n{len(rows)} steps"
        place += len(rows) + 6
    most = 1.1 * max(np.abs(errors).max(), np.abs(out).max(), 0.3)
    axes.set(ylim=(-most, most), xlim=(-4, place - 2), ylabel="predicted / measured - 1")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xticks(list(middles), list(middles.values()))
    axes.tick_params(axis="x", length=0)
    axes.set_title("hollow: fitted to the other widths; grey: 5 % and 20 %", loc="left")
