"""Buses for the checks of lab 12: one carries only copies that are waited for, one signals the end
of each copy. They detect too few or too many waits without a clock.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.memory.bus import Arrival, Bus
from labkit.memory.peak import PeakMemory

PATIENCE_S = 2.0  # for events that must come at once
BLOCKS = (300, 500, 100, 700, 200, 600)  # elements of the blocks of `double_buffered`


class HeldBus(Bus):
    """Carries a copy only when it is waited for, or after `let_go`: earlier reads see old data."""

    def __init__(self) -> None:
        super().__init__()
        self._let_go = threading.Event()

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        arrival = super().copy(target, source)
        wait = arrival.wait

        def let_go_and_wait() -> None:
            self.let_go()
            wait()

        arrival.wait = let_go_and_wait  # type: ignore[method-assign]
        return arrival

    def let_go(self) -> None:
        self._let_go.set()

    def _carry(self, *args: Any) -> None:
        self._let_go.wait(PATIENCE_S)
        super()._carry(*args)


class WatchedBus(Bus):
    """Signals the end of copy k, and keeps all arrivals."""

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


# ---- what the checks run


def brought(student: Callable[..., Any], numel: int, rates: tuple[float, ...]) -> Any:
    """The value of the student's function, and the bytes over the bus."""
    bus, x = HeldBus(), torch.linspace(-3, 3, numel)
    value = student(bus, x, *rates)
    found = value.clone() if isinstance(value, Tensor) else value  # as it is when it returns
    bus.let_go()
    return found, bus.moved_bytes


def prefetch_log(student: Callable[..., Any], n: int, ahead: int) -> list[tuple[str, int]]:
    """("load", k), ("wait", k), ("use", k) and ("done", k), in order of occurrence."""
    log: list[tuple[str, int]] = []

    class Coming:
        def __init__(self, k: int):
            self.k = k
            log.append(("load", k))

        def wait(self) -> str:
            log.append(("wait", self.k))
            return f"weights of block {self.k}"

    for place, weights in enumerate(student(Coming, n, ahead)):
        k = int(weights.rsplit(" ", 1)[-1]) if isinstance(weights, str) else -1
        log.append(("use", k))
        if place > n:
            break
        log.append(("done", k))
    return log


class Doubled(NamedTuple):
    """The record of a run of `double_buffered`."""

    value: Any
    right: float
    peak_bytes: int
    buffers: int
    moved_bytes: int
    late: int | None  # the first block that computed while nothing was loaded
    not_waited: int | None  # the first block that computed before its load was waited for
    spoiled: int | None  # the first block with weights that changed as it computed
    order: list[int]


def doubled(student: Callable[..., Any]) -> Doubled:
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
        next_is_there = k + 1 == len(blocks) or "late" in found  # once late, it is not asked again
        if len(arrivals) <= k or not arrivals[k].event.wait_ended_s:
            found.setdefault("not_waited", k)
        elif not next_is_there and (
            len(arrivals) == k + 1 or not bus.ended[k + 1].wait(PATIENCE_S)
        ):
            found["late"] = k
        if not torch.equal(weights, blocks[k]):
            found.setdefault("spoiled", k)
        return x + weights.sum()

    with PeakMemory() as memory:
        value = student(bus, blocks, compute, torch.zeros(()))
    right = float(sum(block.sum() for block in blocks))
    return Doubled(
        float(value) if isinstance(value, Tensor) and value.numel() == 1 else value, right,
        memory.peak_bytes, len(storages), bus.moved_bytes, found.get("late"),
        found.get("not_waited"), found.get("spoiled"), order,
    )  # fmt: skip
