"""The transport that runs a group's operations through shared memory."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from labkit.runtime.process_context import here
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.shm import collectives
from labkit.runtime.transports.shm.ring import Inbox, Outbox, Ring
from labkit.runtime.transports.shm.slots import Slots
from labkit.runtime.transports.shm.symmetric import SymmetricTensors
from labkit.runtime.transports.transport import Call, Chosen, Kind, Transport
from labkit.runtime.transports.wire import Lane, LaneWork, Work

End = TypeVar("End", Inbox, Outbox)
SLOTS = "slots"  # the algorithm name of collectives.py


def _through_slots(collective: Callable[..., int]) -> Callable[..., Work]:
    """A method of `Shared` that runs this collective."""

    def method(self: "Shared", *args: Any) -> Work:
        *tensors_and_root, call = args
        return self._start(call, lambda slots: collective(slots, *tensors_and_root))

    return method


class Shared(Transport):
    """Rank `rank` of a group of `size` ranks on this machine, which share the file `place` and
    files next to it. CPU tensors only. `messages` runs algorithms requested by name.

    Collectives run in call order: blocking calls in the caller's thread, asynchronous calls (and
    calls queued behind them) on a lane. `Work.wait` returns how many bytes this rank copied.
    Memory is mapped on first use. After a failed operation (for example, a timeout), a rank is out
    of step: it gives up, so that other ranks fail, too, and refuses all later calls of the group.
    """

    name = "shm"

    def __init__(self, place: Path, rank: int, size: int, timeout_s: float, messages: Transport):
        self._path, self._rank, self._size, self._timeout_s = place, rank, size, timeout_s
        self._messages, self.forced = messages, messages.forced
        self._slots: Slots | None = None
        self._symmetric = SymmetricTensors()
        self._rings: dict[tuple[int, int], Ring] = {}  # by source and target rank
        self.broken = ""  # the first error
        self._lane: Lane | None = None
        self._last: LaneWork | None = None  # the last work on the lane
        self._choosing, self._turn = threading.Lock(), threading.Lock()

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        if asked == SLOTS or not (asked or collective in self.forced):
            return self, SLOTS
        return self._messages.choose(collective, nbytes, x, asked)

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        chosen, _ = self.choose(collective, nbytes, x, asked)
        by_messages = self._messages.explain(collective, nbytes, x, "" if chosen is self else asked)
        if chosen is not self:
            return by_messages
        why = f"the ranks share memory. Over gloo it would be {by_messages}"
        return Choice(collective, SLOTS, why)

    def _start(self, call: Call, collective: Callable[[Slots], object]) -> Work:
        work = LaneWork(partial(self._carry, collective))
        with self._choosing:
            if call.asynchronous or not (self._last is None or self._last.is_completed()):
                if self._lane is None:
                    self._lane = Lane("labkit collectives")
                self._last = self._lane.put(work)
                return work
        return work.run()

    def _carry(self, collective: Callable[[Slots], object]) -> object:
        with self._turn, here.carrying():
            self.refuse_if_broken()
            try:
                if self._slots is None:
                    self._slots = Slots(self._path, self._rank, self._size, self._timeout_s)
                return collective(self._slots)
            except BaseException as error:
                self.give_up(error)
                raise

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(
                f"this group cannot be used after an earlier error ({self.broken}): its ranks "
                "are out of step; start new ranks with world.restart()"
            )

    def give_up(self, error: BaseException) -> None:
        """After `error`, make the other ranks fail, too, and refuse all later calls."""
        with self._choosing:
            self.broken = self.broken or str(error).partition("\n")[0] or type(error).__name__
            rings = [*self._rings.values()]
        for ring in rings:
            ring.give_up()
        if self._slots is not None:
            self._slots.give_up()

    def symmetric_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel * dtype.itemsize <= collectives.AT_ONCE_BYTES:  # slots are as fast at this size
            return super().symmetric_empty(numel, dtype)
        made: list[torch.Tensor | None] = []  # not the work's value, which a lane keeps alive

        def make(slots: Slots) -> None:
            made.append(self._symmetric.make(slots, self._path, numel, dtype))

        self._start(Call(0, False, SLOTS), make).wait()
        return super().symmetric_empty(numel, dtype) if made[0] is None else made[0]

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work:
        place = self._symmetric.find(x) if x.nbytes > collectives.AT_ONCE_BYTES else None
        if place is None:
            return self._start(call, lambda slots: collectives.all_reduce(slots, x, op))
        return self._start(
            call, lambda slots: collectives.all_reduce_symmetric(slots, x, *place, op)
        )

    reduce_scatter = _through_slots(collectives.reduce_scatter)
    all_gather = _through_slots(collectives.all_gather)
    broadcast = _through_slots(collectives.broadcast)
    reduce = _through_slots(collectives.reduce)
    gather = _through_slots(collectives.gather)
    scatter = _through_slots(collectives.scatter)
    all_to_all = _through_slots(collectives.all_to_all)
    barrier = _through_slots(collectives.barrier)
    ring_exchange = _through_slots(collectives.ring_exchange)

    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        outbox = self._ring(Outbox, self._rank, peer)
        return Message(self, outbox, lambda: outbox.send(x, call.tag))

    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        inbox = self._ring(Inbox, peer, self._rank)
        return Message(self, inbox, lambda: inbox.receive(x, call.tag, call.asynchronous))

    def _ring(self, end: type[End], source: int, target: int) -> End:
        with self._choosing:
            if (source, target) not in self._rings:
                path = self._path.with_name(f"{self._path.name}-{source}-{target}")
                self._rings[source, target] = end(path, self._timeout_s)
            return self._rings[source, target]  # type: ignore[return-value]


class Message:
    """A send or receive. It never begins in a broken group, and breaks its group if it fails."""

    def __init__(self, group: Shared, ring: Ring, begin: Callable[[], Work]):
        self._group, self._ring = group, ring
        self._work = None if group.broken or ring.gave_up() else begin()

    def wait(self) -> int:
        """Wait until the operation is complete; return the bytes copied."""
        try:
            if self._work is None:
                self._group.refuse_if_broken()
                raise RuntimeError("the other rank gave up after an error")
            return self._work.wait()
        except RuntimeError as error:
            self._group.give_up(error)
            raise

    def is_completed(self) -> bool:
        return self._work is None or self._ring.gave_up() or self._work.is_completed()
