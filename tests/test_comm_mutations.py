"""A faulty door must turn the contract red: a test that cannot fail proves nothing."""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import comm_contract
import pytest
import torch
from comm_contract import check_bytes, check_kernel_bytes, events_of

import labkit.events
from labkit import Comm, RankError, World
from labkit.comm import algorithms
from labkit.comm.algorithms import Algorithm, Chunks, Reduction
from labkit.comm.backs import SendReceive
from labkit.comm.carrier import Carrier
from labkit.comm.handle import Handle
from labkit.comm.wire import Wire

ring_reduce_scatter = algorithms.ring_reduce_scatter
ring_all_gather = algorithms.ring_all_gather
ring_all_reduce = algorithms.ring_all_reduce
tree_broadcast = algorithms.tree_broadcast


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


# --- faults ------------------------------------------------------------------------------------


def skips_a_step(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """The ring of one rank less."""
    n, rank = wire.size, wire.rank
    out.copy_(chunks[rank])
    partial, sent_bytes = chunks[(rank - 1) % n].clone(), 0
    for step in range(1, n - 1):
        share = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(share)
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        send = wire.isend(partial, (rank + 1) % n, tag)
        sent_bytes += partial.nbytes
        yield receive
        reduce(incoming, share)
        yield send
        partial = incoming
    reduce(out, partial) if out.numel() == partial.numel() else None
    return sent_bytes


def forgets_the_division(
    wire: Wire, chunks: Chunks, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    return ring_all_reduce(wire, chunks, reduce, 1, tag)


def divides_every_chunk(
    wire: Wire, chunks: Chunks, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """Not only the one that is complete."""
    sent_bytes = yield from ring_all_reduce(wire, chunks, reduce, divide_by, tag)
    if divide_by != 1:
        for chunk in chunks:
            chunk.div_(divide_by)
    return sent_bytes


def writes_on_what_was_given(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """Right sums, but the input holds partial ones afterwards."""
    sent_bytes = yield from ring_reduce_scatter(wire, chunks, out, reduce, tag)
    for chunk in chunks:
        if chunk.data_ptr() != out.data_ptr():
            chunk.add_(1)
    return sent_bytes


def is_an_all_reduce_inside(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """What gloo's is: right, and twice the bytes."""
    sent_bytes = yield from ring_reduce_scatter(wire, chunks, out, reduce, tag)
    all_sums = [out if r == wire.rank else x.clone() for r, x in enumerate(chunks)]
    return sent_bytes + (yield from ring_all_gather(wire, all_sums, tag))


def is_an_all_reduce_inside_and_hides_it(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    yield from is_an_all_reduce_inside(wire, chunks, out, reduce, tag)
    return sum(chunk.nbytes for chunk in chunks) - chunks[wire.rank].nbytes


def gathers_twice(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    first_bytes = yield from ring_all_gather(wire, chunks, tag)
    return first_bytes + (yield from ring_all_gather(wire, chunks, tag))


def gathers_twice_and_hides_it(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    yield from ring_all_gather(wire, chunks, tag)
    return (yield from ring_all_gather(wire, chunks, tag))


def counts_half(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    return (yield from ring_all_gather(wire, chunks, tag)) // 2


def gathers_in_another_order(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    sent_bytes = yield from ring_all_gather(wire, chunks, tag)
    first, last = chunks[0], chunks[-1]
    if first.numel() == last.numel():
        first_values = first.clone()
        first.copy_(last)
        last.copy_(first_values)
    return sent_bytes


def stops_a_round_early(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    n, position = wire.size, (wire.rank - root) % wire.size
    if position == 0:
        yield wire.isend(x, (wire.rank + 1) % n, tag)
        return x.nbytes
    if position == 1:
        yield wire.irecv(x, (wire.rank - 1) % n, tag)
    return 0


def sends_all_from_the_root(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    """No tree: right, and the bytes in all are right, but one rank sends all of them."""
    if wire.rank != root:
        yield wire.irecv(x, root, tag)
        return 0
    sends = [wire.isend(x, rank, tag) for rank in range(wire.size) if rank != root]
    yield from sends
    return len(sends) * x.nbytes


def gives_everyone_the_first(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    first = [chunks[0]] * wire.size if chunks else None
    return algorithms_as_they_are["flat_scatter"](wire, x, first, root, tag)


def keeps_its_own_only(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    spare = [torch.empty_like(chunk) for chunk in chunks] if chunks else None
    sent_bytes = yield from algorithms_as_they_are["flat_gather"](wire, x, spare, root, tag)
    if chunks:
        chunks[root].copy_(x)
    return sent_bytes


def forgets_the_last_peer(wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> Algorithm:
    kept = outs[(wire.rank + 1) % wire.size]
    before = kept.clone()
    sent_bytes = yield from algorithms_as_they_are["pairwise_all_to_all"](wire, outs, ins, tag)
    kept.copy_(before)
    return sent_bytes


def lets_everybody_pass(wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    yield from ()
    return 0


def keeps_partial_sums(self: SendReceive, x: torch.Tensor, root: int, op: str, call: Any) -> Any:
    """The tree works on the user's tensors, on all ranks."""
    from labkit.comm.backs import REDUCTIONS

    def tree() -> Algorithm:
        sent_bytes = yield from algorithms.tree_reduce(self.wire, x, root, REDUCTIONS[op], call.tag)
        if op == "mean" and self.wire.rank == root:
            x.div_(self.wire.size)
        return sent_bytes

    return self._start(call, lambda: [tree()])


stage = Carrier.stage
algorithms_as_they_are = dict(vars(algorithms))


def never_copies_back(self: Carrier, x: torch.Tensor, finish: Any) -> torch.Tensor:
    """Of a tensor with gaps, the caller's own memory stays as it was."""
    return stage(self, x, None)


def waits_for_nothing(self: Handle) -> None:
    self._work = None


def counts_all_but_its_own(chunk_bytes: list[int], rank: int) -> int:
    """An all-gather whose bytes are right for sizes that divide only."""
    return labkit.events.reduce_scatter_bus_bytes(chunk_bytes, rank)


def counts_the_whole(chunk_bytes: list[int], rank: int) -> int:
    return sum(chunk_bytes)


# --- and what finds them -----------------------------------------------------------------------

WRONG_RESULTS = {
    skips_a_step: (algorithms, "ring_reduce_scatter", comm_contract.all_reduce),
    writes_on_what_was_given: (algorithms, "ring_reduce_scatter", comm_contract.reduce_scatter),
    forgets_the_division: (algorithms, "ring_all_reduce", comm_contract.all_reduce),
    divides_every_chunk: (algorithms, "ring_all_reduce", comm_contract.all_reduce),
    gathers_in_another_order: (algorithms, "ring_all_gather", comm_contract.all_gather),
    stops_a_round_early: (algorithms, "tree_broadcast", comm_contract.broadcast),
    gives_everyone_the_first: (algorithms, "flat_scatter", comm_contract.gather_and_scatter),
    keeps_its_own_only: (algorithms, "flat_gather", comm_contract.gather_and_scatter),
    forgets_the_last_peer: (algorithms, "pairwise_all_to_all", comm_contract.all_to_all),
    lets_everybody_pass: (algorithms, "dissemination_barrier", comm_contract.objects_and_barrier),
    keeps_partial_sums: (SendReceive, "reduce", comm_contract.reduce),
    never_copies_back: (Carrier, "stage", comm_contract.all_reduce),
    waits_for_nothing: (Handle, "wait", comm_contract.point_to_point),
}
WRONG_BYTES = {
    is_an_all_reduce_inside: (algorithms, "ring_reduce_scatter"),
    gathers_twice: (algorithms, "ring_all_gather"),
    counts_half: (algorithms, "ring_all_gather"),
    sends_all_from_the_root: (algorithms, "tree_broadcast"),
    counts_all_but_its_own: (labkit.events, "all_gather_bus_bytes"),
    counts_the_whole: (labkit.events, "reduce_scatter_bus_bytes"),
}
HIDDEN_BYTES = {
    is_an_all_reduce_inside_and_hides_it: ("ring_reduce_scatter", "reduce_scatter"),
    gathers_twice_and_hides_it: ("ring_all_gather", "all_gather"),
}


def run_with(world: World, owner: Any, name: str, fault: Any, then: Callable[[Comm], Any]) -> Any:
    """Run `then` on ranks whose `owner.name` is the fault. (Ranks that fail are made anew.)"""

    def on_rank() -> Any:
        with patch.object(owner, name, fault):
            return then(Comm())

    return world.run(on_rank)


@pytest.mark.parametrize("fault", WRONG_RESULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_result_is_found(world: World, fault: Callable[..., Any]) -> None:
    owner, name, part = WRONG_RESULTS[fault]
    with pytest.raises(RankError, match="AssertionError"):
        run_with(world, owner, name, fault, part)


@pytest.mark.parametrize("fault", WRONG_BYTES, ids=lambda fault: fault.__name__)
def test_a_byte_too_many_or_too_few_is_found(world: World, fault: Callable[..., Any]) -> None:
    told = run_with(world, *WRONG_BYTES[fault], fault, lambda comm: events_of(comm, 1001))
    with pytest.raises(AssertionError):
        check_bytes(told, 1001)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count its loopback")
@pytest.mark.parametrize("fault", HIDDEN_BYTES, ids=lambda fault: fault.__name__)
def test_bytes_that_are_not_told_are_found_in_the_kernels_count(
    world: World, fault: Callable[..., Any]
) -> None:
    name, op = HIDDEN_BYTES[fault]
    told = run_with(world, algorithms, name, fault, lambda comm: events_of(comm, 1001))
    check_bytes(told, 1001)  # by its own word, all is well
    world.run(lambda: setattr(algorithms, name, fault))
    try:
        with pytest.raises(AssertionError, match=op):
            check_kernel_bytes(world, op)
    finally:
        world.restart()


def test_without_a_fault_all_is_green(world: World) -> None:
    world.run(lambda: comm_contract.all_reduce(Comm()))
    check_bytes(world.run(lambda: events_of(Comm(), 1001)), 1001)
