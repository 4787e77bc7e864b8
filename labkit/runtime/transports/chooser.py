"""Choose a collective's algorithm by the size in bytes and the number of ranks, from a stored
table, so that results and byte counts are the same in every run.

The table (table.json) was measured once; its `source` says how. Overrides, in order of priority:

    comm.all_reduce(x, algorithm="tree")                      for one call
    LABKIT_ALGO="all_reduce:tree,broadcast:chain"             for a process; read at the first use
                                                              of a group, as NCCL reads NCCL_ALGO
    LABKIT_TABLE="my/table.json"                              a table for your own link, written by
                                                              labkit bench collectives --fit

All ranks must choose the same algorithm. `comm.explain("all_reduce", nbytes)` explains a choice.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from labkit.comm.collectives import ALGORITHMS, EQUAL_SIZES_ONLY, POWERS_OF_TWO_ONLY
from labkit.events import ranks_in_words
from labkit.foreign import brief, read_file

VARIABLE, TABLE_VARIABLE = "LABKIT_ALGO", "LABKIT_TABLE"
GLOO = "gloo"  # the backend's own all-reduce, listed in the table with labkit's algorithms
TABLE = Path(__file__).parent / "table.json"


@dataclass(frozen=True)
class Choice:
    """Returned by `explain`; prints as a sentence."""

    collective: str
    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm}: {self.why}"

    __repr__ = __str__


@dataclass(frozen=True)
class Row:
    """Use `algorithm` from `from_bytes` on, or `otherwise` if `algorithm` cannot be used."""

    from_bytes: int
    algorithm: str
    otherwise: str = ""


class Chooser:
    """Chooses algorithms for `size` ranks. Raises ValueError if a variable's value is invalid."""

    def __init__(self, size: int, table: Mapping[str, Any] | None = None):
        self._size = size
        self._table = present_table() if table is None else table
        self._rows = {collective: self._rows_of(collective) for collective in ALGORITHMS}
        self.forced = overrides(os.environ.get(VARIABLE, ""))

    def choose(self, collective: str, nbytes: int, gloo_can: bool = False, asked: str = "") -> str:
        """The algorithm's name for `nbytes` (all chunks together). `gloo_can`: whether gloo's
        all-reduce supports the dtype and reduction. Raises ValueError if `asked` is unusable."""
        if asked:
            if problem := self._problem(collective, asked, gloo_can):
                raise ValueError(problem)
            return asked
        forced = self.forced.get(collective)
        if forced is not None and not self._problem(collective, forced, gloo_can):
            return forced
        row = self._row(collective, nbytes)
        return row.algorithm if row.algorithm != GLOO or gloo_can else row.otherwise

    def explain(
        self, collective: str, nbytes: int, gloo_can: bool = False, asked: str = ""
    ) -> Choice:
        """Like `choose`, but with the reason."""
        if collective not in ALGORITHMS:
            raise ValueError(
                f"{collective!r} is not a collective; choose one of {', '.join(ALGORITHMS)}"
            )
        name, forced = self.choose(collective, nbytes, gloo_can, asked), self.forced.get(collective)
        if asked:
            return Choice(collective, name, "the call requests it")
        if name == forced:
            return Choice(collective, name, f"{VARIABLE} requests it")
        row, rows = self._row(collective, nbytes), self._rows[collective]
        above = min((r.from_bytes for r in rows if r.from_bytes > row.from_bytes), default=0)
        why = f"{nbytes} bytes on {ranks_in_words(self._size)}; the table says {row.algorithm}"
        if row.from_bytes or above:
            why += f" from {row.from_bytes}" + (f" to {above - 1}" if above else " bytes on")
        if name != row.algorithm:
            why += f", which is not available here, so {name} is used"
        if forced is not None:
            problem = self._problem(collective, forced, gloo_can)
            why += f" ({VARIABLE} requests {forced}, but {problem})"
        return Choice(collective, name, f"{why}. Source of the table: {self._table['source']}")

    def _row(self, collective: str, nbytes: int) -> Row:
        for row in self._rows[collective]:
            if nbytes >= row.from_bytes:
                return row
        raise AssertionError("a table begins at 0 bytes")

    def _rows_of(self, collective: str) -> list[Row]:
        """Rows of the table's largest rank count up to `self._size`, largest `from_bytes` first."""
        by_size = self._table[collective]
        sizes = list(map(int, by_size))
        nearest = max((size for size in sizes if size <= self._size), default=min(sizes))
        rows = [Row(**row) for row in by_size[str(nearest)]]
        for i, row in enumerate(rows):
            if self._problem(collective, row.algorithm, gloo_can=True):
                rows[i] = Row(row.from_bytes, row.otherwise)
        return sorted(rows, key=lambda row: row.from_bytes, reverse=True)

    def _problem(self, collective: str, name: str, gloo_can: bool) -> str:
        """Why the algorithm cannot be used; empty if it can."""
        if name == GLOO and collective == "all_reduce":
            if gloo_can:
                return ""
            return (
                "gloo's own all-reduce supports only float32 and float64, no mean and no modeled "
                "link; use 'ring', the same algorithm"
            )
        check_name(collective, name)
        if (collective, name) in POWERS_OF_TWO_ONLY and self._size & (self._size - 1):
            return (
                f"{collective} by {name} needs a power of two ranks, not {self._size}; "
                f"choose one of {', '.join(n for n in names(collective) if n != name)}"
            )
        return ""


