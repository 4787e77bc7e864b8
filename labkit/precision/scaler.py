"""Loss scaling: keeps small fp16 gradients from underflowing; all ranks step or skip together.

fp16's smallest positive number is 2^-24, and many gradients are smaller. So the loss is scaled:

    loss * S -> backward -> gradients * S (fp16) -> / S (fp32) -> clip -> step
                                              \\
                                               inf or NaN?   skip the step, S <- S / 2
                                               N good steps?                S <- S * 2

        rank 0   gradients finite     S  \\
        rank 1   a gradient is inf  inf   >  max = inf: all ranks skip
        rank 2   has no gradient      0  /

The max is an all-reduce of 4 bytes per step. Without it, a rank in ZeRO, tensor or pipeline
parallelism, which sees only its own gradients, would skip steps that other ranks take.

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, sections 3.2 and 4;
growth and back-off, state and methods: torch.amp.GradScaler.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from labkit.comm import Comm
from labkit.precision.dynamic_scale import DynamicScale
from labkit.precision.shadow_optimizer import ShadowOptimizer
from labkit.precision.unscaling import (
    Trained,
    check_not_clipped,
    check_owner,
    forget_clipped,
    parameters_of,
    still_scaled,
    unscale,
)

Outputs = TypeVar("Outputs", torch.Tensor, list[Any], tuple[Any, ...])


@dataclass
class PendingStep:
    """One step of an optimizer or module, from unscaling to update."""

    trained: Trained
    parameters: set[torch.Tensor]
    reduced: torch.Tensor  # shape (): inf, the scale, or 0; see the diagram above
    still_scaled: list[tuple[int, int]]  # 16-bit gradients that an optimizer unscales in its step
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)

    @cached_property
    def value(self) -> float:
        return self.reduced.item()


class GradScaler:
    """Like `torch.amp.GradScaler`, but all ranks skip the same steps.

    >>> scaler.scale(loss).backward()
    >>> scaler.unscale_(optimizer)            # only to clip or inspect gradients
    >>> clip_grad_norm(optimizer, 1.0)
    >>> scaler.step(optimizer)                # skipped if a gradient is inf or NaN
    >>> scaler.update()

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        comm: the ranks that step together, such as the ranks of a mesh axis; by default all ranks.
        skip_bad_losses: if the loss was inf or NaN before scaling, skip the step silently, as torch
            does. By default, `step` raises ValueError: a smaller scale cannot help.

    Supports torch's optimizers on fp32 weights (or ZeRO3 shards), MasterWeights and ZeroOptimizer.
    All ranks of `comm` must call `unscale_`, `step` and `update`; a rank without a loss calls
    `scale(torch.zeros(()))`, as `pipeline.step(x, y, scaler=scaler)` does."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        comm: Comm | None = None,
        *,
        skip_bad_losses: bool = False,
    ):
        self._scale = DynamicScale(init_scale, growth_factor, backoff_factor, growth_interval)
        self._enabled, self.skip_bad_losses = enabled, skip_bad_losses
        self.comm = None if comm is None else Comm.of(comm)
        self._losses: list[torch.Tensor] = []  # before scaling, since the last update
        self._pending: list[PendingStep] = []

    def __getstate__(self) -> dict[str, Any]:
        if self._pending:
            raise RuntimeError("GradScaler: copy or pickle it after update(), before unscale_()")
        return vars(self)

    # --- a step ---

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply the loss, or a list or tuple of tensors, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(x) for x in outputs)
        if not isinstance(outputs, torch.Tensor):
            raise ValueError(
                f"scale({type(outputs).__name__}): the loss must be a tensor, or a list or tuple "
                "of tensors"
            )
        loss = outputs.detach()  # reduced to one element; checked if a step is skipped
        self._losses.append(loss if loss.numel() < 2 else loss.abs().amax())
        # Uses a tensor of shape (), as torch does: a float would keep an fp16 loss in fp16.
        return outputs * torch.full((), self._scale.scale, device=loss.device, dtype=torch.float32)

    @torch.no_grad()
    def unscale_(self, trained: Trained) -> None:
        """Divide the gradients of an optimizer or a model by the scale, after the last backward.
        16-bit gradients (MasterWeights, ZeroOptimizer) are unscaled in `step`: clip them with
        `clip_grad_norm(optimizer, ...)`. Raises ValueError if called twice or after clipping."""
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        parameters = parameters_of(trained)
        if any(not x.parameters.isdisjoint(parameters) for x in self._pending):
            raise ValueError(
                "GradScaler.unscale_: these gradients have been unscaled since the last update(); "
                "call unscale_ once per optimizer, after the last backward of a step"
            )
        comm = self.comm or _all_ranks()
        check_owner(trained, comm)
        check_not_clipped(trained, self._scale.scale)
        nonfinite = unscale(trained, self._scale.scale)
        device = nonfinite.device if nonfinite is not None else parameters[0].device
        value = torch.full((), 0.0 if nonfinite is None else self._scale.scale, device=device)
        if nonfinite is not None:
            value.masked_fill_(nonfinite > 0, torch.inf)
        if comm is not None:
            comm.all_reduce(value, "max")
        self._pending.append(PendingStep(trained, {*parameters}, value, still_scaled(trained)))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if necessary, and step if all ranks' gradients are finite. Returns
        the result of `optimizer.step`, or None if the step is skipped. Raises ValueError on a
        second step before `update`; if gradients are missing, or 16-bit gradients changed while
        scaled; if ranks differ in scale; and, after skipping, if the loss itself was inf or NaN."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or kwargs.get("closure"):
            raise ValueError("GradScaler.step: a closure would compute scaled gradients; omit it")
        self._check_scaled("step")
        pending = self._pending_of(optimizer)
        if any(optimizer is other for other in pending.stepped):
            raise ValueError(
                "GradScaler.step: this optimizer has stepped since the last update(); call "
                "scaler.update() once, at the end of each step"
            )
        if pending.still_scaled and pending.still_scaled != still_scaled(optimizer):
            raise ValueError(
                f"GradScaler: 16-bit gradients of {type(optimizer).__name__} were changed after "
                "unscale_. They stay scaled until the step, which unscales them in float32, so "
                "clipping by the model, or torch's clip_grad_norm_, sees norms that are too "
                "large. Use labkit's clip_grad_norm(optimizer, max_norm)"
            )
        pending.stepped.append(optimizer)
        forget_clipped(optimizer)
        if not self._must_skip(pending):
            return optimizer.step(**kwargs)
        if isinstance(optimizer, ShadowOptimizer):
            optimizer.skip()
        self._check_losses()
        return None

    def update(self, new_scale: float | None = None) -> None:
        """End the step: update the scale, or set it to `new_scale`. Ignores an optimizer without a
        gradient on any rank if others have gradients; drops a step that was unscaled but not taken.
        Raises ValueError without a step, or if the scale is below 1 after 20 skips in a row."""
        if not self._enabled:
            return
        steps, self._pending, self._losses = self._pending, [], []
        for step in steps:
            if isinstance(step.trained, ShadowOptimizer) and not step.stepped:
                step.trained.skip()  # drops its gradient_factor
        if new_scale is not None:
            self._scale.load_state_dict({**self._scale.state_dict(), "scale": float(new_scale)})
        elif steps:
            with_gradients = [step for step in steps if step.value != 0] or steps
            self._scale.after_step(skipped=any([self._must_skip(step) for step in with_gradients]))
        else:
            raise ValueError("GradScaler.update: no step since the last update(); call step first")
        self._scale.check_can_recover()

    # --- the decision ---

    def _pending_of(self, optimizer: torch.optim.Optimizer) -> PendingStep:
        parameters = {*parameters_of(optimizer)}
        for pending in self._pending:
            if parameters <= pending.parameters:
                return pending
        self.unscale_(optimizer)  # raises if any gradient is already unscaled
        return self._pending[-1]

    def _must_skip(self, pending: PendingStep) -> bool:
        if pending.value == 0:
            raise ValueError(
                "GradScaler: no parameter of this optimizer has a gradient on any rank; call "
                "scaler.scale(loss).backward() first, and zero_grad() after the step"
            )
        if pending.value not in (self._scale.scale, torch.inf):
            raise ValueError(
                f"GradScaler: the scale is {self.get_scale():g} on this rank and {pending.value:g} "
                "on another; create the same scaler and load the same state on every rank"
            )
        return pending.value == torch.inf

    def _check_scaled(self, method: str) -> None:
        if not self._losses:
            raise ValueError(
                f"GradScaler.{method}: nothing has been scaled since the last update(); call "
                "scaler.scale(loss).backward() instead of loss.backward()"
            )

    def _check_losses(self) -> None:
        bad = [x for x in self._losses if not torch.isfinite(x).all()]
        if bad and not self.skip_bad_losses:
            raise ValueError(
                f"GradScaler: the loss was {bad[0].item()} before scaling, so the cause is not "
                "the scale, but NaN or inf in the batch or the weights, or an overflow in "
                "forward. labkit.find_nonfinite(model, *batch), inside the same autocast region "
                "as the forward, reports where it begins. The step was skipped on all ranks; "
                "GradScaler(skip_bad_losses=True) skips silently"
            )

    # --- state ---

    def get_scale(self) -> float:
        return self._scale.scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def skipped(self) -> int:
        return self._scale.skipped

    def state_dict(self) -> dict[str, Any]:
        """torch.amp.GradScaler's state, equal on all ranks; empty if disabled."""
        return self._scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load labkit's or torch's state; call on all ranks. Raises ValueError if it is invalid."""
        if self._enabled:
            self._scale.load_state_dict(state_dict)


def _all_ranks() -> Comm | None:
    try:
        return Comm()
    except RuntimeError:  # this process is not a rank
        return None
