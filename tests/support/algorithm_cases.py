"""One operation on simulated ranks (fake_wire.py): inputs, results and bytes of each rank."""

from collections.abc import Iterable, Iterator
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

Operation = tuple[tuple[Any, ...], list[torch.Tensor], list[torch.Tensor]]
EVERY = [(collective, name) for collective, named in ALGORITHMS.items() for name in named]
RANKS = range(1, 9)
SIZES = (0, 1, 5, 97)  # fewer elements than ranks, and none that divides
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def of(*collectives: str) -> list[tuple[str, str]]:
    return [one for one in EVERY if one[0] in collectives]


def serves(collective: str, name: str, n: int) -> bool:
    return (collective, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0


def served(collective: str, name: str, ranks: Iterable[int] = RANKS) -> list[int]:
    return [n for n in ranks if serves(collective, name, n)]


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
        self.results: dict[int, list[torch.Tensor]] = {}
        self.expected: dict[int, list[torch.Tensor]] = {}

    def run(self) -> list[int]:
        def start(wire: Wire) -> Algorithm:
            rank, of_collective = wire.rank, getattr(self, self.collective)
            arguments, self.results[rank], self.expected[rank] = of_collective(rank)
            return ALGORITHMS[self.collective][self.name](wire, *arguments, 7)

        return drive(self.mailbox, start)

    def check(self) -> None:
        sent = self.run()
        for rank in range(self.n):
            for result, right in zip(self.results[rank], self.expected[rank], strict=True):
                assert torch.equal(result, right), (self.collective, self.name, rank, self.sizes)
        nbytes = 1 if self.collective == "barrier" else self.whole[0].element_size()
        calls = [Call(self.sizes, r, self.root, self.mailbox.nodes) for r in range(self.n)]
        predicted = [sent_bytes(self.collective, self.name, nbytes, call) for call in calls]
        assert sent == predicted, "the formulas of algorithm_bytes.py"

    # Of each rank: the algorithm's arguments, the tensors to look at, and what they must be.

    def all_reduce(self, rank: int) -> Operation:
        x, divide_by = self.whole[rank].clone(), self.n if self.op == "mean" else 1
        return (x, REDUCTIONS[self.op], divide_by), [x], [reduced(self.whole, self.op)]

    def reduce(self, rank: int) -> Operation:
        x, at_root = self.whole[rank].clone(), rank == self.root
        total = fold(PLAIN[self.op], self.whole)
        return (x, self.root, REDUCTIONS[self.op]), [x][:at_root], [total][:at_root]

    def reduce_scatter(self, rank: int) -> Operation:
        chunks = self.parts(self.whole[rank].clone())
        out = torch.zeros_like(chunks[rank])
        total = fold(PLAIN[self.op], self.whole)
        expected = [self.parts(total)[rank], *self.parts(self.whole[rank])]
        return (chunks, out, REDUCTIONS[self.op]), [out, *chunks], expected

    def all_gather(self, rank: int) -> Operation:
        """On the odd ranks into tensors that lie apart."""
        chunks = self.parts(torch.zeros_like(self.whole[0]))
        if rank % 2:
            chunks = [chunk.clone() for chunk in chunks]
        chunks[rank].copy_(self.own(rank))
        return (chunks,), chunks, [self.own(r) for r in range(self.n)]

    def broadcast(self, rank: int) -> Operation:
        x = self.whole[rank].clone()
        return (x, self.root), [x], [self.whole[self.root]]

    def gather(self, rank: int) -> Operation:
        x = self.own(rank).clone()
        if rank != self.root:
            return (x, None, self.root), [x], [self.own(rank)]
        chunks = self.parts(torch.zeros_like(self.whole[0]))
        expected = [self.own(rank), *(self.own(r) for r in range(self.n))]
        return (x, chunks, self.root), [x, *chunks], expected

    def scatter(self, rank: int) -> Operation:
        chunks = self.parts(self.whole[rank].clone()) if rank == self.root else None
        out, given_there = torch.zeros_like(self.own(rank)), self.parts(self.whole[self.root])
        expected = [given_there[rank], *(given_there if chunks else [])]
        return (out, chunks, self.root), [out, *(chunks or [])], expected

    def all_to_all(self, rank: int) -> Operation:
        """Rank i sends sizes[j] elements to rank j."""
        ins = self.parts(self.whole[rank].clone())
        outs = [torch.zeros_like(ins[rank]) for _ in range(self.n)]
        return (outs, ins), outs, [self.parts(x)[rank] for x in self.whole]

    def barrier(self, rank: int) -> Operation:
        return (torch.zeros(1, dtype=torch.uint8),), [], []

    def ring_exchange(self, rank: int) -> Operation:
        out = torch.zeros_like(self.whole[0])
        return (out, self.whole[rank]), [out], [self.whole[rank - 1]]

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split(self.sizes))

    def own(self, rank: int) -> torch.Tensor:
        """Chunk `rank` of what this rank brings."""
        return self.parts(self.whole[rank])[rank]


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
