"""The simplest network: linear layers with a nonlinearity between them.

    x [n, sizes[0]] ── layers[0] ── act ── layers[1] ── act ── ... ── layers[-1] ── [n, sizes[-1]]

Odd sizes expose strategies that require layer sizes divisible by the number of ranks.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """`len(sizes) - 1` linear layers with biases, named `layers.0`, `layers.1`, ...

        sizes       the widths from input to output, at least two, each at least 1
        activation  a tensor function (or a module), applied between layers, not after the last

    `MLP([3, 17, 5])(x)` maps x [..., 3] to [..., 5]. Raises ValueError for invalid sizes."""

    def __init__(
        self, sizes: Sequence[int], activation: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                f"an MLP needs at least two sizes, each at least 1, but got {list(sizes)}; pass "
                "the widths from input to output, such as MLP([3, 17, 5])"
            )
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(sizes))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)
