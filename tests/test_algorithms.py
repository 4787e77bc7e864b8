"""Every algorithm of labkit/comm/algorithms on simulated ranks: results, bytes, waiting.

The ranks are generators in this process (mailbox.py), so many cases cost little, and nothing is
left to chance. A few run on real ranks at the end.
"""

import operator
from collections.abc import Callable, Iterator
from functools import reduce as fold
from typing import Any

import mailbox
import pytest
import torch
from comm_contract import PLAIN, given, ops_of, reduced
from comm_faults import replaced
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mailbox import Deadlock, Mailbox, drive

from labkit import Comm, Link, RankError, World, listen
from labkit.comm import algorithms
from labkit.comm.algorithms import (
    ALGORITHMS,
    POWERS_OF_TWO_ONLY,
    Algorithm,
    Call,
    cost,
    costs,
    hierarchical_cost,
    sent_bytes,
    steps,
)
from labkit.comm.algorithms.sent import SENT
from labkit.comm.backs import REDUCTIONS
from labkit.comm.wire import Wire, nodes_of
from labkit.events import chunk_sizes

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
        assert sent == self.predicted(), "the formulas of sent.py"

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


# --- results and bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_algorithm_equals_plain_computation(collective: str, name: str) -> None:
    for n in filter(lambda n: serves(collective, name, n), RANKS):
        for numel in SIZES:
            for late in (False, True):
                sizes = sizes_for(collective, name, n, numel)
                Case(collective, name, sizes, root=numel % n, late=late).check()


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_dtype_and_reduction(collective: str, name: str) -> None:
    reduces = "reduce" in collective
    for n in filter(lambda n: serves(collective, name, n), (2, 3, 4, 7)):
        for dtype in DTYPES:
            for op in ops_of(dtype) if reduces else ["sum"]:
                if op != "mean" or collective == "all_reduce":  # else the back divides
                    Case(collective, name, sizes_for(collective, name, n, 23), n - 1, dtype, op).check()


@pytest.mark.parametrize(
    ("collective", "name"),
    [*of("all_gather", "reduce_scatter", "all_to_all"), ("gather", "flat"), ("scatter", "flat")],
)
def test_chunks_of_different_sizes(collective: str, name: str) -> None:
    for n in filter(lambda n: serves(collective, name, n), RANKS):
        for seed in (1, 2, 5):
            Case(collective, name, uneven(n, seed), root=n - 1).check()


@pytest.mark.parametrize("name", ALGORITHMS["broadcast"])
def test_every_root(name: str) -> None:
    for n in (2, 3, 5, 8):
        for root in range(n):
            Case("broadcast", name, chunk_sizes(11, n), root).check()
            Case("reduce", name, chunk_sizes(11, n), root).check()
            if name != "chain":
                Case("gather", name, [5] * n, root).check()
                Case("scatter", name, [5] * n, root).check()


def test_hierarchical_on_nodes_of_every_size() -> None:
    for n in RANKS:
        for nodes in nodes_for(n):
            for op in ("sum", "mean"):
                Case("all_reduce", "hierarchical", chunk_sizes(29, n), op=op, nodes=nodes).check()
    for odd_nodes in ([[0, 3], [1, 2, 4]], [[0, 1, 2, 3, 4], [5, 6]], [[6, 2], [5], [0, 1, 3, 4]]):
        n = sum(map(len, odd_nodes))
        Case("all_reduce", "hierarchical", chunk_sizes(29, n), nodes=odd_nodes).check()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PIECE_BYTES", 12)  # three float32


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_in_many_pieces(collective: str, name: str) -> None:
    assert steps.piece_count(100) == 9
    for n in filter(lambda n: serves(collective, name, n), RANKS):
        for late in (False, True):
            sizes = sizes_for(collective, name, n, 97)
            nodes = [list(range(n))[:2], list(range(n))[2:]] if n > 2 else None
            Case(collective, name, sizes, nodes=nodes, late=late).check()


