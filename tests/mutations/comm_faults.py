"""Deliberate faults of the communicator, apart from the tests: the ranks import this file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

import labkit.events as events
from harness import Replacement, instead, replaces
from labkit.comm import collectives as algorithms
from labkit.comm.collectives import all_gather, broadcast
from labkit.comm.collectives import reduce as reductions
from labkit.comm.collectives.steps import Algorithm, Chunks
from labkit.comm.handle import Handle
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.transports.send_receive import REDUCTIONS, SendReceive
from labkit.runtime.transports.wire import Wire


class FaultyAlgorithm(Replacement):
    """Replaced also in the modules that import it from each other, and in ALGORITHMS."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        real = getattr(self.owner, self.name)
        new = self.make(real)
        self._swap(real, new)
        try:
            yield
        finally:
            self._swap(new, real)

    def _swap(self, old: Any, new: Any) -> None:
        for module in _collectives():
            if hasattr(module, self.name):
                setattr(module, self.name, new)
        for by_name in algorithms.ALGORITHMS.values():
            by_name.update({key: new for key, function in by_name.items() if function is old})


def algorithm(name: str) -> Any:
    defined_in = next(module for module in _collectives() if hasattr(module, name))
    return replaces(defined_in, name, FaultyAlgorithm)


def _collectives() -> list[ModuleType]:
    package = algorithms.__name__
    return [module for name, module in [*sys.modules.items()] if name.startswith(package)]


@algorithm("ring_reduce_scatter")
def skips_a_step(
    real: Any, wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Any, tag: int
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


@algorithm("ring_all_reduce")
def forgets_the_division(
    real: Any, wire: Wire, chunks: Chunks, reduce: Any, divide_by: int, tag: int
) -> Algorithm:
    return real(wire, chunks, reduce, 1, tag)


@algorithm("ring_all_reduce")
def divides_every_chunk(
    real: Any, wire: Wire, chunks: Chunks, reduce: Any, divide_by: int, tag: int
) -> Algorithm:
    """Not only the one that is complete."""
    sent_bytes = yield from real(wire, chunks, reduce, divide_by, tag)
    if divide_by != 1:
        for chunk in chunks:
            chunk.div_(divide_by)
    return sent_bytes


@algorithm("ring_reduce_scatter")
def overwrites_its_input(real: Any, wire: Wire, chunks: Chunks, *how: Any) -> Algorithm:
    """The sums are right, but the input holds partial ones afterwards."""
    out = how[0]
    sent_bytes = yield from real(wire, chunks, *how)
    for chunk in chunks:
        if chunk.data_ptr() != out.data_ptr():
            chunk.add_(1)
    return sent_bytes


@algorithm("ring_all_gather")
def gathers_in_another_order(real: Any, wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    sent_bytes = yield from real(wire, chunks, tag)
    first, last = chunks[0], chunks[-1]
    if first.numel() == last.numel():
        first_values = first.clone()
        first.copy_(last)
        last.copy_(first_values)
    return sent_bytes


@algorithm("tree_broadcast")
def stops_a_round_early(real: Any, wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    n, position = wire.size, (wire.rank - root) % wire.size
    if position == 0:
        yield wire.isend(x, (wire.rank + 1) % n, tag)
        return x.nbytes
    if position == 1:
        yield wire.irecv(x, (wire.rank - 1) % n, tag)
    return 0


@algorithm("flat_scatter")
def scatters_the_first_chunk_to_all(
    real: Any, wire: Wire, x: torch.Tensor, chunks: Chunks | None, *how: Any
) -> Algorithm:
    return real(wire, x, [chunks[0]] * wire.size if chunks else None, *how)


@algorithm("flat_gather")
def gathers_the_roots_chunk_only(
    real: Any, wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    spare = [torch.empty_like(chunk) for chunk in chunks] if chunks else None
    sent_bytes = yield from real(wire, x, spare, root, tag)
    if chunks:
        chunks[root].copy_(x)
    return sent_bytes


@algorithm("pairwise_all_to_all")
def forgets_the_last_peer(real: Any, wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> Algorithm:
    kept = outs[(wire.rank + 1) % wire.size]
    before = kept.clone()
    sent_bytes = yield from real(wire, outs, ins, tag)
    kept.copy_(before)
    return sent_bytes


@algorithm("next_ring_exchange")
def returns_its_own_tensor(
    real: Any, wire: Wire, out: torch.Tensor, x: torch.Tensor, tag: int
) -> Algorithm:
    yield from ()
    out.copy_(x)
    return x.nbytes


@algorithm("dissemination_barrier")
def is_no_barrier(real: Any, wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    yield from ()
    return 0


@replaces(SendReceive, "reduce")
def keeps_partial_sums(
    real: Any, self: SendReceive, x: torch.Tensor, root: int, op: str, call: Any
) -> Any:
    """The tree works on the user's tensors, on all ranks."""

    def tree() -> Algorithm:
        sent_bytes = yield from reductions.tree_reduce(self.wire, x, root, REDUCTIONS[op], call.tag)
        if op == "mean" and self.wire.rank == root:
            x.div_(self.wire.size)
        return sent_bytes

    return self._start(call, tree)


@replaces(Dispatcher, "stage")
def never_copies_back(real: Any, self: Dispatcher, x: torch.Tensor, finish: Any) -> Any:
    """The caller's own memory of a strided tensor stays as it was."""
    return real(self, x, None)


@replaces(Handle, "wait")
def does_not_wait(real: Any, self: Handle) -> None:
    self._work = None


@algorithm("ring_reduce_scatter")
def is_an_all_reduce(
    real: Any, wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Any, tag: int
) -> Algorithm:
    """As in gloo: right, with twice the bytes."""
    sent_bytes = yield from real(wire, chunks, out, reduce, tag)
    all_sums = [out if r == wire.rank else x.clone() for r, x in enumerate(chunks)]
    return sent_bytes + (yield from all_gather.ring_all_gather(wire, all_sums, tag))


@algorithm("ring_reduce_scatter")
def is_an_all_reduce_and_hides_it(real: Any, wire: Wire, chunks: Chunks, *how: Any) -> Algorithm:
    yield from is_an_all_reduce.make(real)(wire, chunks, *how)
    return sum(chunk.nbytes for chunk in chunks) - chunks[wire.rank].nbytes


@algorithm("ring_all_gather")
def gathers_twice(real: Any, wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    first_bytes = yield from real(wire, chunks, tag)
    return first_bytes + (yield from real(wire, chunks, tag))


@algorithm("ring_all_gather")
def gathers_twice_and_hides_it(real: Any, wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    yield from real(wire, chunks, tag)
    return (yield from real(wire, chunks, tag))


@algorithm("ring_all_gather")
def counts_half(real: Any, wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    return (yield from real(wire, chunks, tag)) // 2


@algorithm("tree_broadcast")
def sends_all_from_the_root(
    real: Any, wire: Wire, x: torch.Tensor, root: int, tag: int
) -> Algorithm:
    """Not a tree: the result and the total bytes are right, but one rank sends all of them."""
    return broadcast.flat_broadcast(wire, x, root, tag)


def whole_bytes(chunk_bytes: list[int], rank: int) -> int:
    return sum(chunk_bytes)


# An all-gather whose bytes are right only for sizes that divide.
counts_other_chunks = instead(
    "counts_other_chunks", events, "all_gather_bus_bytes", events.reduce_scatter_bus_bytes
)
counts_the_whole = instead("counts_the_whole", events, "reduce_scatter_bus_bytes", whole_bytes)
