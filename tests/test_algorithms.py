"""Every algorithm of labkit/comm/algorithms on simulated ranks: results, bytes, waiting.

The ranks are generators in this process (mailbox.py), so many cases cost little, and nothing is
left to chance. A few run on real ranks at the end.
"""

from collections.abc import Callable, Iterator
from functools import partial
from functools import reduce as fold
from itertools import pairwise
from mailbox import Deadlock, Mailbox, drive
from typing import Any

import comm_faults as faults
import pytest
import torch
from comm_contract import PLAIN, given, ops_of, reduced
from comm_faults import replaced
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from labkit import Comm, World, listen
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
                    Case(
                        collective, name, sizes_for(collective, name, n, 23), n - 1, dtype, op
                    ).check()


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
    nodes = [list(order[a:b]) for a, b in pairwise(cuts)]
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
    for n in RANKS:
        same_bits(name, op, n)


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


# --- on real ranks -------------------------------------------------------------------------------


def every_algorithm(comm: Comm) -> set[tuple[str, str]]:
    """Each by its name, on tensors with gaps; and the events say what ran and what it sent."""
    n, rank, ran = comm.size, comm.rank, set()
    gaps = torch.zeros(2 * 29)[::2]
    for name in ALGORITHMS["all_reduce"]:
        for op in ("sum", "mean"):
            for async_op in (False, True):
                gaps.copy_(given(rank, 29))
                with listen() as events:
                    handle = comm.all_reduce(gaps, op, async_op, algorithm=name)
                    if handle:
                        handle.wait()
                assert torch.equal(gaps, reduced([given(r, 29) for r in range(n)], op)), name
                nodes = nodes_of(comm.ranks)
                call = Call(chunk_sizes(29, n), rank, nodes=nodes)
                assert events[0].wire_bytes == sent_bytes("all_reduce", name, 4, call), name
                ran.add(("all_reduce", events[0].algorithm))
    with listen() as events:
        for name in ALGORITHMS["broadcast"]:
            gaps.copy_(given(rank, 29))
            comm.broadcast(gaps, n - 1, algorithm=name)
            assert torch.equal(gaps, given(n - 1, 29))
            gaps.copy_(given(rank, 29))
            comm.reduce(gaps, n - 1, "mean", algorithm=name)
            everyone = reduced([given(r, 29) for r in range(n)], "mean")
            assert torch.equal(gaps, everyone if rank == n - 1 else given(rank, 29))
        for name in ("flat", "tree"):
            at_root = rank == 1
            outs = [torch.zeros(3, n)[:, 0] for _ in range(n)] if at_root else None
            comm.gather(given(rank, 3), outs, 1, algorithm=name)
            assert all(torch.equal(out, given(r, 3)) for r, out in enumerate(outs or ()))
            comm.scatter(gaps[:3], [given(r, 3) for r in range(n)] if at_root else None, 1,
                         algorithm=name)  # fmt: skip
            assert torch.equal(gaps[:3], given(rank, 3))
        for name in ALGORITHMS["all_gather"]:
            if serves("all_gather", name, n):
                out = torch.zeros(n, 3)
                comm.all_gather_into_tensor(out, given(rank, 3), algorithm=name)
                assert torch.equal(out, torch.stack([given(r, 3) for r in range(n)]))
        for name in ALGORITHMS["reduce_scatter"]:
            x = given(rank, n, 3)
            total = reduced([given(r, n, 3) for r in range(n)], "mean")
            comm.reduce_scatter_tensor(x[-1], x, "mean", algorithm=name)  # into what was given
            assert torch.equal(x[-1], total[rank])
    return ran | {(event.op, event.algorithm) for event in events}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_on_real_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two nodes, if there are more ranks
    with World(size) as world:
        for ran in world.run(lambda: every_algorithm(Comm())):
            alone = {"all_to_all", "barrier", "ring_exchange"}  # have one algorithm
            expected = {(c, name) for c, name in EVERY if c not in alone and serves(c, name, size)}
            assert ran == expected


