"""Gather: collect every rank's `x` in the root's `chunks` (None on the other ranks).

    flat      all ranks send to the root                      (n-1) alpha + (n-1)/n S beta
    tree      blocks of 1, 2, 4, ... ranks are merged         ceil(log2 n) alpha + (n-1)/n S beta

S is the number of bytes that the root holds at the end. The tree takes fewer steps, but sends part
of the data more than once, and requires equal sizes on all ranks, because intermediate ranks must
know how many bytes arrive. Source: as in broadcast.py.
"""

import torch

from labkit.comm.collectives.steps import Algorithm, Chunks
from labkit.runtime.transports.wire import Wire


def flat_gather(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """All ranks send `x` directly to the root.
    Cost: (n-1) alpha + (n-1)/n S beta at the root.

        1 --> 0
        2 --> 0      all three arrive over rank 0's link
        3 --> 0
    """
    if wire.rank != root:
        yield wire.isend(x, root, tag)
        return x.nbytes
    assert chunks is not None
    chunks[root].copy_(x)
    receives = [wire.irecv(chunks[r], r, tag) for r in range(wire.size) if r != root]
    yield from receives
    return 0


def tree_gather(
    wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int
) -> Algorithm:
    """Binomial tree: each rank forwards the whole block it has gathered.
    Cost: ceil(log2 n) alpha + (n-1)/n S beta.

        round 1      1 -x1-> 0     3 -x3-> 2
        round 2      2 -x2,x3-> 0
    """
    n, position = wire.size, (wire.rank - root) % wire.size
    block = x.new_empty(subtree(n, position), x.numel())  # row k: the chunk of position + k
    receives = [
        wire.irecv(block[child - position :][: subtree(n, child)], (root + child) % n, tag)
        for child in children(n, position)
    ]
    block[0].copy_(x)
    yield from receives
    if position > 0:
        yield wire.isend(block, (root + parent(position)) % n, tag)
        return block.nbytes
    assert chunks is not None
    for k in range(n):
        chunks[(root + k) % n].copy_(block[k])
    return 0


# In this binomial tree, a subtree's positions are consecutive: with 8 ranks, 5, 6, 7 are below 4,
# and 3 is below 2. (In the broadcast tree, which sends to distant ranks last, they are not.)


def parent(position: int) -> int:
    """The position with its lowest bit cleared: 7 -> 6 -> 4 -> 0."""
    return position & (position - 1)


def children(n: int, position: int) -> list[int]:
    """The children from nearest (its block is ready first) to farthest: 5 and 6 for 4."""
    bits = [1 << k for k in range((n - 1).bit_length())]
    lowest = position & -position or n
    return [position + bit for bit in bits if bit < lowest and position + bit < n]


def subtree(n: int, position: int) -> int:
    """Number of ranks in the subtree rooted at `position`."""
    return min(position & -position or n, n - position)
