"""Averages the gradients of replicas, and sums the gradients of a tied parameter's copies.

Replicas of a stage average their gradients. A pipeline runs many backwards per step:

    1F1B, the last of 3 stages    F0 B0 F1 B1 F2 B2
    DDP, ZeRO-1                                  └ once per step      2 (d-1)/d G
    ZeRO-2                           B0    B1    B2 each time    (m+1) (d-1)/d G
    ZeRO-3                        F0 B0 F1 B1 F2 B2 each time        3m (d-1)/d G

ZeRO-2 keeps no full gradients, so it communicates in every backward; ZeRO-3, without full weights,
also in every forward. DeepSpeed's PipelineEngine rejects both; labkit rejects only deferred weight
gradients in either, tied weights in ZeRO-3, and replicas in a schedule without a flush.

A tied parameter, such as an embedding shared with the head, is on several stages:

    stage 0   embed ─ ...          dE from the token lookup       ╲
    stage 3   ... ─ head           dE from the logits             ╱  one all-reduce over two ranks

Copies stay equal: each gets the same summed gradient. On a mesh, there is one embedding
group (the owners) per data- and tensor-parallel index:

    Mesh(pp=4, dp=2, tp=2), 16 ranks      {0, 12}  {1, 13}  {2, 14}  {3, 15}

    traffic     2(2-1)/2 V w / t elements of an embedding [V, w], after averaging over replicas;
                with a ZeroOptimizer, which gives tied weights their own bucket, 1/d of that

Legend: d replicas, m micro-batches, t tensor-parallel ranks, G bytes of the stage's gradients;
    traffic is per rank and step.
Source: Megatron-LM's `initialize_model_parallel` (groups) and `_ParamAndGradBuffer` (own bucket).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.ownership import owner_of
from labkit.parallel.common.sharder import Sharder, TiedGradient, implements, shards_parameters
from labkit.schedules.actions import Action, Schedule

TAG = 104


def wrapped(
    stages: Sequence[nn.Module], own: Sequence[int], size: int,
    wrap: Callable[[nn.Module], nn.Module] | None,
) -> list[nn.Module]:  # fmt: skip
    """`stages`, with this rank's trainable stages wrapped. Raises ValueError, on all ranks, if two
    stages of one rank share a parameter, which both wrappers would average."""
    stages = list(stages)
    if wrap is None:
        return stages
    for index, stage in enumerate(stages):
        for other in range(index + size, len(stages), size):
            if not {*stage.parameters()}.isdisjoint(stages[other].parameters()):
                raise ValueError(
                    f"stages {index} and {other} are both on rank {index % size} and share a "
                    "parameter, which wrap= would give two owners; untie it (tied=False), or "
                    "choose chunks that put these stages on different ranks"
                )
    for index in own:
        if any(p.requires_grad for p in stages[index].parameters()):
            stages[index] = wrap(stages[index])
    return stages


def last_backward(actions: Iterable[Action], stages: Sequence[Any]) -> Action | None:
    """The last action that adds to a parameter's gradient, or None if no parameter is trained."""
    trains = [any(p.requires_grad for p in stage.module.parameters()) for stage in stages]
    backwards = [a for a in actions if a.phase in ("backward", "weight") and trains[a.chunk]]
    return backwards[-1] if backwards else None


def optimizers_that_send_once(module: nn.Module, schedule: Schedule) -> list[Any]:
    """This rank's sharders that average once per step, in the last backward. Raises ValueError if
    any other sharder would run a schedule that splits backward into halves."""
    owners = {id(owner): owner for owner in map(owner_of, module.parameters())}.values()
    sharders = [owner for owner in owners if implements(owner, Sharder)]
    halves = any(action.phase == "weight" for actions in schedule for action in actions)
    for sharder in sharders:
        if halves and not sharder.sends_once:
            raise ValueError(
                f"a {type(sharder).__name__} with stage=2 sends and frees gradients in every "
                "backward, but this schedule has two backwards per micro-batch; choose a schedule "
                'that does not defer weight gradients, such as "1f1b", or stage=1, which sends '
                "once per step"
            )
    return [sharder for sharder in sharders if sharder.sends_once]