def test_long_tensors_over_trees_and_chains(world4: World) -> None:
    """Several pieces of a megabyte, over real wires."""

    def long() -> None:
        comm = Comm()
        numel = 1_000_001
        for name in ("double_tree", "halving_doubling", "ring", "hierarchical"):
            x = given(comm.rank, numel)
            comm.all_reduce(x, algorithm=name)
            assert torch.equal(x, reduced([given(r, numel) for r in range(4)], "sum")), name
        x = given(comm.rank, numel)
        comm.broadcast(x, 2, algorithm="chain")
        assert torch.equal(x, given(2, numel))
        x = given(comm.rank, numel)
        comm.reduce(x, 2, algorithm="chain")
        total = reduced([given(r, numel) for r in range(4)], "sum")
        assert torch.equal(x, total if comm.rank == 2 else given(comm.rank, numel))

    world4.run(long)


# --- faults must turn these tests red ------------------------------------------------------------


def messages_of(collective: str, name: str, n: int) -> int:
    case = Case(collective, name, sizes_for(collective, name, n, 23), nodes=two_nodes(n))
    case.check()
    return case.mailbox.sent


def two_nodes(n: int) -> list[list[int]]:
    return [list(range(n))[:2], list(range(n))[2:]]


@pytest.mark.parametrize(("collective", "name"), [one for one in EVERY if one[0] != "barrier"])
def test_every_message_of_every_algorithm_matters(collective: str, name: str) -> None:
    """One that is lost, or sent twice, whichever it is, is found."""
    for n in filter(lambda n: serves(collective, name, n), (3, 4, 5)):
        for k in range(messages_of(collective, name, n)):
            for fault in ("lost", "doubled"):
                sizes = sizes_for(collective, name, n, 23)
                case = Case(collective, name, sizes, dtype=torch.float64, nodes=two_nodes(n))
                for rank, x in enumerate(case.whole):  # no zeros, which would not be missed
                    x.copy_(torch.arange(len(x)) + 100.0 * (rank + 1))
                setattr(case.mailbox, fault, k)
                with pytest.raises(AssertionError):
                    case.check()


def passes(wire: Wire, late: int, algorithm: Callable[..., Algorithm]) -> Algorithm:
    """A barrier to which rank `late` never comes."""
    if wire.rank == late:
        yield wire.irecv(torch.empty(1), (late + 1) % wire.size, 99)
    return (yield from algorithm(wire, torch.zeros(1, dtype=torch.uint8), 7))


