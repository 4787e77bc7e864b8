"""Collective calls for the benchmark, and expected results, computed without communication: inputs
are seeded by rank, so every rank knows all inputs. Inputs are 0, 1 or 2, so that sums are exact in
every dtype. Output that a call must not write has to keep the value `UNTOUCHED`.
"""

from collections.abc import Callable, Iterable
from functools import partial, reduce
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
    """A rank's input and output: `count` elements, or `count` per rank for operations in PARTED."""

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
        """For timing: clear both buffers; sums of zeros stay zero, however many calls follow."""
        self.input.zero_()
        self.output.zero_()

    def fill(self) -> None:
        """For checking: write this rank's input, and reset the output."""
        self.input.copy_(input_of(self.rank, self.numel))
        if self.op in IN_PLACE:
            self.output.copy_(self.input)
        else:
            self.output.fill_(UNTOUCHED)

    def wrong(self, expected: torch.Tensor) -> int:
        """The number of wrong output elements. (`sum` would need 8 bytes per element.)"""
        return int((self.output.cpu() != expected.to(self.output.dtype)).count_nonzero())


def input_of(rank: int, numel: int) -> torch.Tensor:
    """The input of `rank`: integers from 0 to 2."""
    drawn = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (numel,), generator=drawn, dtype=torch.int32)


def expected(buffers: Buffers, redop: str) -> torch.Tensor:
    """The expected `buffers.output` after the operation, in int32."""
    rank, ranks, count = buffers.rank, buffers.ranks, buffers.count
    own = slice(rank * count, (rank + 1) * count)
    untouched = torch.full((buffers.numel,), UNTOUCHED, dtype=torch.int32)

    def sent(by: int) -> torch.Tensor:
        return input_of(by, buffers.numel)

    def reduced() -> torch.Tensor:
        return reduce(REDUCTIONS[redop], map(sent, range(ranks)))

    def joined(numbers: Iterable[int]) -> torch.Tensor:
        """Join part `numbers[r]` of each rank r's input, with one whole input in memory at once."""
        parts = enumerate(numbers)
        return torch.cat([sent(by).split(count)[number].clone() for by, number in parts])

    match buffers.op:
        case "all_reduce":
            return reduced()
        case "reduce":
            return reduced() if rank == 0 else sent(rank)
        case "broadcast":
            return sent(0)
        case "reduce_scatter" | "scatter":
            whole = sent(0) if buffers.op == "scatter" else reduced()
            untouched[own] = whole[own]
        case "all_gather":
            return joined(range(ranks))
        case "gather" if rank == 0:
            return joined(range(ranks))
        case "all_to_all":
            return joined([rank] * ranks)
        case "ring_exchange":
            return sent((rank - 1) % ranks)
        case "there_and_back" if rank ^ 1 < ranks:
            return sent(rank ^ 1)
    return untouched


def call_of(comm: Any, buffers: Buffers, redop: str, algorithm: str) -> Callable[[], object]:
    """One blocking call of the operation; `comm` is a `Comm` or `NativeCalls`."""
    b, root = buffers, 0
    if b.op == "there_and_back":
        return partial(_there_and_back, comm, b)
    at_root, own = b.rank == root, b.rank if b.op in PARTED else 0
    own_input, own_output = b.input_parts[own], b.output_parts[own]
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (b.output, redop),
        "reduce": (b.output, root, redop),
        "broadcast": (b.output, root),
        "reduce_scatter": (own_output, b.input_parts, redop),
        "all_gather": (b.output_parts, own_input),
        "gather": (own_input, b.output_parts if at_root else None, root),
        "scatter": (own_output, b.input_parts if at_root else None, root),
        "all_to_all": (b.output_parts, b.input_parts),
        "ring_exchange": (b.output, b.input),
    }
    return partial(getattr(comm, b.op), *arguments[b.op], algorithm=algorithm)


def _there_and_back(comm: Any, buffers: Buffers) -> None:
    """A round trip between neighbors; with an odd number of ranks, the last has no peer."""
    peer = buffers.rank ^ 1
    if buffers.rank % 2:
        comm.recv(buffers.output, peer)
        comm.send(buffers.input, peer)
    elif peer < buffers.ranks:
        comm.send(buffers.input, peer)
        comm.recv(buffers.output, peer)


class NativeCalls:
    """The backend's own operations, without labkit's communicator, under `Comm`'s method names."""

    def __init__(self, group: Any, backend: str):
        self._group, self._native = group, Native(group, backend)

    def send(self, x: torch.Tensor, peer: int) -> None:
        self._group.send([x], peer, 0).wait()

    def recv(self, x: torch.Tensor, peer: int) -> None:
        self._group.recv([x], peer, 0).wait()

    def __getattr__(self, name: str) -> Callable[..., None]:
        operation = getattr(self._native, name)

        def blocking(*args: Any, algorithm: str = "") -> None:
            operation(*args, Call(0, False, "")).wait()

        return blocking
