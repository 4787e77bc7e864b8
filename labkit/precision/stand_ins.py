"""An optimizer that steps on something else than the model's parameters.

    the user's loop, a scheduler          StandIns                inner, any torch optimizer
    param_groups with the parameters  ->  options handed down ->  the same groups, with stand-ins

A stand-in is an fp32 copy (labkit/precision/master.py), a piece of a parameter, or both
(labkit/parallel/zero.py). Groups, their options and the state of each stand-in are torch's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

LOW = (torch.bfloat16, torch.float16)  # too coarse to add a small update to


def fp32_of(x: torch.Tensor) -> torch.Tensor:
    """What an optimizer can step on: `x` itself, or a copy in fp32 where `x` has fewer bits."""
    return x.detach().float() if x.dtype in LOW else x.detach()


class StandIns(torch.optim.Optimizer):
    """`param_groups` are the model's, `state` is that of `inner`, which steps on the stand-ins."""

    inner: torch.optim.Optimizer
    defaults: dict[str, Any]

    def _step_on(
        self,
        stand_ins: Mapping[torch.Tensor, Sequence[nn.Parameter]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        defaults: dict[str, Any],
    ) -> None:
        """Make `inner`, from what stands for each parameter. Parameters without are left alone."""
        groups = [
            {**_options(group), "params": [x for p in group["params"] for x in stand_ins.get(p, ())]}
            for group in self.param_groups
        ]
        self.inner = optimizer_cls(groups, **defaults)
        self.defaults = self.inner.defaults
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(_options(its))
        self.state = self.inner.state

    def _hand_down_options(self) -> None:
        """Schedulers change the learning rate of the outer groups."""
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            its.update(_options(mine))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            raise ValueError(
                f"{type(self).__name__}: groups cannot be added later; give all of them when the "
                "optimizer is made (a frozen parameter may be among them, but not be thawed)"
            )
        super().add_param_group(param_group)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in group.items() if key not in ("params", "param_names")}


def value_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of `step(closure)` gives, its gradients made."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
