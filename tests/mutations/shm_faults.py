"""Deliberate faults of the shared memory. (Apart from the tests that use them, as comm_faults.)"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import replaces
from labkit import Comm
from labkit.runtime.transports.shm import collectives, ring, slots
from labkit.runtime.transports.shm.ring import Arriving, Inbox, Ring
from labkit.runtime.transports.shm.slots import Slots
from labkit.runtime.transports.shm.transport import Shared
from labkit.runtime.transports.wire import Lane, LaneWork


def fast_root(comm: Comm) -> None:
    """Rank 0 broadcasts one tensor after the other while the others are still asleep."""
    for first in range(0, 40, 10):
        for k in range(first, first + 10):
            if comm.rank:
                time.sleep(0.002)
            comm.broadcast(x := torch.full((100,), float(k if comm.rank == 0 else -1)), src=0)
            assert x.eq(k).all(), (k, x[0])


def send_ends_when_received(comm: Comm) -> None:
    if comm.rank == 0:
        handle = comm.isend(torch.ones(3), 1, tag=1)
        comm.send(torch.ones(3), 1, tag=2)  # so that the first has come out of the ring
        assert not handle.is_completed()
        comm.barrier()
        handle.wait()
    elif comm.rank == 1:
        comm.recv(torch.ones(3), 0, tag=2)
        comm.barrier()
        comm.recv(torch.ones(3), 0, tag=1)
    else:
        comm.barrier()


@replaces(collectives, "_reduce")
def forgets_the_last_rank(real: Any, slots: Slots, *args: Any) -> None:
    slots.size -= 1
    try:
        real(slots, *args)
    finally:
        slots.size += 1


@replaces(collectives, "_reduce")
def begins_with_itself(
    real: Any, slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str
) -> None:
    """Right but for rounding: each slice in another order."""
    total = own.clone()
    for rank in slots.others:
        term = slots.view(rank, begin, out.numel(), out.dtype)
        total = collectives.PAIRWISE[op](total, term)
    out.copy_(total / slots.size if op == "mean" else total)


@replaces(collectives, "_reduce")
def forgets_the_division(
    real: Any, slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str
) -> None:
    real(slots, out, own, begin, "sum" if op == "mean" else op)


@replaces(collectives, "share_memory")
def never_sees_shared_memory(real: Any, x: torch.Tensor, *others: torch.Tensor) -> bool:
    return False


@replaces(Slots, "wait")
def does_not_wait(real: Any, self: Slots, ranks: Any, stage: int) -> None:
    pass


@replaces(Slots, "begin")
def overwrites_what_is_read(real: Any, self: Slots, note: int = slots.NOTHING) -> None:
    self._piece += 1
    self._region.write(self._note(self.rank), note)


@replaces(Slots, "take")
def takes_from_the_first(real: Any, self: Slots, x: torch.Tensor, rank: int, begin: int = 0) -> Any:
    return real(self, x, self.others[0], begin)


@replaces(Slots, "notes")
def knows_its_own_length_only(real: Any, self: Slots) -> list[int]:
    return [real(self)[self.rank]]


@replaces(slots, "copy")
def counts_half(real: Any, target: int, source: int, nbytes: int) -> Any:
    return real(target, source, nbytes) // 2


@replaces(Inbox, "receive")
def ignores_tags(real: Any, self: Inbox, x: torch.Tensor, tag: int, asynchronous: bool) -> Any:
    return real(self, x, 0, asynchronous)


@replaces(Inbox, "_expect")
def expects_no_tags(real: Any, self: Inbox, tag: int, nbytes: int) -> Any:
    return real(self, 0, nbytes)


@replaces(Inbox, "_expect")
def announces_what_is_kept_as_taken(real: Any, self: Inbox, tag: int, nbytes: int) -> Arriving:
    message: Arriving = real(self, tag, nbytes)
    self.region.announce(ring.taken_word(message.number), message.number)
    return message


@replaces(Ring, "_spans")
def stops_at_the_end(real: Any, self: Ring, position: int, nbytes: int) -> Any:
    """What wraps around the end of the ring is lost."""
    at = position % ring.RING_BYTES
    yield self.region.address(at), 0, min(nbytes, ring.RING_BYTES - at)


@replaces(Shared, "_start")
def overtakes(real: Any, self: Shared, call: Any, collective: Any) -> Any:
    """A blocking collective does not wait for those under way."""
    work = LaneWork(partial(self._carry, collective))
    if not call.asynchronous:
        return work.run()
    if self._lane is None:
        self._lane = Lane("overtaken")
    return self._lane.put(work)


@replaces(Path, "unlink")
def keeps_its_name(real: Any, self: Path, *_: Any, **__: Any) -> None:
    pass
