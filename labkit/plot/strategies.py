"""Strategies side by side.

compare          from recorded runs: where the time of a step goes, what travels, what is held
draw_comparison  their losses, and the bytes that one rank sends and holds against the prediction
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.plot import style
from labkit.plot.choice import choose_step, usual_steps
from labkit.plot.figure import BarPart, constrained, legend_below, name_rows, stacked_bars, styled
from labkit.plot.memories import detailed_step, peak_bytes
from labkit.plot.style import CATEGORIES, IDLE, byte_unit
from labkit.trace import RankTrace, Trace
from labkit.trace.measures import common, communicating, computing, length_s, waiting

if TYPE_CHECKING:
    from labkit.compare import Result


@styled
def compare(runs: Mapping[str, Trace] | Sequence[Trace], figure: Figure | None = None) -> Figure:
    """Strategies side by side, from their recorded runs.

    Args:
        runs: name -> trace; the runs of a list have the names that they were recorded under.

    Time and bytes are of a usual step: the mean over the ranks, and the median over the timed
    steps after the run's first. Memory is that of the rank with the highest peak, at its peak, and
    is left out where no run has a step in detail. Raises ValueError for no run or an empty one.
    """
    named = dict(runs) if isinstance(runs, Mapping) else _named(runs)
    if not named:
        raise ValueError('nothing to compare: give recorded runs, as compare({"ddp": trace})')
    for trace in named.values():
        choose_step(trace)  # raises for an empty one
    traces = named.values()
    panels = {
        "Time of a step": ("ms", _time_parts([step_times(trace) for trace in traces])),
        "Sent by one rank in a step": _byte_parts([sent_bytes(trace) for trace in traces]),
    }
    held = [_held_at_peak(trace) for trace in traces]
    if any(held):
        panels["Held by one rank at its peak"] = _memory_parts(held)
    figure = constrained(figure, 2.3 + 0.5 * len(named))
    names = [f"{name}\n{_circumstances(trace)}" for name, trace in named.items()]
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, (unit, parts)) in zip(grid, panels.items()):
        stacked_bars(axes, parts, names)
        axes.set(title=title, xlabel=unit)
        axes.label_outer()
    return figure


def _circumstances(trace: Trace) -> str:
    paced = ", paced" if trace.about.get("link") else ""
    return f"{trace.size} rank{'s' * (trace.size != 1)}{paced}"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step; they add up to it."""

    alone_s: float  # computing while nothing travels
    hidden_s: float  # computing while something does
    waiting_s: float
    neither_s: float


def step_times(trace: Trace) -> StepTimes:
    """Of a usual step: the mean over the ranks, the median over the steps."""
    usual = usual_steps(trace)
    of_step: dict[int, list[tuple[float, ...]]] = {}
    for rank in trace.ranks.values():
        for part in _by_step(rank):
            (step,) = part.steps
            if step.index in usual and step.ended_s:
                compute, wait = computing(part), waiting(part)
                hidden_s = length_s(common(compute, communicating(part)))
                busy_s = length_s(compute) + length_s(wait)
                neither_s = max(0.0, step.ended_s - step.began_s - busy_s)
                times = (length_s(compute) - hidden_s, hidden_s, length_s(wait), neither_s)
                of_step.setdefault(step.index, []).append(times)
    if not of_step:
        return StepTimes(0.0, 0.0, 0.0, 0.0)
    means = [[fmean(column) for column in zip(*ranks)] for ranks in of_step.values()]
    return StepTimes(*(median(column) for column in zip(*means)))


def sent_bytes(trace: Trace) -> dict[str, float]:
    """`bus_bytes` that a rank sends in a usual step, by operation: likewise."""
    usual = usual_steps(trace)
    events = [event for rank in trace.ranks.values() for event in rank.comms]
    events = [event for event in events if event.op != "recv"]  # counted where it is sent
    totals = {op: dict.fromkeys(usual, 0) for op in sorted({event.op for event in events})}
    for event in events:
        if event.step in usual:
            totals[event.op][event.step] += event.bus_bytes
    return {op: median(of_step.values()) / len(trace.ranks) for op, of_step in totals.items()}


def _by_step(rank: RankTrace) -> Iterator[RankTrace]:
    parts = {x.index: replace(rank, steps=[x], spans=[], comms=[], memory=[]) for x in rank.steps}
    for span in rank.spans:
        if span.step in parts:
            parts[span.step].spans.append(span)
    for event in rank.comms:
        if event.step in parts:
            parts[event.step].comms.append(event)
    yield from parts.values()


