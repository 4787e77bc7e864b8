"""A recorded run as a table: what ran, where its time went, what it sent and what it held."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from rich.filesize import decimal
from rich.table import Table

from labkit.foreign import check_output, markup
from labkit.trace import CATEGORIES, RankTrace, Trace
from labkit.trace.graph import PHASES
from labkit.trace.measures import communicating, length_s, overlap, union, waiting, without

Rows = list[tuple[str, str]]


def table(trace: Trace, name: str = "run") -> Table:
    """The trace as a rich table. Times are medians over the timed steps of all ranks; a step that
    was recorded in detail counts for bytes and memory only."""
    shown = Table(show_header=False, title=markup(name), title_justify="left")
    for group, rows in (
        ("what ran", _what(trace)),
        ("time of a step", _times(trace)),
        ("sent by a rank", _sent(trace)),
        ("memory at its peak", _memory(trace)),
    ):
        for i, (left, right) in enumerate(rows):
            title = f"[bold]{group}[/]" if i == 0 else ""
            shown.add_row(title, markup(left), markup(right), end_section=i == len(rows) - 1)
    return shown


def draw(trace: Trace, folder: Path, step: int | None = None) -> list[Path]:
    """Draw what there is: timeline.png (of one step, where given), and memory.png where memory
    was recorded. Raises ValueError for a step that is not there."""
    from labkit import plot

    pictures = {}
    if trace.steps():
        pictures["timeline.png"] = plot.timeline(trace, step=step)
    if trace.steps(detail=True) and any(one.memory for one in trace.ranks.values()):
        pictures["memory.png"] = plot.memory(trace)
    for name, figure in pictures.items():
        check_output(folder / name)
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in pictures]


def _what(trace: Trace) -> Rows:
    about = trace.about
    rows: Rows = [
        (key, str(about[key])) for key in ("what", "command", "started_at") if key in about
    ]
    versions = [f"{key} {about[key]}" for key in ("labkit", "python", "torch") if key in about]
    rows += [("versions", ", ".join(versions))] if versions else []
    rows += [("seeds", str(about[key])) for key in ("seed", "seeds") if key in about]
    missing = f", {trace.size - len(trace.ranks)} missing"
    where = sorted({f"{one.device} of {one.host or 'a host'}" for one in trace.ranks.values()})
    rows.append(("ranks", f"{trace.size}{missing if trace.size != len(trace.ranks) else ''}"))
    rows.append(("devices", ", ".join(where[:4]) + (" ..." if len(where) > 4 else "")))
    steps, detailed = trace.steps(), trace.steps(detail=True)
    told = ", ".join(map(str, detailed))
    rows.append(("steps", f"{len(steps)}" + (f", in detail: step {told}" if detailed else "")))
    losses = [(x["step"], x["loss"]) for x in trace.metrics if {"step", "loss"} <= x.keys()]
    if losses:
        ends = (min(losses)[0], max(losses)[0])
        of_ends = [[loss for step, loss in losses if step == end] for end in ends]
        first, last = (sum(own) / len(own) for own in of_ends)
        rows.append(("loss", f"{first:.4f} -> {last:.4f}, mean of the ranks"))
    return rows


def _times(trace: Trace) -> Rows:
    timed = _timed(trace)
    steps = [timed.step(index) for index in timed.steps()]
    phases = [p for p in PHASES if any(x.phase == p for r in timed.ranks.values() for x in r.spans)]
    measures: list[tuple[str, Callable[[RankTrace], float]]] = [
        ("the whole", lambda one: sum(x.ended_s - x.began_s for x in one.steps)),
        *((phase, partial(_phase_s, phase=phase)) for phase in phases),
        ("waiting", lambda one: length_s(waiting(one))),
    ]
    rows = []
    for name, measure in measures:
        times_s: dict[int, list[float]] = defaultdict(list)  # of each rank
        for step in steps:
            for rank, one in step.ranks.items():
                if any(x.ended_s for x in one.steps):
                    times_s[rank].append(measure(one))
        if times_s:
            typical_s = median(time_s for of_rank in times_s.values() for time_s in of_rank)
            slowest = max(times_s, key=lambda rank: median(times_s[rank]))
            most = f", most on rank {slowest}: {_ms(median(times_s[slowest]))}"
            rows.append((name, _ms(typical_s) + (most if len(times_s) > 1 else "")))
    if any(communicating(one) for one in timed.ranks.values()):
        rows.append(("overlap", f"{overlap(timed):.0%} of communication ran behind computing"))
    return rows


def _phase_s(one: RankTrace, phase: str) -> float:
    """Seconds in its spans, less the waits inside them."""
    spans = [x for x in one.spans if x.phase == phase and x.ended_s]
    return length_s(without(union((x.began_s, x.ended_s) for x in spans), waiting(one)))


def _sent(trace: Trace) -> Rows:
    """Means over the ranks, and over those steps in which the operation came at all; over ranks
    alone where nobody counted steps."""
    steps, ranks = len(trace.steps()), max(1, len(trace.ranks))
    calls: dict[str, int] = defaultdict(int)
    sent_bytes: dict[str, int] = defaultdict(int)
    seen: dict[str, set[int]] = defaultdict(set)
    for one in trace.ranks.values():
        for event in one.comms:
            calls[event.op] += 1
            sent_bytes[event.op] += event.bus_bytes
            seen[event.op].add(event.step if steps else 0)
    rows = []
    for op in sorted(calls, key=lambda op: -sent_bytes[op]):
        parts = ranks * len(seen[op])
        often = " a step" if len(seen[op]) == steps else f" in {len(seen[op])} of {steps} steps"
        count = f"{calls[op] / parts:.4g} call{'s' * (calls[op] != parts)}"
        rows.append(
            (op, f"{decimal(round(sent_bytes[op] / parts))}{often if steps else ''}, in {count}")
        )
    return rows


def _memory(trace: Trace) -> Rows:
    """The moment at which the fullest rank held most."""
    points = [(sum(p.held_bytes), r) for r, one in trace.ranks.items() for p in one.memory]
    if not points:
        return []
    most, rank = max(points, key=lambda x: (x[0], -x[1]))
    point = next(p for p in trace.ranks[rank].memory if sum(p.held_bytes) == most)
    rows = [(name, decimal(nbytes)) for name, nbytes in zip(CATEGORIES, point.held_bytes) if nbytes]
    return [("together", f"{decimal(most)}, on rank {rank} in step {point.step}"), *rows]


def _timed(trace: Trace) -> Trace:
    """The usual steps: without those whose times mean nothing, those that never ended and, where
    others are left, the first, which has to warm up."""
    unfinished = {x.index for one in trace.ranks.values() for x in one.steps if not x.ended_s}
    steps = set(trace.steps(detail=False)) - unfinished
    steps -= set(trace.steps()[:1]) if len(steps) > 1 else set()
    return trace.only(steps)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f} ms"
