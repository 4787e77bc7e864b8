"""A trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    process   rank 0                       a process for each rank
    thread      computing                  steps, and the spans inside them
    thread      waiting
    thread      group default              what is under way; more threads where more is
    counter     memory                     bytes by category, in the detailed step
    arrows      issue -> wait, send -> receive, and from the rank whose part of a collective
                began first to the others

The rules that are kept here: times are microseconds; on a thread, one complete event ("X") lies
wholly inside another or beside it; an arrow ("s" to "f") goes forward in time, and both its ends
lie inside an event of their thread. Source: "Trace Event Format", Google, 2016.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.events import CommEvent
from labkit.trace.graph import CATEGORIES, RankTrace, Trace
from labkit.trace.measures import end_of, lanes

Event = dict[str, Any]

# In one file, at one time: an event before those inside it, and before what points at it.
ORDER = {"M": 0, "X": 1, "s": 2, "f": 3, "C": 4}


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as the JSON object of the format. What never ended is drawn to the trace's end."""
    end_s = end_of(trace)
    pages = {rank: _Page(one, end_s) for rank, one in sorted(trace.ranks.items())}
    events = [event for page in pages.values() for event in page.events()]
    for number, (name, begin, end) in enumerate(_arrows(trace, pages)):
        events += _arrow(number, name, begin, end)
    events.sort(key=lambda x: (x.get("ts", -1), ORDER[x["ph"]], -x.get("dur", 0)))
    about = {key: str(value) for key, value in trace.about.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace as `path`, packed when that ends in ".gz"; both viewers open it so."""
    path = Path(path)
    data = json.dumps(to_chrome(trace), separators=(",", ":"), allow_nan=False).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@dataclass
class _Slice:
    """A complete event, in whole nanoseconds: sums of rounded times would not nest."""

    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    thread: int = 0
    around: "_Slice | None" = None  # on the same thread


class _Page:
    """The slices of one rank, each on its thread."""

    def __init__(self, one: RankTrace, end_s: float):
        self.one, self.end_s = one, end_s
        self.threads: list[tuple[str, list[_Slice]]] = []
        self.carried: dict[int, _Slice] = {}  # id of an event -> where it travels
        self.waited: dict[int, _Slice] = {}  # id of an event -> where it is waited for
        self._lay("computing", [*self._steps(), *self._spans()])
        self._lay("waiting", self._waits())
        ended = [e if e.ended_s else _till(e, end_s) for e in one.comms]
        original = {id(new): old for new, old in zip(ended, one.comms)}
        for group, lane in lanes(ended):
            slices = [self._transfer(original[id(event)], event) for event in lane]
            self._lay(f"group {group}", slices)
        self._begins = [x.begin_ns for x in self.threads[0][1]]

    def _lay(self, name: str, slices: Iterable[_Slice]) -> None:
        """Put the slices on a thread, and those that would cut across others on a further one."""
        rest = sorted(slices, key=lambda x: (x.begin_ns, -x.end_ns))
        while rest or not self.threads:
            here: list[_Slice] = []
            around: list[_Slice] = []
            crossing: list[_Slice] = []
            for one in rest:
                while around and around[-1].end_ns <= one.begin_ns:
                    around.pop()
                if around and one.end_ns > around[-1].end_ns:
                    crossing.append(one)
                    continue
                one.around = around[-1] if around else None
                around.append(one)
                here.append(one)
                one.rank, one.thread = self.one.rank, len(self.threads) + 1
            self.threads.append((name, here))
            rest = crossing

    def _slice(self, name: str, category: str, begin_s: float, end_s: float, **args: Any) -> _Slice:
        if not end_s:
            name, end_s = f"{name} (never ended)", self.end_s
        begin_ns = round(begin_s * 1e9)
        told = {key: value for key, value in args.items() if value is not None}
        return _Slice(name, category, begin_ns, max(begin_ns, round(end_s * 1e9)), told)

    def _steps(self) -> Iterator[_Slice]:
        for step in self.one.steps:
            name = f"step {step.index}" + ", in detail: its times mean nothing" * step.detail
            yield self._slice(name, "step", step.began_s, step.ended_s)

    def _spans(self) -> Iterator[_Slice]:
        for span in self.one.spans:
            yield self._slice(
                f"{span.phase} {span.module or span.kind}".strip(), span.phase, span.began_s,
                span.ended_s, kind=span.kind, step=span.step, flops=span.flops,
                moved_bytes=span.moved_bytes,
            )  # fmt: skip

    def _waits(self) -> Iterator[_Slice]:
        for event in self.one.comms:
            if event.blocking or event.wait_ended_s:
                name = f"wait for {event.op} {event.seq}"
                wait = self._slice(name, "wait", event.wait_began_s, event.wait_ended_s)
                self.waited[id(event)] = wait
                yield wait

    def _transfer(self, event: CommEvent, ended: CommEvent) -> _Slice:
        end_s = event.ended_s and ended.ended_s  # 0.0 where it never ended
        self.carried[id(event)] = one = self._slice(
            f"{event.op} {event.seq}", "communication", ended.began_s, end_s, step=event.step,
            group=event.group, dtype=event.dtype, shape=list(event.shape),
            payload_bytes=event.payload_bytes, bus_bytes=event.bus_bytes,
            wire_bytes=event.wire_bytes, transport=event.transport, algorithm=event.algorithm,
            blocking=event.blocking, source=event.source,
        )  # fmt: skip
        return one

    def computing_at(self, when_ns: int) -> _Slice | None:
        """A slice of the first thread that holds this moment, for an arrow to leave from."""
        i = bisect_right(self._begins, when_ns)
        one = self.threads[0][1][i - 1] if i else None
        while one and one.end_ns <= when_ns:
            one = one.around
        return one

    def events(self) -> Iterator[Event]:
        """All but the arrows."""
        one = self.one
        where = ", ".join(filter(None, (one.device, one.host)))
        yield _meta("process_name", one.rank, 0, name=f"rank {one.rank} ({where})")
        yield _meta("process_sort_index", one.rank, 0, sort_index=one.rank)
        for i, (name, slices) in enumerate(self.threads, start=1):
            yield _meta("thread_name", one.rank, i, name=name)
            yield _meta("thread_sort_index", one.rank, i, sort_index=i)
            for x in slices:
                yield {
                    "ph": "X", "name": x.name, "cat": x.category, "pid": _pid(one.rank), "tid": i,
                    "ts": x.begin_ns / 1e3, "dur": (x.end_ns - x.begin_ns) / 1e3, "args": x.args,
                }  # fmt: skip
        for point in one.memory:
            yield {
                "ph": "C", "name": "memory, bytes", "pid": _pid(one.rank),
                "ts": round(point.when_s * 1e9) / 1e3,
                "args": dict(zip(CATEGORIES, point.held_bytes)),
            }  # fmt: skip


Arrow = tuple[str, _Slice, _Slice]


def _arrows(trace: Trace, pages: dict[int, _Page]) -> Iterator[Arrow]:
    for rank, page in pages.items():
        for event in trace.ranks[rank].comms:
            issued_ns = round(event.issued_s * 1e9)
            at, wait = page.computing_at(issued_ns), page.waited.get(id(event))
            if at and wait and not event.blocking:
                yield "issued", replace(at, begin_ns=issued_ns), wait
    carried = {event: x for page in pages.values() for event, x in page.carried.items()}
    for ends in trace.messages().values():
        if len(ends) == 2:
            yield "message", carried[id(ends["send"])], carried[id(ends["recv"])]
    for events in trace.collectives().values():
        first, *others = sorted(
            (carried[id(event)] for event in events.values()),
            key=lambda x: (x.begin_ns, x.rank),
        )
        for other in others:
            yield "collective", first, other


def _arrow(number: int, name: str, begin: _Slice, end: _Slice) -> list[Event]:
    """Two events, from one slice to the other; none where one of them is over too early."""
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


def _meta(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": _pid(rank), "tid": thread, "args": args}


def _pid(rank: int) -> int:
    return rank + 1  # process 0 is the idle one of Linux, to Perfetto


def _till(event: CommEvent, end_s: float) -> CommEvent:
    began_s = event.began_s or event.issued_s
    return replace(event, began_s=began_s, ended_s=max(end_s, began_s))
