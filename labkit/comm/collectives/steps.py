"""Building blocks of the algorithms: generators that yield to wait, interleaving, helpers.

All ranks of the group run the same generator: `yield work` waits for the message, and the return
value is the number of bytes this rank sent. `tag` separates the messages of different operations;
messages between two ranks with the same tag arrive in order.

A wait must never depend on a later action of the same rank. With `interleave`, therefore, all
ranks either wait in the same order (the rings), or post all receives first and send without waiting
(double_tree.py).
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate

import torch

from labkit.comm.collectives.costs import piece_count
from labkit.runtime.transports.wire import Wire, Work

Chunks = list[torch.Tensor]  # n flat tensors; chunk i belongs to rank i
Reduction = Callable[[torch.Tensor, torch.Tensor], object]  # reduces the second into the first
Algorithm = Generator[Work, None, int]

STREAM = 1 << 21  # tag + k * STREAM: additional tags of one operation


def run(algorithm: Algorithm) -> int:
    """Run the algorithm to completion; returns the number of bytes sent."""
    try:
        while True:
            next(algorithm).wait()
    except StopIteration as end:
        return int(end.value)


def interleave(*algorithms: Algorithm) -> Algorithm:
    """Interleave algorithms at their waits: one piece is in flight while another is reduced."""
    if len(algorithms) == 1:
        return (yield from algorithms[0])
    turns: deque[tuple[Algorithm, Work | None]] = deque((a, None) for a in algorithms)
    sent_bytes = 0
    while turns:
        algorithm, awaited = turns.popleft()
        if awaited is not None:
            yield awaited
        try:
            turns.append((algorithm, next(algorithm)))
        except StopIteration as end:
            sent_bytes += end.value
    return sent_bytes


class SubsetWire(Wire):
    """A `Wire` over `ranks`, a subset of a group that includes this rank; `ranks[0]` is rank 0."""

    def __init__(self, wire: Wire, ranks: Sequence[int]):
        self._wire, self._ranks = wire, ranks
        self.rank, self.size = ranks.index(wire.rank), len(ranks)

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._wire.isend(x, self._ranks[peer], tag)

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._wire.irecv(x, self._ranks[peer], tag)


def pieces_of(x: torch.Tensor) -> Chunks:
    """Split `x` into equal pieces of at most PIECE_BYTES."""
    return list(x.tensor_split(piece_count(x.nbytes)))


def pieces_of_chunks(chunks: Chunks) -> list[Chunks]:
    """Split chunks into equally many pieces of at most PIECE_BYTES; list k has all k-th pieces."""
    count = piece_count(max(chunk.nbytes for chunk in chunks))
    return [list(piece) for piece in zip(*(chunk.tensor_split(count) for chunk in chunks))]


def bounds_of(sizes: Sequence[int]) -> list[int]:
    """Offsets of adjacent blocks of these sizes: [0, 3, 5] for [3, 2]."""
    return list(accumulate(sizes, initial=0))


def side_by_side(chunks: Chunks) -> torch.Tensor | None:
    """All chunks as one tensor if they are adjacent in memory, otherwise None."""
    first = chunks[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for chunk in chunks:
        if chunk.untyped_storage().data_ptr() != storage or chunk.storage_offset() != place:
            return None
        place += chunk.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))