def one_round_less(wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    """A barrier without its last round."""
    heard, distance = torch.empty_like(note), 1
    while 2 * distance < wire.size:
        receive = wire.irecv(heard, (wire.rank - distance) % wire.size, tag)
        yield wire.isend(note, (wire.rank + distance) % wire.size, tag)
        yield receive
        distance *= 2
    return 0


def test_nobody_passes_a_barrier_before_all_have_come() -> None:
    for n in range(2, 9):
        for late in range(n):
            with pytest.raises(Deadlock) as told:
                start = partial(passes, late=late, algorithm=ALGORITHMS["barrier"]["dissemination"])
                drive(Mailbox(n, late=True), start)
            assert str(told.value) == f"ranks {list(range(n))} wait for each other", "nobody left"
    with pytest.raises(Deadlock) as told:  # without the last round, some do
        drive(Mailbox(8, late=True), partial(passes, late=0, algorithm=one_round_less))
    assert str(told.value) != f"ranks {list(range(8))} wait for each other"


def adds_its_own_first(
    wire: Wire, x: torch.Tensor, reduce: Any, divide_by: int, tag: int
) -> Algorithm:
    """Recursive doubling in which the order of adding depends on the rank."""
    reach, sent_bytes = 1, 0
    while reach < wire.size:
        theirs = torch.empty_like(x)
        receive = wire.irecv(theirs, wire.rank ^ reach, tag)
        yield wire.isend(x, wire.rank ^ reach, tag)
        yield receive
        reduce(x, theirs)
        sent_bytes += x.nbytes
        reach *= 2
    return sent_bytes


def test_an_order_of_adding_that_depends_on_the_rank_is_found() -> None:
    """The sums are right; only bits show it."""
    with replaced(algorithms, "recursive_doubling_all_reduce", adds_its_own_first):
        Case("all_reduce", "recursive_doubling", chunk_sizes(23, 4)).check()
        with pytest.raises(AssertionError):
            same_bits("recursive_doubling", "min", 4)


FAULTS = [
    (faults.skips_a_step, "ring_reduce_scatter", "reduce_scatter"),
    (faults.skips_a_step, "ring_reduce_scatter", "all_reduce"),
    (faults.writes_on_its_input, "ring_reduce_scatter", "reduce_scatter"),
    (faults.is_an_all_reduce_inside, "ring_reduce_scatter", "reduce_scatter"),
    (faults.is_an_all_reduce_inside_and_hides_it, "ring_reduce_scatter", "reduce_scatter"),
    (faults.gathers_twice, "ring_all_gather", "all_gather"),
    (faults.gathers_twice_and_hides_it, "ring_all_gather", "all_gather"),
    (faults.counts_half, "ring_all_gather", "all_gather"),
    (faults.gathers_in_another_order, "ring_all_gather", "all_gather"),
    (faults.stops_a_round_early, "tree_broadcast", "broadcast"),
    (faults.sends_all_from_the_root, "tree_broadcast", "broadcast"),
    (faults.forgets_the_last_peer, "pairwise_all_to_all", "all_to_all"),
    (faults.gives_back_its_own, "next_ring_exchange", "ring_exchange"),
]


@pytest.mark.parametrize(("fault", "function", "collective"), FAULTS)
def test_the_faults_of_the_door_are_found_here_too(
    fault: Callable[..., Algorithm], function: str, collective: str
) -> None:
    name = {"broadcast": "tree", "all_to_all": "pairwise", "ring_exchange": "next"}
    case = Case(collective, name.get(collective, "ring"), chunk_sizes(24, 4))
    with replaced(algorithms, function, fault), pytest.raises(AssertionError):
        case.check()


def test_the_mailbox_finds_what_is_read_or_written_too_early() -> None:
    def swap(wire: Wire, early: str) -> Algorithm:
        x, y = torch.full((3,), float(wire.rank)), torch.zeros(3)
        receive = wire.irecv(y, 1 - wire.rank, 0)
        send = wire.isend(x, 1 - wire.rank, 0)
        if early == "write":
            x.fill_(9.0)
        if early != "read":
            yield receive
            yield send
        assert y.tolist() == [1.0 - wire.rank] * 3
        if early == "read":
            yield receive
            yield send
        return 12

    assert drive(Mailbox(2, late=True), lambda wire: swap(wire, "nothing")) == [12, 12]
    for early in ("read", "write"):
        with pytest.raises(AssertionError):
            drive(Mailbox(2, late=True), partial(swap, early=early))


def test_the_mailbox_finds_deadlocks_and_messages_left_over() -> None:
    def all_receive_first(wire: Wire) -> Algorithm:
        yield wire.irecv(torch.zeros(1), 1 - wire.rank, 0)
        yield wire.isend(torch.zeros(1), 1 - wire.rank, 0)
        return 4

    def sends_to_nobody(wire: Wire) -> Algorithm:
        wire.isend(torch.zeros(1), 1 - wire.rank, 0)
        yield from ()
        return 4

    with pytest.raises(Deadlock, match="wait for each other"):
        drive(Mailbox(2, late=False), all_receive_first)
    with pytest.raises(AssertionError, match="only one of the two knows"):
        drive(Mailbox(2, late=False), sends_to_nobody)
