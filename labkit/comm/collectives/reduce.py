"""Reduce: the root's `x` becomes the reduction of all ranks' `x`. The algorithms are broadcasts in
reverse, with an addition at each hop. Other ranks' `x` may hold partial sums afterward.

    flat      all ranks send to the root       (n-1) (alpha + S beta + S gamma)
    tree      pairs, pairs of pairs, ...       ceil(log2 n) (alpha + S beta + S gamma)
    chain     along a line, in P pieces        (P + n-2) (alpha + S/P beta + S/P gamma)

gamma = seconds to reduce a byte. Source: as in broadcast.py.
"""

import torch

from labkit.comm.collectives.steps import Algorithm, Reduction, pieces_of
from labkit.runtime.transports.wire import Wire


def flat_reduce(wire: Wire, x: torch.Tensor, root: int, reduce: Reduction, tag: int) -> Algorithm:
    """The root adds the other ranks' `x` in rank order, starting with the next rank.
    Cost: (n-1) (alpha + S beta + S gamma).

        1 --> 0      (0+1)
        2 --> 0      (0+1)+2
        3 --> 0      ((0+1)+2)+3
    """
    n = wire.size
    if wire.rank != root:
        yield wire.isend(x, root, tag)
        return x.nbytes
    buffers = x.new_empty(2, x.numel())  # receive into one while adding the other
    receives = [wire.irecv(buffers[k % 2], (root + k) % n, tag) for k in range(1, min(n, 3))]
    for k in range(1, n):
        yield receives[k - 1]
        reduce(x, buffers[k % 2])
        if k + 2 < n:
            receives.append(wire.irecv(buffers[k % 2], (root + k + 2) % n, tag))
    return 0


def tree_reduce(wire: Wire, x: torch.Tensor, root: int, reduce: Reduction, tag: int) -> Algorithm:
    """Binomial tree in reverse: in each round, half of the remaining ranks send and finish.
    Cost: ceil(log2 n) (alpha + S beta + S gamma).

        round 1      2 --> 0     3 --> 1      0 has (0+2), 1 has (1+3)
        round 2      1 --> 0                  0 has (0+2)+(1+3)
    """
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


def chain_reduce(wire: Wire, x: torch.Tensor, root: int, reduce: Reduction, tag: int) -> Algorithm:
    """Pipelined chain in reverse: each rank adds its piece to the piece received and sends the sum.
    Cost: (P + n-2) (alpha + S/P beta + S/P gamma), P pieces.

        step 1                            2 <-a- 3
        step 2                   1 <-a- 2 <-b- 3
        step 3          0 <-a- 1 <-b- 2 <-c- 3        ...
    """
    n, position, pieces = wire.size, (wire.rank - root) % wire.size, pieces_of(x)
    buffers, receives, sends = [], [], []
    if position < n - 1:
        buffers = pieces_of(torch.empty_like(x))
        receives = [wire.irecv(buffer, (wire.rank + 1) % n, tag) for buffer in buffers]
    for k, piece in enumerate(pieces):
        if receives:
            yield receives[k]
            reduce(piece, buffers[k])
        if position > 0:
            sends.append(wire.isend(piece, (wire.rank - 1) % n, tag))
    yield from sends
    return x.nbytes if sends else 0
