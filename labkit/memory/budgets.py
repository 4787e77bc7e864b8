"""A model edited so that its step stays within a budget of memory, with the least recomputation.

measure      one step for each choice: what each keeps, needs and computes again (measuring.py)
search       the least recomputation within the budget                           (chooser.py)
apply        every block does what was chosen for it                             (edits.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labkit.memory.chooser import Costs, Plan, least_recompute
from labkit.memory.edits import Choices
from labkit.memory.measuring import measure
from labkit.memory.offload import Offload


@dataclass(frozen=True)
class Chosen:
    """The plan, what it was made from, and the edit: `remove()` takes it back."""

    plan: Plan
    costs: Costs
    edit: Choices

    def remove(self) -> None:
        self.edit.remove()


def choose_activations(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    budget_bytes: int,
    *,
    blocks: Sequence[nn.Module] | None = None,
    core: str = "attn.core",
    offload: Offload | None = None,
    most_moved_bytes: int = 0,
    held_bytes: int | None = None,
) -> Chosen:
    """Have each block keep, compute again or move its activations, so that forward and backward
    hold at most `budget_bytes`, and as little as possible is computed twice.

    Args:
        step: forward and loss, a scalar; it is run once for each choice, with its backward.
        blocks, core: as for `labkit.Recompute`.
        offload, most_moved_bytes: to offload, too: what of `offload_activations(model)`, and how
            much of it the bus can carry while a forward runs. Without them nothing is moved.
        held_bytes: as for `measure`; an optimizer's state counts once it has made a step.

    The optimizer's own step is not part of it.
    Raises ValueError where nothing fits, and names the smallest budget that can be met.

    >>> chosen = choose_activations(model, lambda: loss(model(x), batch), budget_bytes=10**9)
    >>> print(chosen.plan)
    """
    costs = measure(model, step, blocks, core, offload, held_bytes)
    plan = least_recompute(costs, budget_bytes, most_moved_bytes)
    return Chosen(plan, costs, Choices(model, plan.choices, blocks, core, offload))
