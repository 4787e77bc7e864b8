"""Reduce-scatter: `out` on rank r becomes the reduction of all ranks' chunk r.

    ring                pass on the partial sum       (n-1) alpha   + (n-1)/n S (beta + gamma)
    recursive halving   exchange half of the block    log2(n) alpha + (n-1)/n S (beta + gamma)

If n is not a power of two, recursive halving folds first: each extra rank sends all its chunks to a
core rank and receives its reduced chunk at the end. This adds 2 alpha + (1 + 1/n) S beta + S gamma.
Source: Thakur, Rabenseifner and Gropp, 2005, sections 4.2 and 4.4.
"""

import torch

from labkit.comm.collectives.costs import power_of_two
from labkit.comm.collectives.fold import fold
from labkit.comm.collectives.steps import (
    Algorithm,
    Chunks,
    Reduction,
    SubsetWire,
    bounds_of,
    interleave,
    pieces_of_chunks,
)
from labkit.runtime.transports.wire import Wire


def ring_reduce_scatter(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """In n - 1 steps, add this rank's chunk to the partial sum just received and pass the sum on.
    `out` may be chunks[rank]. Cost: (n-1) alpha + (n-1)/n S (beta + gamma). 3 ranks:

        step     rank 0            rank 1            rank 2            (ranks in the sum)
        1        sends c2 (0)      sends c0 (1)      sends c1 (2)
        2        sends c1 (2+0)    sends c2 (0+1)    sends c0 (1+2)
        after    has c0 (1+2+0)    has c1 (2+0+1)    has c2 (0+1+2)
    """
    n, rank = wire.size, wire.rank
    own, in_place = chunks[rank], out.data_ptr() == chunks[rank].data_ptr()
    if n == 1 and not in_place:
        out.copy_(own)
    staging = out.new_empty(2, max(chunk.numel() for chunk in chunks))
    partial, sent_bytes = chunks[(rank - 1) % n], 0
    for step in range(1, n):
        share, is_last = chunks[(rank - step - 1) % n], step == n - 1
        incoming = out if is_last and not in_place else staging[step % 2, : share.numel()]
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        send = wire.isend(partial, (rank + 1) % n, tag)
        sent_bytes += partial.nbytes
        yield receive
        if is_last and in_place:
            reduce(own, incoming)
        else:
            reduce(incoming, share)
        yield send
        partial = incoming
    return sent_bytes


def rings_reduce_scatter(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """One ring per piece of the chunks (long chunks are split), interleaved. Cost: as for one ring,
    plus (n-1) alpha per additional piece; gamma is hidden behind beta."""
    pieces = pieces_of_chunks([*chunks, out])
    rings = [ring_reduce_scatter(wire, piece[:-1], piece[-1], reduce, tag) for piece in pieces]
    return (yield from interleave(*rings))


def recursive_halving_reduce_scatter(
    wire: Wire, chunks: Chunks, out: torch.Tensor, reduce: Reduction, tag: int
) -> Algorithm:
    """Exchange halves with the rank at distance n/2, n/4, ..., 1. Cost: log2(n) alpha + (n-1)/n S
    (beta + gamma), plus a copy that keeps the chunks intact. 4 ranks and the chunks they reduce:

        at first     c0 c1 c2 c3   (all)
        0-2, 1-3     0: c0 c1      1: c0 c1      2: c2 c3      3: c2 c3
        0-1, 2-3     0: c0         1: c1         2: c2         3: c3
    """
    n, core = wire.size, power_of_two(wire.size)
    # Block i contains chunk i and the chunk of the rank folded into rank i, if any.
    order = [r for i in range(core) for r in range(i, n, core)]
    work = torch.cat([chunks[r] for r in order])
    bounds = bounds_of([sum(c.numel() for c in chunks[i::core]) for i in range(core)])
    sent_bytes = yield from fold(wire, work, reduce, tag)
    if wire.rank >= core:
        yield wire.irecv(out, wire.rank - core, tag)
        return sent_bytes
    sent_bytes += yield from halve(SubsetWire(wire, range(core)), work, bounds, reduce, tag)
    block = work[bounds[wire.rank] : bounds[wire.rank + 1]]
    if wire.rank + core < n:
        folded = block[chunks[wire.rank].numel() :]
        yield wire.isend(folded, wire.rank + core, tag)
        sent_bytes += folded.nbytes
    out.copy_(block[: out.numel()])
    return sent_bytes


def halve(wire: Wire, x: torch.Tensor, bounds: list[int], reduce: Reduction, tag: int) -> Algorithm:
    """Recursive halving in place; n is a power of two. On rank r, x[bounds[r] : bounds[r + 1]]
    becomes the reduction; the other blocks of `x` hold partial sums."""
    rank, sent_bytes = wire.rank, 0
    half, first = wire.size // 2, 0  # this rank's blocks: first to first + 2 half - 1
    staging = x.new_empty(max(bounds[half], bounds[-1] - bounds[half]))
    while half > 0:
        lower, upper = (first, first + half), (first + half, first + 2 * half)
        keep, give = (upper, lower) if rank & half else (lower, upper)
        kept, given = x[bounds[keep[0]] : bounds[keep[1]]], x[bounds[give[0]] : bounds[give[1]]]
        incoming = staging[: kept.numel()]
        receive = wire.irecv(incoming, rank ^ half, tag)
        send = wire.isend(given, rank ^ half, tag)
        sent_bytes += given.nbytes
        yield receive
        reduce(kept, incoming)
        yield send
        half, first = half // 2, keep[0]
    return sent_bytes
