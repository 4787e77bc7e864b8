"""Parameters that stand on several ranks of a pipeline, as an embedding that is the head, too.

    stage 0   embed ─ ...          dE from looking tokens up      ╲
    stage 3   ... ─ head           dE from scoring tokens         ╱  one all-reduce of the two ranks

In one process it is one parameter, with the sum of both gradients. Here each owner has a copy, all
start as the first owner's, and all take the same step by the same sum.

Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2); its embedding group.
"""

from collections.abc import Sequence

import torch
from torch import nn

from labkit.comm import Comm


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
        groups: dict[tuple[int, ...], Comm | None] = {}
        for ranks in owners.values():
            if ranks not in groups:
                groups[ranks] = comm if len(ranks) == comm.size else comm.subgroup(ranks)
        self._copies = [(p, group) for p, ranks in owners.items() if (group := groups[ranks])]
        for parameter, group in self._copies:
            group.broadcast(parameter.detach(), 0)

    def begin(self) -> None:
        """Before a step: the gradients of earlier steps, summed already, are put aside."""
        self._before = [p.grad for p, _ in self._copies]
        for parameter, _ in self._copies:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """After the last backward: every owner gets the sum of all owners' gradients."""
        for (parameter, group), before in zip(self._copies, self._before, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group.all_reduce(parameter.grad)
            if before is not None:
                parameter.grad += before
