"""Strategies side by side: recorded runs (`compare`), or results with losses, bytes sent (measured
and predicted) and memory of the model states (`draw_comparison`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.plot import style
from labkit.plot.choice import choose_step, usual_steps
from labkit.plot.figure import (
    BarPart,
    constrained,
    legend_below,
    memory_parts,
    name_rows,
    stacked_bars,
    styled,
)
from labkit.plot.style import CATEGORIES, COLORS, DASHES, IDLE, byte_unit
from labkit.trace import RankTrace, Trace
from labkit.trace.measures import common, communicating, computing, length_s, peak_memory, waiting

if TYPE_CHECKING:
    from labkit.compare import Result


class StepParts(NamedTuple):
    """The parts of a step, in seconds."""

    alone_s: float  # computing with no transfer in progress
    hidden_s: float  # computing during a transfer
    waiting_s: float
    other_s: float


TIME_PARTS: dict[str, tuple[str, ...]] = {  # a label per field of StepParts: color, hatch, edge
    "compute": (style.COMPUTING,),
    "compute, hiding communication": (style.HIDDEN,),
    "waiting": (style.WAITING, "////", style.UNFINISHED),
    "other": (IDLE,),
}


@styled
def compare(runs: Mapping[str, Trace] | Sequence[Trace], figure: Figure | None = None) -> Figure:
    """Recorded runs side by side. `runs`: name -> trace, or a list of traces with recorded names.

    Time and bytes are means over the ranks, and medians over the timed steps after the run's first.
    Memory is the peak on the fullest rank, and is omitted if no run has a detailed step.
    Raises ValueError if there are no runs or a run is empty.
    """
    named = dict(runs) if isinstance(runs, Mapping) else _named(runs)
    if not named:
        raise ValueError('nothing to compare: pass recorded runs, e.g. compare({"ddp": trace})')
    for trace in named.values():
        choose_step(trace)  # raises ValueError for an empty trace
    traces = named.values()
    times = zip(*(step_times(trace) for trace in traces))
    time_parts = [
        BarPart(label, [time_s * 1e3 for time_s in of_runs], *look)
        for (label, look), of_runs in zip(TIME_PARTS.items(), times, strict=True)
    ]
    panels = [
        ("Step time", "ms", time_parts),
        ("Bytes sent per rank and step", *_byte_parts([sent_bytes(trace) for trace in traces])),
    ]
    held = [
        max(map(peak_memory, trace.ranks.values()), key=lambda memory: sum(memory.values()))
        for trace in traces
    ]
    if most_bytes := max(sum(memory.values()) for memory in held):
        scale, unit = byte_unit(most_bytes)
        panels.append(("Peak memory of a rank", unit, memory_parts(held, scale)))
    figure = constrained(figure, 2.3 + 0.5 * len(named))
    names = [
        f"{name}\n{trace.size} rank{'s' * (trace.size != 1)}"
        + ", paced" * bool(trace.about.get("link"))
        for name, trace in named.items()
    ]
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, unit, parts) in zip(grid, panels):
        stacked_bars(axes, parts, names)
        axes.set_title(title, loc="center")
        axes.set_xlabel(unit)
        axes.label_outer()
    return figure


def _named(runs: Sequence[Trace]) -> dict[str, Trace]:
    named: dict[str, Trace] = {}
    for number, trace in enumerate(runs, 1):
        name = str(trace.about.get("strategy") or trace.about.get("what") or f"run {number}")
        named[name if name not in named else f"{name} ({number})"] = trace
    return named


def step_times(trace: Trace) -> StepParts:
    """The parts of a step: mean over ranks, median over `usual_steps`."""
    parts: dict[int, list[RankTrace]] = {index: [] for index in usual_steps(trace)}
    for rank in trace.ranks.values():
        own = {
            x.index: RankTrace(rank.rank, rank.size, steps=[x])
            for x in rank.steps
            if x.index in parts and x.ended_s
        }
        for kind in ("spans", "comms"):
            for x in getattr(rank, kind):
                if x.step in own:
                    getattr(own[x.step], kind).append(x)
        for index, part in own.items():
            parts[index].append(part)
    means = [[fmean(c) for c in zip(*map(_times_of, ranks))] for ranks in parts.values() if ranks]
    return StepParts(*map(median, zip(*means))) if means else StepParts(0.0, 0.0, 0.0, 0.0)


def _times_of(rank: RankTrace) -> StepParts:
    step = rank.steps[0]
    compute, wait_s = computing(rank), length_s(waiting(rank))
    hidden_s, compute_s = length_s(common(compute, communicating(rank))), length_s(compute)
    other_s = max(0.0, step.ended_s - step.began_s - (compute_s + wait_s))
    return StepParts(compute_s - hidden_s, hidden_s, wait_s, other_s)


def sent_bytes(trace: Trace) -> dict[str, float]:
    """`bus_bytes` sent in a step by operation: mean over ranks, median over `usual_steps`."""
    usual = usual_steps(trace)
    totals: dict[str, dict[int, int]] = {}
    for rank in trace.ranks.values():
        for event in rank.comms:
            if event.op != "recv":  # counted by the sender
                step_bytes = totals.setdefault(event.op, dict.fromkeys(usual, 0))
                if event.step in usual:
                    step_bytes[event.step] += event.bus_bytes
    return {op: median(steps.values()) / len(trace.ranks) for op, steps in totals.items()}


def _byte_parts(sent: Sequence[dict[str, float]]) -> tuple[str, list[BarPart]]:
    scale, unit = byte_unit(max(sum(ops.values()) for ops in sent))
    ops = style.in_order(op for run in sent for op, nbytes in run.items() if nbytes)
    others = [op for op in ops if op not in style.OPERATIONS]
    shades = {op: style.shade(op, others.index(op) if op in others else 0) for op in ops}
    parts = [BarPart(op, [run.get(op, 0.0) / scale for run in sent], shades[op]) for op in ops]
    return unit, parts or [BarPart("nothing", [0.0] * len(sent), IDLE)]


@styled
def draw_comparison(results: Sequence["Result"], path: Path) -> Figure:
    """Draw `results` and save the picture as `path` (PNG)."""
    figure = constrained(None, max(3.6, 1.8 + 0.5 * len(results)))
    losses, sent, held = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    held.sharey(sent)
    for i, result in enumerate(results):
        losses.plot(
            range(1, len(result.losses) + 1), result.losses, DASHES[i % len(DASHES)],
            color=COLORS[i % len(COLORS)], lw=5 - 1.5 * min(i, 2), label=result.strategy,
            alpha=0.9,
        )  # fmt: skip
    losses.set(xlabel="step", ylabel="nats per token")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend()
    names = [f"{x.strategy}\n{x.ranks} rank{'s' * (x.ranks > 1)}" for x in results]
    for offset, label, color in (
        (-0.2, "measured", style.MEASURED), (0.2, "predicted", style.PREDICTED),
    ):  # fmt: skip
        places = [place + offset for place in range(len(results))]
        lengths = [getattr(result, label).bus_bytes / 1e6 for result in results]
        sent.barh(places, lengths, 0.38, color=color, label=label)
    most = max(result.predicted.bus_bytes for result in results) / 1e6 or 1
    sent.set(xlabel="MB", xlim=(0, most * 1.05))
    name_rows(sent, names)
    legend_below(sent)
    fields = {"parameters": "parameter_bytes", "gradients": "gradient_bytes",
              "optimizer state": "optimizer_bytes"}  # fmt: skip
    stacked_bars(held, [
        BarPart(name, [getattr(x.measured, field) / 1e6 for x in results], CATEGORIES[name])
        for name, field in fields.items()
    ])  # fmt: skip
    held.set_xlabel("MB")
    held.tick_params(axis="y", labelleft=False, length=0)
    losses.set_title("Loss: the curves coincide", loc="center")
    sent.set_title("Bytes sent per rank and step", loc="center")
    held.set_title("Model states of a rank", loc="center")
    figure.savefig(path, dpi=120)
    return figure
