"""The event file of one rank: JSON lines that are appended while it runs, and read whole or cut.

    {"rank":0, "size":4, "device":"cpu", "host":"n1", "clock":{...}, "columns":{"step":[...], ...}}
    ["step",0, 0,81.25,0.0,false]       kind, number, then the columns of its kind
    ["span",1, "forward","blocks.0",0,81.26,81.27,1,"Block",null,null]
    ["step",0, 0,81.25,81.5,false]      number 0 again, now that it has ended: the later line wins
    ["end",2]                           the end mark: 2 things were written

All is ASCII and a line is written at once, so a file can be cut off anywhere and is understood up
to there. Columns stand in the header: those that this labkit does not know are passed over. Times
are seconds on the machine's monotonic clock; `clock` has one moment on it and in Unix time.
"""

import json
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from labkit.events import CommEvent
from labkit.foreign import read_file
from labkit.trace.graph import CATEGORIES, PHASES, MemoryPoint, Operation, RankTrace, Span, Step

Thing = Step | Span | CommEvent | MemoryPoint | Operation

KINDS: dict[str, Any] = {
    "step": Step, "span": Span, "comm": CommEvent, "memory": MemoryPoint, "operation": Operation
}  # fmt: skip
MOMENTS = (MemoryPoint, Operation)  # which do not last
TYPES: dict[str, dict[str, Any]] = {
    kind: dict(of.__annotations__) if of in MOMENTS else {f.name: f.type for f in fields(of)}
    for kind, of in KINDS.items()
}
KIND_OF = {of: kind for kind, of in KINDS.items()}
COLUMNS = {kind: list(types) for kind, types in TYPES.items()}

MOST_RANKS, LARGEST, LONGEST_S = 1 << 17, 1 << 60, 4e9  # that a file may have: ranks, int, time

_line = json.JSONEncoder(separators=(",", ":")).encode


