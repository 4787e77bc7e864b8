"""When the replicas of a stage average their gradients: a pipeline runs many backwards in a step.

    1F1B, the last of 3 stages    F0 B0 F1 B1 F2 B2
    DDP, stage 1 of ZeRO                         └ here, once          2 (d-1)/d G
    stage 2 of ZeRO                  B0    B1    B2 in each      (m+1) (d-1)/d G
    ZeRO-3                        F0 B0 F1 B1 F2 B2 in each          3m (d-1)/d G

Legend: d replicas, m micro-batches, G bytes of the stage's parameters, and of their gradients; what
one rank sends in a step.

Stages 2 and 3 do without whole gradients, or weights, so they must send as often as these are made
and used. That is right, and in a pipeline, whose micro-batches are many, dear: (m+1)/2 and 3m/2
times what DDP sends. DeepSpeed's PipelineEngine refuses both; Megatron-LM's distributed optimizer
is stage 1. Here they run, and `predict.bytes_by_axis` says what they cost. Refused is what would be
wrong, or dearer still: a schedule that puts the gradients of weights off, with either; a tied
embedding in ZeRO-3 (tied.py); updates without a flush, with any of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from labkit.parallel.common.agreement import owner_of
from labkit.parallel.common.sharder import Sharder, fulfils
from labkit.schedules.actions import Action, Schedule

BACKWARD = ("backward", "weight")


def wrapped(
    stages: Sequence[nn.Module],
    own: Sequence[int],
    size: int,
    wrap: Callable[[nn.Module], nn.Module] | None,
) -> list[nn.Module]:
    """`stages`, those of this rank in what `wrap` makes of them: what has nothing to train needs
    nothing around it.

    Raises ValueError, on all ranks, where two stages of one rank have a parameter in common: each
    wrapper would average it for itself."""
    found = list(stages)
    if wrap is None:
        return found
    for index, stage in enumerate(stages):
        for other in range(index + size, len(stages), size):
            if not {*stage.parameters()}.isdisjoint(stages[other].parameters()):
                raise ValueError(
                    f"stages {index} and {other} are both on rank {index % size} and have a "
                    "parameter in common, which wrap= would give two owners; untie it (as "
                    "tied=False), or choose chunks that put the two on different ranks"
                )
    for index in own:
        if any(p.requires_grad for p in found[index].parameters()):
            found[index] = wrap(found[index])
    return found


def last_backward(actions: Iterable[Action], stages: Sequence[Any]) -> Action | None:
    """The last action of this rank that makes gradients of parameters."""
    makes = [any(p.requires_grad for p in one.module.parameters()) for one in stages]
    found = [one for one in actions if one.phase in BACKWARD and makes[one.chunk]]
    return found[-1] if found else None


def optimizers_that_send_once(module: nn.Module, schedule: Schedule) -> list[Any]:
    """Those whose averages can wait for the last backward, of all that have parameters here.

    Raises ValueError for one that sends in each, in a schedule of which every backward is two."""
    owners = {id(owner): owner for owner in map(owner_of, module.parameters())}.values()
    found = [one for one in owners if fulfils(one, Sharder)]
    halves = any(action.phase == "weight" for actions in schedule for action in actions)
    for one in found:
        if halves and not one.sends_once:
            raise ValueError(
                f"a {type(one).__name__} of stage 2 sends gradients in every backward and frees "
                "them, and this schedule has two for each micro-batch; choose one that does not "
                'put the gradients of weights off, as "1f1b", or stage 1, which sends once in a '
                "step"
            )
    return [one for one in found if one.sends_once]
