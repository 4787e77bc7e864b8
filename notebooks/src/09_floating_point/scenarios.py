"""Inputs for lab 09's exercises: sums in fp16, shards, values to quantize."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

# ---- sums in fp16


class Adder:
    """Adds and subtracts like an fp16-only processor.

    Raises ValueError for a number that fp16 cannot represent."""

    def __init__(self) -> None:
        self.calls, self.results = 0, {0.0}

    def add(self, a: float, b: float) -> float:
        return self._recorded(self._half(a) + self._half(b))

    def sub(self, a: float, b: float) -> float:
        return self._recorded(self._half(a) - self._half(b))

    def _half(self, x: float) -> np.float16:
        half = np.float16(x)
        if float(half) != x:
            raise ValueError(f"{x!r} is not an fp16 number; only add and sub create new ones")
        return half

    def _recorded(self, half: np.float16) -> float:
        self.calls += 1
        self.results.add(float(half))
        return float(half)


def run_sum(comm: Any, student: Callable[..., Any], values: list[float]) -> tuple[Any, bool, int]:
    """The result of my_sum, whether add or sub returned this result, and the number of calls."""
    adder = Adder()
    total = student(list(values), adder.add, adder.sub)
    return total, total in adder.results, adder.calls


def _halves(values: Sequence[float]) -> list[float]:
    return np.asarray(values, dtype=np.float16).astype(float).tolist()


_normal = np.random.default_rng(0).standard_normal(3000)
CASES = {
    "10,000 times 0.0001": _halves([1e-4] * 10_000),
    "2048, then 2,000 times 1": _halves([2048.0] + [1.0] * 2000),
    "3,000 gradients of all sizes": _halves((1e-3 * np.abs(_normal) * 10.0**_normal).tolist()),
}

# ---- int8 on ranks

SHARD = 192  # 3 blocks of 64, 12 of 16


def shard(rank: int) -> torch.Tensor:
    """A rank's values: magnitudes differ between blocks of 16, and one block is zero."""
    generator = torch.Generator().manual_seed(rank)
    sizes = 10.0 ** torch.arange(-6, 6).float().roll(rank)
    sizes[5] = 0.0
    return torch.randn(SHARD, generator=generator) * sizes.repeat_interleave(16)


def run_gather(comm: Any, student: Callable[..., Any], block: int) -> Any:
    """On a rank: the student's gather of this rank's shard with all other ranks' shards."""
    return student(comm, shard(comm.rank), block)


# ---- levels for 4-bit numbers

BITS = 4
BEST_MILLIONTHS = 20_270  # of the variance: the lowest error known


@cache
def sample(seed: int) -> torch.Tensor:
    """4,096 values, distributed like weights and gradients: many small ones, a few large ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, generator=generator, dtype=torch.float64)
    size = torch.randn(4096, generator=generator, dtype=torch.float64).mul(0.5).exp()
    return x * size


def codebook_error(levels: Sequence[float], seed: int = 1) -> float:
    """Mean squared error of new values rounded to the nearest level, relative to their variance."""
    x = sample(seed)
    table = torch.tensor(sorted(levels), dtype=torch.float64)
    nearest = (x[:, None] - table).abs().amin(dim=1)
    return float(nearest.square().mean() / x.var())


def uniform_levels(x: torch.Tensor) -> list[float]:
    """16 equally spaced levels from -largest to largest."""
    largest = float(x.abs().max())
    return torch.linspace(-largest, largest, 2**BITS, dtype=torch.float64).tolist()
