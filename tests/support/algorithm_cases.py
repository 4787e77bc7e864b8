"""One operation on simulated ranks (fake_wire.py): inputs, results and bytes of each rank."""

from collections.abc import Callable, Iterator
from functools import reduce as fold
from typing import Any

import torch

from algorithm_bytes import Call, sent_bytes
from comm_contract import PLAIN, given, reduced
from fake_wire import Mailbox, drive
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.comm.collectives.steps import Algorithm
from labkit.events import chunk_sizes
from labkit.runtime.transports.send_receive import REDUCTIONS
from labkit.runtime.transports.wire import Wire

EVERY = [(collective, name) for collective, named in ALGORITHMS.items() for name in named]
RANKS = range(1, 9)
SIZES = (0, 1, 5, 97)  # fewer elements than ranks, and none that divides
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def of(*collectives: str) -> list[tuple[str, str]]:
    return [one for one in EVERY if one[0] in collectives]


def serves(collective: str, name: str, n: int) -> bool:
    return (collective, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0


def uneven(n: int, seed: int) -> list[int]:
    """Sizes of n chunks: none, some, many."""
    return [(3 * rank + seed) % 7 * seed for rank in range(n)]


class Case:
    """One operation on n simulated ranks: its inputs, and what must come out."""

    def __init__(
        self, collective: str, name: str, sizes: list[int], root: int = 0,
        dtype: torch.dtype = torch.float32, op: str = "sum", nodes: Any = None, late: bool = True,
    ):  # fmt: skip
        self.collective, self.name, self.sizes = collective, name, sizes
        self.root = root if collective in ("broadcast", "reduce", "gather", "scatter") else 0
        self.dtype, self.op, self.n = dtype, op, len(sizes)
        self.mailbox = Mailbox(self.n, late, nodes)
        self.whole = [given(rank, sum(sizes), dtype=dtype) for rank in range(self.n)]
        self.results: dict[int, Any] = {}

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split(self.sizes))

    def run(self) -> list[int]:
        start = getattr(self, self.collective)
        return drive(self.mailbox, lambda wire: start(wire, ALGORITHMS[self.collective][self.name]))

    def check(self) -> None:
        sent = self.run()
        expected = getattr(self, "expected_" + self.collective)
        for rank in range(self.n):
            for result, right in zip(self.results[rank], expected(rank), strict=True):
                assert torch.equal(result, right), (self.collective, self.name, rank, self.sizes)
        assert sent == self.predicted(), "the formulas of algorithm_bytes.py"

    def predicted(self) -> list[int]:
        nbytes = 1 if self.collective == "barrier" else self.whole[0].element_size()
        nodes = self.mailbox.nodes
        return [
            sent_bytes(self.collective, self.name, nbytes, Call(self.sizes, r, self.root, nodes))
            for r in range(self.n)
        ]

    # What each rank brings and keeps, and what it must have in the end.

    def all_reduce(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        x = self.whole[wire.rank].clone()
        self.results[wire.rank] = [x]
        divide_by = self.n if self.op == "mean" else 1
        return algorithm(wire, x, REDUCTIONS[self.op], divide_by, 7)

    def expected_all_reduce(self, rank: int) -> list[torch.Tensor]:
        return [reduced(self.whole, self.op)]

    def reduce(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        x = self.whole[wire.rank].clone()
        self.results[wire.rank] = [x] if wire.rank == self.root else []
        return algorithm(wire, x, self.root, REDUCTIONS[self.op], 7)

    def expected_reduce(self, rank: int) -> list[torch.Tensor]:
        return [fold(PLAIN[self.op], self.whole)] if rank == self.root else []

    def reduce_scatter(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        chunks = self.parts(self.whole[wire.rank].clone())
        out = torch.zeros_like(chunks[wire.rank])
        self.results[wire.rank] = [out, *chunks]
        return algorithm(wire, chunks, out, REDUCTIONS[self.op], 7)

    def expected_reduce_scatter(self, rank: int) -> list[torch.Tensor]:
        total = fold(PLAIN[self.op], self.whole)
        return [self.parts(total)[rank], *self.parts(self.whole[rank])]

    def all_gather(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        """On the odd ranks into tensors that lie apart."""
        chunks = self.parts(torch.zeros_like(self.whole[0]))
        if wire.rank % 2:
            chunks = [chunk.clone() for chunk in chunks]
        chunks[wire.rank].copy_(self.parts(self.whole[wire.rank])[wire.rank])
        self.results[wire.rank] = chunks
        return algorithm(wire, chunks, 7)

    def expected_all_gather(self, rank: int) -> list[torch.Tensor]:
        return [self.parts(self.whole[r])[r] for r in range(self.n)]

    def broadcast(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        x = self.whole[wire.rank].clone()
        self.results[wire.rank] = [x]
        return algorithm(wire, x, self.root, 7)

    def expected_broadcast(self, rank: int) -> list[torch.Tensor]:
        return [self.whole[self.root]]

    def gather(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        x = self.parts(self.whole[wire.rank])[wire.rank].clone()
        chunks = None
        if wire.rank == self.root:
            chunks = self.parts(torch.zeros_like(self.whole[0]))
        self.results[wire.rank] = [x, *(chunks or [])]
        return algorithm(wire, x, chunks, self.root, 7)

    def expected_gather(self, rank: int) -> list[torch.Tensor]:
        own = self.parts(self.whole[rank])[rank]
        return [own, *self.expected_all_gather(rank)] if rank == self.root else [own]

    def scatter(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        chunks = self.parts(self.whole[wire.rank].clone()) if wire.rank == self.root else None
        out = torch.zeros_like(self.parts(self.whole[0])[wire.rank])
        self.results[wire.rank] = [out, *(chunks or [])]
        return algorithm(wire, out, chunks, self.root, 7)

    def expected_scatter(self, rank: int) -> list[torch.Tensor]:
        chunks = self.parts(self.whole[self.root])
        return [chunks[rank], *(chunks if rank == self.root else [])]

    def all_to_all(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        """Rank i sends sizes[j] elements to rank j."""
        ins = self.parts(self.whole[wire.rank].clone())
        outs = [torch.zeros_like(ins[wire.rank]) for _ in range(self.n)]
        self.results[wire.rank] = outs
        return algorithm(wire, outs, ins, 7)

    def expected_all_to_all(self, rank: int) -> list[torch.Tensor]:
        return [self.parts(self.whole[r])[rank] for r in range(self.n)]

    def barrier(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        self.results[wire.rank] = []
        return algorithm(wire, torch.zeros(1, dtype=torch.uint8), 7)

    def expected_barrier(self, rank: int) -> list[torch.Tensor]:
        return []

    def ring_exchange(self, wire: Wire, algorithm: Callable[..., Algorithm]) -> Algorithm:
        out = torch.zeros_like(self.whole[0])
        self.results[wire.rank] = [out]
        return algorithm(wire, out, self.whole[wire.rank], 7)

    def expected_ring_exchange(self, rank: int) -> list[torch.Tensor]:
        return [self.whole[rank - 1]]


def sizes_for(collective: str, name: str, n: int, numel: int) -> list[int]:
    return [numel] * n if collective in ("gather", "scatter") else chunk_sizes(numel, n)


def nodes_for(n: int) -> Iterator[list[list[int]]]:
    """Nodes of 1, 2, 3, ... ranks; the last may have fewer."""
    for per_node in range(1, n + 1):
        yield [list(range(n))[at : at + per_node] for at in range(0, n, per_node)]


def two_nodes(n: int) -> list[list[int]]:
    return [list(range(n))[:2], list(range(n))[2:]]


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


def same_bits(name: str, op: str, n: int) -> None:
    """Also where the order of adding shows: rounding, zeros of both signs, NaNs that differ."""
    for dtype, integer, nan in (
        (torch.float32, torch.int32, 0x7FC00000),
        (torch.bfloat16, torch.int16, 0x7FC0),
    ):
        case = Case("all_reduce", name, chunk_sizes(60, n), dtype=dtype, op=op)
        generator = torch.Generator().manual_seed(n)
        case.whole = [torch.randn(60, generator=generator).to(dtype) for _ in range(n)]
        for rank, x in enumerate(case.whole):
            x[40:50] = 0.0 if rank % 2 else -0.0
            x[50:].view(integer).fill_(nan + rank)
        case.run()
        for rank in range(n):
            assert bits(case.results[rank][0]) == bits(case.results[0][0]), (rank, n, dtype)
