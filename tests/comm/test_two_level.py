"""Wires of two levels: fast inside a node, slow between nodes. Lower bounds on times only."""

import time

import torch
from matplotlib.text import Text

from labkit import Comm, Link, TwoLevel, World, listen, plot, record
from labkit.comm import paced_bytes
from labkit.comm.collectives.costs import hierarchical_cost
from labkit.runtime.transports.wire import PacedWire
from tables import cases, raises
from worlds import on_each_rank, world_fixture

WIRES = TwoLevel(inside=Link(gbps=1000), between=Link(gbps=0.1), ranks_per_node=2)
cluster = world_fixture(4, backend="gloo", device="cpu", link=WIRES)


def test_neighbours_share_a_node_and_its_fast_wire_and_no_node_is_empty() -> None:
    for pair, fast in {(0, 1): True, (2, 3): True, (1, 2): False, (3, 0): False}.items():
        assert WIRES.joining(*pair) is (WIRES.inside if fast else WIRES.between), pair
    assert Link(gbps=1).joining(0, 7) == Link(gbps=1)
    words = r"ranks_per_node=0.*at least 1 rank"
    raises(words, TwoLevel, Link(gbps=1), Link(gbps=1), ranks_per_node=0)


@on_each_rank("cluster")
def test_a_wire_knows_its_nodes_and_has_a_link_for_each_peer() -> None:
    wire, fast, slow = PacedWire(Comm().group, WIRES), WIRES.inside, WIRES.between
    assert wire.nodes == [[0, 1], [2, 3]]
    links = [fast, fast, slow, slow] if Comm().rank < 2 else [slow, slow, fast, fast]
    assert [out.link for out in wire._out] == links
    assert len({id(out) for out in wire._out}) == 2, "a message to another node delays none inside"


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


@on_each_rank("cluster")
def test_a_message_between_nodes_takes_the_slow_wire() -> None:
    """A megabyte takes at least 80 ms at 0.1 Gb/s."""
    comm, x = Comm(), torch.zeros(1_000_000, dtype=torch.uint8)
    comm.barrier()
    began_s = time.monotonic()
    if comm.rank == 1:
        comm.send(x, 2)
        assert time.monotonic() - began_s >= 0.080
    elif comm.rank == 2:
        comm.recv(x, 1)


@cases(
    # The ring goes 0 -> 1 => 2 -> 3 => 0: each hop carries 2(n-1)/n S, two of them between.
    ("ring", [1.5, 0, 1.5, 0], [0, 1.5, 0, 1.5]),
    # 2(k-1)/k S inside, and 2(m-1)/m S/k between, from each rank.
    ("hierarchical", [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5]),
)
@on_each_rank("cluster")
def test_bytes_on_each_wire_and_the_same_sum(
    algorithm: str, inside: list[float], between: list[float]
) -> None:
    comm, wires = Comm(), (WIRES.inside, WIRES.between)
    x = torch.arange(1000.0) * (comm.rank + 1)
    before = [paced_bytes(link) for link in wires]
    with listen() as events:
        comm.all_reduce(x, algorithm=algorithm)
    assert torch.equal(x, 10 * torch.arange(1000.0))
    by_wire = [paced_bytes(link) - sent for link, sent in zip(wires, before)]
    assert by_wire == [4000 * inside[comm.rank], 4000 * between[comm.rank]]
    assert events[0].wire_bytes == sum(by_wire)


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
