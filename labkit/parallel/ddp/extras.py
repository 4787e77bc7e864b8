"""Agreement between DDP ranks: bucket order, static graphs, uneven inputs.

    registered w0 w1 w2 w3, used w2 w0 w3 w1         gradients arrive   g1  g3  g0  g2
    buckets by registration    [ g3  g2 ][ g1  g0 ]      first bucket full only at the end
    buckets by arrival         [ g1  g3 ][ g0  g2 ]      used after the first backward

Uneven inputs: a rank that runs out of data joins. Before each buffer broadcast and each backward,
an all-reduce of one element per rank announces all phases (DONE for joined ranks). Until all ranks
have joined, joined ranks take part in collectives with -0.0 gradients, which do not change sums.

Sources: "PyTorch Distributed", arXiv 2006.15704, sections 3.2.2, 4.2, 6.2.1; torch's `Join`.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

import torch
from torch import nn

from labkit.comm import Comm

STATIC = "omit static_graph=True, which requires the same parameters in every step on all ranks"


def agreed_order(
    parameters: Sequence[nn.Parameter], arrived: Sequence[nn.Parameter], comm: Comm, src: int = 0
) -> list[nn.Parameter]:
    """Parameters in order of gradient arrival on rank `src`, then parameters without gradients."""
    place = {parameter: i for i, parameter in enumerate(parameters)}
    order = comm.broadcast_object([place[p] for p in arrived], src)
    others = sorted(set(place.values()) - set(order), reverse=True)
    return [parameters[i] for i in [*order, *others]]


def agreed_used(
    names: Mapping[nn.Parameter, str], used: Collection[nn.Parameter] | None, comm: Comm
) -> set[nn.Parameter]:
    """Returns the parameters in use, the same on all ranks; `used` is None on joined ranks. Raises
    ValueError, on every rank, if ranks used different parameters."""
    own = None if used is None else [names[p] for p in names if p in used]
    by_rank = {rank: {*x} for rank, x in enumerate(comm.all_gather_object(own)) if x is not None}
    first, *others = by_rank
    for rank in others:
        for name in (name for name in names.values() if name in by_rank[rank] ^ by_rank[first]):
            with_it, without = (first, rank) if name in by_rank[first] else (rank, first)
            raise ValueError(
                f"{name} got a gradient on rank {with_it} and none on rank {without}; {STATIC}"
            )
    return {parameter for parameter, name in names.items() if name in by_rank[first]}


class Phase(IntEnum):
    """A rank's next phase, announced to all ranks in `join()`."""

    DONE = 0
    FORWARD = 1  # broadcasts buffers
    BACKWARD = 2


class JoinCoordinator:
    """Tracks active ranks. Outside `join()` (device=None), all are active and nothing is sent."""

    def __init__(
        self, comm: Comm, device: torch.device | None = None, divide_by_active: bool = False
    ):
        self.comm, self.divide_by_active = comm, divide_by_active
        self.active = list(range(comm.size))
        self._device = device

    def announce(self, phase: Phase) -> Phase:
        """Announces `phase` and returns the active ranks' common phase (DONE if all ranks have
        joined). Raises ValueError if phases differ."""
        if self._device is None:
            return phase
        announced = torch.zeros(self.comm.size, device=self._device)
        announced[self.comm.rank] = phase
        self.comm.all_reduce(announced)
        phases = {rank: Phase(int(x)) for rank, x in enumerate(announced.tolist()) if x}
        if len(set(phases.values())) > 1:
            raise ValueError(
                "inside join() the active ranks must call forward and backward together, but "
                + ", ".join(f"rank {rank} is in {x.name.lower()}" for rank, x in phases.items())
            )
        self.active = list(phases) or self.active
        return next(iter(phases.values()), Phase.DONE)

    @property
    def first(self) -> int:
        return self.active[0]  # joined ranks have outdated weights

    @property
    def divisor(self) -> int:
        return len(self.active) if self.divide_by_active else self.comm.size