class RankFile:
    """Writes `rank<n>.jsonl` in the run folder `path`. For one thread at a time.

    A thing may be given while it is open (its `ended_s` is 0.0): it is written as it stands, and
    once more by the first `append` or `close` that finds it ended. So whoever ends a thing sets
    its `ended_s` last.

    `clock`: (monotonic, Unix) seconds of one moment; now if absent.
    Raises ValueError when the file is there already.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        size: int,
        device: str = "cpu",
        host: str | None = None,
        clock: tuple[float, float] | None = None,
        alike: tuple[int, ...] = (),
    ):
        self.path = Path(path) / f"rank{rank}.jsonl"
        self._open: dict[int, tuple[int, Thing]] = {}  # id -> number, thing
        self._count = 0
        monotonic_s, unix_s = clock or (time.monotonic(), time.time())
        header = {
            "rank": rank,
            "size": size,
            "device": device,
            "host": platform.node() if host is None else host,
            "clock": {"monotonic_s": monotonic_s, "unix_s": unix_s},
            "columns": COLUMNS,
            **({"alike": _packed(alike)} if alike else {}),
        }
        try:
            self._file = self.path.open("x", encoding="ascii", newline="\n")
        except FileExistsError:
            raise ValueError(
                f"{self.path} is there already: another rank {rank} writes it, or it is of an "
                "earlier run; begin a new folder, or begin_run(..., replace=True)"
            ) from None
        self._write([_line(header)])

    def append(self, things: Iterable[Thing] = ()) -> None:
        """Write `things`, and those from before that have ended since; then flush."""
        since = [thing for _, thing in self._open.values() if not _is_open(thing)]
        self._write([self._row(thing) for thing in (*since, *things)])

    def mark_end(self) -> None:
        """Write what has ended since, and an end mark: all is there, unless more is appended."""
        self.append()
        self._write([_line(["end", self._count])])

    def close(self, complete: bool = True) -> None:
        """Write what has ended since, and the end mark (not so if not `complete`)."""
        if not self._file.closed:
            self.mark_end() if complete else self.append()
            self._file.close()

    def __enter__(self) -> "RankFile":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=error is None)

    def _row(self, thing: Thing) -> str:
        number, _ = self._open.pop(id(thing), (self._count, thing))
        self._count += number == self._count
        if _is_open(thing):  # asked before its values are read: it may be ending just now
            self._open[id(thing)] = (number, thing)
        kind = KIND_OF[type(thing)]
        return _line([kind, number, *(_packed(getattr(thing, name)) for name in COLUMNS[kind])])

    def _write(self, lines: list[str]) -> None:
        self._file.write("".join(line + "\n" for line in lines))
        self._file.flush()


@dataclass
class ReadRank:
    """A rank file as it was read: times are as in the file."""

    trace: RankTrace
    unix_offset_s: float  # Unix time less monotonic time, on that host
    problems: list[str]  # a sentence for each


def read_rank_file(path: Path) -> ReadRank:
    """What can be read of the file. Raises OSError, and ValueError where it lacks its header."""
    lines = read_file(path).split(b"\n")
    ranges = _Ranges()
    if lines[-1] == b"":
        lines.pop()
    try:
        header = json.loads(lines[0])
        rank, size = (_unpacked(header[name], int) for name in ("rank", "size"))
        if not 0 <= rank < size <= MOST_RANKS:
            raise ValueError("no rank of a run")
        trace = RankTrace(rank, size, str(header["device"]), str(header["host"]))
        trace.alike = _unpacked(header.get("alike", []), tuple[int, ...], ranges)
        clock, columns = header["clock"], header["columns"]
        unix_s, monotonic_s = (_unpacked(clock[name], float) for name in ("unix_s", "monotonic_s"))
        columns = {str(kind): [str(name) for name in columns[kind]] for kind in columns}
    except _UNREADABLE:
        raise ValueError(
            f"{path.name} breaks off in its first line, nothing of it is read"
        ) from None
    if path.name != f"rank{trace.rank}.jsonl":
        raise ValueError(f"{path.name} is of rank {trace.rank}, so it is not read")

    things: dict[int, Thing | None] = {}
    ended_after: int | None = None
    unreadable: list[int] = []
    for i, line in enumerate(lines[1:], start=2):
        try:
            kind, number, *values = json.loads(line)
            if type(number) is not int:
                raise ValueError("no number")
            if kind == "end":
                ended_after = number
            else:
                things[number] = _thing(kind, columns, values, ranges)
        except _UNREADABLE:
            unreadable.append(i)

    of_kind: dict[type, list[Any]] = {
        Step: trace.steps, Span: trace.spans, CommEvent: trace.comms,
        MemoryPoint: trace.memory, Operation: trace.operations,
    }  # fmt: skip
    for thing in things.values():
        if thing is not None:
            of_kind[type(thing)].append(thing)
    problems = _problems(path.name, len(lines), unreadable, len(things), ended_after)
    trace.complete = not problems
    return ReadRank(trace, unix_s - monotonic_s, problems)


_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)


def _problems(
    name: str, lines: int, unreadable: list[int], things: int, ended_after: int | None
) -> list[str]:
    found = []
    breaks_off = lines in unreadable
    if lost := [line for line in unreadable if line != lines]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        found.append(f"{name}: line {lost[0]}{more} cannot be read and is left out")
    elif ended_after is not None and things < ended_after:
        found.append(f"{name}: of {ended_after} things that were written, {things} are there")
    if breaks_off:
        found.append(f"{name} breaks off in line {lines}: the rank died, or is still running")
    elif ended_after is None or things > ended_after:
        found.append(f"{name} has no end mark: the rank died, or is still running")
    return found


def _thing(
    kind: str, columns: dict[str, list[str]], values: list[Any], ranges: "_Ranges"
) -> Thing | None:
    """The thing of one line; None for a kind that this labkit does not know."""
    if kind not in KINDS and kind in columns:
        return None
    types = TYPES[kind]
    known = {
        name: _unpacked(value, types[name], ranges)
        for name, value in zip(columns[kind], values, strict=True)
        if name in types
    }
    thing = KINDS[kind](**known)
    if not _is_possible(thing):
        raise ValueError("no such phase, category or place in a group")
    return thing


def _is_possible(thing: Thing) -> bool:
    """Whether its phase, categories, sizes and places in the group can be."""
    match thing:
        case Span():
            return thing.phase in PHASES
        case MemoryPoint():
            return len(thing.held_bytes) == len(CATEGORIES)
        case Operation():
            sizes = thing.flops, thing.moved_bytes, *thing.sides
            return min(sizes) >= 0 and (thing.flops == 0 or 0 not in thing.sides)
        case CommEvent():
            peer = thing.peer if thing.op in ("send", "recv") else 0
            return all(x is not None and 0 <= x < len(thing.ranks) for x in (thing.rank, peer))
    return True


def _is_open(thing: Thing) -> bool:
    return not isinstance(thing, MOMENTS) and thing.ended_s == 0.0


def _packed(value: Any) -> Any:
    """Evenly spaced ranks as "first:stop:step": a group of 1024 takes 8 bytes."""
    if isinstance(value, tuple) and len(value) > 3:
        step = value[1] - value[0]
        if step > 0 and value == tuple(range(value[0], value[-1] + 1, step)):
            return f"{value[0]}:{value[-1] + 1}:{step}"
    return value


class _Ranges(dict[str, tuple[int, ...]]):
    """The ranges of one file, "first:stop:step" -> their numbers; equal ones share a tuple."""

    left = 1 << 20  # numbers that it may have yet

    def __missing__(self, text: str) -> tuple[int, ...]:
        numbers = range(*map(int, text.split(":")))
        if len(numbers) > self.left:
            raise ValueError("more numbers than any run has")
        self.left -= len(numbers)
        self[text] = tuple(numbers)
        return self[text]


def _unpacked(value: Any, wanted: Any, ranges: _Ranges | None = None) -> Any:
    """`value` as the `wanted` type of its column. Raises ValueError when it is another, or larger
    than in any run."""
    if wanted == tuple[int, ...]:
        if isinstance(value, str) and ranges is not None:
            return ranges[value]
        if all(type(x) is int and abs(x) <= LARGEST for x in value):
            return tuple(value)
    elif wanted is float:
        if type(value) in (int, float) and abs(value) <= LONGEST_S:  # not so NaN
            return float(value)
    elif type(value) is int and wanted is not bool:
        if isinstance(value, wanted) and abs(value) <= LARGEST:
            return value
    elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not {wanted}")
