"""Deliberate faults of the door, each a replacement of one of its functions. (Apart from the tests
that use them: the ranks import this file, and it should cost them little.)"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import labkit.events
from labkit.comm import collectives as algorithms
from labkit.comm.collectives import Algorithm, Chunks, Reduction
from labkit.comm.handle import Handle
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.transports.send_receive import REDUCTIONS, SendReceive
from labkit.runtime.transports.wire import Wire

ring_reduce_scatter = algorithms.ring_reduce_scatter
ring_all_gather = algorithms.ring_all_gather
ring_all_reduce = algorithms.ring_all_reduce
flat_scatter, flat_gather = algorithms.flat_scatter, algorithms.flat_gather
pairwise_all_to_all = algorithms.pairwise_all_to_all
stage = Dispatcher.stage


@contextmanager
def replaced(owner: Any, name: str, fault: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is the fault meanwhile."""
    right = getattr(owner, name)
    replace(owner, name, fault)
    try:
        yield
    finally:
        replace(owner, name, right)


def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """`owner.name`, wherever it is at hand: of the algorithms also in the modules that import it
    from each other, and in the registry."""
    was = getattr(owner, name)
    setattr(owner, name, by)
    if owner is not algorithms:
        return
    for module in list(sys.modules.values()):
        if module.__name__.startswith(algorithms.__name__ + ".") and hasattr(module, name):
            setattr(module, name, by)
    for of_collective in algorithms.ALGORITHMS.values():
        for key in [key for key, function in of_collective.items() if function is was]:
            of_collective[key] = by


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


def writes_on_its_input(
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
    return flat_scatter(wire, x, first, root, tag)


def keeps_its_own_only(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    spare = [torch.empty_like(chunk) for chunk in chunks] if chunks else None
    sent_bytes = yield from flat_gather(wire, x, spare, root, tag)
    if chunks:
        chunks[root].copy_(x)
    return sent_bytes


def forgets_the_last_peer(wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> Algorithm:
    kept = outs[(wire.rank + 1) % wire.size]
    before = kept.clone()
    sent_bytes = yield from pairwise_all_to_all(wire, outs, ins, tag)
    kept.copy_(before)
    return sent_bytes


def gives_back_its_own(wire: Wire, out: torch.Tensor, x: torch.Tensor, tag: int) -> Algorithm:
    yield from ()
    out.copy_(x)
    return x.nbytes


def lets_all_pass(wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    yield from ()
    return 0


def keeps_partial_sums(self: SendReceive, x: torch.Tensor, root: int, op: str, call: Any) -> Any:
    """The tree works on the user's tensors, on all ranks."""

    def tree() -> Algorithm:
        sent_bytes = yield from algorithms.tree_reduce(self.wire, x, root, REDUCTIONS[op], call.tag)
        if op == "mean" and self.wire.rank == root:
            x.div_(self.wire.size)
        return sent_bytes

    return self._start(call, tree)


def never_copies_back(self: Dispatcher, x: torch.Tensor, finish: Any) -> torch.Tensor:
    """Of a tensor with gaps, the caller's own memory stays as it was."""
    return stage(self, x, None)


def waits_for_nothing(self: Handle) -> None:
    self._work = None


def counts_all_but_its_own(chunk_bytes: list[int], rank: int) -> int:
    """An all-gather whose bytes are right for sizes that divide only."""
    return labkit.events.reduce_scatter_bus_bytes(chunk_bytes, rank)


def counts_the_whole(chunk_bytes: list[int], rank: int) -> int:
    return sum(chunk_bytes)