def names(collective: str) -> list[str]:
    """The algorithms of a collective, including gloo's own."""
    return [*ALGORITHMS[collective], *([GLOO] if collective == "all_reduce" else [])]


def check_name(collective: str, name: str) -> None:
    """Raises ValueError (listing the names) if `collective` has no algorithm `name`."""
    if name not in names(collective):
        raise ValueError(
            f"{collective} has no algorithm {name!r}; choose one of {', '.join(names(collective))}"
        )


def overrides(text: str) -> dict[str, str]:
    """Parse "all_reduce:tree,broadcast:chain" into {collective: algorithm}."""
    algorithms = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        collective, colon, name = (part.strip() for part in pair.partition(":"))
        if not colon or collective not in ALGORITHMS:
            raise ValueError(
                f"{VARIABLE}={text!r}: {pair!r} is not collective:algorithm; the collectives are "
                f"{', '.join(ALGORITHMS)}"
            )
        check_name(collective, name)
        algorithms[collective] = name
    return algorithms


def present_table() -> dict[str, Any]:
    """The table in use, from LABKIT_TABLE or else labkit's own: collective -> ranks -> rows, and
    "source". Raises ValueError for a missing or invalid file."""
    if not (path := os.environ.get(TABLE_VARIABLE)):
        return stored_table()
    table = read_table(path)
    return {**table, "source": f"{path} ({TABLE_VARIABLE}): {table['source']}"}


def table_note() -> dict[str, str]:
    """A description of the table in use, for a recorded run: file, SHA-256 and source."""
    path = os.environ.get(TABLE_VARIABLE, "")
    file = path or f"labkit/runtime/transports/{TABLE.name}"
    try:
        digest = hashlib.sha256(Path(path or TABLE).read_bytes()).hexdigest()
        source = (read_table(path) if path else stored_table())["source"]
    except (OSError, ValueError) as error:  # the first collective will raise this error
        digest, source = "", str(error)
    return {"file": file, "sha256": digest, "source": source}


@cache
def stored_table() -> dict[str, Any]:
    """labkit's own table.json."""
    return read_table(TABLE)


def read_table(path: str | Path) -> dict[str, Any]:
    """Read and validate a table. Raises ValueError, with the problem, for an invalid file."""
    try:
        table = json.loads(read_file(path))
        if problem := _problem_of(table):
            raise ValueError(problem)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a table of algorithms: {brief(error)}. Write one with labkit bench "
            f"collectives --fit --table FILE, or unset {TABLE_VARIABLE} to use labkit's own"
        ) from None
    return dict(table)


def _problem_of(table: Any) -> str:
    """The first problem found in a table; empty if it covers every collective and rank count."""
    if not isinstance(table, dict) or not isinstance(table.get("source"), str):
        return "its source is missing"
    for collective in ALGORITHMS:
        by_size = table.get(collective)
        if not isinstance(by_size, dict) or not by_size:
            return f"{collective} is missing"
        if not all(size.isdecimal() and isinstance(by_size[size], list) for size in by_size):
            return f"{collective} must map numbers of ranks to lists of rows"
        sizes = sorted(map(int, by_size))
        for size, above in zip(sizes, [*sizes[1:], 2 * sizes[-1] + 2]):
            served = range(1 if size == sizes[0] else size, above)
            if problem := _problem_of_rows(collective, by_size[str(size)], served):
                return f"{collective} on {ranks_in_words(size)}: {problem}"
    return ""


def _problem_of_rows(collective: str, rows: list[Any], served: range) -> str:
    """The first problem found in `rows`. `served`: the numbers of ranks that use these rows."""
    try:
        table_rows = [Row(**row) for row in rows]
    except TypeError:
        return "a row needs `from_bytes` and `algorithm`; a fallback, `otherwise`, is optional"
    begins = [row.from_bytes for row in table_rows]
    if 0 not in begins or not all(type(begin) is int and begin >= 0 for begin in begins):
        return "from_bytes must be whole numbers of bytes, and one must be 0"
    limited = set(EQUAL_SIZES_ONLY)
    if any(n & (n - 1) for n in served):
        limited |= POWERS_OF_TWO_ONLY
    for row in table_rows:
        last = row.otherwise or row.algorithm
        check_name(collective, row.algorithm)
        check_name(collective, last)
        if last == GLOO or (collective, last) in limited:
            return f"{last} cannot run every call; name in `otherwise` an algorithm that can"
    return ""
