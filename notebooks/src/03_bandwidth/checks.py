"""Checks of lab 03, "Bandwidth"."""

from collections.abc import Callable, Iterator, Sequence
from math import isclose
from typing import Any

import torch

from labkit.comm import Comm, Mesh
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, equal, fail, several
from labkit.course.ranks import alone, run
from labkit.trace.nccl_log import EXAMPLES, parse_nccl_log

from .scenarios import DGX1, best_us, bytes_by_pair, ring_in_order, rings_us

# ---- bandwidths(op, nbytes, ranks, seconds)

COLLECTIVES: dict[str, Callable[[Comm, torch.Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_gather": lambda comm, x: comm.all_gather_into_tensor(x, _shard(comm, x)),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter_tensor(_shard(comm, x), x),
    "broadcast": lambda comm, x: comm.broadcast(x),
}


@exercise(points=2)
def bandwidths(student: Student) -> Iterator[str]:
    """bandwidths(op, nbytes, ranks, seconds): (algbw, busbw) in GB/s, as nccl-tests prints them."""
    nbytes, seconds = 240_000, 1e-3
    for ranks in (2, 3, 4):

        def play(comm: Comm) -> None:
            for call in COLLECTIVES.values():
                call(comm, torch.zeros(nbytes // 4))

        sent_bytes = [event.bus_bytes for event in run(ranks, play).events[0]]
        for op, bus_bytes in zip(COLLECTIVES, sent_bytes):
            given = (op, nbytes, ranks, seconds)
            returned = alone(student, *given)
            expected = (nbytes / seconds / 1e9, bus_bytes / seconds / 1e9)
            if not _two_numbers(returned):
                fail(
                    f"bandwidths returned {brief(returned)}.",
                    expected="two numbers: (algbw, busbw)",
                    hint="Does it end with `return algbw, busbw`?",
                )
            for name, value, right in zip(("algbw", "busbw"), returned, expected):
                if not isclose(value, right, rel_tol=1e-9):
                    hint = (
                        "algbw = S / t"
                        if name == "algbw"
                        else f"Which factor gives the busbw of {op}?"
                    )
                    fail(
                        f"{name} of {op} on {ranks} ranks should be {right:.4g} GB/s, not "
                        f"{value:.4g}.",
                        expected=f"{right:.4g}: {nbytes:,} bytes in 1 ms"
                        + f", of which a rank sends {bus_bytes:,}" * (name == "busbw"),
                        hint="1 GB/s is 1e9 bytes per second."
                        if _off_by_unit(value, right)
                        else hint,
                    )
    yield "algbw and busbw of 4 collectives, on 2, 3 and 4 ranks"
    yield "busbw · t equals the bytes that each rank must send"


def _shard(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() // comm.size)


def _two_numbers(returned: Any) -> bool:
    return (
        isinstance(returned, (tuple, list))
        and len(returned) == 2
        and all(isinstance(x, (int, float)) for x in returned)
    )


def _off_by_unit(value: float, expected: float) -> bool:
    return any(isclose(value, expected * unit, rel_tol=1e-6) for unit in (8, 1 / 8, 1e-3, 1e3, 1e9))


# ---- best_order(node_of)


@exercise(points=2)
def best_order(student: Student) -> Iterator[str]:
    """best_order(node_of): the rank order whose ring crosses between nodes the least."""
    for node_of in ([0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0], [5, 5, 5]):
        n = len(node_of)

        def play(comm: Comm, node_of: list[int]) -> tuple[Any, torch.Tensor]:
            x = torch.arange(12.0) * (comm.rank + 1)
            order = student(list(node_of))
            if not _is_order(order, comm.size):
                return order, x
            ring_in_order(comm, x, order)
            return order, x

        ran = run(n, play, node_of)
        order = ran.values[0][0]
        if not _is_order(order, n):
            fail(
                f"for node_of={node_of}, your order is {brief(order)}.",
                expected=f"a list of the {n} ranks, each once",
                hint="Return the ranks, not the nodes.",
            )
        expected = [torch.arange(12.0) * n * (n + 1) / 2] * n
        equal(
            [x for _, x in ran.values],
            expected,
            "gets from the all-reduce",
            hint="Do all ranks return the same order?",
        )
        _crosses_least(node_of, order, bytes_by_pair(ran.events))
    yield "a ring in your order computes the right sum, on 3 and 4 ranks"
    yield "the fewest possible bytes between nodes"
    nodes = [0, 1, 2] * 4
    order = alone(student, list(nodes))
    valid = _is_order(order, 12)
    hops = sum(nodes[a] != nodes[b] for a, b in zip(order, order[1:] + order[:1])) if valid else 0
    if hops != 3:
        fail(
            f"with 12 ranks on 3 nodes, your order is {brief(order)}, which crosses between "
            f"nodes {hops} times.",
            expected="each rank once, and 3 crossings, one out of each node",
            hint="The ranks of a node must be consecutive in the ring.",
        )
    yield "3 crossings for 12 ranks on 3 nodes"


def _is_order(order: Any, n: int) -> bool:
    return isinstance(order, list) and sorted(order, key=str) == sorted(range(n), key=str)


def _crosses_least(node_of: list[int], order: list[int], sent_bytes: torch.Tensor) -> None:
    nodes, n = len(set(node_of)), len(node_of)
    crossing = sum(
        int(sent_bytes[a, b]) for a in range(n) for b in range(n) if node_of[a] != node_of[b]
    )
    least = (nodes if nodes > 1 else 0) * 2 * (n - 1) * 48 // n
    if crossing != least:
        fail(
            f"for node_of={node_of}, your ring {order} sends {crossing} bytes between nodes, but "
            f"{least} are enough.",
            expected=f"{nodes} crossings, one out of each node",
            hint="The ranks of a node must be consecutive in the ring.",
        )


# ---- my_hierarchical(inside, between, x)


@exercise(points=3)
def my_hierarchical(student: Student) -> Iterator[str]:
    """my_hierarchical(inside, between, x): x becomes the sum over all ranks, in three steps."""
    for nodes, per_node in ((2, 2), (1, 4), (4, 1)):

        def play(comm: Comm, nodes: int, per_node: int) -> tuple[torch.Tensor, Any, Any]:
            mesh = Mesh(comm, node=nodes, local=per_node)
            x = _values_of(comm.rank)
            student(mesh["local"], mesh["node"], x)
            return x, mesh["local"].ranks, mesh["node"].ranks

        ran = run(4, play, nodes, per_node)
        expected = [4 * torch.arange(16.0) + 600] * 4
        what = f"({nodes} nodes of {per_node}) now holds"
        hint = "Sum inside the node, then sum each part between nodes, then gather the parts."
        if all(torch.equal(x, _values_of(rank)) for rank, (x, _, _) in enumerate(ran.values)):
            hint = "x has not changed: write into x itself. `x = ...` only rebinds the name."
        equal([x for x, _, _ in ran.values], expected, what, hint)
        for rank, (_, inside, between) in enumerate(ran.values):
            _check_bytes(rank, ran.events[rank], inside, between, nodes, per_node)
    yield "every rank has the sum, on 2 nodes of 2, 1 node of 4 and 4 nodes of 1"
    yield "exactly 2(k-1)/k · S bytes inside nodes, and 2(m-1)/m · S/k between them"


def _values_of(rank: int) -> torch.Tensor:
    return torch.arange(16.0) + 100 * rank


def _check_bytes(
    rank: int, events: Sequence[Any], inside: Any, between: Any, nodes: int, per_node: int
) -> None:
    """Fails if a rank's bytes over a group differ from the formulas; a group of 1 sends none."""
    nbytes, k, m = 64, per_node, nodes
    for name, group, enough in (
        ("between", between, 2 * (m - 1) * nbytes // (m * k)),
        ("inside", inside, 2 * (k - 1) * nbytes // k),
    ):
        own_events = [event for event in events if event.ranks == group and len(group) > 1]
        sent = sum(event.bus_bytes for event in own_events)
        if sent != enough:
            ops = ", ".join(event.op for event in own_events) or "nothing"
            fail(
                f"on {m} nodes of {k}, rank {rank} sends {sent} bytes over `{name}`, but {enough} "
                f"{'are enough' if sent > enough else 'are needed'}.",
                expected=f"{enough} bytes over `{name}`",
                found=f"{ops} over `{name}`",
                hint="After a reduce-scatter inside the node, how many bytes must a rank sum with "
                "other nodes?",
            )


# ---- read_log(log)


@exercise(points=2)
def read_log(student: Student) -> Iterator[str]:
    """read_log(log): (channels, transports inside nodes, transports between nodes)."""
    for name, text in _logs().items():
        log = parse_nccl_log(text)
        returned = alone(student, log)
        several(returned, 3, "read_log returned", "three values: (channels, inside, between)")
        for what, value, expected in zip(("channels", "inside", "between"), returned, READ[name]):
            if isinstance(value, (list, tuple, dict)):
                value = set(value)
            if value != expected:
                fail(
                    f"in the log {name}, {what} should be {brief(expected)}, not {brief(value)}.",
                    expected=brief(expected),
                    found=brief(value),
                    hint=_READ_HINTS[what],
                )
    yield "channels and transports of 4 logs, one of them from a single node"


READ: dict[str, tuple[int, set[str], set[str]]] = {  # channels, transports inside and between nodes
    "one_node": (2, {"P2P"}, set()),
    "sockets": (2, {"SHM"}, {"NET/Socket"}),
    "two_nodes": (4, {"P2P"}, {"NET/IB"}),
    "two_nodes, with a plugin": (4, {"P2P"}, {"NET/IBext_v8"}),
}
_READ_HINTS = {
    "channels": "log.main has the number of channels.",
    "inside": "The set of kinds of all connections between ranks on the same node.",
    "between": "The set of kinds of all connections between ranks on different nodes.",
}


def _logs() -> dict[str, str]:
    logs = {name: path.read_text(encoding="utf-8") for name, path in EXAMPLES.items()}
    plugin = logs["two_nodes"].replace("NET/IB/", "NET/IBext_v8/").replace("P2P/", "SHM/", 1)
    return logs | {"two_nodes, with a plugin": plugin}


# ---- rings(links)


@exercise(points=3)
def rings(student: Student) -> Iterator[str | Score]:
    """rings(links): the rings through the 8 GPUs of a DGX-1 that all-reduce 1 GB fastest."""
    returned = alone(student, dict(DGX1))
    if not isinstance(returned, list) or not returned or not all(_is_order(r, 8) for r in returned):
        fail(
            f"rings returned {brief(returned)}.",
            expected="a list of rings, each a list of GPUs 0 to 7, each GPU once",
            hint="Put even a single ring in a list: [[0, 3, ...]].",
        )
    for ring in returned:
        for hop in zip(ring, ring[1:] + ring[:1]):
            if hop not in DGX1:
                fail(
                    f"your ring {ring} goes from GPU {hop[0]} to GPU {hop[1]}, but no NVLink "
                    "connects them.",
                    expected="only hops that are in `links`",
                    hint="This hop would use PCIe, which is slow. Look for another ring.",
                )
    yield f"{len(returned)} ring{'s' * (len(returned) > 1)} through 8 GPUs, every hop over NVLink"
    if round(rings_us(returned, DGX1)) == round(best_us(DGX1)):
        yield "optimal: all 6 NVLinks out of each GPU are saturated"
    yield Score(round(rings_us(returned, DGX1)), round(best_us(DGX1)), "µs for 1 GB")