def _held_at_peak(trace: Trace) -> tuple[int, ...]:
    """Bytes by category on the rank with the highest peak; empty without a step in detail."""
    try:
        part = detailed_step(trace)
    except ValueError:
        return ()
    worst = max(part.ranks.values(), key=peak_bytes)
    return max(worst.memory, key=lambda point: sum(point.held_bytes)).held_bytes


def _named(runs: Sequence[Trace]) -> dict[str, Trace]:
    named: dict[str, Trace] = {}
    for number, trace in enumerate(runs, 1):
        name = str(trace.about.get("strategy") or trace.about.get("what") or f"run {number}")
        named[name if name not in named else f"{name} ({number})"] = trace
    return named


def _time_parts(times: Sequence[StepTimes]) -> list[BarPart]:
    waits_ms = [x.waiting_s * 1e3 for x in times]
    return [
        BarPart("computing", [x.alone_s * 1e3 for x in times], style.COMPUTING),
        BarPart("computing, hiding communication", [x.hidden_s * 1e3 for x in times], style.HIDDEN),
        BarPart("waiting", waits_ms, style.WAITING, "////", style.UNFINISHED),
        BarPart("neither", [x.neither_s * 1e3 for x in times], IDLE),
    ]


def _byte_parts(sent: Sequence[dict[str, float]]) -> tuple[str, list[BarPart]]:
    scale, unit = byte_unit(max(sum(ops.values()) for ops in sent))
    ops = style.in_order(op for run in sent for op, nbytes in run.items() if nbytes)
    others = [op for op in ops if op not in style.OPERATIONS]
    shades = {op: style.shade(op, others.index(op) if op in others else 0) for op in ops}
    parts = [BarPart(op, [run.get(op, 0.0) / scale for run in sent], shades[op]) for op in ops]
    return unit, parts or [BarPart("nothing", [0.0] * len(sent), IDLE)]


def _memory_parts(held: Sequence[tuple[int, ...]]) -> tuple[str, list[BarPart]]:
    scale, unit = byte_unit(max(map(sum, held)))
    return unit, [
        BarPart(category, [run[i] / scale if run else 0.0 for run in held], colour)
        for i, (category, colour) in enumerate(CATEGORIES.items())
        if any(run and run[i] for run in held)
    ]


@styled
def draw_comparison(results: Sequence["Result"], path: Path) -> Figure:
    """Draw `results` and save the picture as `path` (PNG)."""
    figure = constrained(None, max(3.6, 1.8 + 0.5 * len(results)))
    losses, sent, held = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    held.sharey(sent)
    for i, result in enumerate(results):
        losses.plot(
            range(1, len(result.losses) + 1), result.losses, style.DASHES[i % len(style.DASHES)],
            color=style.COLOURS[i % len(style.COLOURS)], lw=5 - 1.5 * min(i, 2),
            label=result.strategy, alpha=0.9,
        )  # fmt: skip
    losses.set(title="Loss: the lines lie on each other", xlabel="step", ylabel="nats per token")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend()
    names = [f"{x.strategy}\n{x.ranks} rank{'s' * (x.ranks > 1)}" for x in results]
    for offset, label, colour in [
        (-0.2, "measured", style.MEASURED),
        (0.2, "predicted", style.PREDICTED),
    ]:
        places = [place + offset for place in range(len(results))]
        lengths = [getattr(result, label).bus_bytes / 1e6 for result in results]
        sent.barh(places, lengths, 0.38, color=colour, label=label)
    most = max(result.predicted.bus_bytes for result in results) / 1e6 or 1
    sent.set(title="Sent by one rank in a step", xlabel="MB", xlim=(0, most * 1.05))
    name_rows(sent, names)
    legend_below(sent)
    fields = {"parameters": "parameter_bytes", "gradients": "gradient_bytes",
              "optimizer state": "optimizer_bytes"}  # fmt: skip
    stacked_bars(held, [
        BarPart(name, [getattr(x.measured, field) / 1e6 for x in results], CATEGORIES[name])
        for name, field in fields.items()
    ], names)  # fmt: skip
    held.set(title="Held by one rank", xlabel="MB")
    held.tick_params(labelleft=False)
    figure.savefig(path, dpi=120)
    return figure
