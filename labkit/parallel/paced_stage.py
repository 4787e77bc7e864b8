"""A paced pipeline stage, which simulates long computations by sleeping.

Four ranks computing on two cores slow each other down, so the measured bubble reflects the machine
rather than the schedule. Sleeping ranks do not compete for cores. Outputs (y = x * weight) and
gradients are real, so tests can detect a schedule that loses a gradient.

    forward   sleeps forward_s
    backward  sleeps input_s, then weight_s; default: 2 forward_s in total
    input     sleeps input_s; the weight half, which the schedule runs later, sleeps weight_s
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.parallel.pipeline.deferred_weights import Later, WeightHalf


class PacedStage(nn.Module):
    """x [rows, ..., width] -> x * weight, of the same shape, after the given delays.

        forward_s            per micro-batch, for any number of rows
        backward_s           default: input_s + weight_s if both are given, else 2 forward_s
        input_s, weight_s    halves of backward; default: equal, or the remainder if one is given

    Raises ValueError for negative times, and for halves that do not add up to backward_s."""

    def __init__(
        self,
        forward_s: float,
        backward_s: float | None = None,
        input_s: float | None = None,
        weight_s: float | None = None,
        *,
        width: int = 8,
    ):
        super().__init__()
        if backward_s is None:
            halves = None if input_s is None or weight_s is None else input_s + weight_s
            backward_s = 2 * forward_s if halves is None else halves
        if input_s is None:
            input_s = backward_s / 2 if weight_s is None else backward_s - weight_s
        if weight_s is None:
            weight_s = backward_s - input_s
        times = {"forward_s": forward_s, "input_s": input_s, "weight_s": weight_s}
        for name, seconds in times.items():
            if not seconds >= 0:
                raise ValueError(f"{name}={seconds}: choose 0 seconds or more")
        if abs(input_s + weight_s - backward_s) > 1e-9 * (1 + backward_s):
            raise ValueError(
                f"input_s={input_s} and weight_s={weight_s} do not add up to "
                f"backward_s={backward_s}; omit one of the three"
            )
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.ones(width))
        self._labkit_later: Later | None = None  # see pipeline/deferred_weights.py

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    def forward(self, x: Tensor) -> Tensor:
        return _Paced.apply(x, self.weight, self, self._labkit_later)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Iterator[Tensor]:
        time.sleep(self.weight_s)
        yield (dy * x).reshape(-1, x.shape[-1]).sum(0)

    def extra_repr(self) -> str:
        return f"paced: {self.forward_s=}, {self.input_s=}, {self.weight_s=}".replace("self.", "")


class _Paced(torch.autograd.Function):
    """y = x * weight; with `later`, backward defers the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: PacedStage, later: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stage, ctx.weight, ctx.later = stage, weight, later
        time.sleep(stage.forward_s)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        time.sleep(ctx.stage.input_s)
        dx = dy * weight if ctx.needs_input_grad[0] else None
        if ctx.later is None:
            return dx, *ctx.stage.weight_gradient(x, dy), None, None
        half = partial(WeightHalf.apply, ctx.stage.weight_gradient, x.detach(), dy, ctx.weight)
        ctx.later.append(half)
        return dx, None, None, None