def owners_of(stages: Sequence[nn.Module], size: int) -> dict[nn.Parameter, tuple[int, ...]]:
    """Maps each parameter that several ranks hold to these ranks."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            ranks.setdefault(parameter, set()).add(index % size)
    return {p: tuple(sorted(owners)) for p, owners in ranks.items() if len(owners) > 1}


class Tied:
    """Parameters that several ranks share: broadcast once, with gradients summed in each step."""

    def __init__(self, owners: dict[nn.Parameter, tuple[int, ...]], comm: Comm):
        groups = {ranks: _group_of(ranks, comm) for ranks in dict.fromkeys(owners.values())}
        self._copies = [(p, group) for p, ranks in owners.items() if (group := groups[ranks])]
        self._gradients: list[tuple[TiedGradient, Any]] = []  # of this step, with their groups
        for parameter, group in self._copies:
            group.broadcast(parameter.detach(), 0)

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which are already summed."""
        self._gradients = []
        for parameter, group in self._copies:
            if parameter.requires_grad and torch.is_grad_enabled():
                owner = owner_of(parameter)
                gradient: TiedGradient = WholeGradient(parameter, group)
                if implements(owner, Sharder):  # this rank's share
                    gradient = owner.gradient_of_copy(parameter)
                gradient.set_aside()
                self._gradients.append((gradient, group))

    def sum_gradients(self) -> None:
        for gradient, group in self._gradients:
            gradient.sum_copies(group)


class WholeGradient:
    """The unsharded gradient of a tied parameter, used without ZeRO."""

    def __init__(self, parameter: nn.Parameter, group: Any):
        self.parameter, self.is_first = parameter, group.rank == 0

    def set_aside(self) -> None:
        """Every owner holds the sum of earlier steps; only the first keeps it, to count it once."""
        if self.parameter.grad is not None and not self.is_first:
            self.parameter.grad.zero_()

    def sum_copies(self, group: Any) -> None:
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.all_reduce(parameter.grad)


def check_ties(
    stages: Sequence[nn.Module], owners: dict[nn.Parameter, tuple[int, ...]], comm: Comm
) -> None:
    """Raises ValueError, on all ranks, if a parameter tied across stages is in a ZeRO3 on any of
    these stages: each owner would hold a different shard."""
    problem = ""
    for index, stage in enumerate(stages):
        parameters = {*stage.parameters()}
        for name, p in stage.named_parameters():
            owner = owner_of(p)
            elsewhere = isinstance(owner, nn.Module) and parameters.isdisjoint(owner.parameters())
            if shards_parameters(owner) and (p in owners or elsewhere):
                problem = problem or f"{name} {list(p.shape)} of stage {index}"
    for tied in comm.all_gather_object(problem):
        if tied:
            raise ValueError(
                f"{tied} is tied across stages, but one stage uses ZeRO3, which keeps a "
                "different shard on each owner, so the copies would diverge; untie it "
                "(tied=False), or use DDP or a ZeroOptimizer"
            )


def _group_of(ranks: tuple[int, ...], comm: Comm) -> "Comm | Owners | None":
    if len(ranks) == comm.size:
        return comm
    if comm.parallel is not None or comm.size == Comm().size:
        return comm.subgroup(ranks, shared=True)
    return Owners(ranks, comm) if comm.rank in ranks else None


class Owners:
    """Replaces a subgroup if `comm` covers only part of the world and cannot create subgroups: each
    owner sends to every other owner. (For two owners, this sends as much as an all-reduce.)"""

    def __init__(self, ranks: tuple[int, ...], comm: Comm):
        self.ranks, self.comm, self.rank = ranks, comm, ranks.index(comm.rank)

    def broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._exchange(x)[src])

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))  # in the same order everywhere

    def _exchange(self, x: Tensor) -> list[Tensor]:
        others = [rank for rank in self.ranks if rank != self.comm.rank]
        copies = {rank: torch.empty_like(x) if rank in others else x for rank in self.ranks}
        handles = [self.comm.irecv(copies[rank], rank, TAG) for rank in others]
        handles += [self.comm.isend(x, rank, TAG) for rank in others]
        for handle in handles:
            handle.wait()
        return list(copies.values())
