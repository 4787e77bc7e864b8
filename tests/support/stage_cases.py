"""What the tests of checkpoints in three dimensions train: a GPT in any layout of a mesh."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shard_cases
from labkit import GPT, Comm, Mesh, split
from labkit import tensor_parallel as cut_over
from labkit.models.gpt import Block
from labkit.parallel.pipeline.pipeline import Pipeline
from pipeline_cases import tokens_loss
from shard_cases import ADAM, STRATEGIES, optimizer_of, wrapped

ROWS, LENGTH, BLOCKS = 8, 6, 4


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, chunks of each pipeline rank, and the strategy over dp."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    chunks: int = 1
    strategy: str = "plain"
    sequence: bool = False
    scatter_gather: bool = False

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        more = f"x{self.chunks}" if self.chunks > 1 else ""
        return f"{self.strategy}-{self.pp}{more}.{self.dp}.{self.tp}"


def gpt(seed: int = 0, tied: bool = True) -> GPT:
    torch.manual_seed(seed)
    return GPT(11, 8, BLOCKS, 2, LENGTH, tied=tied).double()


def tokens(step: int) -> Tensor:
    return torch.randint(0, 11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def built(
    layout: Layout, tied: bool = True, seed: int = 0, make: Any = ADAM
) -> tuple[Mesh, nn.Module, Any]:
    mesh = Mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp)
    model: nn.Module = gpt(seed, tied)
    if layout.tp > 1:
        model = cut_over(model, mesh.tp, sequence=layout.sequence)
    if layout.pp == layout.chunks == 1:
        return mesh, *STRATEGIES[layout.strategy](model, mesh.dp, make)
    stages = split(model, layout.pp * layout.chunks)
    for index in range(mesh.pp.rank, len(stages), layout.pp):
        zero_3 = {"units": Block, "persist_below": 10}
        stages[index] = wrapped(layout.strategy, stages[index], mesh.dp, **zero_3)
    pipe = Pipeline(
        stages, mesh.pp, "interleaved" if layout.chunks > 1 else "1f1b", 2, tokens_loss,
        scatter_gather=mesh.tp if layout.scatter_gather else None,
    )  # fmt: skip
    return mesh, pipe, optimizer_of(layout.strategy, pipe.parameters(), make, mesh.dp, 0.0005)


def train(mesh: Mesh | None, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """The global losses of some steps, where the loss is: on the last stage."""

    def loss_of(model: Any, step: int, dp: Comm | None) -> Tensor | None:
        x = tokens(step) if dp is None else tokens(step).chunk(dp.size)[dp.rank]
        return model.step(x, x) if isinstance(model, Pipeline) else tokens_loss(model(x), x)

    return shard_cases.train(model, optimizer, None if mesh is None else mesh.dp, steps, loss_of)


def alone(tied: bool = True, seed: int = 0, make: Any = ADAM) -> tuple[GPT, torch.optim.Optimizer]:
    model = gpt(seed, tied)
    return model, make(model.parameters())
