"""Predicts the time of each way to transfer a tensor between memories.

    fp32 here, fp16 there: 4 and 2 bytes per element; a cast reads and writes memory

    cast before   cast here  (4 + 2) / memory here     then  2 / bus
    cast after               4 / bus                   then  cast there  (4 + 2) / memory there
    pageable      first a copy of n bytes into the driver's pinned buffer  (n + n) / memory

    seconds = sum over parts of  the part's bytes / bytes per second of its memory or bus

Rates are measured with transfers of one part (timing.py). All other transfers are predicted,
without the overhead of calls. Casting before the copy is faster if 2 / bus > 6 / here - 6 / there.

Source: NVIDIA, CUDA C++ Best Practices Guide, "Pinned Memory"; CUDA Runtime API, "API
synchronization behavior"; where torch casts: pytorch, aten/src/ATen/native/cuda/Copy.cu.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from labkit.memory.bus import Bus

PACED = "paced"  # a place: CPU memory that is reachable only over a paced `Bus`


class Part(NamedTuple):
    """A step of a transfer. `what`: "cast", "copy" (inside a memory), "stage" (a copy into the
    driver's pinned buffer) or "bus". `nbytes`: bytes read and written, or sent over a bus."""

    what: str
    where: str  # a place or, for a bus, "cpu → cuda:0"
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """One way to move elements of `dtype` from `source` to `target`, converted to `to`.

    source, target  places: "cpu", "cuda:0", or "paced", which needs a `Bus`
    cast            "before" the copy (at the source), "after" the copy (at the target); None: no
                    cast or, if `dtype` and `to` differ, wherever torch's copy_ casts
    pinned          CPU memory is page-locked
    non_blocking    the call may return before the data has arrived

    Raises ValueError for an impossible combination."""

    source: str
    target: str
    dtype: torch.dtype = torch.float32
    to: torch.dtype = torch.float32
    cast: str | None = None
    pinned: bool = False
    non_blocking: bool = False

    def __post_init__(self) -> None:
        if self.cast not in (None, "before", "after"):
            raise ValueError(f'cast={self.cast!r}: choose "before", "after" or None')
        if self.cast and self.dtype == self.to:
            raise ValueError(f"cast={self.cast!r}, but {self.dtype} needs no cast; choose None")
        if not self.cast and self.dtype != self.to and PACED in self.ends:
            raise ValueError(
                f"a paced bus moves only bytes: for {self.dtype} to {self.to}, choose "
                'cast="before" or cast="after"'
            )
        if self.pinned and not self.over_host_bus:
            raise ValueError(
                f"pinned=True from {self.source} to {self.target}: only CPU memory can be "
                "pinned, and only copies to or from a device benefit"
            )

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.target

    @property
    def over_host_bus(self) -> bool:
        return self.source != self.target and "cpu" in self.ends

    @property
    def casts(self) -> str | None:
        """Where the cast happens: "before" or "after" the copy. By default, torch casts on the GPU
        if the copy is non-blocking, else on the CPU; between two GPUs, at the source."""
        if self.cast or self.dtype == self.to or self.source == self.target:
            return self.cast
        if not self.over_host_bus:
            return "before"
        cast_by_cpu = not self.non_blocking
        return "before" if (self.source == "cpu") == cast_by_cpu else "after"

    @property
    def sent(self) -> torch.dtype:
        return self.to if self.casts == "before" else self.dtype

    def parts(self, numel: int) -> Iterator[Part]:
        """The parts of a transfer of `numel` elements, in order."""
        cast_bytes = numel * (self.dtype.itemsize + self.to.itemsize)
        sent_bytes = numel * self.sent.itemsize
        if self.casts == "before":
            yield Part("cast", self.source, cast_bytes)
        if self.source != self.target:
            if self.over_host_bus and not self.pinned:
                yield Part("stage", "cpu", 2 * sent_bytes)
            yield Part("bus", f"{self.source} → {self.target}", sent_bytes)
        elif not self.cast and self.dtype != self.to:
            yield Part("cast", self.source, cast_bytes)  # a copy that casts: one pass
        else:
            yield Part("copy", self.source, 2 * sent_bytes)
        if self.casts == "after":
            yield Part("cast", self.target, cast_bytes)

    def bus_bytes(self, numel: int) -> int:
        return sum(part.nbytes for part in self.parts(numel) if part.what == "bus")

    def __str__(self) -> str:
        words = [f"{self.source} → {self.target}", f"{short(self.dtype)} → {short(self.to)}"]
        words += [f"cast {self.cast}"] if self.cast else []
        if self.over_host_bus:
            words.append("pinned" if self.pinned else "pageable")
        return ", ".join(words + ["non-blocking"] * self.non_blocking)


@dataclass(frozen=True)
class Rates:
    """Bytes per second by (what, where) of a `Part`; "stage" uses the rate of a CPU "copy"."""

    bytes_per_s: Mapping[tuple[str, str], float]

    def seconds(self, part: Part) -> float:
        """Seconds that `part` takes. Raises ValueError if its rate is unknown."""
        what = "copy" if part.what == "stage" else part.what
        where = "cpu" if part.where == PACED else part.where
        if (what, where) not in self.bytes_per_s:
            raise ValueError(
                f"no rate is known for the {what} in {where}; measure all transfers of ways(), "
                "or pass this rate to Rates"
            )
        return part.nbytes / self.bytes_per_s[what, where]

    def predict_s(self, way: Transfer, numel: int) -> float:
        return sum(self.seconds(part) for part in way.parts(numel))


def ways(bus: Bus | None = None, to: torch.dtype = torch.float16) -> list[Transfer]:
    """All transfers on this machine from fp32 to fp32 and to `to`: inside CPU memory; over `bus`,
    if given; to, from and inside the first GPU, and from the first GPU to the second."""
    gpus = [f"cuda:{i}" for i in range(min(torch.cuda.device_count(), 2))]
    pairs = [(place, place) for place in ("cpu", *gpus[:1])]
    for place in [PACED] * (bus is not None) + gpus[:1]:
        pairs += [("cpu", place), (place, "cpu")]
    pairs += [(gpus[0], gpus[1])] if len(gpus) == 2 else []
    transfers = []
    for source, target in pairs:
        over_bus = source != target and "cpu" in (source, target)
        left_to_torch = [(to, None)] if PACED not in (source, target) else []
        casts = [(torch.float32, None), (to, "before"), (to, "after"), *left_to_torch]
        either = [False, True] if over_bus else [False]
        for (wanted, cast), pinned, non_blocking in product(casts, either, either):
            way = Transfer(source, target, torch.float32, wanted, cast, pinned, non_blocking)
            transfers.append(way)
    return transfers


def short(dtype: torch.dtype) -> str:
    """ "fp32" for torch.float32."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
