"""The two halves of backward apart: the gradient of the input now, that of the weights later.

    backward of y = x Wᵀ + b      input    dx = dy W                 the stage before waits for it
                                  weight   dW = dyᵀ x, db = Σ dy     no stage waits for it

Inside `deferring`, each plain nn.Linear, and any module with a `_labkit_later`, puts its second
half on a list, with the x and dy that it needs; `run_later` runs the list as a backward, with every
hook. The first half runs inside `deferring`, too, for recompute. Norms and embeddings get their
gradients with the first half: they cost little.

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

Later = list[Callable[[], Tensor]]  # each gives a scalar, whose backward makes the gradients


@contextmanager
def deferring(module: nn.Module, later: Later) -> Iterator[None]:
    """What `module` computes in this block has a backward that puts its gradients of weights on
    the list `later`."""
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


def run_later(later: Later, also: Iterable[nn.Parameter] = ()) -> None:
    """Compute what is on the list, and empty it. `also`: parameters that have their gradients
    already, and whose hooks are called in this backward."""
    roots = [make() for make in later]
    roots += [p.reshape(-1)[:0].sum() for p in also]  # adds zeros
    later.clear()
    if roots:
        torch.autograd.backward(roots)


def _is_plain(part: nn.Module) -> bool:
    """A linear layer as torch has it, whose weight is a parameter that is trained."""
    if type(part).forward is not nn.Linear.forward or "forward" in part.__dict__:
        return False
    weight: Any = part.weight
    return bool(weight.is_leaf and weight.requires_grad)


def _deferred(linear: nn.Linear, later: Later, x: Tensor) -> Tensor:
    """Takes the place of the layer's `forward`."""
    if not torch.is_grad_enabled():
        return F.linear(x, linear.weight, linear.bias)
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    return _InputHalf.apply(anchor, x, linear, later)


class _InputHalf(torch.autograd.Function):
    """x [..., in] -> [..., out]; its backward computes dx, and keeps x and dy for dW.

    Parameters are no inputs: autograd would call their hooks here already, with nothing. The anchor
    has the backward run where x needs no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, linear: nn.Linear, later: Later) -> Tensor:
        weight, bias = linear.weight, linear.bias
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        # Detached: else autocast keeps the cast weight, for users outside, too, without a gradient.
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
    """Computes nothing; its backward returns the gradients of the parameters, which
    `gradients(x, dy)` yields in their order."""

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
