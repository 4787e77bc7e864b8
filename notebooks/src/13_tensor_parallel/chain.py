"""A chain of layers to shard so that ranks send few bytes: the open exercise of lab 13.

    x ── gelu ── W₁ ── gelu ── W₂ ── ... ── gelu ── y        each W by columns, by rows, or whole

The input that each kind of layer needs, and its output on each rank:

    columns   needs the whole input                        outputs this rank's features
    rows      needs this rank's features of the input      outputs a partial sum
    whole     needs the whole input                        outputs all features, on every rank

Between two layers, forward and backward may communicate. For a tensor of S bytes, each rank
sends 2(t-1)/t S in an all-reduce, and half as much in an all-gather or a reduce-scatter.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.parallel.common.conjugate import (
    all_gather_sequence,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)

WAYS = ("columns", "rows", "whole")
RANKS, TOKENS = 2, 8
CHAIN = (64, 16, 96, 256, 32, 32, 256, 96, 16, 64)  # features before, between and after 9 layers
BUDGETS = (0.5, 0.52, 0.7)  # fraction of the chain's matrix elements that a rank may hold
BEST_BYTES = 31_744  # minimum that a rank sends, summed over the budgets

# (this layer, the next) -> communication of the tensor between them, in halves of an all-reduce
TRAVELS = {
    ("columns", "rows"): 0,  #    none: each rank has the features that it needs
    ("columns", "columns"): 2,  # all-gather; the gradient is reduce-scattered
    ("columns", "whole"): 1,  #   all-gather; each rank slices the gradient
    ("rows", "rows"): 2,  #       reduce-scatter; the gradient is all-gathered
    ("rows", "columns"): 4,  #    g and f: all-reduce, and again in backward
    ("rows", "whole"): 2,  #      g: all-reduce
    ("whole", "rows"): 1,  #      each rank slices; the gradient is all-gathered
    ("whole", "columns"): 2,  #   f: all-reduce in backward
    ("whole", "whole"): 0,
}


def travels(ways: Sequence[str], widths: Sequence[int]) -> int:
    """Elements communicated per token. The chain's input and output are whole."""
    pairs = zip(["whole", *ways], [*ways, "whole"], strict=True)
    return sum(TRAVELS[pair] * width for pair, width in zip(pairs, widths, strict=True))


def held(ways: Sequence[str], widths: Sequence[int], ranks: int) -> int:
    """Matrix elements that a rank holds."""
    sizes = [before * after for before, after in pairwise(widths)]
    return sum(size // (1 if way == "whole" else ranks) for size, way in zip(sizes, ways))


def sent_bytes(ways: Sequence[str]) -> float:
    """Bytes that a rank sends for TOKENS tokens in float32, forward and backward."""
    return travels(ways, CHAIN) * (RANKS - 1) / RANKS * TOKENS * 4


def budget_elements(part: float) -> int:
    """The fraction `part` of all matrix elements."""
    return int(part * held(["whole"] * (len(CHAIN) - 1), CHAIN, RANKS))


def in_turns() -> list[str]:
    """Columns, rows, columns, rows, ...; the last of an odd number of layers is columns."""
    return [WAYS[i % 2] for i in range(len(CHAIN) - 1)]


# ---- the chain on ranks


def transition(before: str, after: str, x: Tensor, comm: Any) -> Tensor:
    """Turn the output of layer `before` into the input of layer `after`: TRAVELS as code."""
    match before, after:
        case "columns", "columns":
            return all_gather_sequence(F.gelu(x), comm, dim=-1)
        case "columns", "whole":
            return gather_from_ranks(F.gelu(x), comm, dim=-1)
        case "rows", "rows":
            return F.gelu(reduce_scatter_sequence(x, comm, dim=-1))
        case "rows", "columns":
            return copy_to_ranks(F.gelu(reduce_from_ranks(x, comm)), comm)
        case "rows", "whole":
            return F.gelu(reduce_from_ranks(x, comm))
        case "whole", "rows":
            return scatter_to_ranks(F.gelu(x), comm, dim=-1)
        case "whole", "columns":
            return copy_to_ranks(F.gelu(x), comm)
    return F.gelu(x)


def run_chain(comm: Any, ways: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The output of the chain, sharded in these `ways`, and the gradient of its input."""
    generator = torch.Generator().manual_seed(3)
    inputs = x = torch.randn(TOKENS, CHAIN[0], generator=generator).requires_grad_()
    state = "whole"
    for way, before, after in zip(ways, CHAIN, CHAIN[1:]):
        weight = torch.randn(before, after, generator=generator) * (3 / before) ** 0.5
        x = transition(state, way, x, comm)
        if way != "whole":
            weight = weight.chunk(comm.size, dim=1 if way == "columns" else 0)[comm.rank]
        x, state = x @ weight, way
    y = transition(state, "whole", x, comm)
    (y * y.detach().cos()).sum().backward()
    assert inputs.grad is not None
    return y.detach(), inputs.grad
