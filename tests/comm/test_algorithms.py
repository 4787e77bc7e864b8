"""Every algorithm of labkit/comm/collectives: results, bytes, costs; mostly on simulated ranks."""

from functools import partial
from itertools import product

import pytest
import torch

import algorithm_cases
from algorithm_bytes import SENT, Call, sent_bytes
from algorithm_cases import DTYPES, EVERY, RANKS, SIZES, Case, served, serves, sizes_for, uneven
from comm_contract import WAYS, everyones, given, ops_of, reduced
from fake_wire import Mailbox
from labkit import Comm, World, listen
from labkit.comm.collectives import ALGORITHMS, costs, steps
from labkit.comm.collectives.costs import cost, hierarchical_cost
from labkit.events import chunk_sizes
from labkit.runtime.transports.wire import nodes_of
from worlds import on_each_rank


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_algorithm_equals_plain_computation(collective: str, name: str) -> None:
    for n in served(collective, name):
        for numel in SIZES:
            for late in (False, True):
                sizes = sizes_for(collective, name, n, numel)
                Case(collective, name, sizes, root=numel % n, late=late).check()


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_dtype_and_reduction(collective: str, name: str) -> None:
    reduces = "reduce" in collective
    for n in served(collective, name, (2, 3, 4, 7)):
        sizes = sizes_for(collective, name, n, 23)
        for dtype in DTYPES:
            for op in ops_of(dtype) if reduces else ["sum"]:
                if op != "mean" or collective == "all_reduce":  # else the back divides
                    Case(collective, name, sizes, n - 1, dtype, op).check()


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        *algorithm_cases.of("all_gather", "reduce_scatter", "all_to_all"),
        ("gather", "flat"),
        ("scatter", "flat"),
    ],
)
def test_chunks_of_different_sizes(collective: str, name: str) -> None:
    for n in served(collective, name):
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
        for nodes in algorithm_cases.nodes_for(n):
            for op in ("sum", "mean"):
                Case("all_reduce", "hierarchical", chunk_sizes(29, n), op=op, nodes=nodes).check()
    for odd_nodes in ([[0, 3], [1, 2, 4]], [[0, 1, 2, 3, 4], [5, 6]], [[6, 2], [5], [0, 1, 3, 4]]):
        n = sum(map(len, odd_nodes))
        Case("all_reduce", "hierarchical", chunk_sizes(29, n), nodes=odd_nodes).check()


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_in_many_pieces(collective: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PIECE_BYTES", 12)  # three float32
    assert steps.piece_count(100) == 9
    for n in served(collective, name):
        for late in (False, True):
            sizes = sizes_for(collective, name, n, 97)
            nodes = [list(range(n))[:2], list(range(n))[2:]] if n > 2 else None
            Case(collective, name, sizes, nodes=nodes, late=late).check()


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_an_all_reduce_gives_all_ranks_the_same_bits(name: str, op: str) -> None:
    for n in RANKS:
        algorithm_cases.same_bits(name, op, n)


def test_every_algorithm_has_its_bytes_and_its_cost() -> None:
    for collective, name in EVERY:
        assert name in SENT[collective]
        assert name in costs.COSTS[collective] or name == "hierarchical"
        if name != "hierarchical":
            assert cost(collective, name, 1, 1000) == costs.Cost(0, 0)


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        *algorithm_cases.of("broadcast", "reduce"),
        *((one, name) for one in ("all_gather", "reduce_scatter")
          for name in ("ring", "recursive_doubling", "bruck") if name in ALGORITHMS[one]),
        *(("all_reduce", name) for name in ("naive", "tree", "ring", "double_tree")),
    ],
)  # fmt: skip
def test_sums_over_all_ranks_are_the_textbooks(collective: str, name: str) -> None:
    for n in served(collective, name):
        sizes = uneven(n, 2)
        calls = [Call(sizes, rank) for rank in range(n)]
        in_total = sum(sent_bytes(collective, name, 4, call) for call in calls)
        times = 2 if collective == "all_reduce" else 1
        assert in_total == times * (n - 1) * 4 * sum(sizes)


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


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_costs_are_the_time_that_the_schedule_takes(
    collective: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run on wires with a clock: beta's bytes are exact, also for odd numbers of ranks and many
    pieces; alpha's messages are counted one by one, of which wires may have several under way."""
    monkeypatch.setattr(costs, "PIECE_BYTES", 64)
    if name == "hierarchical" or collective == "barrier":
        return
    for n in served(collective, name, (2, 3, 4, 5, 6, 8)):
        for numel in (n * 16, n * 128):
            sizes = sizes_for(collective, name, n, numel)
            model = cost(collective, name, n, sum(sizes) * 4)
            took_s = [timed(Case(collective, name, sizes), *wires) for wires in ((1, 0), (0, 1))]
            assert model.steps >= took_s[0] > 0
            if name == "double_tree":  # whose ticks are not in step
                assert took_s[1] <= model.sent_bytes <= 1.2 * took_s[1]
            else:
                assert model.sent_bytes == pytest.approx(took_s[1])


def timed(case: Case, alpha_s: float, beta_s_per_byte: float) -> float:
    case.mailbox = box = Mailbox(case.n, late=True)
    box.alpha_s, box.beta_s_per_byte = alpha_s, beta_s_per_byte
    case.check()
    return max(box.now_s)


def test_large_messages_want_rings_and_small_ones_trees() -> None:
    """The reason for having several: alpha = 20 us, beta = 1 ns (1 GB/s), 64 ranks."""

    def seconds(name: str, nbytes: int) -> float:
        return cost("all_reduce", name, 64, nbytes).seconds(20e-6, 1e-9)

    for nbytes, best in ((1000, "recursive_doubling"), (1 << 20, "halving_doubling")):
        assert min(costs.COSTS["all_reduce"], key=lambda name: seconds(name, nbytes)) == best
    tree, ring, double_tree = (seconds(name, 1 << 30) for name in ("tree", "ring", "double_tree"))
    assert ring < tree / 5 and double_tree < 1.2 * ring


def test_between_nodes_a_hierarchical_all_reduce_sends_one_part_of_each_rank() -> None:
    inside, between = hierarchical_cost(nodes=4, ranks_per_node=8, nbytes=8000)
    assert (inside.steps, inside.sent_bytes) == (14, 14000)
    assert (between.steps, between.sent_bytes) == (6, 1500)


def test_nearly_no_rank_is_an_inner_node_of_both_trees() -> None:
    for n in range(1, 70):
        inside = []
        for parents in costs.double_tree(n):
            assert parents.count(None) == 1
            assert all(parents.count(rank) <= 2 for rank in range(n))
            depths = [costs.depth(parents, rank) for rank in range(n)]  # ends: there is no circle
            assert max(depths) <= (n - 1).bit_length()
            inside.append({rank for rank in range(n) if rank in parents})
        assert len(inside[0] & inside[1]) <= 1


def test_nodes_are_as_torchrun_or_the_wire_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert nodes_of([0, 1, 2, 7]) == [[0, 1, 2, 3]]
    assert nodes_of([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert nodes_of([1, 3, 2], 2) == [[0], [1, 2]], "counted inside the group"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert nodes_of([0, 1, 2, 3, 4]) == [[0, 1], [2, 3], [4]]
    assert nodes_of([1, 2, 3]) == [[0], [1, 2]], "a group counts its own ranks"


def every_algorithm(comm: Comm) -> set[tuple[str, str]]:
    """Each by its name, on tensors with gaps; and the events say what ran and what it sent."""
    n, rank = comm.size, comm.rank
    gaps = torch.zeros(2 * 29)[::2]
    call = Call(chunk_sizes(29, n), rank, nodes=nodes_of(comm.ranks))
    with listen() as events:
        for name, op, way in product(ALGORITHMS["all_reduce"], ("sum", "mean"), WAYS):
            gaps.copy_(given(rank, 29))
            way(partial(comm.all_reduce, algorithm=name), gaps, op)
            assert torch.equal(gaps, reduced(everyones(comm, 29), op)), name
            assert events[-1].wire_bytes == sent_bytes("all_reduce", name, 4, call), name
        for name in ALGORITHMS["broadcast"]:
            gaps.copy_(given(rank, 29))
            comm.broadcast(gaps, n - 1, algorithm=name)
            assert torch.equal(gaps, given(n - 1, 29))
            gaps.copy_(given(rank, 29))
            comm.reduce(gaps, n - 1, "mean", algorithm=name)
            mean = reduced(everyones(comm, 29), "mean")
            assert torch.equal(gaps, mean if rank == n - 1 else given(rank, 29))
        for name in ("flat", "tree"):
            outs = [torch.zeros(3, n)[:, 0] for _ in range(n)] if rank == 1 else None
            comm.gather(given(rank, 3), outs, 1, algorithm=name)
            assert all(torch.equal(out, given(r, 3)) for r, out in enumerate(outs or ()))
            ins = [given(r, 3) for r in range(n)] if rank == 1 else None
            comm.scatter(gaps[:3], ins, 1, algorithm=name)
            assert torch.equal(gaps[:3], given(rank, 3))
        for name in ALGORITHMS["all_gather"]:
            if serves("all_gather", name, n):
                out = torch.zeros(n, 3)
                comm.all_gather_into_tensor(out, given(rank, 3), algorithm=name)
                assert torch.equal(out, torch.stack(everyones(comm, 3)))
        for name in ALGORITHMS["reduce_scatter"]:
            x, total = given(rank, n, 3), reduced(everyones(comm, n, 3), "mean")
            comm.reduce_scatter_tensor(x[-1], x, "mean", algorithm=name)  # into what was given
            assert torch.equal(x[-1], total[rank])
    return {(event.op, event.algorithm) for event in events}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_on_real_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two nodes, if there are more ranks
    with World(size) as world:
        for ran in world.run(lambda: every_algorithm(Comm())):
            alone = {"all_to_all", "barrier", "ring_exchange"}  # have one algorithm
            expected = {(c, name) for c, name in EVERY if c not in alone and serves(c, name, size)}
            assert ran == expected


@on_each_rank("world4")
def test_long_tensors_over_trees_and_chains() -> None:
    comm, numel = Comm(), 1_000_001
    total = reduced(everyones(comm, numel), "sum")
    for name in ("double_tree", "halving_doubling", "ring", "hierarchical"):
        x = given(comm.rank, numel)
        comm.all_reduce(x, algorithm=name)
        assert torch.equal(x, total), name
    x = given(comm.rank, numel)
    comm.broadcast(x, 2, algorithm="chain")
    assert torch.equal(x, given(2, numel))
    x = given(comm.rank, numel)
    comm.reduce(x, 2, algorithm="chain")
    assert torch.equal(x, total if comm.rank == 2 else given(comm.rank, numel))
