"""The collectives, written from send and receive.

Each is a generator that every rank of the group runs: `yield work` waits for that message, the
value it returns is the bytes that this rank sent. `run` drives one; given several, it drives them
in turns, so that one piece of a tensor travels while another is being reduced.

`tag` keeps the messages of one operation apart from those of the next; messages between two ranks
under one tag arrive in the order in which they were sent.

Shapes: n ranks, S bytes; `chunks` is a list of n flat tensors, chunk i belonging to rank i.
Cost: alpha = latency of a message, beta = seconds per byte.
Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

from collections import deque
from collections.abc import Callable, Generator

import torch

from labkit.comm.wire import Wire, Work

Chunks = list[torch.Tensor]
Reduction = Callable[[torch.Tensor, torch.Tensor], object]  # reduces the second into the first
Algorithm = Generator[Work, None, int]


def run(*algorithms: Algorithm) -> int:
    """Drive the algorithms, each in its turn as far as its next wait; the bytes they sent."""
    turns: deque[tuple[Algorithm, Work | None]] = deque((one, None) for one in algorithms)
    sent_bytes = 0
    while turns:
        algorithm, awaited = turns.popleft()
        if awaited is not None:
            awaited.wait()
        try:
            turns.append((algorithm, next(algorithm)))
        except StopIteration as end:
            sent_bytes += end.value
    return sent_bytes


def ring_reduce_scatter(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """`out` becomes the reduction of all ranks' chunk r on rank r; it may be that chunk itself.

    n - 1 steps: pass on the partial sum that just arrived, with one's own share added. 3 ranks,
    who has added in brackets:

        step     rank 0            rank 1            rank 2
        1        sends c2 (0)      sends c0 (1)      sends c1 (2)
        2        sends c1 (2+0)    sends c2 (0+1)    sends c0 (1+2)
        after    has c0 (1+2+0)    has c1 (2+0+1)    has c2 (0+1+2)

    Cost: (n-1) alpha + (n-1)/n S beta.
    """
    n, rank = wire.size, wire.rank
    if out.data_ptr() != chunks[rank].data_ptr():
        out.copy_(chunks[rank])
    room = out.new_empty(2, max(chunk.numel() for chunk in chunks))
    partial, sent_bytes = chunks[(rank - 1) % n], 0
    for step in range(1, n):
        share = chunks[(rank - step - 1) % n]
        incoming = room[step % 2, : share.numel()]
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        send = wire.isend(partial, (rank + 1) % n, tag)
        sent_bytes += partial.nbytes
        yield receive
        if step < n - 1:
            reduce(incoming, share)
        else:
            reduce(out, incoming)
        yield send
        partial = incoming
    return sent_bytes


def ring_all_gather(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    """Before: chunk r is filled on rank r. After: all chunks are filled on all ranks.

    n - 1 steps: pass on the chunk that just arrived. Cost: (n-1) alpha + (n-1)/n S beta.
    """
    n, rank = wire.size, wire.rank
    sends, sent_bytes = [], 0
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        sends.append(wire.isend(outgoing, (rank + 1) % n, tag))
        sent_bytes += outgoing.nbytes
        yield receive
    yield from sends
    return sent_bytes


def ring_all_reduce(
    wire: Wire, chunks: Chunks, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """A reduce-scatter in place, a division of the one chunk that is complete then (1 for none),
    and an all-gather. Cost: 2(n-1) alpha + 2(n-1)/n S beta."""
    own = chunks[wire.rank]
    sent_bytes = yield from ring_reduce_scatter(wire, chunks, own, reduce, tag)
    if divide_by != 1:
        own.div_(divide_by)
    return sent_bytes + (yield from ring_all_gather(wire, chunks, tag))


def tree_broadcast(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    """Binomial tree: in each round, all who have `x` send it to one who has not.

    Cost: ceil(log2 n) (alpha + S beta).
    """
    n, position = wire.size, (wire.rank - root) % wire.size
    sent_bytes, reach = 0, 1
    while reach < n:
        if position < reach and position + reach < n:
            yield wire.isend(x, (wire.rank + reach) % n, tag)
            sent_bytes += x.nbytes
        elif reach <= position < 2 * reach:
            yield wire.irecv(x, (wire.rank - reach) % n, tag)
        reach *= 2
    return sent_bytes


def tree_reduce(wire: Wire, x: torch.Tensor, root: int, reduce: Reduction, tag: int) -> Algorithm:
    """The broadcast tree backwards: leaves send first, `x` on the root ends as the reduction.
    On the other ranks `x` holds partial sums. Cost: ceil(log2 n) (alpha + S beta)."""
    n, position = wire.size, (wire.rank - root) % wire.size
    incoming = torch.empty_like(x)
    reach = 1 << (n - 1).bit_length()
    while (reach := reach // 2) > 0:
        if position < reach and position + reach < n:
            yield wire.irecv(incoming, (wire.rank + reach) % n, tag)
            reduce(x, incoming)
        elif reach <= position < 2 * reach:
            yield wire.isend(x, (wire.rank - reach) % n, tag)
            return x.nbytes
    return 0


def flat_gather(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """Everyone sends `x` straight to the root. Cost: (n-1) alpha + (n-1)/n S beta at the root."""
    if wire.rank != root:
        yield wire.isend(x, root, tag)
        return x.nbytes
    assert chunks is not None
    chunks[root].copy_(x)
    receives = [wire.irecv(chunks[r], r, tag) for r in range(wire.size) if r != root]
    yield from receives
    return 0


def flat_scatter(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """The root sends chunk r straight to rank r. Cost: (n-1) alpha + (n-1)/n S beta."""
    if wire.rank != root:
        yield wire.irecv(x, root, tag)
        return 0
    assert chunks is not None
    sends = [wire.isend(chunks[r], r, tag) for r in range(wire.size) if r != root]
    yield from sends
    x.copy_(chunks[root])
    return sum(chunks[r].nbytes for r in range(wire.size) if r != root)


def pairwise_all_to_all(wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> Algorithm:
    """ins[j] of rank i becomes outs[i] of rank j: in step k everyone sends k ranks ahead.

    Cost: (n-1) alpha + (n-1)/n S beta, S being what one rank holds.
    """
    n, rank = wire.size, wire.rank
    outs[rank].copy_(ins[rank])
    sent_bytes = 0
    for step in range(1, n):
        ahead, behind = (rank + step) % n, (rank - step) % n
        receive = wire.irecv(outs[behind], behind, tag)
        yield wire.isend(ins[ahead], ahead, tag)
        yield receive
        sent_bytes += ins[ahead].nbytes
    return sent_bytes


def dissemination_barrier(wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    """Round k: tell the rank 2^k ahead, hear from the rank 2^k behind; after ceil(log2 n) rounds
    everyone has heard, through others, from everyone. Cost: ceil(log2 n) alpha."""
    heard = torch.empty_like(note)
    sent_bytes, distance = 0, 1
    while distance < wire.size:
        receive = wire.irecv(heard, (wire.rank - distance) % wire.size, tag)
        yield wire.isend(note, (wire.rank + distance) % wire.size, tag)
        yield receive
        sent_bytes += note.nbytes
        distance *= 2
    return sent_bytes
