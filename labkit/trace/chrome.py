"""Exports a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

    process    one per rank
    threads    computing (steps with nested spans), waiting, and one or more per group (transfers)
    counter    memory: bytes by category, in the detailed step
    arrows     issue -> wait, send -> receive, first rank of a collective -> every other rank

Times are in microseconds. Complete events ("X") on one thread nest or are disjoint. An arrow ("s"
to "f") points forward in time, and each end is inside an event on its thread. Source: "Trace
Event Format", Google, 2016.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.trace.graph import CATEGORIES, RankTrace, Trace
from labkit.trace.measures import end_of, union

Event = dict[str, Any]

# Order of simultaneous events: an event precedes its nested events and the arrows from it.
ORDER = {"M": 0, "X": 1, "s": 2, "f": 3, "C": 4}
SHOWN = ("step", "group", "dtype", "payload_bytes", "bus_bytes", "wire_bytes", "transport",
         "algorithm", "blocking", "source")  # fmt: skip


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a Trace Event JSON object; unfinished events extend to the end of the trace."""
    end_s = end_of(trace)
    ranks = {number: _RankSlices(rank, end_s) for number, rank in sorted(trace.ranks.items())}
    events = [event for slices in ranks.values() for event in slices.events()]
    for number, (name, begin, end) in enumerate(_arrows(trace, ranks)):
        events += _arrow(number, name, begin, end)
    events.sort(key=lambda x: (x.get("ts", -1), ORDER[x["ph"]], -x.get("dur", 0)))
    about = {key: str(value) for key, value in trace.about.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace to `path`, gzipped if the name ends in ".gz"; the viewers open both."""
    path = Path(path)
    data = json.dumps(to_chrome(trace), separators=(",", ":"), allow_nan=False).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@dataclass
class _Slice:
    """A complete event. Times are whole nanoseconds: float rounding would break the nesting."""

    rank: int
    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]
    thread: int = 1


class _RankSlices:
    """The slices of one rank, by thread."""

    def __init__(self, rank: RankTrace, end_s: float):
        self.rank, self.end_s = rank, end_s
        self.threads: list[tuple[str, list[_Slice]]] = []
        self.transfers: dict[int, _Slice] = {}  # id(event) -> slice
        self.waits: dict[int, _Slice] = {}  # id(event) -> slice
        slices = []
        for step in rank.steps:
            name = f"step {step.index}" + ", in detail (times not meaningful)" * step.detail
            slices.append(self._slice(name, "step", step.began_s, step.ended_s))
        for span in rank.spans:
            name = f"{span.phase} {span.module or span.kind}".strip()
            args = {x: getattr(span, x) for x in ("kind", "step", "flops", "moved_bytes")}
            slices.append(self._slice(name, span.phase, span.began_s, span.ended_s, **args))
        groups: dict[str, list[_Slice]] = {}
        for event in rank.comms:
            name, began_s = f"{event.op} {event.seq}", event.began_s or event.issued_s
            if event.blocking or event.wait_ended_s:
                times_s = event.wait_began_s, event.wait_ended_s
                self.waits[id(event)] = self._slice(f"wait for {name}", "wait", *times_s)
            args = {x: getattr(event, x) for x in SHOWN} | {"shape": list(event.shape)}
            transfer = self._slice(name, "communication", began_s, event.ended_s, **args)
            self.transfers[id(event)] = transfer
            groups.setdefault(event.group, []).append(transfer)
        self._add_threads("computing", slices)
        self._add_threads("waiting", self.waits.values())
        for group, transfers in groups.items():
            self._add_threads(f"group {group}", transfers, nest=False)
        self._computing = union((x.begin_ns, x.end_ns) for x in self.threads[0][1])

    def _slice(self, name: str, category: str, begin_s: float, end_s: float, **args: Any) -> _Slice:
        if not end_s:
            name, end_s = f"{name} (never ended)", self.end_s
        begin_ns, end_ns = round(begin_s * 1e9), round(end_s * 1e9)
        known = {key: value for key, value in args.items() if value is not None}
        return _Slice(self.rank.rank, name, category, begin_ns, max(begin_ns, end_ns), known)

    def _add_threads(self, name: str, slices: Iterable[_Slice], nest: bool = True) -> None:
        """Put slices on new threads, on each of which they are disjoint (or nested, if `nest`)."""
        remaining = sorted(slices, key=lambda x: (x.begin_ns, -x.end_ns))
        while remaining or not self.threads:
            placed: list[_Slice] = []
            ends: list[int] = []  # of the slices that enclose the next slice
            crossing: list[_Slice] = []
            for x in remaining:
                while ends and ends[-1] <= x.begin_ns:
                    ends.pop()
                if ends and (x.end_ns > ends[-1] or not nest):
                    crossing.append(x)
                    continue
                x.thread = len(self.threads) + 1
                ends.append(x.end_ns)
                placed.append(x)
            self.threads.append((name, placed))
            remaining = crossing

    def computing_from(self, when_ns: int) -> _Slice | None:
        """A slice from `when_ns` on, to start an arrow; None if the rank is not computing then."""
        place = bisect_right(self._computing, when_ns, key=lambda x: int(x[0]))
        end_ns = int(self._computing[place - 1][1]) if place else 0
        return _Slice(self.rank.rank, "", "", when_ns, end_ns, {}) if end_ns > when_ns else None

    def events(self) -> Iterator[Event]:
        """Every event of this rank except arrows."""
        rank, pid = self.rank, _pid(self.rank.rank)
        where = ", ".join(filter(None, (rank.device, rank.host)))
        yield _meta("process_name", pid, 0, name=f"rank {rank.rank} ({where})")
        yield _meta("process_sort_index", pid, 0, sort_index=rank.rank)
        for i, (name, slices) in enumerate(self.threads, start=1):
            yield _meta("thread_name", pid, i, name=name)
            yield _meta("thread_sort_index", pid, i, sort_index=i)
            for x in slices:
                yield {
                    "ph": "X", "name": x.name, "cat": x.category, "pid": pid, "tid": i,
                    "ts": x.begin_ns / 1e3, "dur": (x.end_ns - x.begin_ns) / 1e3, "args": x.args,
                }  # fmt: skip
        for point in rank.memory:
            yield {
                "ph": "C", "name": "memory, bytes", "pid": pid,
                "ts": round(point.when_s * 1e9) / 1e3,
                "args": dict(zip(CATEGORIES, point.held_bytes)),
            }  # fmt: skip


def _arrows(trace: Trace, ranks: dict[int, _RankSlices]) -> Iterator[tuple[str, _Slice, _Slice]]:
    """Every arrow as (name, slice at the start, slice at the end)."""
    for rank, of_rank in ranks.items():
        for event in trace.ranks[rank].comms:
            at = of_rank.computing_from(round(event.issued_s * 1e9))
            if at and not event.blocking and id(event) in of_rank.waits:
                yield "issued", at, of_rank.waits[id(event)]
    transfers = {event: x for of_rank in ranks.values() for event, x in of_rank.transfers.items()}
    for ends in trace.messages().values():
        if len(ends) == 2:
            yield "message", transfers[id(ends["send"])], transfers[id(ends["recv"])]
    for events in trace.collectives().values():
        slices = [transfers[id(event)] for event in events.values()]
        first, *others = sorted(slices, key=lambda x: (x.begin_ns, x.rank))
        for other in others:
            yield "collective", first, other


def _arrow(number: int, name: str, begin: _Slice, end: _Slice) -> list[Event]:
    """The two events of an arrow; an empty list if either end is outside its slice."""
    begin_ns = begin.begin_ns
    end_ns = max(end.begin_ns, begin_ns)
    if not (begin_ns < begin.end_ns and end_ns < end.end_ns):
        return []
    return [
        {
            "ph": phase, "name": name, "cat": "arrow", "id": number, "pid": _pid(x.rank),
            "tid": x.thread, "ts": ns / 1e3, **({"bp": "e"} if phase == "f" else {}),
        }
        for phase, x, ns in (("s", begin, begin_ns), ("f", end, end_ns))
    ]  # fmt: skip


def _meta(what: str, pid: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": args}


def _pid(rank: int) -> int:
    return rank + 1  # Perfetto treats process 0 as Linux's idle process
