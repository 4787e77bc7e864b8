"""Data, models and comparisons that the checks of several labs share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.course.findings import brief, fail


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed elements, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def detached(x: Any) -> Any:
    """A tensor without its graph, so that it can be sent; any other value unchanged."""
    return x.detach() if isinstance(x, Tensor) else x


def small_model() -> nn.Sequential:
    """A small model, the same on all ranks; not all 8 parameter sizes are divisible by 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        )


def some_rows(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that grow from row to row, so that gradients differ between ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randn(rows, 3, generator=generator) * torch.arange(1, rows + 1)[:, None]


def right_gradients(size: int, seed: int = 0, rows: int = 0) -> dict[str, Tensor]:
    """The gradients that a single process computes on the whole batch."""
    model, (x, y) = small_model(), some_rows(rows or 4 * size, seed)
    F.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_bytes() -> list[int]:
    """Bytes of each gradient of the small model, in the order of the parameters."""
    return [p.nbytes for p in small_model().parameters()]


class Passing(torch.autograd.Function):
    """The identity, with a callback in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return gradient, None


def is_a_cut(rank: int, counts: Any, gradients: int) -> None:
    """Fail unless `counts`, returned by `rank`, splits `gradients` gradients into buckets."""
    right = isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts)
    if not right or sum(counts) != gradients:
        fail(
            f"rank {rank} returned {brief(counts)}, which does not split {gradients} gradients "
            "into buckets.",
            expected=f"a list of positive integers that sum to {gradients}",
            hint="The first number counts the gradients of the first bucket, in backward's order.",
        )
