"""All-gather: initially, only rank r holds chunk r; at the end, every rank holds all chunks.

    ring                 pass on the chunk received    (n-1) alpha        + (n-1)/n S beta
    recursive doubling   exchange all chunks held      log2(n) alpha      + (n-1)/n S beta
    Bruck                the same, for any n           ceil(log2 n) alpha + (n-1)/n S beta

All three send the minimum number of bytes. The ring sends to one neighbor only, which avoids
congestion, and splits large messages; the other two take fewer steps, which suits small messages.

Source: as in broadcast.py; Bruck et al., "Efficient Algorithms for All-to-All Communications in
Multiport Message-Passing Systems", 1997.
"""

import torch

from labkit.comm.collectives.steps import (
    Algorithm,
    Chunks,
    bounds_of,
    interleave,
    pieces_of_chunks,
    side_by_side,
)
from labkit.runtime.transports.wire import Wire


def ring_all_gather(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    """In n - 1 steps, pass on the chunk just received. Picture: the chunks that 3 ranks hold.
    Cost: (n-1) alpha + (n-1)/n S beta.

        at first     c0 . .       . c1 .       . . c2
        step 1       c0 . c2      c0 c1 .      . c1 c2      (from the previous rank)
        step 2       c0 c1 c2     c0 c1 c2     c0 c1 c2
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


def rings_all_gather(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    """One ring per piece of the chunks (long chunks are split), interleaved."""
    rings = [ring_all_gather(wire, piece, tag) for piece in pieces_of_chunks(chunks)]
    return (yield from interleave(*rings))


def recursive_doubling_all_gather(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    """Exchange all chunks held so far with the rank at distance 1, 2, 4, ...; n is a power of two.
    Cost: log2(n) alpha + (n-1)/n S beta.

        at first     c0 . . .      . c1 . .      . . c2 .      . . . c3
        0-1, 2-3     c0 c1 . .     c0 c1 . .     . . c2 c3     . . c2 c3
        0-2, 1-3     c0 c1 c2 c3   (on all)
    """
    bounds = bounds_of([chunk.numel() for chunk in chunks])
    whole = side_by_side(chunks)
    if whole is not None:
        return (yield from double(wire, whole, bounds, tag))
    whole = chunks[0].new_empty(bounds[-1])
    copies = whole.split([chunk.numel() for chunk in chunks])
    copies[wire.rank].copy_(chunks[wire.rank])
    sent_bytes = yield from double(wire, whole, bounds, tag)
    for chunk, copy in zip(chunks, copies):
        chunk.copy_(copy)
    return sent_bytes


def double(wire: Wire, x: torch.Tensor, bounds: list[int], tag: int) -> Algorithm:
    """Recursive doubling in place; block i is x[bounds[i] : bounds[i + 1]]."""
    sent_bytes, reach = 0, 1
    while reach < wire.size:
        own = wire.rank // reach * reach  # the first block that this rank holds
        other = own ^ reach  # the first block that its peer holds
        incoming = x[bounds[other] : bounds[other + reach]]
        outgoing = x[bounds[own] : bounds[own + reach]]
        receive = wire.irecv(incoming, wire.rank ^ reach, tag)
        send = wire.isend(outgoing, wire.rank ^ reach, tag)
        sent_bytes += outgoing.nbytes
        yield receive
        yield send
        reach *= 2
    return sent_bytes


def bruck_all_gather(wire: Wire, chunks: Chunks, tag: int) -> Algorithm:
    """Works for any n. Keep chunks in ring order, starting with this rank's. Each round doubles the
    number of chunks by fetching from the rank 1, 2, 4, ... ahead; the last round fetches the rest.
    Cost: ceil(log2 n) alpha + (n-1)/n S beta, plus a copy of S bytes to sort the chunks by rank.

        at first     0: c0           1: c1           2: c2
        1 ahead      0: c0 c1        1: c1 c2        2: c2 c0
        2 ahead      0: c0 c1 c2     1: c1 c2 c0     2: c2 c0 c1      (one was missing)
    """
    n, rank = wire.size, wire.rank
    order = [chunks[(rank + k) % n] for k in range(n)]
    bounds = bounds_of([chunk.numel() for chunk in order])
    block = order[0].new_empty(bounds[-1])
    block[: bounds[1]].copy_(order[0])
    sent_bytes, have = 0, 1
    while have < n:
        more = min(have, n - have)
        receive = wire.irecv(block[bounds[have] : bounds[have + more]], (rank + have) % n, tag)
        send = wire.isend(block[: bounds[more]], (rank - have) % n, tag)
        sent_bytes += block[: bounds[more]].nbytes
        yield receive
        yield send
        have += more
    for k in range(1, n):
        order[k].copy_(block[bounds[k] : bounds[k + 1]])
    return sent_bytes
