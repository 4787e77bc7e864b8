"""Bus bandwidth against size: measured, and predicted by the alpha-beta model. Both axes are
logarithmic, so that algorithms can be compared at 4 KiB as well as at 64 MiB."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from labkit.plot.figure import constrained, note, styled
from labkit.plot.style import ALGORITHMS, BACKENDS_OWN, FAINT, MUTED, OTHER_ALGORITHM, SMALL_PT
from labkit.sweeps.alpha_beta import Fit, crossovers, fit_sweep
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, Point, Sweep, in_binary_units, read_sweep

PANEL_IN = 3.2
MOST_TICKS = 9
ROOM = 2.0  # the y-axis extends from the lowest rate / ROOM to the highest rate x ROOM squared
LEVELS = 3  # heights of crossover labels, so that neighbors do not overlap


@styled
def bandwidth(
    sweep: Sweep | str | Path, op: str | None = None, ranks: int | None = None,
    figure: Figure | None = None,
) -> Figure:  # fmt: skip
    """Bus bandwidth against size: measured (solid) and according to fitted alpha and beta (dashed).
    A dotted line marks a crossover: above this size, the fits favor a different labkit algorithm.

    Args:
        sweep: from `labkit.bench.bench_collectives`, or the path of a saved sweep.
        op, ranks: draw only this operation or number of ranks; None: all, one panel for each pair.

    Raises ValueError if nothing in the sweep matches.
    """
    sweep = sweep if isinstance(sweep, Sweep) else read_sweep(sweep)
    panels = [
        (name, n, points)
        for name, n, points in sweep.tables()
        if op in (None, name) and ranks in (None, n)
    ]
    if not panels:
        known = ", ".join(f"{name} on {n} ranks" for name, n, _ in sweep.tables()) or "nothing"
        raise ValueError(f"op={op!r}, ranks={ranks}: not in this sweep; it has {known}")
    fits = fit_sweep(sweep)
    figure = constrained(figure, PANEL_IN * len(panels))
    rows = figure.subplots(len(panels), 2, squeeze=False, width_ratios=[1.5, 1])
    for (axes, beside), (name, n, points) in zip(rows, panels):
        panel_fits = {fit.algorithm: fit for fit in fits if (fit.op, fit.ranks) == (name, n)}
        _draw(axes, points, panel_fits)
        _mark_crossovers(axes, points, panel_fits)
        title = f"{name} on {n} ranks: busbw = {BUS_FACTORS[name](n):.3g} algbw"
        axes.set_title(title, loc="center")
        axes.set(xlabel="size", ylabel="bus bandwidth, GB/s")
        beside.axis("off")
        beside.legend(
            *axes.get_legend_handles_labels(), loc="center left", borderaxespad=0,
            fontsize=SMALL_PT, title="dashed: time = steps x alpha + bytes x beta",
            title_fontsize=SMALL_PT, alignment="left",
        )  # fmt: skip
    return figure


def _draw(axes: Axes, points: Sequence[Point], fits: dict[str, Fit]) -> None:
    sizes = sorted({point.size_bytes for point in points})
    fine = np.geomspace(sizes[0], sizes[-1], 300)
    for name in dict.fromkeys(point.algorithm for point in points):
        line = sorted((p for p in points if p.algorithm == name), key=lambda p: p.size_bytes)
        color, marker = BACKENDS_OWN if line[0].own else ALGORITHMS.get(name, OTHER_ALGORITHM)
        label = f"{name}'s own" if line[0].own else name
        words = "labkit's choice if no algorithm is named"
        if fit := fits.get(name):  # alpha, 1 / beta, and the error of the fit
            rate = f"{1e-9 / fit.beta_s_per_byte:.3g} GB/s" if fit.beta_s_per_byte else "no beta"
            words = f"{fit.alpha_s * 1e6:,.0f} us, {rate}, error {fit.error:.0%}"
            fitted = [fit.busbw_bytes_per_s(size) / 1e9 for size in fine]
            axes.plot(fine, fitted, "--", color=color, lw=1.1, zorder=2)
        axes.plot(
            [point.size_bytes for point in line], [p.busbw_bytes_per_s / 1e9 for p in line],
            color=color, marker=marker, ms=5, lw=6 if name == DEFAULT else 1.6,
            zorder=1 if name == DEFAULT else 3, label=f"{label}: {words}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    shown = sizes[:: -(-len(sizes) // MOST_TICKS)]
    # Round to whole KiB: a size that is split over three ranks is a few bytes smaller.
    whole = [size if size < 1024 else round(size / 1024) * 1024 for size in shown]
    axes.set_xticks(shown, map(in_binary_units, whole))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    rates = [point.busbw_bytes_per_s / 1e9 for point in points]
    axes.set_ylim(min(rates) / ROOM, max(rates) * ROOM**2)


def _mark_crossovers(axes: Axes, points: Sequence[Point], fits: dict[str, Fit]) -> None:
    """Mark the sizes at which the fastest algorithm changes, according to the fits."""
    backends_own = {point.algorithm for point in points if point.own}
    candidates = [fit for name, fit in fits.items() if name not in backends_own]
    if len(candidates) < 2:
        return
    sizes = [point.size_bytes for point in points]
    low, high = min(sizes), max(sizes)
    for i, (size, _, after) in enumerate(crossovers(candidates, low, high)):
        offset_pt, align = (-4, "right") if size**2 > low * high else (4, "left")
        axes.axvline(size, color=MUTED, lw=0.9, ls=":", zorder=0)
        note(
            axes, f"{size / 1024:,.0f} KiB: {after}", (size, 0.98 - 0.08 * (i % LEVELS)),
            (offset_pt, 0), xycoords=axes.get_xaxis_transform(), ha=align, va="top",
            fontsize=SMALL_PT,
        )  # fmt: skip
