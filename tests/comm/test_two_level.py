"""Wires of two levels: fast inside a node, slow between nodes. Lower bounds on times only."""

import time

import pytest
import torch
from matplotlib.text import Text

from labkit import Comm, Link, TwoLevel, World, listen, plot, record
from labkit.comm import paced_bytes
from labkit.comm.collectives.costs import hierarchical_cost
from labkit.runtime.transports.wire import PacedWire, nodes_of
from tables import cases
from worlds import on_each_rank, world_fixture

WIRES = TwoLevel(inside=Link(gbps=1000), between=Link(gbps=0.1), ranks_per_node=2)
cluster = world_fixture(4, backend="gloo", device="cpu", link=WIRES)


def test_neighbours_share_a_node_and_its_fast_wire_and_no_node_is_empty() -> None:
    for pair, fast in {(0, 1): True, (2, 3): True, (1, 2): False, (3, 0): False}.items():
        assert WIRES.joining(*pair) is (WIRES.inside if fast else WIRES.between), pair
    assert Link(gbps=1).joining(0, 7) == Link(gbps=1)
    with pytest.raises(ValueError, match=r"ranks_per_node=0.*at least 1 rank"):
        TwoLevel(Link(gbps=1), Link(gbps=1), ranks_per_node=0)


def test_nodes_are_those_of_global_ranks() -> None:
    assert nodes_of([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert nodes_of([1, 3, 2], 2) == [[0], [1, 2]], "counted inside the group"
    assert nodes_of([0, 1, 2]) == [[0, 1, 2]]


def test_a_wire_knows_its_nodes_and_has_a_link_for_each_peer(cluster: World) -> None:
    def look() -> tuple[object, list[Link], int]:
        wire = PacedWire(Comm().group, WIRES)
        return wire.nodes, [out.link for out in wire._out], len({id(out) for out in wire._out})

    fast, slow = WIRES.inside, WIRES.between
    for rank, (nodes, links, wires) in enumerate(cluster.run(look)):
        assert nodes == [[0, 1], [2, 3]]
        assert links == ([fast, fast, slow, slow] if rank < 2 else [slow, slow, fast, fast])
        assert wires == 2, "a message to another node delays none inside"


@on_each_rank("cluster")
def test_levels_of_one_speed_are_two_wires() -> None:
    """What leaves over one occupies that one alone."""
    link = Link(gbps=500)
    wire = PacedWire(Comm().group, TwoLevel(link, link, ranks_per_node=2))
    neighbour = wire.rank ^ 1
    x = torch.zeros(2, 1000)
    for work in [wire.isend(x[0], neighbour, 7), wire.irecv(x[1], neighbour, 7)]:
        work.wait()
    outs = [wire._out[neighbour], wire._out[(wire.rank + 2) % 4]]
    assert [out.sent_bytes for out in outs] == [4000, 0] and paced_bytes(link) == 4000
    assert [out._free_at_s > 0 for out in outs] == [True, False]


def test_a_message_between_nodes_takes_the_slow_wire(cluster: World) -> None:
    """A megabyte takes at least 80 ms at 0.1 Gb/s."""
    x = torch.zeros(1_000_000, dtype=torch.uint8)

    def pass_on() -> float:
        comm = Comm()
        comm.barrier()
        began_s = time.monotonic()
        if comm.rank == 1:
            comm.send(x, 2)
        elif comm.rank == 2:
            comm.recv(x, 1)
        return time.monotonic() - began_s

    assert cluster.run(pass_on)[1] >= 0.080


@cases(
    # The ring goes 0 -> 1 => 2 -> 3 => 0: each hop carries 2(n-1)/n S, two of them between.
    ("ring", [1.5, 0, 1.5, 0], [0, 1.5, 0, 1.5]),
    # 2(k-1)/k S inside, and 2(m-1)/m S/k between, from each rank.
    ("hierarchical", [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5]),
)
def test_bytes_on_each_wire_and_the_same_sum(
    algorithm: str, inside: list[float], between: list[float], cluster: World
) -> None:
    def reduce() -> tuple[torch.Tensor, list[int], int]:
        x = torch.arange(1000.0) * (Comm().rank + 1)
        before = [paced_bytes(link) for link in (WIRES.inside, WIRES.between)]
        with listen() as events:
            Comm().all_reduce(x, algorithm=algorithm)
        after = [paced_bytes(link) for link in (WIRES.inside, WIRES.between)]
        return x, [b - a for a, b in zip(before, after)], events[0].wire_bytes

    for rank, (x, by_wire, sent_bytes) in enumerate(cluster.run(reduce)):
        assert torch.equal(x, 10 * torch.arange(1000.0))
        assert by_wire == [4000 * inside[rank], 4000 * between[rank]]
        assert sent_bytes == sum(by_wire)


def test_the_formula_says_that_hierarchical_wins() -> None:
    nbytes = 4e6
    inside, between = hierarchical_cost(2, 2, nbytes)
    beta = [8 / (link.gbps * 1e9) for link in (WIRES.inside, WIRES.between)]
    hierarchical_s = inside.seconds(0, beta[0]) + between.seconds(0, beta[1])
    ring_s = 2 * 3 / 4 * nbytes * beta[1]
    assert hierarchical_s < 0.35 * ring_s


def test_a_recorded_run_says_both_speeds(cluster: World) -> None:
    with record() as trace:
        cluster.run(lambda: Comm().barrier())
    assert trace.about["link"]["ranks_per_node"] == 2
    title = " ".join(text.get_text() for text in plot.timeline(trace).findobj(Text))
    assert "paced to 1000 Gbit/s inside nodes, 0.1 Gbit/s between" in title
