"""Each collective as the bench calls it, through the communicator or past it, and its right result.

The right result is computed without communication: every rank knows what the others send, since
that is drawn from their rank, and reduces it in whole numbers. Inputs are 0, 1 or 2, so that sums
are exact in every dtype; where nothing may arrive, `UNTOUCHED` must stay.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch

from labkit.runtime.transports.native import Native
from labkit.runtime.transports.transport import Call
from labkit.sweeps.sweep import PARTED

UNTOUCHED = 77
IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class Buffers:
    """A rank's input and output: `count` elements, or as many for each rank where the operation is
    about parts."""

    def __init__(
        self, op: str, rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device
    ):
        self.op, self.rank, self.ranks, self.count = op, rank, ranks, count
        self.numel = count * ranks if op in PARTED else count
        self.input = torch.empty(self.numel, dtype=dtype, device=device)
        self.output = torch.empty_like(self.input)
        self.input_parts = list(self.input.split(count))
        self.output_parts = list(self.output.split(count))

    def zero(self) -> None:
        """For timing: sums of zeros stay zero, however often an operation is repeated."""
        self.input.zero_()
        self.output.zero_()

    def fill(self) -> None:
        """For checking: this rank's input, and an output without any result."""
        self.input.copy_(input_of(self.rank, self.numel))
        if self.op in IN_PLACE:
            self.output.copy_(self.input)
        else:
            self.output.fill_(UNTOUCHED)

    def wrong(self, expected: torch.Tensor) -> int:
        """How many elements of the output differ. (A sum would take 8 bytes for each.)"""
        return int((self.output.cpu() != expected.to(self.output.dtype)).count_nonzero())


def input_of(rank: int, numel: int) -> torch.Tensor:
    """What `rank` sends: whole numbers from 0 to 2."""
    drawn = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (numel,), generator=drawn, dtype=torch.int32)


def expected(buffers: Buffers, redop: str) -> torch.Tensor:
    """What `buffers.output` must be after the operation, as whole numbers."""
    op, rank, ranks, count = buffers.op, buffers.rank, buffers.ranks, buffers.count

    def sent(by: int) -> torch.Tensor:
        return input_of(by, buffers.numel)

    def part(whole: torch.Tensor, number: int) -> torch.Tensor:
        return whole[number * count : (number + 1) * count]

    def reduced() -> torch.Tensor:
        return reduce(REDUCTIONS[redop], map(sent, range(ranks)))

    def only_part(whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, and the rest untouched."""
        result = torch.full_like(whole, UNTOUCHED)
        part(result, rank).copy_(part(whole, rank))
        return result

    def joined(numbers: Iterable[int]) -> torch.Tensor:
        """The part of that number from each rank; one whole input at a time is in memory."""
        return torch.cat([part(sent(by), number).clone() for by, number in enumerate(numbers)])

    def gathered() -> torch.Tensor:
        return joined(range(ranks))

    outcomes: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": reduced,
        "reduce": lambda: reduced() if rank == 0 else sent(rank),
        "broadcast": lambda: sent(0),
        "reduce_scatter": lambda: only_part(reduced()),
        "all_gather": gathered,
        "gather": lambda: gathered() if rank == 0 else torch.full_like(sent(0), UNTOUCHED),
        "scatter": lambda: only_part(sent(0)),
        "all_to_all": lambda: joined([rank] * ranks),
        "ring_exchange": lambda: sent((rank - 1) % ranks),
        "there_and_back": lambda: (
            sent(rank ^ 1) if rank ^ 1 < ranks else torch.full_like(sent(0), UNTOUCHED)
        ),
    }
    return outcomes[op]()


def call(comm: Any, buffers: Buffers, redop: str, algorithm: str) -> None:
    """Do the operation once, blocking; `comm` is a `Comm` or `NativeCalls`."""
    b, at_root = buffers, buffers.rank == 0
    named = {"algorithm": algorithm}
    match buffers.op:
        case "all_reduce":
            comm.all_reduce(b.output, redop, **named)
        case "reduce":
            comm.reduce(b.output, 0, redop, **named)
        case "broadcast":
            comm.broadcast(b.output, 0, **named)
        case "reduce_scatter":
            comm.reduce_scatter(b.output_parts[b.rank], b.input_parts, redop, **named)
        case "all_gather":
            comm.all_gather(b.output_parts, b.input_parts[b.rank], **named)
        case "gather":
            comm.gather(b.input_parts[b.rank], b.output_parts if at_root else None, 0, **named)
        case "scatter":
            comm.scatter(b.output_parts[b.rank], b.input_parts if at_root else None, 0, **named)
        case "all_to_all":
            comm.all_to_all(b.output_parts, b.input_parts, **named)
        case "ring_exchange":
            comm.ring_exchange(b.output, b.input, **named)
        case "there_and_back" if b.rank % 2:
            comm.recv(b.output, b.rank - 1)
            comm.send(b.input, b.rank - 1)
        case "there_and_back":
            if b.rank + 1 < b.ranks:
                comm.send(b.input, b.rank + 1)
                comm.recv(b.output, b.rank + 1)
        case other:
            raise AssertionError(f"the bench has no {other}")


class NativeCalls:
    """The backend's own operations, past the communicator, under the names of `Comm`."""

    def __init__(self, group: Any):
        self._group, self._native = group, Native(group)

    def send(self, x: torch.Tensor, peer: int) -> None:
        self._group.send([x], peer, 0).wait()

    def recv(self, x: torch.Tensor, peer: int) -> None:
        self._group.recv([x], peer, 0).wait()

    def __getattr__(self, name: str) -> Callable[..., None]:
        operation = getattr(self._native, name)

        def blocking(*args: Any, algorithm: str = "") -> None:
            operation(*args, Call(0, False, "")).wait()

        return blocking
