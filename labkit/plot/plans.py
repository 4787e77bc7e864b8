"""A plan in pictures: where the time of each layout goes, and the map of tensor and pipeline ranks.

tp 8 · pp 8  ██████████████ compute ██ tensor █ bubble      pp 16 │ 30.1  25.0  27.2
tp 4 · pp 16 ██████████████ compute █ tensor ████ bubble     pp 8 │  --   24.1  25.5
...                                                          tp ──┴──  4     8    16
"""

from collections.abc import Sequence
from math import log2

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from labkit.plot.picture import Picture, styled
from labkit.plot.stacks import LEGEND_IN, Part, name_bars, stack
from labkit.plot.style import (
    BROWN,
    CATEGORIES,
    COMPUTING,
    FAINT,
    GREEN,
    INK,
    MUTED,
    PAPER,
    PURPLE,
    SMALL_PT,
    VERMILION,
    WAITING,
    YELLOW,
    byte_unit,
    text_on,
    tint,
)
from labkit.replaying.planning.layout import described
from labkit.replaying.planning.ranking import Plan
from labkit.replaying.planning.report import PARTS, StepReport, seconds

COLOURS = {
    "compute": COMPUTING, "optimizer": GREEN, "tensor": PURPLE, "pipeline": BROWN, "data": YELLOW,
    "bubble": WAITING,
}  # fmt: skip
NAMES = {"tensor": "waits for tensor", "pipeline": "for pipeline", "data": "for data"}


@styled
def plan(planned: Plan, top: int = 10, figure: Figure | None = None) -> Figure:
    """The seconds of the `top` layouts by their parts, and over tp and pp those of the fastest.

    Raises ValueError for no layouts to draw."""
    if top < 1:
        raise ValueError(f"top={top}: draw at least one layout")
    reports = planned.reports[:top]
    if figure is None:
        figure = Picture(max(4.2, 1.6 + 0.42 * len(reports)), layout="constrained")
    bars, grid = figure.subplots(1, 2, width_ratios=[1.5, 1])
    _draw_seconds(bars, reports)
    name_bars(bars, [f"{place}  {described(one.layout)}" for place, one in enumerate(reports, 1)])
    bars.tick_params(axis="y", labelsize=SMALL_PT)
    bars.set_title(f"The fastest {len(reports)} of {len(planned.reports):,}", loc="left")
    _draw_map(grid, planned)
    return figure


@styled
def chosen(planned: Plan, report: StepReport | None, figure: Figure | None = None) -> Figure:
    """One layout beside the best: the seconds of a step, and what the fullest device holds. Of a
    layout that is none (None), and of the best itself, the best alone."""
    reports = [planned.best]
    if report is not None and report != planned.best:
        reports.insert(0, report)
    if figure is None:
        figure = Picture(3.0, layout="constrained")
    bars, held = figure.subplots(1, 2, width_ratios=[1.4, 1], sharey=True)
    _draw_seconds(bars, reports)
    name_bars(bars, [
        f"{'best' if one is planned.best else 'chosen'}\n{one.layout.in_words}" for one in reports
    ])  # fmt: skip
    names = [name for name in CATEGORIES if any(one.memory_bytes.get(name) for one in reports)]
    scale, unit = byte_unit(planned.budget_bytes)
    stack(held, [
        Part(name, [one.memory_bytes.get(name, 0) / scale for one in reports], CATEGORIES[name])
        for name in names
    ])  # fmt: skip
    held.axvline(planned.budget_bytes / scale, color=VERMILION, linestyle="--", linewidth=1.2)
    held.set(xlim=(0, 1.08 * planned.budget_bytes / scale), xlabel=f"{unit}, line: all there is")
    held.set_title("Held at the peak", loc="left")
    held.tick_params(labelleft=False, length=0)
    bars.set_title("A step", loc="left")
    for axes in (bars, held):
        _legend_in_rows(axes)
    return figure


def _draw_seconds(axes: Axes, reports: Sequence[StepReport]) -> None:
    """A bar for each step, of the parts that add up to it."""
    split = [seconds(one) for one in reports]
    stack(axes, [
        Part(NAMES.get(part, part), [one[part] for one in split], COLOURS[part],
             edge=VERMILION if part == "bubble" else PAPER)
        for part in PARTS
    ])  # fmt: skip
    for row, one in enumerate(reports):
        axes.annotate(
            f"{one.step_s:#.3g} s", (one.step_s, row), (4, 0), textcoords="offset points",
            va="center", fontsize=SMALL_PT,
        )  # fmt: skip
    axes.set_xlim(0, 1.15 * max(one.step_s for one in reports))
    axes.set_xlabel("seconds, mean over the stages")
    _legend_in_rows(axes)


def _legend_in_rows(axes: Axes) -> None:
    """Three names in each, below the axes."""
    below = axes.transAxes + ScaledTranslation(0, -LEGEND_IN, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, 0), bbox_transform=below, borderaxespad=0,
        handlelength=1.4, ncols=3,
    )  # fmt: skip


def _draw_map(axes: Axes, planned: Plan) -> None:
    """Seconds of the fastest layout with each tp and pp; dark is fast."""
    found: dict[tuple[int, int], StepReport] = {}
    for one in planned.reports:
        found.setdefault((one.layout.tp, one.layout.pp), one)
    large = {(one.layout.tp, one.layout.pp) for one in planned.too_large}
    tps, pps = (sorted({at[axis] for at in {*found, *large}}) for axis in (0, 1))
    best_s = planned.best.step_s
    for x, tp in enumerate(tps):
        for y, pp in enumerate(pps):
            said, colour = _cell(found.get((tp, pp)), (tp, pp) in large, best_s)
            axes.fill_between([x, x + 1], y, y + 1, color=colour, edgecolor=PAPER, linewidth=1.5)
            axes.text(
                x + 0.5, y + 0.5, said, ha="center", va="center", fontsize=SMALL_PT,
                color=text_on(colour) if (tp, pp) in found else MUTED,
            )  # fmt: skip
    at = planned.best.layout
    _frame(axes, tps.index(at.tp), pps.index(at.pp))
    axes.set_xticks([x + 0.5 for x in range(len(tps))], map(str, tps))
    axes.set_yticks([y + 0.5 for y in range(len(pps))], map(str, pps))
    node = planned.cluster.devices_per_node
    outside = [x for x, tp in enumerate(tps) if tp > node]
    if outside and tps[0] <= node:
        axes.axvline(outside[0], color=VERMILION, linewidth=1.4, linestyle="--")
        axes.annotate(
            "out of the node", (outside[0], len(pps)), (3, 3), textcoords="offset points",
            color=VERMILION, fontsize=SMALL_PT,
        )  # fmt: skip
    axes.set(xlim=(0, len(tps)), ylim=(0, len(pps)), xlabel="tensor ranks tp")
    axes.set_ylabel("pipeline stages pp")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("Seconds of the fastest with each\n", loc="left")


def _cell(report: StepReport | None, too_large: bool, best_s: float) -> tuple[str, str]:
    if report is None:
        return ("too\nlarge", FAINT) if too_large else ("", PAPER)
    return f"{report.step_s:#.3g}", tint(COMPUTING, min(0.9, log2(report.step_s / best_s)))


def _frame(axes: Axes, x: int, y: int) -> None:
    axes.plot(
        [x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color=INK, linewidth=2, clip_on=False,
        zorder=4,
    )  # fmt: skip
