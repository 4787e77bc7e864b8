"""Plots of plans: step time per layout, split into parts; a map over tp and pp; predicted against
measured step times."""

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from math import log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from labkit.plot import style
from labkit.plot.figure import BarPart, constrained, label, memory_parts, note, stacked_bars, styled
from labkit.plot.style import COMPUTING, FAINT, IDLE, INK, MUTED, PAPER, SMALL_PT, VERMILION
from labkit.replaying.planning.layout import described
from labkit.replaying.planning.plan import Plan
from labkit.replaying.planning.published import Calibration
from labkit.replaying.planning.published import calibration as stored
from labkit.replaying.planning.report import PARTS, StepReport, seconds

COLORS = {
    "compute": COMPUTING, "optimizer": style.GREEN, "tensor": style.PURPLE,
    "pipeline": style.BROWN, "data": style.YELLOW, "bubble": style.WAITING,
}  # fmt: skip
NAMES = {axis: f"exposed: {axis}" for axis in ("tensor", "pipeline", "data")}  # in the legend

WIDTHS = (  # color and marker by model width
    (style.SKY, "o"), (style.BLUE, "s"), (style.ORANGE, "^"), (style.PURPLE, "D"),
    (style.GREEN, "v"), (VERMILION, "*"),
)  # fmt: skip
SHADED = {0.2: FAINT, 0.05: IDLE}  # relative error -> gray
TICKS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@styled
def plan(planned: Plan, top: int = 10, figure: Figure | None = None) -> Figure:
    """Step times, by part, of the `top` fastest layouts, and the fastest step for each tp and pp.

    Raises ValueError if `top` < 1.
    """
    if top < 1:
        raise ValueError(f"top={top}: draw at least one layout")
    reports = planned.reports[:top]
    figure = constrained(figure, max(4.2, 1.6 + 0.42 * len(reports)))
    bars, grid = figure.subplots(1, 2, width_ratios=[1.5, 1])
    names = [f"{place}  {described(report.layout)}" for place, report in enumerate(reports, 1)]
    _draw_seconds(bars, reports, names)
    bars.set_title(f"The {len(reports)} fastest of {len(planned.reports):,} layouts")
    _draw_map(grid, planned)
    return figure


@styled
def compared_with_best(
    planned: Plan, report: StepReport | None, figure: Figure | None = None
) -> Figure:
    """A layout next to the best: step time, and peak memory of the fullest device. Draws only the
    best layout if `report` is None or belongs to the best layout."""
    reports = {"best": planned.best}
    if report is not None and report != planned.best:
        reports = {"chosen": report, **reports}
    figure = constrained(figure, 3.0)
    bars, held = figure.subplots(1, 2, width_ratios=[1.4, 1], sharey=True)
    names = [f"{name}\n{x.layout.in_words}" for name, x in reports.items()]
    _draw_seconds(bars, list(reports.values()), names)
    bars.set_title("Step time")
    scale, unit = style.byte_unit(planned.budget_bytes)
    stacked_bars(held, memory_parts([x.memory_bytes for x in reports.values()], scale), columns=2)
    budget = planned.budget_bytes / scale
    held.axvline(budget, color=VERMILION, linestyle="--", linewidth=1.2)
    held.set(xlim=(0, 1.08 * budget), xlabel=f"{unit}, dashed: budget")
    held.set_title("Peak memory")
    held.tick_params(labelleft=False, length=0)
    return figure


def _draw_seconds(axes: Axes, reports: Sequence[StepReport], names: Sequence[str]) -> None:
    """Draw one bar per step, split into parts."""
    split = [seconds(report) for report in reports]
    parts = [
        BarPart(NAMES.get(part, part), [step[part] for step in split], COLORS[part],
                edge=VERMILION if part == "bubble" else PAPER)
        for part in PARTS
    ]  # fmt: skip
    stacked_bars(axes, parts, names, columns=3)
    for row, report in enumerate(reports):
        end = (report.step_s, row)
        note(axes, f"{report.step_s:#.3g} s", end, (4, 0), va="center", fontsize=SMALL_PT)
    axes.set_xlim(0, 1.15 * max(report.step_s for report in reports))
    axes.set_xlabel("s, mean over the stages")