@settings(max_examples=150, deadline=None, derandomize=True)
@drawn(st.data())
def test_whatever_is_drawn(data: st.DataObject) -> None:
    """Any algorithm, ranks, sizes, root, dtype, reduction, nodes, pieces and order of delivery."""
    collective, name = data.draw(st.sampled_from(EVERY))
    n = data.draw(st.integers(1, 9).filter(lambda n: serves(collective, name, n)))
    small = st.integers(0, 30)
    if collective in ("gather", "scatter") and name == "tree":
        sizes = [data.draw(small)] * n
    elif collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        sizes = data.draw(st.lists(small, min_size=n, max_size=n))
    else:
        sizes = chunk_sizes(data.draw(st.integers(0, 200)), n)
    dtype = data.draw(st.sampled_from(DTYPES))
    ops = [op for op in ops_of(dtype) if op != "mean" or collective == "all_reduce"]
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n), max_size=3)) | {0, n})
    nodes = [list(order[a:b]) for a, b in zip(cuts, cuts[1:])]
    case = Case(
        collective, name, sizes, data.draw(st.integers(0, n - 1)), dtype,
        data.draw(st.sampled_from(ops)), nodes, data.draw(st.booleans()),
    )  # fmt: skip
    piece_bytes, costs.PIECE_BYTES = costs.PIECE_BYTES, data.draw(st.sampled_from([4, 16, 1 << 20]))
    try:
        case.check()
    finally:
        costs.PIECE_BYTES = piece_bytes


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_an_all_reduce_gives_all_ranks_the_same_bits(name: str, op: str) -> None:
    """Also where the order of adding shows: rounding, zeros of both signs, NaNs that differ."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in RANKS:
            case = Case("all_reduce", name, chunk_sizes(60, n), dtype=dtype, op=op)
            generator = torch.Generator().manual_seed(n)
            case.whole = [torch.randn(60, generator=generator).to(dtype) for _ in range(n)]
            for rank, x in enumerate(case.whole):
                x[40:50] = 0.0 if rank % 2 else -0.0
                nans = x[50:].view(torch.int32 if dtype is torch.float32 else torch.int16)
                nans.fill_((0x7FC00000 if dtype is torch.float32 else 0x7FC0) + rank)
            case.run()
            for rank in range(n):
                assert bits(case.results[rank][0]) == bits(case.results[0][0])


# --- formulas ----------------------------------------------------------------------------------


def test_every_algorithm_has_its_bytes_and_its_cost() -> None:
    for collective, name in EVERY:
        assert name in SENT[collective]
        assert name in costs.COSTS[collective] or name == "hierarchical"
        if name != "hierarchical":
            assert cost(collective, name, 1, 1000) == costs.Cost(0, 0)


@pytest.mark.parametrize(
    ("collective", "name", "in_all"),
    [
        *((one, name, lambda n, S: (n - 1) * S) for one in ("broadcast", "reduce")
          for name in ALGORITHMS[one]),
        *((one, name, lambda n, S: (n - 1) * S) for one in ("all_gather", "reduce_scatter")
          for name in ("ring", "recursive_doubling", "bruck") if name in ALGORITHMS[one]),
        *(("all_reduce", name, lambda n, S: 2 * (n - 1) * S) for name in
          ("naive", "tree", "ring", "double_tree")),
    ],
)  # fmt: skip
def test_the_sums_over_all_ranks_are_those_of_the_textbooks(
    collective: str, name: str, in_all: Callable[[int, int], int]
) -> None:
    for n in filter(lambda n: serves(collective, name, n), RANKS):
        sizes = uneven(n, 2)
        calls = [Call(sizes, rank) for rank in range(n)]
        in_total = sum(sent_bytes(collective, name, 4, call) for call in calls)
        assert in_total == in_all(n, 4 * sum(sizes))


def test_costs_are_the_bytes_of_the_busiest_rank_and_the_known_steps() -> None:
    """Where all divides: the model's bytes are those that the busiest rank sends."""
    S = 840 * 4
    for n in (2, 4, 8):
        for collective, name in EVERY:
            if name == "hierarchical" or collective in ("barrier", "all_to_all"):
                continue
            calls = [Call([840 // n] * n, rank) for rank in range(n)]
            busiest = max(sent_bytes(collective, name, 4, call) for call in calls)
            model = cost(collective, name, n, S)
            if collective in ("reduce", "gather") or name in (
                "naive", "double_tree", "tree", "chain",
            ):  # fmt: skip
                assert busiest <= model.sent_bytes, (collective, name)  # a rank waits, or takes in
            else:
                assert busiest == model.sent_bytes, (collective, name)
    known = {
        ("all_reduce", "ring"): 14, ("all_reduce", "naive"): 14, ("all_reduce", "tree"): 6,
        ("all_reduce", "recursive_doubling"): 3, ("all_reduce", "halving_doubling"): 6,
        ("all_gather", "ring"): 7, ("all_gather", "bruck"): 3, ("broadcast", "flat"): 7,
        ("broadcast", "tree"): 3, ("broadcast", "chain"): 7, ("barrier", "dissemination"): 3,
    }  # fmt: skip
    for (collective, name), count in known.items():
        assert cost(collective, name, 8, 1000).steps == count, (collective, name)


def test_large_messages_want_rings_and_small_ones_trees() -> None:
    """The reason for having several: alpha = 20 us, beta = 1 ns (1 GB/s), 64 ranks."""

    def best(nbytes: int) -> str:
        seconds = {
            name: cost("all_reduce", name, 64, nbytes).seconds(20e-6, 1e-9)
            for name in costs.COSTS["all_reduce"]
        }
        return min(seconds, key=seconds.__getitem__)

    assert best(1000) == "recursive_doubling"
    assert best(1 << 20) == "halving_doubling"
    tree = cost("all_reduce", "tree", 64, 1 << 30).seconds(20e-6, 1e-9)
    ring = cost("all_reduce", "ring", 64, 1 << 30).seconds(20e-6, 1e-9)
    double_tree = cost("all_reduce", "double_tree", 64, 1 << 30).seconds(20e-6, 1e-9)
    assert ring < tree / 5 and double_tree < 1.2 * ring


def test_between_nodes_a_hierarchical_all_reduce_sends_one_part_of_each_rank() -> None:
    inside, between = hierarchical_cost(nodes=4, ranks_per_node=8, nbytes=8000)
    assert (inside.steps, inside.sent_bytes) == (14, 14000)
    assert (between.steps, between.sent_bytes) == (6, 1500)


def test_the_two_trees_are_trees_and_nearly_nobody_is_inside_both() -> None:
    for n in range(1, 70):
        inside = []
        for parents in costs.double_tree(n):
            assert parents.count(None) == 1
            assert all(parents.count(rank) <= 2 for rank in range(n))
            depths = [costs.depth(parents, rank) for rank in range(n)]  # ends: there is no circle
            assert max(depths) <= (n - 1).bit_length()
            inside.append({rank for rank in range(n) if rank in parents})
        assert len(inside[0] & inside[1]) <= 1


def test_nodes_are_as_torchrun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert nodes_of([0, 1, 2, 7]) == [[0, 1, 2, 3]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert nodes_of([0, 1, 2, 3, 4]) == [[0, 1], [2, 3], [4]]
    assert nodes_of([1, 2, 3]) == [[0], [1, 2]], "a group counts its own ranks"
