"""Recorded runs side by side: where the time of a step goes, what travels, what is held.

`labkit.plot.comparison` draws the same strategies' losses, and bytes against their prediction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.plot.choice import choose_step, usual_steps
from labkit.plot.memories import detailed_step, peak_bytes
from labkit.plot.picture import Picture, styled
from labkit.plot.stacks import Part, name_bars, stack
from labkit.plot.style import (
    CATEGORIES,
    COMPUTING,
    HIDDEN,
    IDLE,
    OPERATIONS,
    UNFINISHED,
    WAITING,
    byte_unit,
    in_order,
    shade,
)
from labkit.trace import RankTrace, Trace
from labkit.trace.measures import common, communicating, computing, length_s, waiting


@styled
def compare(runs: Mapping[str, Trace] | Sequence[Trace], figure: Figure | None = None) -> Figure:
    """Strategies side by side, from their recorded runs.

    Args:
        runs: name -> trace; the runs of a list are named by what they say they are.
        figure: draw into this one instead of a new one.

    Time and bytes are of a usual step: the mean over the ranks, and the median over the timed
    steps after the run's first. Memory is that of the rank with the highest peak, at its peak, and
    is left out where no run has a step in detail. Raises ValueError for no run or an empty one.
    """
    named = dict(runs) if isinstance(runs, Mapping) else _named(runs)
    if not named:
        raise ValueError('nothing to compare: give recorded runs, as compare({"ddp": trace})')
    for trace in named.values():
        choose_step(trace)  # says what to do when it is empty
    held = [_held_at_peak(trace) for trace in named.values()]
    if figure is None:
        figure = Picture(2.3 + 0.5 * len(named))
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    panels = figure.subplots(1, 2 + any(held), squeeze=False, sharey=True)[0]
    _draw_times(panels[0], [step_times(trace) for trace in named.values()])
    _draw_bytes(panels[1], [sent_bytes(trace) for trace in named.values()])
    if any(held):
        _draw_held(panels[2], held)
    for axes in panels:
        name_bars(axes, [f"{name}\n{_circumstances(trace)}" for name, trace in named.items()])
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
    for one in trace.ranks.values():
        for part in _by_step(one):
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
    ops = sorted({event.op for one in trace.ranks.values() for event in one.comms} - {"recv"})
    totals = {op: dict.fromkeys(usual, 0) for op in ops}
    for one in trace.ranks.values():
        for event in one.comms:
            if event.step in usual and event.op != "recv":  # counted where it is sent
                totals[event.op][event.step] += event.bus_bytes
    return {op: median(of_step.values()) / len(trace.ranks) for op, of_step in totals.items()}


def _by_step(one: RankTrace) -> Iterator[RankTrace]:
    parts = {x.index: replace(one, steps=[x], spans=[], comms=[], memory=[]) for x in one.steps}
    for span in one.spans:
        if span.step in parts:
            parts[span.step].spans.append(span)
    for event in one.comms:
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


def _draw_times(axes: Axes, times: Sequence[StepTimes]) -> None:
    stack(axes, [
        Part("computing", [x.alone_s * 1e3 for x in times], COMPUTING),
        Part("computing, hiding communication", [x.hidden_s * 1e3 for x in times], HIDDEN),
        Part("waiting", [x.waiting_s * 1e3 for x in times], WAITING, "////", UNFINISHED),
        Part("neither", [x.neither_s * 1e3 for x in times], IDLE),
    ])  # fmt: skip
    axes.set(title="Time of a step", xlabel="ms")


def _draw_bytes(axes: Axes, sent: Sequence[dict[str, float]]) -> None:
    scale, unit = byte_unit(max(sum(one.values()) for one in sent))
    ops = in_order(op for one in sent for op, count in one.items() if count)
    others = [op for op in ops if op not in OPERATIONS]
    parts = [
        Part(op, [one.get(op, 0.0) / scale for one in sent],
             shade(op, others.index(op) if op in others else 0))
        for op in ops
    ]  # fmt: skip
    stack(axes, parts or [Part("nothing", [0.0] * len(sent), IDLE)])
    axes.set(title="Sent by one rank in a step", xlabel=unit)


def _draw_held(axes: Axes, held: Sequence[tuple[int, ...]]) -> None:
    scale, unit = byte_unit(max(map(sum, held)))
    stack(axes, [
        Part(category, [one[i] / scale if one else 0.0 for one in held], colour)
        for i, (category, colour) in enumerate(CATEGORIES.items())
        if any(one and one[i] for one in held)
    ])  # fmt: skip
    axes.set(title="Held by one rank at its peak", xlabel=unit)
