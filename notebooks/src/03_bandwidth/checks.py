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

OPERATIONS: dict[str, Callable[[Comm, torch.Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_gather": lambda comm, x: comm.all_gather_into_tensor(x, _part(comm, x)),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter_tensor(_part(comm, x), x),
    "broadcast": lambda comm, x: comm.broadcast(x),
}


@exercise(points=2)
def bandwidths(student: Student) -> Iterator[str]:
    """bandwidths(op, nbytes, ranks, seconds): (algbw, busbw) in GB/s, as nccl-tests prints them."""
    nbytes, seconds = 240_000, 1e-3
    for ranks in (2, 3, 4):

        def play(comm: Comm) -> None:
            for call in OPERATIONS.values():
                call(comm, torch.zeros(nbytes // 4))

        moved = [event.bus_bytes for event in run(ranks, play).events[0]]
        for op, bus_bytes in zip(OPERATIONS, moved):
            given = (op, nbytes, ranks, seconds)
            found = alone(student, *given)
            expected = (nbytes / seconds / 1e9, bus_bytes / seconds / 1e9)
            if not _two_numbers(found):
                fail(
                    f"bandwidths returned {brief(found)}.",
                    expected="two numbers: (algbw, busbw)",
                    hint="Does it end with `return algbw, busbw`?",
                )
            for name, its, right in zip(("algbw", "busbw"), found, expected):
                if not isclose(its, right, rel_tol=1e-9):
                    hint = "algbw = S / t" if name == "algbw" else f"What is the factor of {op}?"
                    fail(
                        f"{name} of {op} on {ranks} ranks is {its:.4g} GB/s, but {right:.4g} is "
                        "right.",
                        expected=f"{right:.4g}: {nbytes:,} bytes in 1 ms"
                        + f", of which a rank sends {bus_bytes:,}" * (name == "busbw"),
                        hint="GB/s are 1e9 bytes per second." if _off_by_unit(its, right) else hint,
                    )
    yield "algbw and busbw of 4 operations, on 2, 3 and 4 ranks"
    yield "busbw · t equals the bytes that each rank must send"


def _part(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() // comm.size)


def _two_numbers(found: Any) -> bool:
    return (
        isinstance(found, (tuple, list))
        and len(found) == 2
        and all(isinstance(one, (int, float)) for one in found)
    )


def _off_by_unit(found: float, right: float) -> bool:
    return any(isclose(found, right * unit, rel_tol=1e-6) for unit in (8, 1 / 8, 1e-3, 1e3, 1e9))


# ---- best_order(node_of)


@exercise(points=2)
def best_order(student: Student) -> Iterator[str]:
    """best_order(node_of): the order of the ranks whose ring crosses nodes least often."""
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
                f"for {node_of} your order is {brief(order)}.",
                expected=f"a list of the {n} ranks, each once",
                hint="Return the ranks, not the nodes.",
            )
        right = [torch.arange(12.0) * n * (n + 1) / 2] * n
        equal([x for _, x in ran.values], right, "all-reduces to", hint="Do all ranks agree?")
        _crosses_least(node_of, order, bytes_by_pair(ran.events))
    yield "the right sum by a ring in your order, on 3 and 4 real ranks"
    yield "the fewest possible bytes between nodes"
    many = [0, 1, 2] * 4
    order = alone(student, list(many))
    whole = _is_order(order, 12)
    hops = sum(many[a] != many[b] for a, b in zip(order, order[1:] + order[:1])) if whole else 0
    if hops != 3:
        fail(
            f"with 12 ranks on 3 nodes, your order is {brief(order)}, which crosses {hops} times.",
            expected="each rank once, and 3 crossings, one from each node",
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
            f"for {node_of} your ring {order} sends {crossing} bytes between nodes, but {least} "
            "are enough.",
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
            x = _numbers_of(comm.rank)
            student(mesh["local"], mesh["node"], x)
            return x, mesh["local"].ranks, mesh["node"].ranks

        ran = run(4, play, nodes, per_node)
        right = [4 * torch.arange(16.0) + 600] * 4
        what = f"({nodes} nodes of {per_node}) now holds"
        hint = "Sum inside the node, then sum each part between nodes, then gather the parts."
        if all(torch.equal(x, _numbers_of(rank)) for rank, (x, _, _) in enumerate(ran.values)):
            hint = "x is as it was: x itself must change. `x = ...` only gives the name away."
        equal([x for x, _, _ in ran.values], right, what, hint)
        for rank, (_, inside, between) in enumerate(ran.values):
            _bytes_over(rank, ran.events[rank], inside, between, nodes, per_node)
    yield "the sum everywhere, on 2 nodes of 2, 1 node of 4 and 4 nodes of 1"
    yield "exactly 2(k-1)/k · S bytes inside, and 2(m-1)/m · S/k between nodes"


def _numbers_of(rank: int) -> torch.Tensor:
    return torch.arange(16.0) + 100 * rank


def _bytes_over(
    rank: int, events: Sequence[Any], inside: Any, between: Any, nodes: int, per_node: int
) -> None:
    """Fails if a group sends more or fewer bytes than the formulas say; one rank sends none."""
    nbytes, k, m = 64, per_node, nodes
    for name, group, enough in (
        ("between", between, 2 * (m - 1) * nbytes // (m * k)),
        ("inside", inside, 2 * (k - 1) * nbytes // k),
    ):
        its = [event for event in events if event.ranks == group and len(group) > 1]
        sent = sum(event.bus_bytes for event in its)
        if sent != enough:
            ops = ", ".join(event.op for event in its) or "nothing"
            fail(
                f"on {m} nodes of {k}, rank {rank} sends {sent} bytes over `{name}`, but {enough} "
                f"{'are enough' if sent > enough else 'are needed'}.",
                expected=f"{enough} bytes over `{name}`",
                found=f"{ops} over `{name}`",
                hint="After a reduce-scatter inside, how many bytes has each rank to sum with "
                "the other nodes?",
            )


# ---- read_log(log)


@exercise(points=2)
def read_log(student: Student) -> Iterator[str]:
    """read_log(log): (channels, transports inside nodes, transports between nodes)."""
    for name, text in _logs().items():
        log = parse_nccl_log(text)
        found = alone(student, log)
        right = READ[name]
        several(found, 3, "read_log returned", "three things: (channels, inside, between)")
        for what, its, its_right in zip(("channels", "inside", "between"), found, right):
            if isinstance(its, (list, tuple, dict)):
                its = set(its)
            if its != its_right:
                fail(
                    f"in the log {name}, {what} is {brief(its)}, but {brief(its_right)} is right.",
                    expected=brief(its_right),
                    found=brief(its),
                    hint=_READ_HINTS[what],
                )
    yield "channels and transports of 4 logs, one of them without a connection between nodes"


READ: dict[str, tuple[int, set[str], set[str]]] = {  # channels, kinds inside nodes, and between
    "one_node": (2, {"P2P"}, set()),
    "sockets": (2, {"SHM"}, {"NET/Socket"}),
    "two_nodes": (4, {"P2P"}, {"NET/IB"}),
    "two_nodes, with a plugin": (4, {"P2P"}, {"NET/IBext_v8"}),
}
_READ_HINTS = {
    "channels": "log.main has the number of channels.",
    "inside": "One set of kinds: those of connections whose two ranks are on the same node.",
    "between": "One set of kinds: those of connections whose two ranks are on different nodes.",
}


def _logs() -> dict[str, str]:
    logs = {name: path.read_text(encoding="utf-8") for name, path in EXAMPLES.items()}
    plugin = logs["two_nodes"].replace("NET/IB/", "NET/IBext_v8/").replace("P2P/", "SHM/", 1)
    return logs | {"two_nodes, with a plugin": plugin}


# ---- rings(wires)


@exercise(points=3)
def rings(student: Student) -> Iterator[str | Score]:
    """rings(wires): rings through the 8 GPUs of a DGX-1 that all-reduce 1 GB fastest."""
    found = alone(student, dict(DGX1))
    if not isinstance(found, list) or not found or not all(_is_order(r, 8) for r in found):
        fail(
            f"rings returned {brief(found)}.",
            expected="a list of rings, each a list of the GPUs 0 to 7, each once",
            hint="Also a single ring stands in a list: [[0, 3, ...]].",
        )
    for ring in found:
        for hop in zip(ring, ring[1:] + ring[:1]):
            if hop not in DGX1:
                fail(
                    f"your ring {ring} goes from GPU {hop[0]} to {hop[1]}, which no NVLink joins.",
                    expected="hops that are in `wires`",
                    hint="That hop would use PCIe, which is slow. Look for another ring.",
                )
    yield f"{len(found)} ring{'s' * (len(found) > 1)} through 8 GPUs, every hop over NVLink"
    if round(rings_us(found, DGX1)) == round(best_us(DGX1)):
        yield "all 6 NVLinks out of each GPU are full: nobody can do better"
    yield Score(round(rings_us(found, DGX1)), round(best_us(DGX1)), "µs for 1 GB")
