"""The wires of fake_wire.py with a clock on each rank: a schedule's time in the alpha-beta model,
found by running it. A message leaves when the sender's wire is free, occupies it and then the
receiver's for bytes x beta, and arrives alpha later. Computing takes no time, and no formula is
known here."""

from collections.abc import Sequence
from typing import Any

import torch

from fake_wire import FakeWire, Mailbox


class TimedMailbox(Mailbox):
    def __init__(self, size: int, late: bool, nodes: Sequence[Sequence[int]] | None = None):
        super().__init__(size, late, nodes)
        self.alpha_s, self.beta_s_per_byte = 0.0, 0.0
        self.now_s = [0.0] * size  # of each rank's program
        self.out_free_s = [0.0] * size
        self.in_free_s = [0.0] * size

    def wire(self, rank: int) -> "TimedWire":
        return TimedWire(self, rank)


class TimedWire(FakeWire):
    mailbox: TimedMailbox

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        box = self.mailbox
        begins_s = max(box.now_s[self.rank], box.out_free_s[self.rank])
        box.out_free_s[self.rank] = begins_s + x.nbytes * box.beta_s_per_byte
        message = super().isend(x, peer, tag)
        message.left_s = box.out_free_s[self.rank]
        return Timed(message, box, self.rank)

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return Timed(super().irecv(x, peer, tag), self.mailbox, self.rank)


class Timed:
    """A message of one rank, which waits on its clock."""

    def __init__(self, message: Any, box: TimedMailbox, rank: int):
        self.message, self.box, self.rank = message, box, rank

    def is_completed(self) -> bool:
        return bool(self.message.is_completed())

    def wait(self) -> None:
        self.message.wait()
        box, rank = self.box, self.rank
        if self.message.sends:
            done_s = self.message.left_s
        else:
            taken_s = self.message.x.nbytes * box.beta_s_per_byte
            box.in_free_s[rank] = max(self.message.other.left_s, box.in_free_s[rank] + taken_s)
            done_s = box.in_free_s[rank] + box.alpha_s
        box.now_s[rank] = max(box.now_s[rank], done_s)
