"""Results of a sweep over sizes, as plain data, without torch.

    algbw = S / t                 bytes of the operation divided by its time
    busbw = algbw x factor        comparable with a link's peak rate for any number of ranks

S and the factors follow nccl-tests (doc/PERFORMANCE.md or, for gather, scatter, send and receive,
src/*.cu). S is the total size: of all n shards, if an operation takes shards. labkit adds
`there_and_back`: a message of S bytes from an even rank to the next, and a reply of S bytes.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any

from labkit.foreign import brief, plain, read_file

FORMAT = 1
WHAT = "sweep of collectives"
DEFAULT = "default"  # algorithm name: labkit's choice, if none is named
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ring_exchange": lambda n: 1.0,
    "there_and_back": lambda n: 1.0,
}
PARTED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")  # S is n shards
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
POSITIVE = ("ranks", "size_bytes", "count", "time_s", "copy_s")
ROOTED = ("broadcast", "reduce", "gather", "scatter")  # from or to rank 0


@dataclass(frozen=True)
class Point:
    """One row of the table: an operation of `size_bytes` by one algorithm."""

    op: str
    ranks: int
    size_bytes: int
    count: int  # elements (per shard if the operation takes shards)
    dtype: str
    redop: str
    algorithm: str  # "default" if none was named; the backend's name for its own algorithm
    chosen: str  # the algorithm that ran
    own: bool  # whether this is the backend's own algorithm
    time_s: float  # per call
    ratio: float  # time_s divided by the time of the backend's own algorithm
    wrong: int | None  # wrong elements over all ranks; None if not checked
    copy_s: float  # per memory copy of `size_bytes`, on all ranks at once

    @property
    def algbw_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.algbw_bytes_per_s * BUS_FACTORS[self.op](self.ranks)

    @property
    def of_copy_rate(self) -> float:
        """busbw as a fraction of the memory copy rate."""
        return self.busbw_bytes_per_s * self.copy_s / self.size_bytes

    @property
    def root(self) -> int | None:
        return 0 if self.op in ROOTED else None


@dataclass(frozen=True)
class Sweep:
    """All points of a run; `about`: host, backend, versions, turns, and how times are averaged."""

    points: list[Point]
    about: dict[str, Any] = field(default_factory=dict)

    def tables(self) -> Iterator[tuple[str, int, list[Point]]]:
        """Yield (operation, ranks, points) in the order of measurement."""
        for op, ranks in dict.fromkeys((point.op, point.ranks) for point in self.points):
            yield op, ranks, self.of(op, ranks)

    def of(self, op: str, ranks: int, algorithm: str | None = None) -> list[Point]:
        """The points of operation `op` on `ranks` ranks, for one algorithm or, if None, for all."""
        return [
            point
            for point in self.points
            if (point.op, point.ranks) == (op, ranks) and algorithm in (None, point.algorithm)
        ]

    def save(self, path: str | Path) -> Path:
        """Write as JSON, one line per point, for `read_sweep`."""
        head = json.dumps({"what": WHAT, "format": FORMAT, "about": self.about}, indent=1)
        lines = ",\n".join(json.dumps(asdict(point)) for point in self.points)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = head.removesuffix("\n}") + f',\n "points": [\n{lines}\n]\n}}\n'
        path.write_text(text, encoding="utf-8")
        return path


def read_sweep(path: str | Path) -> Sweep:
    """Read a saved sweep. Raises FileNotFoundError, or ValueError if the file is not a sweep."""
    try:
        contents = json.loads(read_file(path))
        if contents["what"] != WHAT or contents["format"] > FORMAT:
            raise ValueError(f"format {contents['format']} of {contents['what']!r}")
        points = [Point(**point) for point in contents["points"]]
        for point, (name, kind) in product(points, Point.__annotations__.items()):
            value = getattr(point, name)
            correct = isinstance(value, kind) and plain(value) == str(value)
            if not correct or (name in POSITIVE and not 0 < value < math.inf):
                raise ValueError(f"invalid {name}: {value!r}")
        if unknown := {point.op for point in points} - BUS_FACTORS.keys():
            raise ValueError(f"unknown operations: {', '.join(sorted(unknown))}")
        return Sweep(points, dict(contents["about"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a sweep that this labkit can read ({brief(error)}); write one with "
            "labkit bench collectives --save FILE.json"
        ) from None


def count_of(op: str, ranks: int, size_bytes: int, item_bytes: int) -> tuple[int, int]:
    """How many elements fit in `size_bytes` (per shard, if the operation takes shards), and
    the total bytes, rounded down as in nccl-tests. Raises ValueError if no element fits."""
    parts = ranks if op in PARTED else 1
    count = size_bytes // (item_bytes * parts)
    if not count:
        raise ValueError(
            f"{op} of {size_bytes} bytes on {ranks} ranks: fewer than one element of {item_bytes} "
            f"bytes per rank; start at {item_bytes * parts} bytes or more"
        )
    return count, count * parts * item_bytes


def parse_bytes(text: str) -> int:
    """ "4K" -> 4096; K, M and G are powers of 1024, as in nccl-tests."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write bytes as 4096, 4K, 64M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def sizes_between(from_bytes: int, to_bytes: int, factor: int) -> list[int]:
    """Sizes from `from_bytes` to `to_bytes`, each `factor` times the previous size."""
    if factor < 2:
        raise ValueError(f"factor={factor}: choose 2 or more")
    if from_bytes > to_bytes:
        raise ValueError(f"from {from_bytes} to {to_bytes} bytes: put the smaller size first")
    powers = (from_bytes * factor**k for k in count())
    return list(takewhile(lambda size: size <= to_bytes, powers))


def in_binary_units(nbytes: int) -> str:
    """4096 -> "4 KiB"; bytes if not a multiple of 1024."""
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << bits and nbytes % (1 << bits) == 0:
            return f"{nbytes >> bits} {unit}"
    return f"{nbytes} B"
