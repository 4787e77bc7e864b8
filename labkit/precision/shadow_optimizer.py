"""An optimizer that steps on shadow parameters instead of the model's parameters.

    the user's loop, a scheduler          ShadowOptimizer         inner, any torch optimizer
    param_groups with the parameters  ->  options handed down ->  the same groups, with shadows

A shadow is a parameter's fp32 copy (master.py), a slice, or both (parallel/zero/zero.py).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

LOW = (torch.bfloat16, torch.float16)  # too coarse to add small updates to


def fp32_of(x: torch.Tensor) -> torch.Tensor:
    """Detach `x`, and convert it to fp32 if its dtype has 16 bits."""
    return x.detach().float() if x.dtype in LOW else x.detach()


def fp32_gradient(gradient: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    """A 16-bit `gradient` as a new fp32 tensor, times `factor`; a wider `gradient` unchanged."""
    if gradient.dtype not in LOW:
        return gradient
    copied = gradient.float()
    return copied if factor is None else copied.mul_(factor)


def sync_master_from_param(master: torch.Tensor, x: torch.Tensor) -> None:
    """Update the master where a write made `x` differ from the rounded master."""
    master.copy_(torch.where(master.to(x.dtype) == x, master, x.float()))


class ShadowOptimizer(torch.optim.Optimizer):
    """`param_groups` lists the model's parameters; `inner` steps on shadows and owns `state`."""

    inner: torch.optim.Optimizer
    defaults: dict[str, Any]
    _depends_on = "model"  # for errors: what a loaded state must match

    # Multiplies 16-bit gradients, in fp32, in the next step; set by a loss scaler and by clipping.
    gradient_factor: float | torch.Tensor | None = None

    def own_gradients(self) -> list[torch.Tensor]:
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]

    def skip(self) -> None:
        """Called instead of `step` if gradients are inf or NaN."""
        self.gradient_factor = None

    def _step_on(
        self,
        shadows: Mapping[torch.Tensor, Sequence[nn.Parameter]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        defaults: dict[str, Any],
    ) -> None:
        groups = []
        for group in self.param_groups:
            params = [x for p in group["params"] for x in shadows.get(p, ())]
            groups.append({**options_of(group), "params": params})
        self.inner = optimizer_cls(groups, **defaults)
        self.defaults = self.inner.defaults
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(options_of(inner_group))
        self.state = self.inner.state
        for x in (x for p, copies in shadows.items() for x in copies if x.dtype != p.dtype):
            self.state[x] = self.state[x]  # registers master copies before the first step

    def _check_frozen(self, trained: Container[torch.Tensor]) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        if unfrozen := [p for p in every if p.grad is not None and p not in trained]:
            raise ValueError(
                f"{type(self).__name__}: {len(unfrozen)} parameters, the first of shape "
                f"{list(unfrozen[0].shape)}, have gradients now but were frozen when the optimizer "
                "was created, so it does not train them; create it after requires_grad_(True)"
            )

    def _hand_down_options(self) -> None:
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update(options_of(group))

    # --- this rank's state; labkit.checkpoints saves all ranks' state ---

    def _masters(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def after_load(self) -> None:
        raise NotImplementedError

    def _position(self) -> list[int]:
        """The rank and number of ranks to which this state belongs."""
        return [0, 1]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for the same rank of the same number of ranks and the same model."""
        self._hand_down_options()  # a scheduler may have changed options
        return {**self.inner.state_dict(), "masters": self._masters(), "whose": self._position()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for a state of a different rank, number of ranks or model."""
        inner_state, own = dict(state_dict), self._masters()
        masters, position = inner_state.pop("masters", None), inner_state.pop("whose", None)
        if position != self._position() or [x.shape for x in masters] != [x.shape for x in own]:
            raise ValueError(
                f"{type(self).__name__}: this state is from an optimizer with a different "
                f"{self._depends_on}; to load it here, save it with labkit.save_checkpoint"
            )
        self.inner.load_state_dict(inner_state)
        self.state = self.inner.state
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(options_of(inner_group))
        with torch.no_grad():
            for x, loaded in zip(own, masters, strict=True):
                x.copy_(loaded)
        self.after_load()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            raise ValueError(
                f"{type(self).__name__}: groups cannot be added later; pass all groups when you "
                "create the optimizer (frozen parameters may be included and stay frozen)"
            )
        super().add_param_group(param_group)


class NotCopyable:
    """Has hooks on parameters: a copy would lack these hooks and silently do nothing."""

    copy_advice: str  # what to do instead

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; {self.copy_advice}")


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    return {key: x for key, x in group.items() if key not in ("params", "param_names")}


def value_of(closure: Callable[[], Any] | None) -> Any:
    """The value of an optimizer's `closure`, if any, computed with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
