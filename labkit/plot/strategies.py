"""Strategies side by side.

compare          from recorded runs: where the time of a step goes, what travels, what is held
draw_comparison  their losses, and the bytes that one rank sends and holds against the prediction
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.plot import style
from labkit.plot.choice import choose_step, usual_steps
from labkit.plot.figure import BarPart, constrained, legend_below, name_rows, stacked_bars, styled
from labkit.plot.memories import detailed_step, peak_bytes
from labkit.plot.style import CATEGORIES, IDLE
from labkit.trace import RankTrace, Trace
from labkit.trace.measures import common, communicating, computing, length_s, waiting

if TYPE_CHECKING:
    from labkit.compare import Result


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
    figure = constrained(figure, 2.3 + 0.5 * len(named))
    panels = figure.subplots(1, 2 + any(held), squeeze=False, sharey=True)[0]
    names = [f"{name}\n{_circumstances(trace)}" for name, trace in named.items()]
    _draw_times(panels[0], [step_times(trace) for trace in named.values()], names)
    _draw_bytes(panels[1], [sent_bytes(trace) for trace in named.values()], names)
    if any(held):
        _draw_held(panels[2], held, names)
    for axes in panels:
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


def _draw_times(axes: Axes, times: Sequence[StepTimes], names: Sequence[str]) -> None:
    stacked_bars(axes, [
        BarPart("computing", [x.alone_s * 1e3 for x in times], style.COMPUTING),
        BarPart("computing, hiding communication", [x.hidden_s * 1e3 for x in times], style.HIDDEN),
        BarPart("waiting", [x.waiting_s * 1e3 for x in times], style.WAITING, "////",
                style.UNFINISHED),
        BarPart("neither", [x.neither_s * 1e3 for x in times], IDLE),
    ], names)  # fmt: skip
    axes.set(title="Time of a step", xlabel="ms")


def _draw_bytes(axes: Axes, sent: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    scale, unit = style.byte_unit(max(sum(one.values()) for one in sent))
    ops = style.in_order(op for one in sent for op, nbytes in one.items() if nbytes)
    others = [op for op in ops if op not in style.OPERATIONS]
    parts = [
        BarPart(op, [one.get(op, 0.0) / scale for one in sent],
                style.shade(op, others.index(op) if op in others else 0))
        for op in ops
    ]  # fmt: skip
    stacked_bars(axes, parts or [BarPart("nothing", [0.0] * len(sent), IDLE)], names)
    axes.set(title="Sent by one rank in a step", xlabel=unit)


def _draw_held(axes: Axes, held: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
    scale, unit = style.byte_unit(max(map(sum, held)))
    stacked_bars(axes, [
        BarPart(category, [one[i] / scale if one else 0.0 for one in held], colour)
        for i, (category, colour) in enumerate(CATEGORIES.items())
        if any(one and one[i] for one in held)
    ], names)  # fmt: skip
    axes.set(title="Held by one rank at its peak", xlabel=unit)


@styled
def draw_comparison(results: Sequence["Result"], path: Path) -> Figure:
    """Draw `results` and save the picture as `path` (PNG)."""
    figure = constrained(None, max(3.6, 1.8 + 0.5 * len(results)))
    losses, sent, held = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    held.sharey(sent)
    _draw_losses(losses, results)
    names = [f"{one.strategy}\n{one.ranks} rank{'s' * (one.ranks > 1)}" for one in results]
    for offset, footprints, label, colour in [
        (-0.2, [one.measured for one in results], "measured", style.MEASURED),
        (0.2, [one.predicted for one in results], "predicted", style.PREDICTED),
    ]:
        places = [place + offset for place in range(len(results))]
        lengths = [one.bus_bytes / 1e6 for one in footprints]
        sent.barh(places, lengths, 0.38, color=colour, label=label)
    most = max(one.predicted.bus_bytes for one in results) / 1e6 or 1
    sent.set(title="Sent by one rank in a step", xlabel="MB", xlim=(0, most * 1.05))
    name_rows(sent, names)
    legend_below(sent)
    measured = [one.measured for one in results]
    stacked_bars(held, [
        BarPart(name, [nbytes / 1e6 for nbytes in some], CATEGORIES[name])
        for name, some in {
            "parameters": [x.parameter_bytes for x in measured],
            "gradients": [x.gradient_bytes for x in measured],
            "optimizer state": [x.optimizer_bytes for x in measured],
        }.items()
    ], names)  # fmt: skip
    held.set(title="Held by one rank", xlabel="MB")
    held.tick_params(labelleft=False)
    figure.savefig(path, dpi=120)
    return figure


def _draw_losses(axes: Axes, results: Sequence["Result"]) -> None:
    for i, one in enumerate(results):
        axes.plot(
            range(1, len(one.losses) + 1), one.losses, style.DASHES[i % len(style.DASHES)],
            color=style.COLOURS[i % len(style.COLOURS)], lw=5 - 1.5 * min(i, 2),
            label=one.strategy, alpha=0.9,
        )  # fmt: skip
    axes.set(title="Loss: the lines lie on each other", xlabel="step", ylabel="nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
