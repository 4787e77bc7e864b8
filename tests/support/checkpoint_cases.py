"""What the tests of checkpoints train: one model under every strategy, on some of the ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import shard_cases
from data_parallel_contract import Awkward
from labkit import Comm, load_checkpoint, save_checkpoint
from shard_cases import optimizer_of, wrapped

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
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "lr": lr},
        {"params": [p for name, p in named if "bias" in name], "lr": lr / 2, "weight_decay": 0.0},
    ]


def under(strategy: str, module: nn.Module, comm: Comm, lr: float) -> tuple[nn.Module, Any]:
    model = wrapped(strategy, module, comm, persist_below=20)
    adam = partial(torch.optim.AdamW)
    return model, optimizer_of(strategy, groups_of(model, lr), adam, comm, 0.01)


NAMES = ("naive-ddp", "ddp", "zero-1", "zero-2", "zero-3", "masters")
STRATEGIES = {name: partial(under, name) for name in NAMES}
MEETING: dict[int, Comm | None] = {}  # on a rank: the first n ranks of its world


def first_ranks(n: int) -> Comm | None:
    """The group of the first `n` ranks; None on the others. All ranks of the world call it."""
    world = Comm()
    if n == world.size:
        return world
    if n not in MEETING:
        MEETING[n] = world.subgroup(range(n))
    return MEETING[n]


def loss_of(model: nn.Module, step: int, comm: Comm) -> torch.Tensor:
    rows = torch.randint(0, 256, (ROWS,), generator=torch.Generator().manual_seed(step))
    return model(rows.chunk(comm.size)[comm.rank]).square().mean()


train = partial(shard_cases.train, loss_of=loss_of)


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


def same(one: Any, other: Any) -> bool:
    """Whether two trees of dicts and lists have equal tensors and values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(x, other[key]) for key, x in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def written_by(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that one process would write."""
    weights, states = get_state_dict(model, optimizer)
    tensors = {f"model.{name}": x for name, x in weights.items()}
    for name, state in states["state"].items():
        tensors |= {f"optimizer.state.{name}.{key}": x for key, x in state.items()}
    return tensors


def check_written(folder: Path, expected: dict[str, torch.Tensor]) -> Metadata:
    """Each element is there once, and no padding, as torch's own reader sees it; the metadata."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    assert {name for name, entry in entries.items() if hasattr(entry, "size")} == set(expected)
    for name, x in expected.items():
        assert entries[name].size == x.shape, name
        assert sum(chunk.sizes.numel() for chunk in entries[name].chunks) == x.numel(), name
    stored = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in expected.items()}
    dcp.load(stored, storage_reader=reader, no_dist=True)
    for name, x in expected.items():
        assert torch.allclose(stored[name], x, rtol=0, atol=1e-10), name
    return metadata
