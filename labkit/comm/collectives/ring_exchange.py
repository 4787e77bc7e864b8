"""Ring exchange: each rank sends `x` to the next rank, the last rank to the first. This is one
step of every ring algorithm, and of ring attention, where keys and values travel around the ring.
"""

import torch

from labkit.comm.collectives.steps import Algorithm
from labkit.runtime.transports.wire import Wire


def next_ring_exchange(wire: Wire, out: torch.Tensor, x: torch.Tensor, tag: int) -> Algorithm:
    """Set `out` to the previous rank's `x`; all ranks send at the same time: 0 --> 1 --> 2 --> 0.
    Cost: alpha + S beta."""
    n, rank = wire.size, wire.rank
    if n == 1:
        out.copy_(x)
        return 0
    receive = wire.irecv(out, (rank - 1) % n, tag)
    send = wire.isend(x, (rank + 1) % n, tag)
    yield receive
    yield send
    return x.nbytes
