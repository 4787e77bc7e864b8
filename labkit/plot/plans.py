"""A plan in pictures: where the time of each layout goes, and the map of tensor and pipeline ranks.

    tp 8 · pp 8  ██████████████ compute ██ tensor █ bubble      pp 16 │ 30.1  25.0  27.2
    tp 4 · pp 16 ██████████████ compute █ tensor ████ bubble     pp 8 │  --   24.1  25.5
    ...                                                          tp ──┴──  4     8    16
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.plot.picture import Picture, styled
from labkit.plot.stacks import Part, name_bars, stack
from labkit.plot.style import (
    COMPUTING,
    FAINT,
    GREEN,
    GREY,
    INK,
    MUTED,
    PAPER,
    PURPLE,
    SMALL_PT,
    VERMILION,
    WAITING,
    YELLOW,
    text_on,
    tint,
)
from labkit.planning.fits import described
from labkit.planning.ranking import Plan
from labkit.planning.reasons import PARTS, seconds
from labkit.planning.report import StepReport

COLOURS = {
    "compute": COMPUTING, "optimizer": GREEN, "tensor": PURPLE, "pipeline": GREY, "data": YELLOW,
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
    draw_seconds(bars, [f"{place}  {described(one.layout)}" for place, one in
                        enumerate(reports, 1)], reports)  # fmt: skip
    bars.set_title(f"The fastest {len(reports)} of {len(planned.reports):,}", loc="left")
    _draw_map(grid, planned)
    return figure


def draw_seconds(axes: Axes, names: list[str], reports: "list[StepReport] | tuple[StepReport, ...]") -> None:
    """A bar for each step, of the parts that add up to it."""
    split = [seconds(one) for one in reports]
    stack(axes, [
        Part(NAMES.get(part, part), [one[part] for one in split], COLOURS[part],
             edge=VERMILION if part == "bubble" else PAPER)
        for part in PARTS
    ])  # fmt: skip
    name_bars(axes, names)
    axes.tick_params(axis="y", labelsize=SMALL_PT)
    for row, one in enumerate(reports):
        axes.annotate(
            f"{one.step_s:.3g} s", (one.step_s, row), (4, 0), textcoords="offset points",
            va="center", fontsize=SMALL_PT,
        )  # fmt: skip
    axes.set_xlim(0, 1.12 * max(one.step_s for one in reports))
    axes.set_xlabel("seconds of a step, mean over the stages")
    legend = axes.get_legend()
    if legend is not None:
        axes.legend(
            *axes.get_legend_handles_labels(), loc="upper left", ncols=3, borderaxespad=0,
            bbox_to_anchor=(-0.02, -0.14), handlelength=1.4,
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
        return ("too\nlarge" if too_large else "", FAINT)
    return f"{report.step_s:.3g}", tint(COMPUTING, min(0.9, (report.step_s / best_s - 1) / 2))


def _frame(axes: Axes, x: int, y: int) -> None:
    axes.plot(
        [x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color=INK, linewidth=2, clip_on=False,
        zorder=4,
    )  # fmt: skip


