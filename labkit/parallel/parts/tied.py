"""Parameters that stand on several ranks of a pipeline, as an embedding that is the head, too.

    stage 0   embed ─ ...          dE from looking tokens up      ╲
    stage 3   ... ─ head           dE from scoring tokens         ╱  one all-reduce of the two ranks

In one process it is one parameter, with the sum of both gradients. Here each owner has a copy, all
start as the first owner's, and all take the same step by the same sum.

Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2); its embedding group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.parts.agreement import owner_of

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
        for parameter, group in self._copies:
            group.broadcast(parameter.detach(), 0)

    def begin(self) -> None:
        """Before a step: the gradients of earlier steps, summed already, are put aside. Raises
        ValueError for a copy whose gradients a strategy has in pieces: the sum would miss them."""
        for parameter, _ in self._copies:
            check_whole(parameter)
        self._before = [p.grad for p, _ in self._copies]
        for parameter, _ in self._copies:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """After the last backward: every owner gets the sum of all owners' gradients."""
        for (parameter, group), before in zip(self._copies, self._before, strict=True):
            if parameter.requires_grad and torch.is_grad_enabled():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                group.all_reduce(parameter.grad)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad


def check_whole(parameter: nn.Parameter) -> None:
    """Raises ValueError where it is in a ZeroOptimizer or ZeRO3."""
    owner = owner_of(parameter)
    if hasattr(owner, "gradient_pieces"):
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is tied over ranks of the pipeline and "
            f"in a {type(owner).__name__}, which keeps a part of its gradient: its copies would "
            "come apart; untie it (as tied=False), or put the stage in DDP and step with a torch "
            "optimizer"
        )


def _group_of(ranks: tuple[int, ...], comm: Comm) -> "Comm | Owners | None":
    """The owners as a group of their own; None on the others."""
    if len(ranks) == comm.size:
        return comm
    if comm.size == Comm().size:
        return comm.subgroup(ranks)
    return Owners(ranks, comm) if comm.rank in ranks else None


class Owners:
    """Some ranks of a group that is a part of the world, as one line of a mesh: the others are not
    here to help make a group, so each of these sends to each. (Two send what an all-reduce does.)
    """

    def __init__(self, ranks: tuple[int, ...], comm: Comm):
        self.ranks, self.comm = ranks, comm

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
