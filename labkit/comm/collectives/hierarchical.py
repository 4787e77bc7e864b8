"""All-reduce inside each node, then between nodes: for clusters whose links inside nodes (NVLink,
shared memory) are much faster than those between nodes (Ethernet, InfiniBand).

2 nodes of 2 ranks; a and b are the halves of each rank's `x`:

    at first                 0: a0 b0       1: a0 b0    |    2: a1 b1       3: a1 b1
    inside: reduce-scatter   0: A0          1: B0       |    2: A1          3: B1
    between: all-reduce      0: A0+A1  <----------------->   2: A0+A1
                                            1: B0+B1 <------------------->  3: B0+B1
    inside: all-gather       0: A B         1: A B      |    2: A B         3: A B

Cost for m nodes of k ranks: 2(k-1) alpha + 2(k-1)/k S beta inside nodes; between nodes, with
different alpha and beta, 2(m-1) alpha + 2(m-1)/m S/k beta, since each rank reduces only S/k bytes.
If nodes differ in size, the smallest node sets how many ranks per node communicate between nodes;
the other ranks first fold into these ranks (fold.py).

Source: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018,
section 3.3; NCCL's trees are hierarchical as well.
"""

import torch

from labkit.comm.collectives.all_gather import ring_all_gather
from labkit.comm.collectives.all_reduce import rings_all_reduce
from labkit.comm.collectives.fold import fold, unfold
from labkit.comm.collectives.reduce_scatter import ring_reduce_scatter
from labkit.comm.collectives.steps import Algorithm, Reduction, SubsetWire
from labkit.events import chunk_sizes
from labkit.runtime.transports.wire import Wire


def hierarchical_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """All-reduce inside and between nodes; `wire.nodes` lists the ranks of each node."""
    node = next(ranks for ranks in wire.nodes if wire.rank in ranks)
    columns = min(len(ranks) for ranks in wire.nodes)
    inside = SubsetWire(wire, node)
    sent_bytes = yield from fold(inside, x, reduce, tag, core=columns)
    if inside.rank < columns:
        row = SubsetWire(wire, node[:columns])
        chunks = list(x.split(chunk_sizes(x.numel(), columns)))
        own = chunks[row.rank]
        sent_bytes += yield from ring_reduce_scatter(row, chunks, own, reduce, tag)
        column = SubsetWire(wire, [ranks[row.rank] for ranks in wire.nodes])
        sent_bytes += yield from rings_all_reduce(column, own, reduce, divide_by, tag)
        sent_bytes += yield from ring_all_gather(row, chunks, tag)
    return sent_bytes + (yield from unfold(inside, x, tag, core=columns))
