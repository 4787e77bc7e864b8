"""Barrier: no rank leaves before all ranks have come.

Source: Hensgen, Finkel and Manber, "Two Algorithms for Barrier Synchronization", 1988.
"""

import torch

from labkit.comm.collectives.steps import Algorithm
from labkit.runtime.transports.wire import Wire


def dissemination_barrier(wire: Wire, note: torch.Tensor, tag: int) -> Algorithm:
    """Round k: tell the rank 2^k ahead, hear from the rank 2^k behind; after ceil(log2 n) rounds
    everyone has heard, through others, from everyone. Whom 4 ranks know to be there:

        round 1      0: 3 0        1: 0 1        2: 1 2        3: 2 3
        round 2      0: 1 2 3 0    1: 2 3 0 1    2: 3 0 1 2    3: 0 1 2 3

    Cost: ceil(log2 n) alpha.
    """
    heard = torch.empty_like(note)
    sent_bytes, distance = 0, 1
    while distance < wire.size:
        receive = wire.irecv(heard, (wire.rank - distance) % wire.size, tag)
        yield wire.isend(note, (wire.rank + distance) % wire.size, tag)
        yield receive
        sent_bytes += note.nbytes
        distance *= 2
    return sent_bytes
