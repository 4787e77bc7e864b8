"""Memory by category during the detailed step, for each rank."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch

from labkit.plot import style
from labkit.plot.choice import choose_ranks, listed
from labkit.plot.figure import constrained, label, legend_row, note, size_in, styled
from labkit.plot.style import CATEGORIES, INK, MUTED, PAPER, PHASES, SMALL_PT, TITLE_PT
from labkit.trace import RankTrace, Trace
from labkit.trace.measures import peak_memory, union

if TYPE_CHECKING:
    from labkit.holdings import Footprint

SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "user": ""}
MOST_RANKS = 8  # drawn by default
HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")  # fields of a Footprint


@styled
def memory(
    trace: Trace,
    ranks: Iterable[int] | None = None,
    predicted: "Footprint | float | None" = None,
    figure: Figure | None = None,
) -> Figure:
    """Memory by category during the detailed step, its peak, and the predicted model states.

    Args:
        ranks: global ranks; None draws at most the first eight.
        predicted: total bytes of parameters, gradients and optimizer state on a rank, or a
            `Footprint`; None uses the prediction recorded with the run, if any.

    Raises ValueError if the trace has no detailed step, or for an unknown rank.
    """
    part = detailed_step(trace)
    chosen = choose_ranks(part, ranks)[: MOST_RANKS if ranks is None else None]
    across = 1 if len(chosen) == 1 else 2 if len(chosen) <= 4 else 4
    down = -(-len(chosen) // across)
    figure = constrained(figure, min(1.0 + 2.4 * down, 12.0))
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    predicted_bytes = _held_bytes(part.about.get("predicted") if predicted is None else predicted)
    most_bytes = max(predicted_bytes or 0, *(peak_bytes(part.ranks[rank]) for rank in chosen))
    scale, unit = style.byte_unit(most_bytes)
    panel_in = 0.88 * size_in(figure)[0] / across
    for place, (axes, rank) in enumerate(zip(panels, chosen)):
        _draw_rank(axes, part.ranks[rank], scale, unit, panel_in)
        if predicted_bytes:
            axes.axhline(predicted_bytes / scale, color=INK, linestyle="--", linewidth=1.2)
        if place % across == 0:
            axes.set_ylabel(unit)
        if place + across >= len(chosen):  # the lowest panel of its column
            in_detail = " in detail:" if part.steps(detail=True) else ","
            axes.set_xlabel(f"step {part.steps()[0]}{in_detail} % done", labelpad=2)
            axes.tick_params(labelbottom=True)
    panels[0].set(xlim=(0, 100), ylim=(0, most_bytes / scale * 1.25 or 1))
    for axes in panels[len(chosen) :]:
        axes.set_visible(False)
    words = ["Memory by category"]
    if len(chosen) < part.size:
        words.append(f"rank{'s' * (len(chosen) > 1)} {listed(chosen)} of {part.size}")
    if predicted_bytes:
        words.append(
            "dashed: parameters, gradients and optimizer state as predicted, "
            f"{predicted_bytes / scale:.3g} {unit}"
        )
    figure.suptitle("  ·  ".join(words), x=0.01, ha="left", fontsize=TITLE_PT)
    held = zip(*(point.held_bytes for rank in chosen for point in part.ranks[rank].memory))
    entries = [
        Patch(facecolor=color, label=category)
        for (category, color), nbytes in zip(CATEGORIES.items(), held)
        if max(nbytes) > 0.01 * most_bytes  # smaller ones are invisible
    ]
    legend_row(figure, entries, handlelength=1.4, handleheight=0.9, columnspacing=1.5)
    return figure


def detailed_step(trace: Trace) -> Trace:
    """The trace of the first step with recorded memory. Raises ValueError if there is none."""
    for index in trace.steps():
        part = trace.step(index)
        if any(rank.memory for rank in part.ranks.values()):
            return part
    raise ValueError(
        "this trace has no memory records, because no step was recorded in detail; record the run "
        "again with `record(detail_step=1)`"
    )


def peak_bytes(rank: RankTrace) -> int:
    """The peak of the sum over all categories; 0 if the rank has no memory records."""
    return sum(peak_memory(rank).values())


def _draw_rank(axes: Axes, rank: RankTrace, scale: float, unit: str, panel_in: float) -> None:
    axes.set_title(f"rank {rank.rank}", fontsize=SMALL_PT, pad=16, color=MUTED)
    if not rank.memory or not rank.steps:
        axes.text(50, 0, "nothing recorded", ha="center", va="bottom", color=MUTED)
        return
    begin_s = rank.steps[0].began_s
    end_s = rank.steps[0].ended_s or max(point.when_s for point in rank.memory)
    percent_per_s = 100 / ((end_s - begin_s) or 1.0)
    when = [(point.when_s - begin_s) * percent_per_s for point in rank.memory]
    held = np.array([point.held_bytes for point in rank.memory]) / scale
    axes.stackplot(
        [*when, 100.0], np.vstack([held, held[-1:]]).T, colors=list(CATEGORIES.values()),
        edgecolor="none", linewidth=0, step="post",
    )  # fmt: skip
    totals = held.sum(axis=1)
    outline = [*totals, totals[-1]]  # shows spikes that are narrower than a pixel
    axes.step([*when, 100.0], outline, where="post", color=INK, linewidth=0.5)
    peak = int(totals.argmax())
    place = (when[peak], totals[peak])
    axes.plot(*place, marker=CARETDOWN, color=INK, markersize=6, zorder=4)
    align = "right" if place[0] > 75 else "left" if place[0] < 25 else "center"
    note(axes, f"peak {place[1]:.3g} {unit}", place, (0, 7), ha=align,
         va="bottom", fontweight="bold", fontsize=SMALL_PT)  # fmt: skip
    above = axes.get_xaxis_transform()
    for phase, color in PHASES.items():  # a ribbon above the axes
        spans = [x for x in rank.spans if x.depth == 0 and x.phase == phase and x.ended_s]
        for began_s, ended_s in union((x.began_s, x.ended_s) for x in spans):
            left, width = (began_s - begin_s) * percent_per_s, (ended_s - began_s) * percent_per_s
            axes.barh(
                1.05, width, 0.08, left, transform=above, color=color, edgecolor=PAPER,
                linewidth=0.7, clip_on=False,
            )  # fmt: skip
            room_in = width / 100 * panel_in
            name = next((x for x in (phase, SHORT[phase]) if 0.07 * len(x) < room_in), "")
            if name:
                label(axes, (left + width / 2, 1.045), name, transform=above, fontsize=7.5,
                      va="center_baseline", color=style.text_on(color))  # fmt: skip
            if left + width < 99.5:
                axes.axvline(left + width, color=MUTED, linewidth=0.6, linestyle=":", zorder=3)


def _held_bytes(predicted: object) -> float | None:
    """Bytes of a rank's model states, from a Footprint, a dict of its fields, or a number."""
    if predicted is None or isinstance(predicted, (int, float)):
        return predicted
    fields = predicted if isinstance(predicted, dict) else vars(predicted)
    return sum(fields[name] for name in HELD) if fields.keys() >= set(HELD) else None
