"""A plan in pictures: where the time of each layout goes, and the map of tensor and pipeline ranks.

tp 8 · pp 8  ██████████████ compute ██ tensor █ bubble      pp 16 │ 30.1  25.0  27.2
tp 4 · pp 16 ██████████████ compute █ tensor ████ bubble     pp 8 │  --   24.1  25.5
...                                                          tp ──┴──  4     8    16
"""

from collections.abc import Sequence
from itertools import product
from math import log2
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.plot import style
from labkit.plot.figure import BarPart, constrained, legend_below, note, stacked_bars, styled
from labkit.plot.style import CATEGORIES, COMPUTING, INK, MUTED, PAPER, SMALL_PT, VERMILION
from labkit.replaying.planning.layout import described
from labkit.replaying.planning.report import PARTS, StepReport, seconds

if TYPE_CHECKING:
    from labkit.replaying.planning.plan import Plan

COLOURS = {
    "compute": COMPUTING, "optimizer": style.GREEN, "tensor": style.PURPLE,
    "pipeline": style.BROWN, "data": style.YELLOW, "bubble": style.WAITING,
}  # fmt: skip
NAMES = {"tensor": "waits for tensor", "pipeline": "for pipeline", "data": "for data"}


@styled
def plan(planned: "Plan", top: int = 10, figure: Figure | None = None) -> Figure:
    """The seconds of the `top` layouts by their parts, and over tp and pp those of the fastest.

    Raises ValueError for no layouts to draw."""
    if top < 1:
        raise ValueError(f"top={top}: draw at least one layout")
    reports = planned.reports[:top]
    figure = constrained(figure, max(4.2, 1.6 + 0.42 * len(reports)))
    bars, grid = figure.subplots(1, 2, width_ratios=[1.5, 1])
    names = [f"{place}  {described(report.layout)}" for place, report in enumerate(reports, 1)]
    _draw_seconds(bars, reports, names)
    bars.set_title(f"The fastest {len(reports)} of {len(planned.reports):,}", loc="left")
    _draw_map(grid, planned)
    return figure


@styled
def compared_with_best(
    planned: "Plan", report: StepReport | None, figure: Figure | None = None
) -> Figure:
    """One layout beside the best: the seconds of a step, and the memory of the fullest device.
    Without a report, or with that of the best, the best alone."""
    reports = {"best": planned.best}
    if report is not None and report != planned.best:
        reports = {"chosen": report, **reports}
    figure = constrained(figure, 3.0)
    bars, held = figure.subplots(1, 2, width_ratios=[1.4, 1], sharey=True)
    names = [f"{name}\n{x.layout.in_words}" for name, x in reports.items()]
    _draw_seconds(bars, list(reports.values()), names)
    bars.set_title("A step", loc="left")
    scale, unit = style.byte_unit(planned.budget_bytes)
    memories = [x.memory_bytes for x in reports.values()]
    stacked_bars(held, [
        BarPart(name, [memory.get(name, 0) / scale for memory in memories], colour)
        for name, colour in CATEGORIES.items()
        if any(memory.get(name) for memory in memories)
    ])  # fmt: skip
    budget = planned.budget_bytes / scale
    held.axvline(budget, color=VERMILION, linestyle="--", linewidth=1.2)
    held.set(xlim=(0, 1.08 * budget), xlabel=f"{unit}, line: all there is")
    held.set_title("Held at the peak", loc="left")
    held.tick_params(labelleft=False, length=0)
    legend_below(held, columns=3)
    return figure


def _draw_seconds(axes: Axes, reports: Sequence[StepReport], names: Sequence[str]) -> None:
    """A bar for each step, of the parts that add up to it."""
    split = [seconds(report) for report in reports]
    stacked_bars(axes, [
        BarPart(NAMES.get(part, part), [step[part] for step in split], COLOURS[part],
                edge=VERMILION if part == "bubble" else PAPER)
        for part in PARTS
    ], names)  # fmt: skip
    for row, report in enumerate(reports):
        end = (report.step_s, row)
        note(axes, f"{report.step_s:#.3g} s", end, (4, 0), va="center", fontsize=SMALL_PT)
    axes.set_xlim(0, 1.15 * max(report.step_s for report in reports))
    axes.set_xlabel("seconds, mean over the stages")
    legend_below(axes, columns=3)


def _draw_map(axes: Axes, planned: "Plan") -> None:
    """Seconds of the fastest layout with each tp and pp; dark is fast."""
    fastest: dict[tuple[int, int], StepReport] = {}
    for report in planned.reports:
        fastest.setdefault((report.layout.tp, report.layout.pp), report)
    large = {(x.layout.tp, x.layout.pp) for x in planned.too_large}
    tps, pps = (sorted(set(axis)) for axis in zip(*fastest, *large))
    for (x, tp), (y, pp) in product(enumerate(tps), enumerate(pps)):
        text, colour, ink = "", PAPER, MUTED
        if (tp, pp) in fastest:
            step_s = fastest[tp, pp].step_s
            faded = min(0.9, log2(step_s / planned.best.step_s))
            text, colour = f"{step_s:#.3g}", style.tint(COMPUTING, faded)
            ink = style.text_on(colour)
        elif (tp, pp) in large:
            text, colour = "too\nlarge", style.FAINT
        axes.fill_between([x, x + 1], y, y + 1, color=colour, edgecolor=PAPER, linewidth=1.5)
        middle = (x + 0.5, y + 0.5)
        axes.text(*middle, text, ha="center", va="center", fontsize=SMALL_PT, color=ink)
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
        note(axes, "out of the node", edge, (3, 3), color=VERMILION, fontsize=SMALL_PT)
    axes.set(xlim=(0, len(tps)), ylim=(0, len(pps)), xlabel="tensor ranks tp")
    axes.set_ylabel("pipeline stages pp")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Seconds of the fastest with each\n", loc="left")
