"""The gradient buckets of DDP, and the order in which they are filled.

A bucket is one flat tensor, and after backward the gradients are views of it: nothing is copied
back. Buckets are first filled in the reverse of the order in which parameters were registered. The
first backward tells in which order gradients really come, and buckets are then filled by that:

    registered   w0 | w1 | w2 | w3        __init__ made them so
    used         w2 | w0 | w3 | w1        forward has another order
    gradients                    g1  g3  g0  g2

    buckets by registration    [ g3  g2 ][ g1  g0 ]      the first is full when backward is over
    buckets by arrival         [ g1  g3 ][ g0  g2 ]      the first leaves in the middle

The ranks must fill the same buckets in the same order, whatever each of them saw: one rank's order
counts for all.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, sections 3.2.2, 4.2 and 6.2.1.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.flat import FlatPartition
from labkit.parallel.common.grad_buffer import GradBuffer, nobody_used
from labkit.parallel.common.grad_reducer import cut
from labkit.parallel.ddp.comm_hooks import UnderWay

STATIC = (
    "static_graph=True says that every rank uses the same parameters in every step; if yours does "
    "not, leave it out"
)


class Bucket(GradBuffer):
    """The gradients of some parameters, which travel together. Without `comm` they stay here."""

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm | None):
        super().__init__(parameters, FlatPartition([p.shape for p in parameters], ranks=1))
        numel, first = self.partition.numel, parameters[0].detach()
        self.use(comm.symmetric_empty(numel, first) if comm else first.new_empty(numel))
        self.handle: UnderWay | None = None  # of the reduction under way

    def receive(self) -> None:
        """Wait for the averages. What this rank did not use has one where another rank did."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        for parameter in self.unused:
            if not nobody_used(self.view[parameter].view(-1)):
                parameter.grad = self.view[parameter]

    def take_over(self) -> None:
        """Move gradients here from the buckets in which they are."""
        for parameter, view in self.view.items():
            if parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)


def buckets_of(params: Sequence[nn.Parameter], nbytes: float, comm: Comm | None) -> list[Bucket]:
    """Of at most `nbytes`, the last parameters first."""
    return [Bucket(group, comm) for group in cut(params, nbytes)]


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
    every = dict(enumerate(comm.all_gather_object(mine)))
    used_on = {rank: set(theirs) for rank, theirs in every.items() if theirs is not None}
    first, *others = used_on
    for rank in others:
        for name in names.values():
            if (name in used_on[rank]) != (name in used_on[first]):
                with_it, without = (first, rank) if name in used_on[first] else (rank, first)
                raise ValueError(
                    f"{name} got a gradient on rank {with_it} and none on rank {without}; {STATIC}"
                )
    return {parameter for parameter, name in names.items() if name in used_on[first]}
