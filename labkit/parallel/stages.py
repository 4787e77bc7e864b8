"""A model cut into the stages of a pipeline.

    GPT of 5 blocks, 3 stages     embed  0 1 │ 2 3 │ 4  norm head        by number of blocks

    with costs                    embed  0 1 2 │ 3 │ 4  norm head        the dearest stage is
    (a head of a large            ├── 3.2 ───┤  1   ├──── 3.9 ────┤      as cheap as it can be
    vocabulary costs 2.9)

A stage takes whole layers, consecutive ones, under the names that they have in the model: its
parameters are called `blocks.3.attn.q.weight`, wherever block 3 is. Layers are the same objects,
not copies. A step takes as long as the dearest stage, m times, so cut by cost where layers differ:
`split(model, 4, measure_costs(model, x))`.

Source: balancing by profile: PipeDream, arXiv 1806.03377, section 3.1; torchgpipe's `balance`.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from labkit import events
from labkit.schedules.balance import balance

NAMES = ("embed", "blocks", "norm", "head")


class Layers(nn.Module):
    """Layers that run one after the other, x -> ... -> y, each under its path in the whole model:
    `Layers({"blocks.3": block, "norm": norm})`."""

    def __init__(self, layers: Mapping[str, nn.Module]):
        super().__init__()
        self._paths = list(layers)
        for path, layer in layers.items():
            *parents, name = path.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        for path in self._paths:
            x = self.get_submodule(path)(x)
        return x

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Each with its path."""
        return {path: self.get_submodule(path) for path in self._paths}

    @staticmethod
    def together(stages: Mapping[int, nn.Module]) -> nn.Module:
        """What one rank has of a model, under the names of the whole: of stages of `split` those
        of the model, of others those of nn.Sequential(*stages). A wrapper, as DDP, is passed
        over."""
        found: dict[str, nn.Module] = {}
        for index, stage in stages.items():
            inner: Any = stage.module if hasattr(stage, "no_sync") else stage
            found |= inner.layers if isinstance(inner, Layers) else {str(index): inner}
        return Layers(found)


def split(
    model: nn.Module | Sequence[nn.Module], stages: int, costs: Sequence[float] | None = None
) -> list[nn.Module]:
    """Cut `model` into `stages` modules, which one after the other compute what it does.

    Args:
        model: one with `embed`, `blocks`, (`norm`,) and `head`, as a GPT; an nn.Sequential; or a
            list of layers.
        stages: how many; ranks times chunks.
        costs: of each layer (`layers_of` lists them), in any unit: cut so that the dearest stage
            is cheapest. Without them stages have equally many layers, the first ones one more
            where that does not divide; of a GPT its blocks count, and its ends go along.

    Raises ValueError for more stages than layers, costs that are not one for each layer, and a
    model that is none of these.
    """
    layers = layers_of(model)
    if costs is not None:
        if len(costs) != len(layers):
            raise ValueError(
                f"{len(costs)} costs for {len(layers)} layers ({', '.join(layers)}); give one for "
                "each, as measure_costs(model, x) does"
            )
        sizes = balance(costs, stages)
    else:
        sizes = _even(list(layers), stages)
    paths = list(layers)
    cuts = pairwise([0, *accumulate(sizes)])
    return [Layers({path: layers[path] for path in paths[begin:end]}) for begin, end in cuts]


def layers_of(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The layers that `split` cuts between, in order, by their names in the model."""
    if isinstance(model, nn.Sequential):
        return dict(model.named_children())
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return {str(index): layer for index, layer in enumerate(model)}
    have = dict(model.named_children())
    kind = type(model).__name__
    if not {"embed", "blocks", "head"} <= set(have):
        raise ValueError(
            f"split cannot see the layers of a {kind}, whose parts are "
            f"{', '.join(have) or 'none'}; give an nn.Sequential, a list of layers, or a model "
            "with embed, blocks and head"
        )
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if others := [name for name in have if name not in NAMES] + own:
        raise ValueError(
            f"split knows {', '.join(NAMES)} of a {kind}, which also has {', '.join(others)}, and "
            "does not say where they run; give a list of layers instead"
        )
    blocks: Any = have["blocks"]
    layers = {"embed": have["embed"]}
    layers |= {f"blocks.{index}": block for index, block in enumerate(blocks)}
    return layers | {name: have[name] for name in ("norm", "head") if name in have}


def _even(paths: list[str], stages: int) -> list[int]:
    """How many layers each stage gets: of a model with blocks, equally many of these."""
    blocks = [path for path in paths if path.startswith("blocks.")]
    counted = blocks or paths
    if not 1 <= stages <= len(counted):
        what = "blocks" if blocks else "layers"
        raise ValueError(
            f"{stages} stages cannot be made of {len(counted)} {what}, each stage has at least "
            f"one; choose 1 to {len(counted)} stages"
        )
    sizes = events.chunk_sizes(len(counted), stages)
    if blocks:
        sizes[0] += paths.index(blocks[0])
        sizes[-1] += len(paths) - 1 - paths.index(blocks[-1])
    return sizes


def measure_costs(
    model: nn.Module | Sequence[nn.Module], x: Tensor, repeats: int = 3
) -> list[float]:
    """Seconds of forward and backward of each layer, of `layers_of(model)`: the least of several
    turns on x [rows, ...], best one micro-batch. Gradients are left as they were.

    What it says holds for this machine and this moment; on ranks, measure on one and broadcast:
    all must cut alike.
    """
    layers = layers_of(model)
    before = [(p, p.grad) for layer in layers.values() for p in layer.parameters()]
    costs = []
    try:
        for layer in layers.values():
            best_s = float("inf")
            for _ in range(repeats):
                given = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
                began_s = time.perf_counter()
                y = layer(given)
                if y.requires_grad:
                    torch.autograd.backward(y, torch.ones_like(y))
                best_s = min(best_s, time.perf_counter() - began_s)
            costs.append(best_s)
            x = y.detach()
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    return costs
