"""Deliberate faults of the shared memory, each a replacement of one of its functions. (Apart from
the tests that use them, as comm_faults.py.)"""

import time
from functools import partial
from typing import Any

import torch

from labkit import Comm
from labkit.runtime.transports.shm import collectives, ring, slots
from labkit.runtime.transports.shm.mail import Arriving, Inbox
from labkit.runtime.transports.shm.ring import Ring
from labkit.runtime.transports.shm.slots import Slots
from labkit.runtime.transports.shm.transport import Shared
from labkit.runtime.transports.wire import LaneWork

reduce, pairwise = collectives._reduce, collectives.PAIRWISE
expect, receive, take, announce = Inbox._expect, Inbox.receive, Slots.take, Slots.announce
copy = slots.copy


def a_fast_root(comm: Comm) -> None:
    """Rank 0 broadcasts one tensor after the other while the others are still asleep."""
    for first in range(0, 40, 10):
        for k in range(first, first + 10):
            if comm.rank:
                time.sleep(0.002)
            comm.broadcast(x := torch.full((100,), float(k if comm.rank == 0 else -1)), src=0)
            assert x.eq(k).all(), (k, x[0])


def a_send_is_taken(comm: Comm) -> None:
    """It is not over while nobody receives."""
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


def forgets_the_last_rank(
    slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str
) -> None:
    slots.size -= 1
    try:
        reduce(slots, out, own, begin, op)
    finally:
        slots.size += 1


def begins_with_itself(
    slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str
) -> None:
    """Right but for rounding: each slice in another order."""
    total = own.clone()
    for rank in slots.others:
        total = pairwise[op](total, slots.view(rank, begin, out.numel(), out.dtype))
    out.copy_(total / slots.size if op == "mean" else total)


def forgets_the_division(
    slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str
) -> None:
    reduce(slots, out, own, begin, "sum" if op == "mean" else op)


def waits_for_nobody(self: Slots, ranks: Any, stage: int) -> None:
    pass


def writes_over_what_is_read(self: Slots) -> None:
    self._piece += 1


def takes_from_the_first(self: Slots, x: torch.Tensor, rank: int, begin: int = 0) -> int:
    return take(self, x, self.others[0], begin)


def knows_its_own_length_only(self: Slots) -> int:
    return int(self._length(self.rank))


def shares_nothing(x: torch.Tensor, *others: torch.Tensor) -> bool:
    return False


def ignores_tags(self: Inbox, x: torch.Tensor, tag: int, asynchronous: bool) -> Any:
    return receive(self, x, 0, asynchronous)


def expects_no_tags(self: Inbox, tag: int, nbytes: int) -> Arriving:
    return expect(self, 0, nbytes)


def calls_taken_what_is_kept(self: Inbox, tag: int, nbytes: int) -> Arriving:
    message = expect(self, tag, nbytes)
    self.words.announce(ring.taken_word(message.number), message.number)
    return message


def ends_at_the_end(self: Ring, position: int, nbytes: int) -> Any:
    """What goes around the end of the ring is lost."""
    at = position % ring.RING_BYTES
    yield self._region.address(at), 0, min(nbytes, ring.RING_BYTES - at)


def overtakes(self: Shared, call: Any, collective: Any) -> Any:
    """A blocking one does not wait for those under way."""
    work = LaneWork(partial(self._carry, collective))
    if not call.asynchronous:
        return work.run()
    if self._lane is None:
        self._lane = collectives_lane()
    return self._lane.put(work)


def collectives_lane() -> Any:
    from labkit.runtime.transports.wire import Lane

    return Lane("overtaken")


def counts_half(target: int, source: int, nbytes: int) -> int:
    return copy(target, source, nbytes) // 2


def keeps_its_name(self: Any, *_: Any, **__: Any) -> None:
    pass
