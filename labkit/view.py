"""A recorded run as a table: the command, the breakdown of step time, bytes sent, peak memory."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

from rich.filesize import decimal
from rich.table import Table

from labkit.events import CommEvent
from labkit.foreign import check_output, markup
from labkit.trace import CATEGORIES, RankTrace, Trace
from labkit.trace.graph import PHASES
from labkit.trace.measures import communicating, length_s, overlap, union, waiting, without

Rows = list[tuple[str, str]]


def table(trace: Trace, name: str = "run") -> Table:
    """The trace as a rich table. Times are medians over the steps of all ranks, excluding detailed
    steps and, if possible, the run's first step."""
    groups = {
        "run": _about(trace),
        "time of a step": _times(trace),
        "sent by a rank": _sent(trace),
        "peak memory": _memory(trace),
    }
    return grouped_table(name, groups)


def grouped_table(title: str, groups: Mapping[str, Rows]) -> Table:
    """A table of groups of (name, value) rows."""
    shown = Table(show_header=False, title=markup(title), title_justify="left")
    for group, rows in groups.items():
        for i, (left, right) in enumerate(rows):
            first = f"[bold]{group}[/]" if i == 0 else ""
            shown.add_row(first, markup(left), markup(right), end_section=i == len(rows) - 1)
    return shown


def draw(trace: Trace, folder: Path, step: int | None = None) -> list[Path]:
    """Draw timeline.png and, if recorded, memory.png. Raises ValueError for an unknown step."""
    from labkit import plot

    pictures = {}
    if trace.steps():
        pictures["timeline.png"] = plot.timeline(trace, step=step)
    if trace.steps(detail=True) and any(rank.memory for rank in trace.ranks.values()):
        pictures["memory.png"] = plot.memory(trace)
    for name, figure in pictures.items():
        check_output(folder / name)
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in pictures]


def _about(trace: Trace) -> Rows:
    about = trace.about
    rows: Rows = [
        (key, str(about[key])) for key in ("what", "command", "started_at") if key in about
    ]
    versions = [f"{key} {about[key]}" for key in ("labkit", "python", "torch") if key in about]
    rows += [("versions", ", ".join(versions))] if versions else []
    rows += [("seeds", str(about[key])) for key in ("seed", "seeds") if key in about]
    missing = trace.size - len(trace.ranks)
    rows.append(("ranks", f"{trace.size}" + (f", {missing} missing" if missing else "")))
    where = sorted({f"{rank.device} on {rank.host or 'a host'}" for rank in trace.ranks.values()})
    rows.append(("devices", ", ".join(where[:4]) + (" ..." if len(where) > 4 else "")))
    detailed = ", ".join(map(str, trace.steps(detail=True)))
    in_detail = f", in detail: step {detailed}" if detailed else ""
    rows.append(("steps", f"{len(trace.steps())}{in_detail}"))
    losses = [(x["step"], x["loss"]) for x in trace.metrics if {"step", "loss"} <= x.keys()]
    if losses:
        ends = (min(losses)[0], max(losses)[0])
        of_ends = [[loss for step, loss in losses if step == end] for end in ends]
        first, last = (sum(values) / len(values) for values in of_ends)  # fmean rejects inf - inf
        rows.append(("loss", f"{first:.4f} -> {last:.4f}, mean over ranks"))
    return rows


def _times(trace: Trace) -> Rows:
    timed = _timed(trace)
    steps = [timed.step(index) for index in timed.steps()]
    phases = [p for p in PHASES if any(x.phase == p for r in timed.ranks.values() for x in r.spans)]
    measures: list[tuple[str, Callable[[RankTrace], float]]] = [
        ("whole step", lambda rank: sum(x.ended_s - x.began_s for x in rank.steps)),
        *((phase, partial(_phase_s, phase=phase)) for phase in phases),
        ("waiting", lambda rank: length_s(waiting(rank))),
    ]
    rows = []
    for name, measure in measures:
        times_s: dict[int, list[float]] = defaultdict(list)  # per rank
        for step in steps:
            for number, rank in step.ranks.items():
                if any(x.ended_s for x in rank.steps):
                    times_s[number].append(measure(rank))
        if times_s:
            typical_s = median(time_s for of_rank in times_s.values() for time_s in of_rank)
            slowest = max(times_s, key=lambda number: median(times_s[number]))
            most = f", most on rank {slowest}: {_ms(median(times_s[slowest]))}"
            rows.append((name, _ms(typical_s) + (most if len(times_s) > 1 else "")))
    if any(communicating(rank) for rank in timed.ranks.values()):
        rows.append(("overlap", f"{overlap(timed):.0%} of communication hidden behind computation"))
    return rows


def _phase_s(rank: RankTrace, phase: str) -> float:
    """Seconds in the spans of a phase, excluding waits."""
    spans = [x for x in rank.spans if x.phase == phase and x.ended_s]
    return length_s(without(union((x.began_s, x.ended_s) for x in spans), waiting(rank)))


def _sent(trace: Trace) -> Rows:
    """Means over ranks and the steps that contain the operation; without steps, over ranks only."""
    steps, ranks = len(trace.steps()), max(1, len(trace.ranks))
    by_op: dict[str, list[CommEvent]] = defaultdict(list)
    for rank in trace.ranks.values():
        for event in rank.comms:
            by_op[event.op].append(event)
    sent_bytes = {op: sum(event.bus_bytes for event in events) for op, events in by_op.items()}
    rows = []
    for op, events in sorted(by_op.items(), key=lambda item: -sent_bytes[item[0]]):
        seen = len({event.step for event in events}) if steps else 1
        often = " per step" if seen == steps else f" in {seen} of {steps} steps" if steps else ""
        calls = len(events) / (ranks * seen)
        sent = f"{decimal(round(sent_bytes[op] / (ranks * seen)))}{often}"
        rows.append((op, f"{sent}, in {calls:.4g} call{'s' * (calls != 1)}"))
    return rows


def _memory(trace: Trace) -> Rows:
    """Memory by category at the highest peak of any rank."""
    points = [(sum(p.held_bytes), n, p) for n, rank in trace.ranks.items() for p in rank.memory]
    if not points:
        return []
    most, rank, point = max(points, key=lambda x: (x[0], -x[1]))
    rows = [(name, decimal(nbytes)) for name, nbytes in zip(CATEGORIES, point.held_bytes) if nbytes]
    return [("total", f"{decimal(most)}, on rank {rank} in step {point.step}"), *rows]


def _timed(trace: Trace) -> Trace:
    """The finished, non-detailed steps; the run's first step is dropped if others remain."""
    unfinished = {x.index for rank in trace.ranks.values() for x in rank.steps if not x.ended_s}
    steps = set(trace.steps(detail=False)) - unfinished
    steps -= set(trace.steps()[:1]) if len(steps) > 1 else set()
    return trace.only(steps)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f} ms"
