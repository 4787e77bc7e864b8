"""All-reduce: every rank's `x` becomes the reduction of all ranks' `x`, bitwise equal everywhere.

    naive                through one server                2(n-1) (alpha + S beta)
    tree                 reduce, then broadcast            2 ceil(log2 n) (alpha + S beta)
    ring                 reduce-scatter, then all-gather   2(n-1) alpha + 2(n-1)/n S beta
    recursive doubling   exchange the whole `x` and add    log2(n) (alpha + S beta)
    halving, doubling    the ring's phases, recursively    2 log2(n) alpha + 2(n-1)/n S beta
    double tree          double_tree.py, in P pieces       (P + 2 log2 n) alpha + ~2 S beta
    hierarchical         hierarchical.py

For a mean, the complete sum is divided by n (`divide_by`; 1 for other reductions). If n is not a
power of two, both recursive algorithms fold first (fold.py), adding 2 alpha + S (2 beta + gamma).

Source: Rabenseifner, 2004 (halving and doubling); Patarasuk and Yuan, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations", 2009 (the ring); Thakur et al., 2005.
"""

import torch

from labkit.comm.collectives.all_gather import double, ring_all_gather
from labkit.comm.collectives.broadcast import flat_broadcast, tree_broadcast
from labkit.comm.collectives.costs import power_of_two
from labkit.comm.collectives.fold import fold, unfold
from labkit.comm.collectives.reduce import flat_reduce, tree_reduce
from labkit.comm.collectives.reduce_scatter import halve, ring_reduce_scatter
from labkit.comm.collectives.steps import (
    Algorithm,
    Chunks,
    Reduction,
    SubsetWire,
    bounds_of,
    interleave,
    pieces_of_chunks,
)
from labkit.events import chunk_sizes
from labkit.runtime.transports.wire import Wire


def naive_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """Rank 0, like a parameter server, sums every rank's `x` and broadcasts the sum.
    Cost: 2(n-1) (alpha + S beta) + (n-1) S gamma, which grows with every additional rank."""
    sent_bytes = yield from flat_reduce(wire, x, 0, reduce, tag)
    if divide_by != 1 and wire.rank == 0:
        x.div_(divide_by)
    return sent_bytes + (yield from flat_broadcast(wire, x, 0, tag))


def tree_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """Reduce up the binomial tree to rank 0, then broadcast down the tree.
    Cost: 2 ceil(log2 n) (alpha + S beta) + ceil(log2 n) S gamma."""
    sent_bytes = yield from tree_reduce(wire, x, 0, reduce, tag)
    if divide_by != 1 and wire.rank == 0:
        x.div_(divide_by)
    return sent_bytes + (yield from tree_broadcast(wire, x, 0, tag))


def ring_all_reduce(
    wire: Wire, chunks: Chunks, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """An in-place reduce-scatter, division of this rank's reduced chunk, and an all-gather.
    Cost: 2(n-1) alpha + 2(n-1)/n S beta + (n-1)/n S gamma."""
    own = chunks[wire.rank]
    sent_bytes = yield from ring_reduce_scatter(wire, chunks, own, reduce, tag)
    if divide_by != 1:
        own.div_(divide_by)
    return sent_bytes + (yield from ring_all_gather(wire, chunks, tag))


def rings_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """One ring per piece (a long `x` is split), interleaved. Cost: as for one ring, plus 2(n-1)
    alpha per additional piece; gamma is hidden behind beta."""
    pieces = pieces_of_chunks(list(x.split(chunk_sizes(x.numel(), wire.size))))
    rings = [ring_all_reduce(wire, piece, reduce, divide_by, tag) for piece in pieces]
    return (yield from interleave(*rings))


def recursive_doubling_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """Exchange the whole `x` with the rank at distance 1, 2, 4, ... and add. Sums on 4 ranks:

        0-1, 2-3     0: (0+1)        1: (0+1)        2: (2+3)        3: (2+3)
        0-2, 1-3     0: (0+1)+(2+3)  1: (0+1)+(2+3)  2: (0+1)+(2+3)  3: (0+1)+(2+3)

    Both ranks of a pair put the lower rank's part first; otherwise, their minimum of -0.0 and 0.0,
    or sum of two NaNs, might differ in bits. Cost: log2(n) (alpha + S (beta + gamma)).
    """
    core = power_of_two(wire.size)
    sent_bytes = yield from fold(wire, x, reduce, tag)
    if wire.rank < core:
        total, incoming, reach = x, torch.empty_like(x), 1
        while reach < core:
            receive = wire.irecv(incoming, wire.rank ^ reach, tag)
            send = wire.isend(total, wire.rank ^ reach, tag)
            sent_bytes += x.nbytes
            yield receive
            yield send
            lower, upper = (incoming, total) if wire.rank & reach else (total, incoming)
            reduce(lower, upper)
            total, incoming = lower, upper
            reach *= 2
        if total is not x:
            x.copy_(total)
        if divide_by != 1:
            x.div_(divide_by)
    return sent_bytes + (yield from unfold(wire, x, tag))


def halving_doubling_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling (Rabenseifner).
    Cost: 2 log2(n) alpha + 2(n-1)/n S beta + (n-1)/n S gamma: the ring's bytes in fewer steps.

        0-2, 1-3     0: c0 c1      1: c0 c1      2: c2 c3      3: c2 c3     (halving)
        0-1, 2-3     0: c0         1: c1         2: c2         3: c3
        0-1, 2-3     0: c0 c1      1: c0 c1      2: c2 c3      3: c2 c3     (doubling)
        0-2, 1-3     c0 c1 c2 c3   (on all)
    """
    core = power_of_two(wire.size)
    sent_bytes = yield from fold(wire, x, reduce, tag)
    if wire.rank < core:
        inner, bounds = SubsetWire(wire, range(core)), bounds_of(chunk_sizes(x.numel(), core))
        sent_bytes += yield from halve(inner, x, bounds, reduce, tag)
        if divide_by != 1:
            x[bounds[wire.rank] : bounds[wire.rank + 1]].div_(divide_by)
        sent_bytes += yield from double(inner, x, bounds, tag)
    return sent_bytes + (yield from unfold(wire, x, tag))
