"""What the first backward tells: in which order gradients come, and whose come at all.

    registered   w0 | w1 | w2 | w3        __init__ made them so
    used         w2 | w0 | w3 | w1        forward has another order
    gradients                    g1  g3  g0  g2

    buckets by registration    [ g3  g2 ][ g1  g0 ]      the first is full when backward is over
    buckets by arrival         [ g1  g3 ][ g0  g2 ]      the first leaves in the middle

The ranks must fill the same buckets in the same order, whatever each of them saw: one rank's order
counts for all.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 6.2.1 (order prediction).
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from labkit.comm import Comm

STATIC = (
    "static_graph=True says that every rank uses the same parameters in every step; if yours does "
    "not, leave it out"
)


def agreed_order(
    parameters: Sequence[nn.Parameter], came: Sequence[nn.Parameter], comm: Comm, src: int = 0
) -> list[nn.Parameter]:
    """The parameters in the order in which their gradients came on rank `src`. Those that did not
    come are last, where they hold back nothing that could leave earlier."""
    place = {parameter: i for i, parameter in enumerate(parameters)}
    order = comm.broadcast_object([place[p] for p in came], src)
    others = sorted(set(place.values()) - set(order), reverse=True)
    return [parameters[i] for i in [*order, *others]]


def agreed_used(
    names: Mapping[nn.Parameter, str], used: Collection[nn.Parameter] | None, comm: Comm
) -> set[nn.Parameter]:
    """The parameters that all ranks used; None on a rank that had no backward of its own.
    Raises ValueError on every rank, naming a parameter, where they used different ones."""
    mine = None if used is None else [names[p] for p in names if p in used]
    told = comm.all_gather_object(mine)
    ranks = [rank for rank, theirs in enumerate(told) if theirs is not None]
    first = told[ranks[0]]
    for rank in ranks:
        for name in names.values():
            if (name in told[rank]) != (name in first):
                one, other = (ranks[0], rank) if name in first else (rank, ranks[0])
                raise ValueError(
                    f"{name} got a gradient on rank {one} and none on rank {other}; {STATIC}"
                )
    return {parameter for parameter, name in names.items() if name in first}
