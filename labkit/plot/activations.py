"""Activation memory: the bytes of one layer, split into the terms of sbw(34 + 5as/w); the Pareto
front of recomputation plans; and memory during one step of each run."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from labkit.memory.chooser import Plan as Choices
from labkit.plot import style
from labkit.plot.figure import constrained, label, name_rows, note, styled
from labkit.plot.memories import detailed_step
from labkit.plot.style import COLORS, INK, PAPER, VERMILION, byte_unit, text_on
from labkit.predict.activations import Bill
from labkit.trace import RankTrace, Trace

# Each part of a layer has shades of one color: attention scores, other attention terms, the MLP,
# and all remaining terms.
SCORES = (VERMILION, "#F0A57A")
PARTS = {
    "core: ": style.SKY, "q, k, v": "#9AD0F0", "out": "#C5E4F7", "GELU": style.ORANGE,
    "mlp": "#F2C76B", "": "#C9CED6",
}  # fmt: skip
SHORT = {  # labels inside the bars; all other labels are terms without ": its input"
    "q, k, v: their shared input": "q, k, v\ninput",
    "core: q, k and v": "core:\nq, k, v",
    "core: weights, before and after dropout": "core: weights,\nand after dropout",
    "core: the mask of its dropout": "core:\nmask",
    "dropout: two masks": "masks",
    "mlp.up: its input": "up",
    "the layer's input": "input",
}
CHOICE_COLORS = {
    "none": COLORS[0], "selective": COLORS[3], "full": COLORS[5], "offload": COLORS[2],
}  # fmt: skip


@styled
def bill(bills: Mapping[str, Bill], figure: Figure | None = None) -> Figure:
    """Activation bytes of one layer: a bar of measured terms for each bill, a line for the formula.

    `bills`: name -> `predict.activation_bill(...)`. Raises ValueError if empty.
    """
    if not bills:
        raise ValueError('nothing to draw: pass at least one bill, e.g. bill({"none": ...})')
    figure = constrained(figure, 1.7 + 0.62 * len(bills))
    axes = figure.subplots()
    most = max(max(layer.measured_bytes, layer.formula_bytes) for layer in bills.values())
    scale, unit = byte_unit(most)
    for row, layer in enumerate(bills.values()):
        left, scores = 0.0, cycle(SCORES)
        for line in sorted(layer.lines, key=lambda line: "as/w" in line.per_sbw):
            width = line.measured_bytes / scale
            if not width:
                continue
            if "as/w" in line.per_sbw:
                color = next(scores)
            else:
                color = next(PARTS[start] for start in PARTS if line.term.startswith(start))
            axes.barh(row, width, 0.62, left=left, color=color, edgecolor=PAPER, linewidth=0.8)
            if line.measured_bytes > 0.05 * most:
                name = SHORT.get(line.term, line.term.removesuffix(": its input"))
                label(axes, (left + width / 2, row), f"{name}\n{line.per_sbw}", fontsize=7.5,
                      color=text_on(color), linespacing=1.15)  # fmt: skip
            left += width
        formula = layer.formula_bytes / scale
        axes.plot([formula] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.6)
        end = (max(left, formula), row)
        note(axes, f"{left:.3g} {unit}", end, (6, 0), va="center", fontweight="bold")
    name_rows(axes, list(bills))
    axes.set(
        xlim=(0, most / scale * 1.12), xlabel=unit,
        title="Activations that one layer keeps for backward  ·  numbers: bytes / sbw  ·  "
        "line: formula",
    )  # fmt: skip
    return figure


@styled
def front(
    plans: Sequence[Choices],
    pick: Choices | None = None,
    budget_bytes: float | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Peak memory against recomputation: one point per plan, the Pareto front, and the chosen plan.

    Args:
        plans: from `memory.chooser.plan_of`; plans with the same choice for all blocks are labeled.
        pick: the chosen plan, marked with a circle.
        budget_bytes: memory limit, drawn as a dashed line.

    Raises ValueError if `plans` is empty.
    """
    if not plans:
        raise ValueError("nothing to draw: pass a list of plans, e.g. front([plan_of(...), ...])")
    figure = constrained(figure, 4.2)
    axes = figure.subplots()
    scale, unit = byte_unit(max(plan.peak_bytes for plan in plans))

    def point(plan: Choices) -> tuple[float, float]:
        return 100 * plan.again, plan.peak_bytes / scale

    points = {point(plan) for plan in plans}
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    axes.plot(*zip(*points), "o", color=PARTS[""], markersize=5, zorder=2)
    axes.step(*zip(*best), where="post", color=COLORS[0], linewidth=1.2, zorder=1)
    axes.plot(*zip(*best), "o", color=COLORS[0], markersize=6, zorder=3)
    for plan in plans:
        if len(set(plan.choices)) == 1:
            note(axes, plan.choices[0], point(plan), (8, 5), fontweight="bold")
    if budget_bytes is not None:
        budget = budget_bytes / scale
        axes.axhline(budget, color=VERMILION, linestyle="--", linewidth=1.2)
        note(axes, f"budget {budget:.3g} {unit}", (1, budget), (0, 4), ha="right", color=VERMILION,
             xycoords=axes.get_yaxis_transform(), fontweight="bold")  # fmt: skip
    if pick is not None:
        axes.plot(
            *point(pick), "o", markersize=14, markeredgewidth=2, markerfacecolor="none",
            markeredgecolor=VERMILION, zorder=4,
        )  # fmt: skip
    wide, high = (max(values) for values in zip(*points))
    wide = wide or 1.0
    axes.set(
        xlim=(-0.04 * wide, 1.12 * wide), ylim=(0, 1.12 * high), ylabel=f"peak memory, {unit}",
        xlabel="recomputed, % of the step's FLOPs",
        title="One point per plan  ·  line: Pareto front",
    )  # fmt: skip
    return figure


