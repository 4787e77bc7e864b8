"""Backward in two halves: the input gradient now, the weight gradients later.

    backward of y = x Wᵀ + b      input    dx = dy W                 the previous stage waits for dx
                                  weight   dW = dyᵀ x, db = Σ dy     no stage waits for dW, db

Inside `deferring`, each plain nn.Linear, and any module with a `_labkit_later`, appends its weight
half to a list; `run_later` runs these halves as one backward, with all hooks. The input half also
runs inside `deferring` (for recompute) and computes the cheap gradients of norms and embeddings.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Later = list[Callable[[], Tensor]]  # each returns a scalar; its backward computes the gradients


@contextmanager
def deferring(module: nn.Module, later: Later) -> Iterator[None]:
    """Layers of `module` whose forward runs in this block append their weight halves to `later`."""
    linears: list[Any] = []
    others: list[tuple[Any, Later | None]] = []
    part: Any
    for part in module.modules():
        if _is_plain(part):
            part.forward = partial(_deferred, part, later)
            linears.append(part)
        elif hasattr(part, "_labkit_later"):
            others.append((part, part._labkit_later))
            part._labkit_later = later
    try:
        yield
    finally:
        for part in linears:
            del part.forward
        for part, before in others:
            part._labkit_later = before


def run_later(later: Later, hooked: Iterable[nn.Parameter] = ()) -> None:
    """Run and clear the halves in `later`, as one backward that also runs the hooks of `hooked`."""
    roots = [make() for make in later]
    roots += [p.reshape(-1)[:0].sum() for p in hooked]  # adds zero gradients
    later.clear()
    if roots:
        torch.autograd.backward(roots)


def _is_plain(part: nn.Module) -> bool:
    if type(part).forward is not nn.Linear.forward or "forward" in part.__dict__:
        return False
    weight: Any = part.weight
    return bool(weight.is_leaf and weight.requires_grad)


def _deferred(linear: nn.Linear, later: Later, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(x, linear.weight, linear.bias)
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    return _InputHalf.apply(anchor, x, linear, later)


class _InputHalf(torch.autograd.Function):
    """x [..., in] -> [..., out]; backward computes dx, and keeps x and dy for dW. Parameters are
    not inputs, because autograd would call their hooks too early. The anchor lets backward run even
    if x needs no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, linear: nn.Linear, later: Later) -> Tensor:
        weight, bias = linear.weight, linear.bias
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        # Detached: otherwise, autocast would cache a cast weight without grad_fn, for later uses.
        return F.linear(x, weight.detach(), None if bias is None else bias.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        parameters = [p for p in (ctx.weight, ctx.bias) if p is not None and p.requires_grad]
        ctx.later.append(partial(WeightHalf.apply, _of_linear, x.detach(), dy, *parameters))
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[1] else None
        return None, dx, None, None


class WeightHalf(torch.autograd.Function):
    """Forward computes nothing; backward returns parameter gradients, from `gradients(x, dy)`."""

    @staticmethod
    def forward(ctx: Any, gradients: Any, x: Tensor, dy: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, dy)
        ctx.gradients, ctx.dtypes = gradients, [p.dtype for p in parameters]
        return dy.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        gradients = ctx.gradients(*ctx.saved_tensors)
        return None, None, None, *(g.to(dtype) for dtype, g in zip(ctx.dtypes, gradients))


def _of_linear(x: Tensor, dy: Tensor) -> Iterator[Tensor]:
    dy = dy.reshape(-1, dy.shape[-1])
    yield dy.T @ x.reshape(-1, x.shape[-1]).to(dy.dtype)
    yield dy.sum(0)
