"""Scatter: the root's chunk r becomes `x` of rank r (`chunks` is None on the other ranks).

    flat      the root sends each rank its chunk              (n-1) alpha + (n-1)/n S beta
    tree      half of the chunks go to half of the ranks      ceil(log2 n) alpha + (n-1)/n S beta

Both are gathers in reverse; the root initially holds S bytes. Source: as in broadcast.py.
"""

import torch

from labkit.comm.collectives.gather import children, parent, subtree
from labkit.comm.collectives.steps import Algorithm, Chunks
from labkit.runtime.transports.wire import Wire


def flat_scatter(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """The root sends chunk r directly to rank r.
    Cost: (n-1) alpha + (n-1)/n S beta.

        0 -c1-> 1
        0 -c2-> 2      all three leave over rank 0's link
        0 -c3-> 3
    """
    if wire.rank != root:
        yield wire.irecv(x, root, tag)
        return 0
    assert chunks is not None
    sends = [wire.isend(chunks[r], r, tag) for r in range(wire.size) if r != root]
    yield from sends
    x.copy_(chunks[root])
    return sum(chunks[r].nbytes for r in range(wire.size) if r != root)


def tree_scatter(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """Binomial tree: each rank keeps one chunk and forwards the others. Chunks have equal sizes.
    Cost: ceil(log2 n) alpha + (n-1)/n S beta.

        round 1      0 -c2,c3-> 2
        round 2      0 -c1-> 1     2 -c3-> 3
    """
    n, position = wire.size, (wire.rank - root) % wire.size
    block = x.new_empty(subtree(n, position), x.numel())  # row k: the chunk for position + k
    if position > 0:
        yield wire.irecv(block, (root + parent(position)) % n, tag)
    else:
        assert chunks is not None
        for k in range(n):
            block[k].copy_(chunks[(root + k) % n])
    sends = [
        wire.isend(block[child - position :][: subtree(n, child)], (root + child) % n, tag)
        for child in reversed(children(n, position))
    ]
    x.copy_(block[0])
    yield from sends
    return block.nbytes - x.nbytes
