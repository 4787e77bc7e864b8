"""Barrier: no rank leaves before all ranks have entered. Source: Hensgen, Finkel and Manber,
"Two Algorithms for Barrier Synchronization", 1988.
"""

import torch

from labkit.comm.collectives.steps import Algorithm
from labkit.runtime.transports.wire import Wire


def dissemination_barrier(wire: Wire, token: torch.Tensor, tag: int) -> Algorithm:
    """Round k: notify the rank 2^(k-1) ahead, wait for the rank 2^(k-1) behind. After ceil(log2 n)
    rounds, each rank has heard from all. Cost: ceil(log2 n) alpha. Ranks heard from:

        round 1      0: 3 0        1: 0 1        2: 1 2        3: 2 3
        round 2      0: 1 2 3 0    1: 2 3 0 1    2: 3 0 1 2    3: 0 1 2 3
    """
    received = torch.empty_like(token)
    sent_bytes, distance = 0, 1
    while distance < wire.size:
        receive = wire.irecv(received, (wire.rank - distance) % wire.size, tag)
        yield wire.isend(token, (wire.rank + distance) % wire.size, tag)
        yield receive
        sent_bytes += token.nbytes
        distance *= 2
    return sent_bytes
