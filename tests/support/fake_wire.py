"""Wires between ranks that are generators in one process: no sockets, no threads, no chance. As
with gloo, a send that nobody receives is never done. Bytes are copied as soon as both ends are
posted (late=False: overwriting too early shows), or when one end waits (late=True: reading early
shows). `drive` runs the ranks in rounds, and raises AssertionError at a deadlock or a message left
over."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.comm.collectives.steps import Algorithm
from labkit.runtime.transports.wire import Wire


class Deadlock(AssertionError):
    """Nobody can go on."""


class Message:
    """One half of a message: the send, or the receive. Both halves are done together."""

    def __init__(self, x: torch.Tensor, sends: bool):
        self.x, self.sends = x, sends
        self.other: Message | None = None
        self.copied = self.is_lost = False

    def is_completed(self) -> bool:
        return self.other is not None

    def wait(self) -> None:
        assert self.other is not None, "an algorithm waits by itself; it must yield the work"
        (self if self.sends else self.other).deliver()

    def deliver(self) -> None:
        """Of a send that has met its receive."""
        if not self.copied and self.other is not None:
            assert self.other.x.nbytes == self.x.nbytes, "a message is received as it was sent"
            place = self.other.x.view(-1).view(torch.uint8)
            if self.is_lost:  # what was in fresh memory may be what is missing
                place.fill_(0x5A)
            else:
                place.copy_(self.x.view(-1).view(torch.uint8))
            self.copied = True


class Mailbox:
    """What has been posted and not met: from, to, tag -> halves in order."""

    def __init__(self, size: int, late: bool, nodes: Sequence[Sequence[int]] | None = None):
        self.size, self.late = size, late
        self.sends: defaultdict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self.nodes = nodes or [list(range(size))]
        self.posted_bytes = [0] * size
        self.sent = 0  # messages so far, of all ranks
        self.lost: int | None = None  # this message arrives with nonsense in it
        self.doubled: int | None = None  # and this one is sent twice

    def wire(self, rank: int) -> "FakeWire":
        return FakeWire(self, rank)

    def meet(self, ends: tuple[int, int, int]) -> None:
        while self.sends[ends] and self.receives[ends]:
            send, receive = self.sends[ends].popleft(), self.receives[ends].popleft()
            send.other, receive.other = receive, send
            if not self.late:
                send.deliver()


class FakeWire(Wire):
    def __init__(self, mailbox: Mailbox, rank: int):
        self.mailbox, self.rank, self.size = mailbox, rank, mailbox.size
        self.nodes = mailbox.nodes

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return self._post(self.mailbox.sends, Message(x, True), (self.rank, peer, tag))

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return self._post(self.mailbox.receives, Message(x, False), (peer, self.rank, tag))

    def _post(self, place: Any, message: Any, ends: tuple[int, int, int]) -> Any:
        assert 0 <= ends[0] < self.size and 0 <= ends[1] < self.size and ends[0] != ends[1], ends
        assert message.x.is_contiguous()
        box = self.mailbox
        if message.sends:
            message.is_lost = box.sent == box.lost
            copies, box.sent = 1 + (box.sent == box.doubled), box.sent + 1
            box.posted_bytes[self.rank] += copies * message.x.nbytes
            place[ends].extend(Message(message.x, True) for _ in range(copies - 1))
        place[ends].append(message)
        box.meet(ends)
        return message


def drive(mailbox: Mailbox, start: Callable[[Wire], Algorithm]) -> list[int]:
    """Run the algorithm on all ranks to its end; what it says that each rank sent."""
    ranks = [start(mailbox.wire(rank)) for rank in range(mailbox.size)]
    awaited: list[Any] = [None] * mailbox.size
    said_bytes: list[int | None] = [None] * mailbox.size
    while None in said_bytes:
        moved = False
        for rank, algorithm in enumerate(ranks):
            if said_bytes[rank] is not None:
                continue
            if awaited[rank] is not None:
                if not awaited[rank].is_completed():
                    continue
                awaited[rank].wait()
            moved = True
            try:
                awaited[rank] = next(algorithm)
            except StopIteration as end:
                said_bytes[rank] = end.value
        if not moved:
            waiting = [rank for rank, said in enumerate(said_bytes) if said is None]
            raise Deadlock(f"ranks {waiting} wait for each other")
    left = [ends for place in (mailbox.sends, mailbox.receives) for ends in place if place[ends]]
    assert not left, f"messages (from, to, tag) that only one of the two knows: {left}"
    assert said_bytes == mailbox.posted_bytes, "what it says that it sent, and what it posted"
    return [said or 0 for said in said_bytes]