def _draw_map(axes: Axes, planned: Plan) -> None:
    """Draw the step time of the fastest layout for each tp and pp; darker is faster."""
    fastest: dict[tuple[int, int], StepReport] = {}
    for report in planned.reports:
        fastest.setdefault((report.layout.tp, report.layout.pp), report)
    large = {(x.layout.tp, x.layout.pp) for x in planned.too_large}
    tps, pps = (sorted(set(axis)) for axis in zip(*fastest, *large))
    for (x, tp), (y, pp) in product(enumerate(tps), enumerate(pps)):
        text, color, ink = "", PAPER, MUTED
        if (tp, pp) in fastest:
            step_s = fastest[tp, pp].step_s
            faded = min(0.9, log2(step_s / planned.best.step_s))
            text, color = f"{step_s:#.3g}", style.tint(COMPUTING, faded)
            ink = style.text_on(color)
        elif (tp, pp) in large:
            text, color = "too\nlarge", FAINT
        axes.fill_between([x, x + 1], y, y + 1, color=color, edgecolor=PAPER, linewidth=1.5)
        label(axes, (x + 0.5, y + 0.5), text, color=ink)
    x, y = tps.index(planned.best.layout.tp), pps.index(planned.best.layout.pp)
    frame = [x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y]
    axes.plot(*frame, color=INK, linewidth=2, clip_on=False, zorder=4)
    axes.set_xticks([x + 0.5 for x in range(len(tps))], map(str, tps))
    axes.set_yticks([y + 0.5 for y in range(len(pps))], map(str, pps))
    node = planned.cluster.devices_per_node
    outside = [x for x, tp in enumerate(tps) if tp > node]
    if outside and tps[0] <= node:
        axes.axvline(outside[0], color=VERMILION, linewidth=1.4, linestyle="--")
        edge = (outside[0], len(pps))
        note(axes, "across nodes", edge, (3, 3), color=VERMILION, fontsize=SMALL_PT)
    axes.set(
        xlim=(0, len(tps)), ylim=(0, len(pps)), xlabel="tensor-parallel ranks tp",
        ylabel="pipeline stages pp", title="Fastest step, s\n",
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# ---- accuracy of predicted step times


@styled
def calibration(fitted: Calibration | None = None, figure: Figure | None = None) -> Figure:
    """Predicted against measured step times, and each step's error with its 90 % interval. Hollow
    markers use constants fitted to all other widths. `fitted`: None uses labkit's calibration."""
    fitted = fitted or stored()
    figure = constrained(figure, 4.4)
    both, errors = figure.subplots(1, 2, width_ratios=[1, 1.7])
    _draw_both(both, fitted)
    _draw_errors(errors, fitted)
    off = np.abs(fitted.errors())
    out = np.abs(fitted.errors(fitted.without_model_s))
    figure.suptitle(
        f"{len(fitted.rows)} steps on A100s: mean error {off.mean():.1%}, median "
        f"{np.median(off):.1%}; held-out widths: mean {out.mean():.1%}, median "
        f"{np.median(out):.1%}",
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _models(fitted: Calibration) -> Iterator[tuple[str, np.ndarray, str, str]]:
    """Yield the label, row indices, color and marker of each model width."""
    widths = np.array([row.sizes.width for row in fitted.rows])
    for width, look in zip(np.unique(widths), cycle(WIDTHS)):
        yield f"width {width:,}", np.flatnonzero(widths == width), *look


def _draw_both(axes: Axes, fitted: Calibration) -> None:
    measured, predicted = fitted.measured_s, fitted.predicted_s
    every = np.concatenate([measured, predicted])
    ends = np.array([0.8 * every.min(), 1.25 * every.max()])
    for part, gray in SHADED.items():
        axes.fill_between(ends, ends * (1 - part), ends * (1 + part), color=gray, lw=0)
    axes.plot(ends, ends, color=MUTED, lw=0.8)
    for name, rows, color, marker in _models(fitted):
        x, y = measured[rows], predicted[rows]
        interval = np.maximum([y - fitted.low_s[rows], fitted.high_s[rows] - y], 0)
        axes.errorbar(x, y, interval, fmt="none", ecolor=color, lw=0.6, alpha=0.5)
        axes.plot(x, y, marker, color=color, ms=4, mec=INK, mew=0.3, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(TICKS_S))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g} s")
    axes.set(xlabel="measured", ylabel="predicted")
    axes.legend(loc="upper left")


def _draw_errors(axes: Axes, fitted: Calibration) -> None:
    """Draw errors by width, short steps first."""
    place = 0
    errors, out = fitted.errors(), fitted.errors(fitted.without_model_s)
    low, high = fitted.errors(fitted.low_s), fitted.errors(fitted.high_s)
    for part, gray in SHADED.items():
        axes.axhspan(-part, part, color=gray, lw=0)
    axes.axhline(0, color=MUTED, lw=0.8)
    middles = {}
    for name, rows, color, marker in _models(fitted):
        rows = rows[np.argsort(fitted.measured_s[rows], kind="stable")]
        x = place + np.arange(len(rows))
        axes.vlines(x, low[rows], high[rows], color=color, lw=0.8, alpha=0.45)
        axes.plot(x, errors[rows], marker, color=color, ms=3.5, mew=0, alpha=0.6)
        axes.plot(x, out[rows], marker, mfc="none", mec=INK, ms=4, mew=0.6)
        middles[float(x.mean())] = f"{name}\n{len(rows)} steps"
        place += len(rows) + 6
    ends = 1.05 * np.concatenate([errors, out, low, high, [-0.3, 0.3]])
    axes.set(
        ylim=(ends.min(), ends.max()), xlim=(-4, place - 2), ylabel="predicted / measured - 1",
        title="hollow: width held out of the fit; gray: 5 % and 20 %",
    )  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xticks(list(middles), list(middles.values()))
    axes.tick_params(axis="x", length=0)
