"""Buses for the checks of lab 12: HeldBus delays copies until the first wait, and WatchedBus
signals the end of each copy. They reveal missing waits and late loads without measuring time.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.memory.bus import Arrival, Bus
from labkit.memory.peak import PeakMemory

DEADLINE_S = 2.0  # for events expected immediately
BLOCKS = (300, 500, 100, 700, 200, 600)  # elements per block, for `double_buffered`


class HeldBus(Bus):
    """Copies only after the first `wait` or `release`: an earlier read sees old data."""

    def __init__(self) -> None:
        super().__init__()
        self._released = threading.Event()

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        arrival = super().copy(target, source)
        wait = arrival.wait

        def release_and_wait() -> None:
            self.release()
            wait()

        arrival.wait = release_and_wait  # type: ignore[method-assign]
        return arrival

    def release(self) -> None:
        self._released.set()

    def _carry(self, *args: Any) -> None:
        self._released.wait(DEADLINE_S)
        super()._carry(*args)


class WatchedBus(Bus):
    """Signals the end of copy k in `ended[k]`, and records all arrivals."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.ended = [threading.Event() for _ in range(copies)]
        self.arrivals: list[Arrival] = []

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        self.arrivals.append(super().copy(target, source))
        return self.arrivals[-1]

    def _carry(self, event: Any, *args: Any) -> None:
        super()._carry(event, *args)
        if event.seq < len(self.ended):
            self.ended[event.seq].set()


# ---- runs of the student's functions


def run_bring_half(student: Callable[..., Any], numel: int, rates: tuple[float, ...]) -> Any:
    """The result of the student's function, and the bytes that crossed the bus."""
    bus, x = HeldBus(), torch.linspace(-3, 3, numel)
    value = student(bus, x, *rates)
    found = value.clone() if isinstance(value, Tensor) else value  # before any later copy
    bus.release()
    return found, bus.moved_bytes


def prefetch_log(student: Callable[..., Any], n: int, ahead: int) -> list[tuple[str, int]]:
    """("load", k), ("wait", k), ("use", k) and ("done", k), in order of occurrence."""
    log: list[tuple[str, int]] = []

    class PendingLoad:
        def __init__(self, k: int):
            self.k = k
            log.append(("load", k))

        def wait(self) -> str:
            log.append(("wait", self.k))
            return f"weights of block {self.k}"

    for place, weights in enumerate(student(PendingLoad, n, ahead)):
        k = int(weights.rsplit(" ", 1)[-1]) if isinstance(weights, str) else -1
        log.append(("use", k))
        if place > n:
            break
        log.append(("done", k))
    return log


class DoubleBufferedRun(NamedTuple):
    """The record of a run of `double_buffered`."""

    value: Any
    right: float
    peak_bytes: int
    buffers: int
    moved_bytes: int
    late: int | None  # the first block that computed before the next load started
    not_waited: int | None  # the first block that computed before the wait for its load
    wrong_weights: int | None  # the first block with wrong weights
    order: list[int]


def run_double_buffered(student: Callable[..., Any]) -> DoubleBufferedRun:
    """Run the student's function; each block waits for the next load, then checks its weights."""
    blocks = [torch.full((numel,), 1.0 + k) for k, numel in enumerate(BLOCKS)]
    bus = WatchedBus(len(blocks))
    found: dict[str, int] = {}
    storages: set[int] = set()
    order: list[int] = []

    def compute(k: int, weights: Tensor, x: Tensor) -> Tensor:
        order.append(k)
        storages.add(weights.untyped_storage().data_ptr())
        arrivals = bus.arrivals
        skip_next = k + 1 == len(blocks) or "late" in found  # wait for one late load at most
        if len(arrivals) <= k or not arrivals[k].event.wait_ended_s:
            found.setdefault("not_waited", k)
        elif not skip_next and (len(arrivals) == k + 1 or not bus.ended[k + 1].wait(DEADLINE_S)):
            found["late"] = k
        if not torch.equal(weights, blocks[k]):
            found.setdefault("wrong_weights", k)
        return x + weights.sum()

    with PeakMemory() as memory:
        value = student(bus, blocks, compute, torch.zeros(()))
    right = float(sum(block.sum() for block in blocks))
    return DoubleBufferedRun(
        float(value) if isinstance(value, Tensor) and value.numel() == 1 else value, right,
        memory.peak_bytes, len(storages), bus.moved_bytes, found.get("late"),
        found.get("not_waited"), found.get("wrong_weights"), order,
    )  # fmt: skip
