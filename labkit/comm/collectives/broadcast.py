"""Broadcast: copy the root's `x` to all ranks. S bytes, n ranks; `position` counts from the root.

    flat      the root sends `x` to each rank in turn             (n-1) (alpha + S beta)
    tree      all ranks that hold `x` pass it on                  ceil(log2 n) (alpha + S beta)
    chain     each rank passes P pieces to the next               (P + n-2) (alpha + S/P beta)

Small messages need few steps: use the tree. A large message should leave each rank only once: use
the chain, which costs about S beta for any n if P is large.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; the chain is NCCL's ring, cut at the root.
"""

import torch

from labkit.comm.collectives.steps import Algorithm, pieces_of
from labkit.runtime.transports.wire import Wire


def flat_broadcast(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    """The root sends `x` to every other rank.
    Cost: (n-1) (alpha + S beta).

        0 --> 1      all three messages leave rank 0 and share its link
        0 --> 2
        0 --> 3
    """
    if wire.rank != root:
        yield wire.irecv(x, root, tag)
        return 0
    sends = [wire.isend(x, rank, tag) for rank in range(wire.size) if rank != root]
    yield from sends
    return len(sends) * x.nbytes


def tree_broadcast(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    """Binomial tree: in each round, each rank that holds `x` sends it to a rank that lacks it.
    Cost: ceil(log2 n) (alpha + S beta).

        round 1      0 --> 1
        round 2      0 --> 2     1 --> 3
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


def chain_broadcast(wire: Wire, x: torch.Tensor, root: int, tag: int) -> Algorithm:
    """Pipelined chain: each rank forwards a piece to the next rank as soon as the piece arrives.
    Cost: (P + n-2) (alpha + S/P beta), P pieces.

        step 1       0 -a-> 1
        step 2       0 -b-> 1 -a-> 2
        step 3       0 -c-> 1 -b-> 2 -a-> 3
        step 4              1 -c-> 2 -b-> 3     ...
    """
    n, position, pieces = wire.size, (wire.rank - root) % wire.size, pieces_of(x)
    receives, sends = [], []
    if position > 0:
        receives = [wire.irecv(piece, (wire.rank - 1) % n, tag) for piece in pieces]
    for k, piece in enumerate(pieces):
        if position > 0:
            yield receives[k]
        if position < n - 1:
            sends.append(wire.isend(piece, (wire.rank + 1) % n, tag))
    yield from sends
    return x.nbytes if sends else 0
