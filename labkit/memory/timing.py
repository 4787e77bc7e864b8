"""Times different ways to move a tensor, in rotating order, and derives memory and bus rates.

turn 1   way a, way b, way c          each turn starts with a different way, so a slowdown
turn 2   way b, way c, way a          of the machine affects every way; the result is the
turn 3   way c, way a, way b          median over the turns
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from labkit.memory.bus import Bus
from labkit.memory.transfers import PACED, Rates, Transfer


@dataclass(frozen=True)
class Measured:
    """Medians of turns: `done_s` until the data arrives, `returned_s` until the call returns."""

    way: Transfer
    numel: int
    done_s: float
    returned_s: float


def measure(
    chosen: Sequence[Transfer], numel: int, bus: Bus | None = None, turns: int = 9
) -> list[Measured]:
    """Time each transfer of `numel` elements, in turns, after a warm-up; on GPUs, with CUDA events.
    Transfers share preallocated buffers. Raises ValueError for a paced transfer without a bus."""
    buffers = Buffers(numel)
    rigs = [Rig(way, buffers, bus) for way in chosen]
    seconds: list[list[tuple[float, float]]] = [[] for _ in rigs]
    for turn in range(turns + 1):
        for i in range(len(rigs)):
            place = (i + turn) % len(rigs)  # each turn starts with a different way
            seconds[place].append(rigs[place].timed())
    return [
        Measured(way, numel, *map(median, zip(*times[1:]))) for way, times in zip(chosen, seconds)
    ]


def rates_of(measured: Iterable[Measured], paced_gbps: float = 0.0) -> Rates:
    """Rates from transfers of one part (inside a memory, or over a bus without staging). The
    fastest transfer sets each rate. `paced_gbps`: the rate of a paced bus, in Gbit/s."""
    rates: dict[tuple[str, str], float] = {}
    for x in measured:
        part, *others = x.way.parts(x.numel)
        if not others:
            key = part.what, part.where
            rates[key] = max(rates.get(key, 0.0), part.nbytes / x.done_s)
    for where in (f"cpu → {PACED}", f"{PACED} → cpu") if paced_gbps else ():
        rates["bus", where] = paced_gbps * 1e9 / 8
    return Rates(rates)


class Buffers:
    """Tensors [numel] for transfers, each allocated on first request and then reused."""

    def __init__(self, numel: int):
        self.numel = numel
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, role: str, place: str, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        pin = pinned and place == "cpu" and torch.cuda.is_available()
        device = "cpu" if place == PACED else place
        key = role, place, dtype, pin
        if key not in self._tensors:
            x = torch.empty(self.numel, dtype=dtype, device=device, pin_memory=pin)
            self._tensors[key] = x.copy_(torch.linspace(-1, 1, self.numel))
        return self._tensors[key]


class Rig:
    """One way to transfer a tensor, and its buffers, which are allocated once."""

    def __init__(self, way: Transfer, buffers: Buffers, bus: Bus | None = None):
        if PACED in way.ends and bus is None:
            raise ValueError(f"{way}: this needs a paced bus; call measure(..., bus=Bus(gbps=16))")
        self.way, self.bus = way, bus
        sent = way.dtype if way.cast == "after" else way.to
        self.source = buffers("source", way.source, way.dtype, way.pinned)
        self.packed = buffers("packed", way.source, way.to, way.pinned)  # .to() would not pin
        self.landed = buffers("landed", way.target, sent, way.pinned)
        self.out = buffers("out", way.target, way.to)
        self.staging = buffers("staging", "cpu", sent) if PACED in way.ends else None
        gpus = [place for place in way.ends if place.startswith("cuda")]
        self.gpu = torch.device(gpus[-1]) if gpus else None

    def run(self) -> Tensor:
        x = self.source
        if self.way.cast == "before":
            x = self.packed.copy_(x)
        self._cross(x)
        if self.way.cast != "after":
            return self.landed
        if self.way.target == "cpu" and self.gpu and self.way.non_blocking:
            torch.cuda.current_stream(self.gpu).synchronize()  # the CPU would cast too early
        return self.out.copy_(self.landed)

    def _cross(self, x: Tensor) -> None:
        if self.staging is None or self.bus is None:
            self.landed.copy_(x, non_blocking=self.way.non_blocking)
        elif self.way.pinned:
            self.arrival = self.bus.copy(self.landed, x)
            if not self.way.non_blocking or self.way.cast == "after":  # a cast needs the data
                self.arrival.wait()
        elif self.way.source == "cpu":
            self.bus.copy(self.landed, self.staging.copy_(x)).wait()  # pageable: blocks
        else:
            self.bus.copy(self.staging, x).wait()
            self.landed.copy_(self.staging)

    def timed(self) -> tuple[float, float]:
        """Seconds until the data has arrived, and until the call has returned."""
        if self.gpu is None:
            began_s = time.perf_counter()
            self.run()
            returned_s = time.perf_counter() - began_s
            if PACED in self.way.ends and self.way.pinned:
                self.arrival.wait()
            return time.perf_counter() - began_s, returned_s
        with torch.cuda.device(self.gpu):
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            began_s = time.perf_counter()
            self.run()
            returned_s = time.perf_counter() - began_s
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1e3, returned_s
