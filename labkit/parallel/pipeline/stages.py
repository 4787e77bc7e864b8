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
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from labkit import events
from labkit.parallel.common.sharder import unwrapped
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
            place: Any = self
            for parent in parents:
                place = place._modules.setdefault(parent, nn.Module())
            place._modules[name] = layer  # whatever its name: a model may have a part `layers`

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Each with its path."""
        return {path: self._at(path) for path in self._paths}

    def _at(self, path: str) -> nn.Module:
        place: Any = self
        for name in path.split("."):
            place = place._modules[name]
        return cast(nn.Module, place)

    @staticmethod
    def together(stages: Sequence[nn.Module], own: Sequence[int]) -> nn.Module:
        """What one rank, which has the stages `own`, has of a model, under the names of the whole:
        of stages of `split` those of the model, of others those of nn.Sequential(*stages). A
        wrapper, as DDP, is passed over.

        Raises ValueError where a name stands for two layers, in any stages."""
        layers = [layers_in(index, stage) for index, stage in enumerate(stages)]
        _check_names(layers)
        return Layers({path: layer for index in own for path, layer in layers[index].items()})


def layers_in(index: int, stage: nn.Module) -> dict[str, nn.Module]:
    """The layers of stage `index` by their names in the whole model; a wrapper is passed over."""
    inner = unwrapped(stage)
    return inner.layers if isinstance(inner, Layers) else {str(index): inner}


def prefix_of(index: int, stage: nn.Module) -> str:
    """What the names of the parts of stage `index` begin with in the whole model."""
    inner = unwrapped(stage)
    return "" if isinstance(inner, Layers) else f"{index}."


def further_names(stages: Sequence[nn.Module]) -> dict[str, str]:
    """Of parameters and buffers that are in the whole model several times, wherever it is cut, the
    further names, each with the first: {"head.weight": "embed.tokens.weight"}."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for index, stage in enumerate(stages):
        layers = Layers(layers_in(index, stage))
        for named in (layers.named_parameters, layers.named_buffers):
            for name, x in named(remove_duplicate=False):
                if (known := first.setdefault(id(x), name)) != name:
                    further[name] = known
    return further


def _check_names(stages: Sequence[Mapping[str, nn.Module]]) -> None:
    """Raises ValueError where two stages have a layer of one name, unless it is the same one."""
    first: dict[str, int] = {}
    for index, layers in enumerate(stages):
        for path, layer in layers.items():
            other = first.setdefault(path, index)
            if layer is not stages[other][path]:
                raise ValueError(
                    f"stages {other} and {index} have a layer called {path} each, and they are not "
                    "the same: one would take the other's place in parameters(), train() and "
                    "full_state_dict(); cut one model, as split(nn.Sequential(*first, *second), "
                    f"{len(stages)}) does"
                )


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
        return dict(_parts(model))  # one that stands twice is two layers
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return {str(index): layer for index, layer in enumerate(model)}
    have = dict(_parts(model))
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


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(named_children leaves out a module that it has seen before.)"""
    return ((name, part) for name, part in model._modules.items() if part is not None)


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
    turns on x [rows, ...], best one micro-batch. Gradients and buffers are left as they were.

    What it says holds for this machine and this moment; on ranks, measure on one and broadcast:
    all must cut alike.
    """
    layers = layers_of(model)
    before = [(p, p.grad) for layer in layers.values() for p in layer.parameters()]
    buffers = [(b, b.clone()) for layer in layers.values() for b in layer.buffers()]
    costs = [float("inf")] * len(layers)
    try:
        for _ in range(repeats):  # all layers in each turn: one stall hits one of a layer's turns
            given = x
            for index, layer in enumerate(layers.values()):
                given = given.detach()
                given.requires_grad_(given.is_floating_point() or given.is_complex())
                given = given.clone()  # a layer may change what it is given in place
                began_s = time.perf_counter()
                y = layer(given)
                if y.requires_grad:
                    torch.autograd.backward(y, torch.ones_like(y))
                costs[index] = min(costs[index], time.perf_counter() - began_s)
                given = y
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
    return costs
