"""Splits a model into pipeline stages by layer count or by cost.

    GPT of 5 blocks, 3 stages     embed  0 1 │ 2 3 │ 4  norm head        by block count
    with costs                    embed  0 1 │ 2 3 4 │ norm head         the most expensive stage
    (a large-vocabulary           ├── 2.2 ───┤   3   ├─── 2.9 ──┤        is as cheap as possible
    head costs 2.9)

A step of m micro-batches takes at least m times the slowest stage's time, so balance the costs:
`split(model, 4, measure_costs(model, x))`.

Sources: PipeDream (balancing by profile), arXiv 1806.03377, section 3.1; torchgpipe's `balance`.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from labkit import events
from labkit.parallel.pipeline.stages import Layers

NAMES = ("embed", "blocks", "norm", "head")


def split(
    model: nn.Module | Sequence[nn.Module], stages: int, costs: Sequence[float] | None = None
) -> list[nn.Module]:
    """Splits `model` into `stages` consecutive modules.

    Args:
        model: nn.Sequential, a layer list, or a model with `embed`, `blocks`, `head` (and `norm`).
        stages: the number of stages: ranks times model chunks per rank.
        costs: one cost per layer of `layers_of(model)`, in any unit. Default: equal layer counts,
            with the remainder in the first stages; for a GPT, only blocks count.

    Raises ValueError for too few or too many stages, invalid costs, or an unsupported model."""
    layers = layers_of(model)
    if costs is not None:
        if len(costs) != len(layers):
            raise ValueError(
                f"{len(costs)} costs for {len(layers)} layers ({', '.join(layers)}); pass one per "
                "layer, as measure_costs(model, x) returns"
            )
        sizes = balance(costs, stages)
    else:
        sizes = _even(list(layers), stages)
    paths = list(layers)
    cuts = pairwise([0, *accumulate(sizes)])
    return [Layers({path: layers[path] for path in paths[begin:end]}) for begin, end in cuts]


def layers_of(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Layers of `model` by name, in order; `split` cuts between layers."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return {str(index): layer for index, layer in enumerate(model)}
    # Not named_children, which skips repeated modules.
    parts = {name: part for name, part in model._modules.items() if part is not None}
    if isinstance(model, nn.Sequential):
        return parts
    kind = type(model).__name__
    if not {"embed", "blocks", "head"} <= set(parts):
        raise ValueError(
            f"split cannot find the layers of {kind}, whose submodules are "
            f"{', '.join(parts) or 'none'}; pass an nn.Sequential, a list of layers, or a model "
            "with embed, blocks and head"
        )
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if others := [name for name in parts if name not in NAMES] + own:
        raise ValueError(
            f"split supports only {', '.join(NAMES)}, but {kind} also has "
            f"{', '.join(others)}; pass a list of layers instead"
        )
    blocks: Any = parts["blocks"]
    layers = {"embed": parts["embed"]}
    layers |= {f"blocks.{index}": block for index, block in enumerate(blocks)}
    return layers | {name: parts[name] for name in ("norm", "head") if name in parts}


def _even(paths: list[str], stages: int) -> list[int]:
    """Layers per stage for equal block counts, or equal layer counts in a model without blocks."""
    blocks = [path for path in paths if path.startswith("blocks.")]
    counted = blocks or paths
    if not 1 <= stages <= len(counted):
        what = "blocks" if blocks else "layers"
        raise ValueError(
            f"stages={stages}: each stage needs at least one of the {len(counted)} {what}; choose "
            f"1 to {len(counted)}"
        )
    sizes = events.chunk_sizes(len(counted), stages)
    if blocks:
        sizes[0] += paths.index(blocks[0])
        sizes[-1] += len(paths) - 1 - paths.index(blocks[-1])
    return sizes


def measure_costs(
    model: nn.Module | Sequence[nn.Module], x: Tensor, repeats: int = 3
) -> list[float]:
    """Seconds of forward and backward per layer of `layers_of(model)` on a micro-batch
    x [rows, ...], the minimum over `repeats` runs. Restores buffers and gradients. Broadcast one
    rank's costs, so that every rank splits the model identically."""
    layers = layers_of(model)
    before = [(p, p.grad) for layer in layers.values() for p in layer.parameters()]
    buffers = [(b, b.clone()) for layer in layers.values() for b in layer.buffers()]
    costs = [float("inf")] * len(layers)
    for parameter, _ in before:
        parameter.grad = None  # backward adds to a gradient in place
    try:
        for _ in range(repeats):  # each repeat runs all layers, so a stall affects only one repeat
            y = x
            for index, layer in enumerate(layers.values()):
                inputs = y.detach()
                inputs.requires_grad_(inputs.is_floating_point() or inputs.is_complex())
                inputs = inputs.clone()  # a layer may change its input in place
                began_s = time.perf_counter()
                y = layer(inputs)
                if y.requires_grad:
                    torch.autograd.backward(y, torch.ones_like(y))
                costs[index] = min(costs[index], time.perf_counter() - began_s)
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
    return costs


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Layers per stage (consecutive, at least 1) that minimize the highest stage cost, then the
    sum of squared stage costs. `costs`: one per layer, in any unit. Raises ValueError unless
    1 <= stages <= len(costs), and for costs that are negative or not finite.

    >>> balance([5, 1, 1, 1, 4], stages=3)
    [1, 3, 1]
    """
    if stages < 1:
        raise ValueError(f"stages={stages}: choose at least 1")
    if stages > len(costs):
        raise ValueError(
            f"stages={stages}: each stage needs at least one of the {len(costs)} layers; choose "
            f"1 to {len(costs)}"
        )
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs[{layer}]={cost}: a cost must be finite and at least 0")
    cost_sums = [0.0, *accumulate(costs)]  # prefix sums
    highest, _ = _best(cost_sums, stages, max, math.inf)
    _, counts = _best(cost_sums, stages, lambda so_far, cost: so_far + cost * cost, highest)
    return counts


def _best(
    cost_sums: Sequence[float], stages: int, combine: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """Minimizes the combined cost with no stage above `limit`; returns (cost, layers per stage)."""
    layers = len(cost_sums) - 1
    least: list[tuple[float, list[int]]] = [(math.inf, [])] * (layers + 1)
    least[0] = (0.0, [])  # index: number of layers placed on the stages so far
    for _ in range(stages):
        following: list[tuple[float, list[int]]] = [(math.inf, [])] * (layers + 1)
        for end in range(1, layers + 1):
            for begin in reversed(range(end)):
                stage_cost = cost_sums[end] - cost_sums[begin]
                if stage_cost > limit:
                    break
                cost = combine(least[begin][0], stage_cost)
                if cost < following[end][0]:
                    following[end] = (cost, [*least[begin][1], end - begin])
        least = following
    return least[layers]
