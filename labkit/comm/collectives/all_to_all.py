"""All-to-all: ins[j] of rank i becomes outs[i] of rank j, a transpose across ranks. Forwarding
chunks would send data more than once, so each rank sends directly to every other rank.
Source: Thakur et al., 2005, section 4.3 (for long messages).
"""

from labkit.comm.collectives.steps import Algorithm, Chunks
from labkit.runtime.transports.wire import Wire


def pairwise_all_to_all(wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> Algorithm:
    """In step k, rank r sends to rank r + k and receives from rank r - k: one sender per receiver.
    Cost: (n-1) alpha + (n-1)/n S beta, where each rank holds S bytes.

        step 1       0 --> 1     1 --> 2     2 --> 0
        step 2       0 --> 2     1 --> 0     2 --> 1
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
