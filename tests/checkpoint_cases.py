"""What the tests of checkpoints train: one model under every strategy, on some of the ranks."""

from collections.abc import Callable
from typing import Any

import torch
from data_parallel_contract import Awkward
from torch import nn

from labkit import DDP, Comm, NaiveDDP, load_checkpoint, save_checkpoint
from labkit.parallel.flat import FlatPartition
from labkit.parallel.pieces import OwnedPiece

ROWS = 12  # divides over 1, 2, 3 and 4 ranks


class Model(nn.Module):
    """Awkward parameters, and a buffer that must come along and one that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Awkward()
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimension
        self.deep = nn.Parameter(torch.randn(3, 5, 2))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inside(x) * self.scale + self.deep.square().sum()


def fresh(seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype)


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Two groups with different hyperparameters."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if p.dim() > 1], "lr": lr},
        {"params": [p for name, p in named if p.dim() <= 1], "lr": lr / 2, "weight_decay": 0.0},
    ]


class FlatShares:
    """The least of a sharded optimizer: a rank steps on its share of all elements."""

    def __init__(self, module: nn.Module, comm: Comm, lr: float, cls: Any = torch.optim.AdamW):
        self.comm = comm
        self.param_groups = groups_of(module, lr)
        self._all = [p for p in module.parameters() if p.requires_grad and p.numel()]
        self._partition = FlatPartition([p.shape for p in self._all], comm.size)
        self._pieces = [
            (
                one,
                nn.Parameter(
                    self._all[one.index].detach().reshape(-1)[one.start :][: one.numel].clone()
                ),
            )
            for one in self._partition.pieces(comm.rank)
        ]
        self.inner = cls([nn.Parameter(torch.zeros(1))], lr=lr)
        self.inner.param_groups.clear()
        for group in self.param_groups:
            ours = {id(p) for p in group["params"]}
            mine = [x for one, x in self._pieces if id(self._all[one.index]) in ours]
            self.inner.add_param_group({**group, "params": mine})
            group |= {**self.inner.param_groups[-1], **group}

    def zero_grad(self) -> None:
        for p in self._all:
            p.grad = None

    def step(self) -> None:
        for p in self._all:
            if p.grad is not None:
                self.comm.all_reduce(p.grad, "mean")
        for one, x in self._pieces:
            gradient = self._all[one.index].grad
            x.grad = None if gradient is None else gradient.reshape(-1)[one.start :][: one.numel]
        for inner, outer in zip(self.inner.param_groups, self.param_groups):
            inner.update({key: x for key, x in outer.items() if key != "params"})
        self.inner.step()
        self.after_load()

    @torch.no_grad()
    def after_load(self) -> None:
        for k, p in enumerate(self._all):
            flat = torch.zeros(p.numel(), dtype=p.dtype)
            for one, x in self._pieces:
                if one.index == k:
                    flat[one.start :][: one.numel] = x
            self.comm.all_reduce(flat)
            p.copy_(flat.view(p.shape))

    def owned(self, module: nn.Module) -> list[OwnedPiece]:
        names = {id(p): name for name, p in module.named_parameters()}
        return [
            OwnedPiece(names[id(p)], p.shape, one.start, x, self.inner)
            for one, x in self._pieces
            for p in [self._all[one.index]]
        ]


def replicated(strategy: Any) -> Any:
    def build(module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
        return strategy(module, comm), torch.optim.AdamW(groups_of(module, lr))

    return build


STRATEGIES: dict[str, Callable[[nn.Module, Comm, float], tuple[nn.Module, Any]]] = {
    "naive-ddp": replicated(NaiveDDP),
    "ddp": replicated(DDP),
    "flat-shares": lambda module, comm, lr: (module, FlatShares(module, comm, lr)),
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


def save_and_go_on(strategy: str, ranks: int, folder: str) -> list[float] | None:
    """Three steps, a checkpoint, three steps: the losses of the last."""
    if (comm := first_ranks(ranks)) is None:
        return None
    model, optimizer = STRATEGIES[strategy](fresh(), comm, 1e-2)
    train(model, optimizer, comm, range(3))
    save_checkpoint(folder, model, optimizer, step=3, extra={"rank": comm.rank})
    return train(model, optimizer, comm, range(3, 6))


def load_and_go_on(strategy: str, ranks: int, folder: str) -> list[float] | None:
    """Another model, other hyperparameters: all has to come from the checkpoint."""
    if (comm := first_ranks(ranks)) is None:
        return None
    model, optimizer = STRATEGIES[strategy](fresh(seed=1), comm, 3e-3)
    train(model, optimizer, comm, range(7, 8))  # a state that must go
    loaded = load_checkpoint(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (3, {"rank": 0})
    return train(model, optimizer, comm, range(3, 6))
