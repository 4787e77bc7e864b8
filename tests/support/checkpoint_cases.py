"""What the tests of checkpoints train: one model under every strategy, on some of the ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from data_parallel_contract import Awkward
from labkit import (
    DDP,
    Comm,
    MasterWeights,
    NaiveDDP,
    ZeRO3,
    ZeroOptimizer,
    load_checkpoint,
    save_checkpoint,
)

ROWS = 12  # divides over 1, 2, 3 and 4 ranks


class Model(nn.Module):
    """Awkward parameters, and a buffer that must come along and one that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Awkward()
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimension
        self.deep = nn.Parameter(torch.randn(2, 5, 3) / 9)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inside(x) * self.scale + (self.deep * self.seen).square().sum()


def fresh(seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype)


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Two groups with different hyperparameters."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "lr": lr},
        {"params": [p for name, p in named if "bias" in name], "lr": lr / 2, "weight_decay": 0.0},
    ]


def replicated(strategy: Any) -> Any:
    def build(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
        return strategy(module, comm), torch.optim.AdamW(groups_of(module, lr))

    return build


def sharded(stage: int) -> Any:
    def build(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
        groups = groups_of(module, lr)
        return module, ZeroOptimizer(groups, torch.optim.AdamW, stage, comm, bucket_mb=0.01)

    return build


def zero_3(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
    model = ZeRO3(module, comm, persist_below=20)
    return model, torch.optim.AdamW(groups_of(model, lr))


def masters(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
    return DDP(module, comm), MasterWeights(groups_of(module, lr), torch.optim.AdamW)


STRATEGIES: dict[str, Callable[[nn.Module, Comm, float], tuple[nn.Module, Any]]] = {
    "naive-ddp": replicated(NaiveDDP),
    "ddp": replicated(DDP),
    "zero-1": sharded(stage=1),
    "zero-2": sharded(stage=2),
    "zero-3": zero_3,
    "masters": masters,
}
MEETING: dict[int, Comm | None] = {}  # on a rank: the first n ranks of its world


def first_ranks(n: int) -> Comm | None:
    """The group of the first `n` ranks; None on the others. All ranks of the world call it."""
    world = Comm()
    if n == world.size:
        return world
    if n not in MEETING:
        MEETING[n] = world.subgroup(range(n))
    return MEETING[n]


def train(model: nn.Module, optimizer: Any, comm: Comm, steps: range) -> list[float]:
    """The global losses of some steps; a step's batch is the same wherever it is run."""
    losses = []
    for step in steps:
        rows = torch.randint(0, 256, (ROWS,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        value = model(rows.chunk(comm.size)[comm.rank]).square().mean()
        value.backward()
        optimizer.step()
        total = value.detach().clone()
        comm.all_reduce(total, "mean")
        losses.append(total.item())
    return losses


def save_and_go_on(
    strategy: str, ranks: int, folder: str, dtype: torch.dtype = torch.float64
) -> list[float] | None:
    """Three steps, a checkpoint, three steps: the losses of the last."""
    if (comm := first_ranks(ranks)) is None:
        return None
    model, optimizer = STRATEGIES[strategy](fresh(dtype=dtype), comm, 1e-2)
    train(model, optimizer, comm, range(3))
    save_checkpoint(folder, model, optimizer, step=3, extra={"rank": comm.rank})
    return train(model, optimizer, comm, range(3, 6))


def load_and_go_on(
    strategy: str, ranks: int, folder: str, dtype: torch.dtype = torch.float64
) -> list[float] | None:
    """Another model, other hyperparameters: all has to come from the checkpoint."""
    if (comm := first_ranks(ranks)) is None:
        return None
    model, optimizer = STRATEGIES[strategy](fresh(seed=1, dtype=dtype), comm, 3e-3)
    train(model, optimizer, comm, range(7, 8))  # a state that must go
    loaded = load_checkpoint(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (3, {"rank": 0})
    return train(model, optimizer, comm, range(3, 6))
