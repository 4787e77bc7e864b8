"""Parameters that stand on several ranks of a pipeline, as an embedding that is the head, too.

    stage 0   embed ─ ...          dE from looking tokens up      ╲
    stage 3   ... ─ head           dE from scoring tokens         ╱  one all-reduce of the two ranks

In one process it is one parameter, with the sum of both gradients. Here each owner has a copy, all
start as the first owner's, and all take the same step by the same sum. The owners are a group of
their own, the embedding group; on a mesh there is one for each data- and tensor-parallel index:

    Mesh(pp=4, dp=2, tp=2), 16 ranks      {0, 12}  {1, 13}  {2, 14}  {3, 15}

    travels     2(2-1)/2 V w / t elements of an embedding [V, w], after its replicas are averaged.
                Of a ZeroOptimizer's, this rank's share of that, 1/dp: both owners have the same
                elements of it, for it is alone in its bucket.

Source: Megatron-LM, the embedding groups of `initialize_model_parallel`, and the bucket of its own
that a shared embedding has under the distributed optimizer (`_ParamAndGradBuffer`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.agreement import owner_of
from labkit.parallel.common.sharder import Sharder, TiedGradient, fulfils, shards_parameters

TAG = 104


def owners_of(stages: Sequence[nn.Module], size: int) -> dict[nn.Parameter, tuple[int, ...]]:
    """The parameters that are found on several ranks, with these ranks; stage s is on rank
    s % size."""
    found: dict[nn.Parameter, set[int]] = {}
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            found.setdefault(parameter, set()).add(index % size)
    return {p: tuple(sorted(ranks)) for p, ranks in found.items() if len(ranks) > 1}


class Tied:
    """The tied parameters of this rank. All ranks of `comm` make it at once."""

    def __init__(self, owners: dict[nn.Parameter, tuple[int, ...]], comm: Comm):
        groups = {ranks: _group_of(ranks, comm) for ranks in dict.fromkeys(owners.values())}
        self._copies = [(p, group) for p, ranks in owners.items() if (group := groups[ranks])]
        self._gradients: list[tuple[Any, Any]] = []  # of the step, each with its group
        for parameter, group in self._copies:
            group.broadcast(parameter.detach(), 0)

    def begin(self) -> None:
        """Before a step: the gradients of earlier steps, summed already, are put aside."""
        trained = [(p, group) for p, group in self._copies if p.requires_grad]
        there = trained if torch.is_grad_enabled() else []
        self._gradients = [(_gradient_of(parameter, group), group) for parameter, group in there]
        for gradient, _ in self._gradients:
            gradient.put_aside()

    def sum_gradients(self) -> None:
        """After the last backward: every owner gets the sum of all owners' gradients."""
        for gradient, group in self._gradients:
            gradient.sum_copies(group)


class WholeGradient:
    """That of `parameter`, as it lies in `.grad`: in DDP's bucket, which each step fills anew."""

    def __init__(self, parameter: nn.Parameter, group: Any):
        self.parameter, self.is_first = parameter, group.rank == 0

    def put_aside(self) -> None:
        """What earlier steps have left is on all owners: the first one adds to it where it lies,
        the others begin anew."""
        if self.parameter.grad is not None and not self.is_first:
            self.parameter.grad.zero_()

    def sum_copies(self, group: Any) -> None:
        """All owners' gradients of this step, and the first one's of the steps before."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.all_reduce(parameter.grad)


def _gradient_of(parameter: nn.Parameter, group: Any) -> TiedGradient:
    """Whole, or this rank's share of it."""
    owner = owner_of(parameter)
    if fulfils(owner, Sharder):
        return owner.gradient_of_copy(parameter)
    return WholeGradient(parameter, group)


def check_ties(
    stages: Sequence[nn.Module], owners: dict[nn.Parameter, tuple[int, ...]], comm: Comm
) -> None:
    """Raises ValueError, on all ranks, where a tied parameter is in a ZeRO3: it cuts what is in
    front of it and behind it, too, elsewhere on each owner. One that is cut already has left a
    parameter in another stage that belongs to it."""
    mine = ""
    for index, stage in enumerate(stages):
        own = {*stage.parameters()}
        for name, p in stage.named_parameters():
            owner = owner_of(p)
            strange = isinstance(owner, nn.Module) and own.isdisjoint(owner.parameters())
            if shards_parameters(owner) and (p in owners or strange):
                mine = mine or f"{name} {list(p.shape)} of stage {index}"
    for told in comm.all_gather_object(mine):
        if told:
            raise ValueError(
                f"{told} is tied over stages, and one of them is in ZeRO3, which keeps another "
                "part of it on each owner, so that the copies would come apart; untie it (as "
                "tied=False), or use DDP or a ZeroOptimizer"
            )


def _group_of(ranks: tuple[int, ...], comm: Comm) -> "Comm | Owners | None":
    """The owners as a group of their own; None on the others."""
    if len(ranks) == comm.size:
        return comm
    if comm.parallel is not None or comm.size == Comm().size:
        return comm.subgroup(ranks, shared=True)
    return Owners(ranks, comm) if comm.rank in ranks else None


class Owners:
    """Some ranks of a group that is a part of the world, as one line of a mesh: the others are not
    here to help make a group, so each of these sends to each. (Two send what an all-reduce does.)
    """

    def __init__(self, ranks: tuple[int, ...], comm: Comm):
        self.ranks, self.comm, self.rank = ranks, comm, ranks.index(comm.rank)

    def broadcast(self, x: Tensor, src: int) -> None:
        """Replace `x` on all owners by that of owner `src`."""
        x.copy_(self._of_all(x)[src])

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum of all owners' `x`, added up in the same order everywhere."""
        x.copy_(torch.stack(self._of_all(x)).sum(0))

    def _of_all(self, x: Tensor) -> list[Tensor]:
        rank = self.comm.rank
        room = {one: x if one == rank else torch.empty_like(x) for one in self.ranks}
        others = [one for one in self.ranks if one != rank]
        handles = [self.comm.irecv(room[one], one, TAG) for one in others]
        handles += [self.comm.isend(x, one, TAG) for one in others]
        for handle in handles:
            handle.wait()
        return list(room.values())
