"""Folding: run a power-of-two algorithm on any number of ranks. 6 ranks fold into 4:

    fold         4 --> 0     5 --> 1       the extra ranks send `x` to a core rank,
                 0 1 2 3                   the core runs the algorithm,
    unfold       0 --> 4     1 --> 5       and sends the result back

Cost: 2 alpha + 2 S beta + S gamma. Source: Rabenseifner, "Optimization of Collective Reduction
Operations", 2004, section 4.
"""

import torch

from labkit.comm.collectives.costs import power_of_two
from labkit.comm.collectives.steps import Algorithm, Reduction
from labkit.runtime.transports.wire import Wire


def fold(
    wire: Wire, x: torch.Tensor, reduce: Reduction, tag: int, core: int | None = None
) -> Algorithm:
    """Reduce `x` of each rank r >= `core` (default: power_of_two(n)) into `x` of rank r % core."""
    core = core or power_of_two(wire.size)
    if wire.rank >= core:
        yield wire.isend(x, wire.rank % core, tag)
        return x.nbytes
    for rank in range(wire.rank + core, wire.size, core):
        incoming = torch.empty_like(x)
        yield wire.irecv(incoming, rank, tag)
        reduce(x, incoming)
    return 0


def unfold(wire: Wire, x: torch.Tensor, tag: int, core: int | None = None) -> Algorithm:
    """Send `x` back to the ranks that were folded into this rank."""
    core = core or power_of_two(wire.size)
    if wire.rank >= core:
        yield wire.irecv(x, wire.rank % core, tag)
        return 0
    sends = [wire.isend(x, rank, tag) for rank in range(wire.rank + core, wire.size, core)]
    yield from sends
    return len(sends) * x.nbytes
