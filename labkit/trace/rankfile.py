"""The record file of a rank: JSON lines, appended while the rank runs.

    {"rank":0, "size":4, "device":"cpu", "host":"n1", "clock":{...}, "columns":{"step":[...], ...}}
    ["step",0, 0,81.25,0.0,false]       kind, record number, columns of this kind
    ["span",1, "forward","blocks.0",0,81.26,81.27,1,"Block",null,null]
    ["step",0, 0,81.25,81.5,false]      record 0 has ended: replaces the earlier line
    ["end",2]                           end mark: 2 records were written

The file is ASCII and written in whole lines: a truncated file can be read up to the cut. The header
names the columns; readers skip unknown columns. Times are seconds on the machine's monotonic clock;
`clock` gives one moment in both monotonic and Unix time.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from labkit.events import CommEvent
from labkit.foreign import read_file
from labkit.trace.graph import CATEGORIES, PHASES, MemoryPoint, Operation, RankTrace, Span, Step

Record = Step | Span | CommEvent | MemoryPoint | Operation

KINDS: dict[str, Any] = {
    "step": Step, "span": Span, "comm": CommEvent, "memory": MemoryPoint, "operation": Operation
}  # fmt: skip
KIND_OF = {record: kind for kind, record in KINDS.items()}
TYPES = {kind: get_type_hints(record) for kind, record in KINDS.items()}  # column types per kind
MAX_RANKS, MAX_INT, MAX_TIME_S = 1 << 17, 1 << 60, 4e9  # limits for values in a file

_line = json.JSONEncoder(separators=(",", ":")).encode


class RankFile:
    """Writes `rank<n>.jsonl` for `trace` in the run folder `path`. Not thread-safe.

    An open record (`ended_s` is 0.0) is written immediately, then rewritten by the first `append`
    or `close` after its end, so set `ended_s` after all other fields. `clock`: one moment as
    (monotonic, Unix) seconds; None: now. Raises ValueError if the file exists.
    """

    def __init__(
        self, path: str | Path, trace: RankTrace, clock: tuple[float, float] | None = None
    ):
        self.path = Path(path) / f"rank{trace.rank}.jsonl"
        self._open: dict[int, tuple[int, Record]] = {}  # id -> record number, record
        self._count = 0
        monotonic_s, unix_s = clock or (time.monotonic(), time.time())
        header = {
            "rank": trace.rank,
            "size": trace.size,
            "device": trace.device,
            "host": trace.host,
            "clock": {"monotonic_s": monotonic_s, "unix_s": unix_s},
            "columns": {kind: list(types) for kind, types in TYPES.items()},
            **({"alike": _packed(trace.alike)} if trace.alike else {}),
        }
        try:
            self._file = self.path.open("x", encoding="ascii", newline="\n")
        except FileExistsError:
            raise ValueError(
                f"{self.path} exists: another rank {trace.rank} is writing it, or it belongs to an "
                "earlier run; choose a new folder, or begin_run(..., replace=True)"
            ) from None
        self._write([header])

    def append(self, records: Iterable[Record] = ()) -> None:
        """Write `records` and earlier records that have ended since, then flush."""
        ended = [record for _, record in self._open.values() if not _is_open(record)]
        self._write([self._row(record) for record in (*ended, *records)])

    def mark_end(self) -> None:
        """Write the end mark, which declares the file complete until more records follow."""
        self.append()
        self._write([["end", self._count]])

    def close(self) -> None:
        """Write ended records and close; a file without an end mark is read as cut off."""
        if not self._file.closed:
            self.append()
            self._file.close()

    def _row(self, record: Record) -> list[Any]:
        number, _ = self._open.pop(id(record), (self._count, record))
        self._count += number == self._count
        if _is_open(record):  # check before reading: the record may end meanwhile
            self._open[id(record)] = (number, record)
        kind = KIND_OF[type(record)]
        return [kind, number, *(_packed(getattr(record, name)) for name in TYPES[kind])]

    def _write(self, rows: list[Any]) -> None:
        self._file.write("".join(_line(row) + "\n" for row in rows))
        self._file.flush()


_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)


def read_rank_file(path: Path) -> tuple[RankTrace, float, list[str]]:
    """Return (trace, offset_s, problems): the readable records with the file's times, Unix time
    minus the host's monotonic time, and one sentence per problem. Raises OSError, or ValueError for
    a header that is invalid or contradicts the file name."""
    lines = read_file(path).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    ranges = _Ranges()
    try:
        header = json.loads(lines[0])
        rank, size = (valid(header[name], int) for name in ("rank", "size"))
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError("not a rank of a run")
        trace = RankTrace(rank, size, str(header["device"]), str(header["host"]))
        trace.alike = ranges.unpack(header.get("alike", []))
        clock, columns = header["clock"], header["columns"]
        unix_s, monotonic_s = (valid(clock[name], float) for name in ("unix_s", "monotonic_s"))
        columns = {str(kind): [str(name) for name in columns[kind]] for kind in columns}
    except _UNREADABLE:
        raise ValueError(f"{path.name} is ignored: its first line cannot be read") from None
    if path.name != f"rank{rank}.jsonl":
        raise ValueError(f"{path.name} is ignored: it belongs to rank {rank}")

    records: dict[int, Record | None] = {}
    ended_after: int | None = None
    unreadable: list[int] = []
    for i, line in enumerate(lines[1:], start=2):
        try:
            kind, number, *values = json.loads(line)
            if type(number) is not int:
                raise ValueError("not a record number")
            if kind == "end":
                ended_after = number
            elif kind in columns and kind not in KINDS:
                records[number] = None  # a kind from a newer labkit
            else:
                records[number] = _record(kind, columns[kind], values, ranges)
        except _UNREADABLE:
            unreadable.append(i)

    for record, collected in zip(KINDS.values(), trace.lists(), strict=True):
        collected += [x for x in records.values() if type(x) is record]
    problems = _problems(path.name, len(lines), unreadable, len(records), ended_after)
    trace.complete = not problems
    return trace, unix_s - monotonic_s, problems


def _problems(
    name: str, lines: int, unreadable: list[int], records: int, ended_after: int | None
) -> list[str]:
    problems = []
    if lost := [line for line in unreadable if line != lines]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        problems.append(f"{name}: line {lost[0]}{more} cannot be read and is left out")
    elif ended_after is not None and records < ended_after:
        problems.append(f"{name}: only {records} of {ended_after} written records are present")
    if lines in unreadable:
        problems.append(f"{name} breaks off in line {lines}: the rank died, or is still running")
    elif ended_after is None or records > ended_after:
        problems.append(f"{name} has no end mark: the rank died, or is still running")
    return problems


def _record(kind: str, columns: list[str], values: list[Any], ranges: "_Ranges") -> Record:
    """Parse one record. Raises ValueError for invalid types, sizes, phases or ranks."""
    known = {}
    for name, value in zip(columns, values, strict=True):
        wanted = TYPES[kind].get(name)
        if wanted == tuple[int, ...]:
            known[name] = ranges.unpack(value)
        elif wanted is not None:
            known[name] = valid(value, wanted)
    match record := KINDS[kind](**known):
        case Span():
            possible = record.phase in PHASES
        case MemoryPoint():
            possible = len(record.held_bytes) == len(CATEGORIES)
        case Operation():
            sizes = record.flops, record.moved_bytes, *record.sides
            possible = min(sizes) >= 0 and (record.flops == 0 or 0 not in record.sides)
        case CommEvent():
            peer = record.peer if record.op in ("send", "recv") else 0
            places = (record.rank, peer)
            possible = all(x is not None and 0 <= x < len(record.ranks) for x in places)
        case _:
            possible = True
    if not possible:
        raise ValueError(f"not a valid {kind}")
    return record


def _is_open(record: Record) -> bool:
    return getattr(record, "ended_s", None) == 0.0


def _packed(value: Any) -> Any:
    """Encode evenly spaced ranks as "first:stop:step": 1024 ranks take 8 bytes."""
    if isinstance(value, tuple) and len(value) > 3:
        step = value[1] - value[0]
        if step > 0 and value == tuple(range(value[0], value[-1] + 1, step)):
            return f"{value[0]}:{value[-1] + 1}:{step}"
    return value


class _Ranges(dict[str, tuple[int, ...]]):
    """A cache per file: "first:stop:step" -> ranks; equal ranges share one tuple."""

    left = 1 << 20  # ranks that may still be unpacked

    def unpack(self, value: Any) -> tuple[int, ...]:
        return self[value] if isinstance(value, str) else tuple(valid(x, int) for x in value)

    def __missing__(self, text: str) -> tuple[int, ...]:
        ranks = range(*map(int, text.split(":")))
        if len(ranks) > self.left:
            raise ValueError("more ranks than any run has")
        self.left -= len(ranks)
        self[text] = tuple(ranks)
        return self[text]


def valid(value: Any, wanted: Any) -> Any:
    """`value` as type `wanted`. Raises ValueError for a wrong type or a value out of range."""
    if wanted is float:
        if type(value) in (int, float) and abs(value) <= MAX_TIME_S:  # false for NaN
            return float(value)
    elif type(value) is int and abs(value) > MAX_INT:
        pass
    elif isinstance(value, wanted) and (wanted is bool) == isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not {wanted}")
