"""Wires between ranks that are generators in one process: no sockets, no threads, no chance. As
with gloo, a send that nobody receives is never done. Bytes are copied as soon as both ends are
posted (late=False: overwriting too early shows), or when one end waits (late=True: reading early
shows). `drive` runs the ranks in rounds, and raises AssertionError at a deadlock or a message left
over.

Each rank has a clock: a schedule's time in the alpha-beta model is found by running it. A message
leaves when the sender's wire is free, occupies it and then the receiver's for bytes x beta, and
arrives alpha later. Computing takes no time, and no formula is known here."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from labkit.comm.collectives.steps import Algorithm
from labkit.runtime.transports.wire import Wire, Work

Ends = tuple[int, int, int]  # from, to, tag


class Deadlock(AssertionError):
    """Nobody can go on."""


class Message:
    """One half of a message: the send, or the receive. Both halves are done together."""

    def __init__(self, box: "Mailbox", rank: int, x: torch.Tensor, sends: bool):
        self.box, self.rank, self.x, self.sends = box, rank, x, sends
        self.other: Message | None = None
        self.copied = self.is_lost = False
        self.takes_s = x.nbytes * box.beta_s_per_byte
        if sends:
            self.left_s = max(box.now_s[rank], box.out_free_s[rank]) + self.takes_s
            box.out_free_s[rank] = self.left_s

    def is_completed(self) -> bool:
        return self.other is not None

    def wait(self) -> None:
        assert self.other is not None, "an algorithm waits by itself; it must yield the work"
        (self if self.sends else self.other).deliver()
        box, rank = self.box, self.rank
        if self.sends:
            done_s = self.left_s
        else:
            box.in_free_s[rank] = max(self.other.left_s, box.in_free_s[rank] + self.takes_s)
            done_s = box.in_free_s[rank] + box.alpha_s
        box.now_s[rank] = max(box.now_s[rank], done_s)

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
        self.sends: defaultdict[Ends, deque[Message]] = defaultdict(deque)
        self.receives: defaultdict[Ends, deque[Message]] = defaultdict(deque)
        self.nodes = nodes or [list(range(size))]
        self.posted_bytes = [0] * size
        self.sent = 0  # messages so far, of all ranks
        self.lost: int | None = None  # this message arrives with nonsense in it
        self.doubled: int | None = None  # and this one is sent twice
        self.alpha_s = self.beta_s_per_byte = 0.0
        self.now_s = [0.0] * size  # of each rank's program
        self.out_free_s, self.in_free_s = [0.0] * size, [0.0] * size

    def meet(self, ends: Ends) -> None:
        while self.sends[ends] and self.receives[ends]:
            send, receive = self.sends[ends].popleft(), self.receives[ends].popleft()
            send.other, receive.other = receive, send
            if not self.late:
                send.deliver()


class FakeWire(Wire):
    def __init__(self, mailbox: Mailbox, rank: int):
        self.mailbox, self.rank, self.size = mailbox, rank, mailbox.size
        self.nodes = mailbox.nodes

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Message:
        return self._post(self.mailbox.sends, x, (self.rank, peer, tag))

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Message:
        return self._post(self.mailbox.receives, x, (peer, self.rank, tag))

    def _post(self, place: dict[Ends, deque[Message]], x: torch.Tensor, ends: Ends) -> Message:
        assert 0 <= ends[0] < self.size and 0 <= ends[1] < self.size and ends[0] != ends[1], ends
        assert x.is_contiguous()
        box = self.mailbox
        message = Message(box, self.rank, x, place is box.sends)
        if message.sends:
            message.is_lost = box.sent == box.lost
            copies, box.sent = 1 + (box.sent == box.doubled), box.sent + 1
            box.posted_bytes[self.rank] += copies * x.nbytes
            place[ends].extend(Message(box, self.rank, x, True) for _ in range(copies - 1))
        place[ends].append(message)
        box.meet(ends)
        return message


def drive(mailbox: Mailbox, start: Callable[[Wire], Algorithm]) -> list[int]:
    """Run the algorithm on all ranks to its end; what it says that each rank sent."""
    ranks = [start(FakeWire(mailbox, rank)) for rank in range(mailbox.size)]
    awaited: list[Work | None] = [None] * mailbox.size
    said_bytes: list[int | None] = [None] * mailbox.size
    while None in said_bytes:
        moved = False
        for rank, algorithm in enumerate(ranks):
            if said_bytes[rank] is not None:
                continue
            if (work := awaited[rank]) is not None:
                if not work.is_completed():
                    continue
                work.wait()
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
