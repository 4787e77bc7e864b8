"""The parts of all algorithms: generators that wait, ways to run several at once, a few helpers.

Every rank of the group runs the same generator: `yield work` waits for that message, the value it
returns is the bytes that this rank sent. `tag` keeps the messages of one operation apart; messages
between two ranks under one tag arrive in the order in which they were sent.

A wait must never need something that the same rank does only after it. With `in_turns`, therefore,
all ranks must wait in the same order (the rings do), or post all receives first and send without
waiting (double_tree.py).
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate

import torch

from labkit.comm.collectives.costs import piece_count
from labkit.runtime.transports.wire import Wire, Work

Chunks = list[torch.Tensor]  # n flat tensors, chunk i belonging to rank i
Reduction = Callable[[torch.Tensor, torch.Tensor], object]  # reduces the second into the first
Algorithm = Generator[Work, None, int]

STREAM = 1 << 21  # tag + k * STREAM: another tag of the same operation


def run(algorithm: Algorithm) -> int:
    """Drive the algorithm to its end; the bytes it sent."""
    try:
        while True:
            next(algorithm).wait()
    except StopIteration as end:
        return int(end.value)


def in_turns(*algorithms: Algorithm) -> Algorithm:
    """Several as one, each in its turn as far as its next wait, so that one piece of a tensor
    travels while another is being reduced."""
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


class Part(Wire):
    """The wire between some ranks of a group, counted anew: `ranks[0]` is rank 0 there. This rank
    is one of them."""

    def __init__(self, wire: Wire, ranks: Sequence[int]):
        self._wire, self._ranks = wire, ranks
        self.rank, self.size = ranks.index(wire.rank), len(ranks)

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._wire.isend(x, self._ranks[peer], tag)

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._wire.irecv(x, self._ranks[peer], tag)


def pieces_of(x: torch.Tensor) -> Chunks:
    """`x` cut into equal pieces, none above PIECE_BYTES."""
    return list(x.tensor_split(piece_count(x.nbytes)))


def pieces_of_chunks(chunks: Chunks) -> list[Chunks]:
    """Every chunk cut into the same number of pieces, none above PIECE_BYTES; piece k of all."""
    count = piece_count(max(chunk.nbytes for chunk in chunks))
    return [list(piece) for piece in zip(*(chunk.tensor_split(count) for chunk in chunks))]


def bounds_of(sizes: Sequence[int]) -> list[int]:
    """Where blocks of these sizes begin and end: [0, 3, 5] for [3, 2]."""
    return list(accumulate(sizes, initial=0))


def side_by_side(chunks: Chunks) -> torch.Tensor | None:
    """All chunks as one tensor, where they follow each other in memory; None where not."""
    first = chunks[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for chunk in chunks:
        if chunk.untyped_storage().data_ptr() != storage or chunk.storage_offset() != place:
            return None
        place += chunk.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))