@styled
def step_memory(
    runs: Mapping[str, Trace], predicted: Mapping[str, float] | None = None,
    figure: Figure | None = None,
) -> Figure:  # fmt: skip
    """Memory during one step of each run, with forward and backward drawn at equal width.

    Args:
        runs: name -> trace with a detailed step.
        predicted: name -> predicted peak in bytes, drawn as a dashed line.

    Raises ValueError if `runs` is empty or a run has no detailed step.
    """
    curves = {name: _curve(detailed_step(trace)) for name, trace in runs.items()}
    if not curves:
        raise ValueError('nothing to draw: pass recorded runs, e.g. step_memory({"none": trace})')
    figure = constrained(figure, 4.2)
    axes = figure.subplots()
    most = max(held.max() for _, held in curves.values())
    scale, unit = byte_unit(most)
    for (name, (when, held)), usual in zip(curves.items(), cycle(COLORS)):
        color, peak = CHOICE_COLORS.get(name, usual), f"{held.max() / scale:.3g} {unit}"
        axes.step(
            when, held / scale, where="post", color=color, linewidth=1.4,
            label=f"{name}: peak {peak}",
        )  # fmt: skip
        if predicted and name in predicted:
            axes.axhline(predicted[name] / scale, color=color, linestyle="--", linewidth=0.8)
    axes.axvline(1, color=style.MUTED, linewidth=0.8, linestyle=":")
    dashed = "  ·  dashed: predicted peak" if predicted else ""
    axes.set(
        xlim=(0, 2), ylim=(0, most / scale * 1.35), ylabel=unit,
        title=f"Memory during one step{dashed}",
    )  # fmt: skip
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    for begin, phase in enumerate(("forward", "backward")):
        axes.axvspan(begin, begin + 1, ymax=0.02, color=style.PHASES[phase])
    axes.legend(loc="upper left")
    return figure


def _curve(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Times (forward from 0 to 1, backward from 1 to 2), and the bytes in use from each time on."""
    rank: RankTrace = next(iter(trace.ranks.values()))
    (begin_s, middle_s), (_, end_s) = _times(rank, "forward"), _times(rank, "backward")
    when_s = np.array([point.when_s for point in rank.memory])
    held = np.array([sum(point.held_bytes) for point in rank.memory])
    # Start at the last point before forward began, or at the first point of the run.
    first = max(0, int(np.searchsorted(when_s, begin_s, side="right")) - 1)
    last = int(np.searchsorted(when_s, end_s, side="right"))
    when = np.interp(when_s[first:last], [begin_s, middle_s, end_s], [0.0, 1.0, 2.0])
    when[0] = 0.0
    return np.append(when, 2.0), np.append(held[first:last], held[last - 1])


def _times(rank: RankTrace, phase: str) -> tuple[float, float]:
    """Start and end time of a phase, in seconds."""
    spans = [x for x in rank.spans if x.phase == phase and x.depth == 0 and x.ended_s]
    if not spans:
        raise ValueError(f"this run has no {phase} pass; record a whole training step in detail")
    return min(x.began_s for x in spans), max(x.ended_s for x in spans)
