"""Every strategy as one line: how to wrap a model and make its optimizer.

`labkit compare` and `labkit run` train through these; a new strategy is added here once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel import DDP, NaiveDDP, ParameterServer, Single, ZeRO3, ZeroOptimizer
from labkit.parallel.footprint import Footprint

Build = Callable[[nn.Module, Comm, float], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class Recipe:
    """`build(module, comm, lr)` gives the wrapped model and its optimizer;
    `predict(module, size)` its bytes. `shown`: stands for its family where one is enough."""

    name: str
    family: str
    build: Build
    predict: Callable[[nn.Module, int], Footprint]
    shown: bool = True
    one_rank: bool = False


def _replicated(strategy: type[Single] | type[NaiveDDP] | type[DDP]) -> Build:
    def build(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        return strategy(module, comm), torch.optim.AdamW(module.parameters(), lr=lr)

    return build


def _served(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ParameterServer(module, comm)
    return model, model.pull_after(torch.optim.AdamW(model.parameters(), lr=lr))


def _zero(stage: int) -> Build:
    def build(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        return module, ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage, comm, lr=lr)

    return build


def _zero_3(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ZeRO3(module, comm)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe("single", "oracle", _replicated(Single), Single.predict, one_rank=True),
        Recipe("naive-ddp", "data parallel", _replicated(NaiveDDP), NaiveDDP.predict),
        Recipe("ddp", "data parallel", _replicated(DDP), DDP.predict),
        Recipe("parameter-server", "data parallel", _served, ParameterServer.predict),
        Recipe("zero-1", "ZeRO", _zero(1), partial(ZeroOptimizer.predict, stage=1)),
        Recipe("zero-2", "ZeRO", _zero(2), partial(ZeroOptimizer.predict, stage=2)),
        Recipe("zero-3", "ZeRO", _zero_3, ZeRO3.predict),
    ]
}


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError, listing the names."""
    if name not in RECIPES:
        raise ValueError(f"no strategy {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
