"""Each collective as the bench calls it, through the door or past it, and what must come out.

What must come out is worked out without any communication: every rank knows what the others give,
since it is drawn from their number, and adds it up itself in whole numbers. What is given is 0, 1
or 2, so that sums are exact in every dtype; where nothing may arrive, `UNTOUCHED` must stay.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch

from labkit.bench.sweep import PARTED
from labkit.runtime.transports.native import Native
from labkit.runtime.transports.transport import Call

UNTOUCHED = 77
IN_PLACE = ("all_reduce", "reduce", "broadcast")  # of what has been given
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class Buffers:
    """What a rank gives and what it gets: `count` elements, or as many for each rank where the
    operation is about parts."""

    def __init__(
        self, op: str, rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device
    ):
        self.op, self.rank, self.ranks, self.count = op, rank, ranks, count
        self.numel = count * ranks if op in PARTED else count
        self.given = torch.empty(self.numel, dtype=dtype, device=device)
        self.got = torch.empty_like(self.given)
        self.given_parts = list(self.given.split(count))
        self.got_parts = list(self.got.split(count))

    def zero(self) -> None:
        """For timing: sums of zeros stay what they are, however often an operation is repeated."""
        self.given.zero_()
        self.got.zero_()

    def fill(self) -> None:
        """For checking: what this rank gives, and nothing of what it is to get."""
        self.given.copy_(given_by(self.rank, self.numel))
        if self.op in IN_PLACE:
            self.got.copy_(self.given)
        else:
            self.got.fill_(UNTOUCHED)

    def wrong(self, expected: torch.Tensor) -> int:
        """How many elements are not what was expected. A sum would take 8 bytes for each."""
        return int((self.got.cpu() != expected.to(self.got.dtype)).count_nonzero())


def given_by(rank: int, numel: int) -> torch.Tensor:
    """What `rank` gives, as whole numbers from 0 to 2."""
    drawn = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (numel,), generator=drawn, dtype=torch.int32)


def expected(buffers: Buffers, redop: str) -> torch.Tensor:
    """What `buffers.got` must be when the operation is done, as whole numbers."""
    op, rank, ranks, count = buffers.op, buffers.rank, buffers.ranks, buffers.count

    def given(by: int) -> torch.Tensor:
        return given_by(by, buffers.numel)

    def part(whole: torch.Tensor, number: int) -> torch.Tensor:
        return whole[number * count : (number + 1) * count]

    def reduced() -> torch.Tensor:
        return reduce(REDUCTIONS[redop], map(given, range(ranks)))

    def only_part(whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of it, and the rest untouched."""
        result = torch.full_like(whole, UNTOUCHED)
        part(result, rank).copy_(part(whole, rank))
        return result

    def joined(numbers: Iterable[int]) -> torch.Tensor:
        """From each rank the part of that number, and never two ranks' whole at a time."""
        return torch.cat([part(given(by), one).clone() for by, one in enumerate(numbers)])

    def gathered() -> torch.Tensor:
        return joined(range(ranks))

    outcomes: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": reduced,
        "reduce": lambda: reduced() if rank == 0 else given(rank),
        "broadcast": lambda: given(0),
        "reduce_scatter": lambda: only_part(reduced()),
        "all_gather": gathered,
        "gather": lambda: gathered() if rank == 0 else torch.full_like(given(0), UNTOUCHED),
        "scatter": lambda: only_part(given(0)),
        "all_to_all": lambda: joined([rank] * ranks),
        "ring_exchange": lambda: given((rank - 1) % ranks),
        "there_and_back": lambda: (
            given(rank ^ 1) if rank ^ 1 < ranks else torch.full_like(given(0), UNTOUCHED)
        ),
    }
    return outcomes[op]()


def call(door: Any, buffers: Buffers, redop: str, algorithm: str) -> None:
    """Do the operation once, blocking; `door` is a `Comm` or an `Own`."""
    b, at_root = buffers, buffers.rank == 0
    mine = {"algorithm": algorithm}
    match buffers.op:
        case "all_reduce":
            door.all_reduce(b.got, redop, **mine)
        case "reduce":
            door.reduce(b.got, 0, redop, **mine)
        case "broadcast":
            door.broadcast(b.got, 0, **mine)
        case "reduce_scatter":
            door.reduce_scatter(b.got_parts[b.rank], b.given_parts, redop, **mine)
        case "all_gather":
            door.all_gather(b.got_parts, b.given_parts[b.rank], **mine)
        case "gather":
            door.gather(b.given_parts[b.rank], b.got_parts if at_root else None, 0, **mine)
        case "scatter":
            door.scatter(b.got_parts[b.rank], b.given_parts if at_root else None, 0, **mine)
        case "all_to_all":
            door.all_to_all(b.got_parts, b.given_parts, **mine)
        case "ring_exchange":
            door.ring_exchange(b.got, b.given, **mine)
        case "there_and_back" if b.rank % 2:
            door.recv(b.got, b.rank - 1)
            door.send(b.given, b.rank - 1)
        case "there_and_back":
            if b.rank + 1 < b.ranks:
                door.send(b.given, b.rank + 1)
                door.recv(b.got, b.rank + 1)
        case other:
            raise AssertionError(f"the bench has no {other}")


class Own:
    """The backend's own operations, past the door, under the names of `Comm`. The arguments are
    those of `Native`, but that it wants the root before the reduction, too."""

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
