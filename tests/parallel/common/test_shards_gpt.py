"""A tensor-parallel GPT under strategies on a mesh: trained and clipped as one process."""

from typing import Any

import pytest
import torch

from labkit import GPT, Comm, Mesh, Recompute, Text, ZeRO3, autocast, clip_grad_norm
from labkit import loss as loss_of
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from shard_cases import ADAM, STRATEGIES, whole_of
from small_models import difference
from tables import cases
from tensor_contract import model_of
from worlds import on_each_rank

AGREE = 1e-10
MAX_NORM = 0.5


def gpt(**changes: Any) -> GPT:
    """257 tokens: one row of padding on 2 ranks."""
    return model_of(0, **{"vocab": 257, "width": 16, "heads": 4, **changes})


def train(model: Any, optimizer: Any, mesh: Mesh | None, low: bool = False) -> list[float]:
    """The norms of the gradients before they are clipped. Each step has 4 rows of 8 tokens."""
    text, norms = Text(), []
    for step in range(3):
        batch = text.batch(step, 4, 8)
        if mesh is not None:
            batch = batch.slice(mesh.dp.rank, mesh.dp.size)
        optimizer.zero_grad()
        with autocast(enabled=low):
            value = loss_of(model(batch.x), batch)
        value.backward()
        sharder = model if isinstance(model, ZeRO3) else optimizer
        norms.append(float(clip_grad_norm(sharder, MAX_NORM)))
        optimizer.step()
    return norms


@cases(({"tied": False}, False), ({"kv_heads": 2}, False), ({}, True))
@on_each_rank("world4")
def test_harder_models_too(changes: dict[str, Any], recompute: bool) -> None:
    alone, mesh = gpt(**changes), Mesh(dp=2, tp=2)
    expected = train(alone, ADAM(alone.parameters()), None)
    assert min(expected) > MAX_NORM  # each step is clipped
    model = tensor_parallel(gpt(**changes), mesh.tp, sequence=True)
    if recompute:
        Recompute(model, what="full")
    wrapped, optimizer = STRATEGIES["zero-3"](model, mesh.dp, ADAM)
    assert train(wrapped, optimizer, mesh) == pytest.approx(expected, abs=AGREE)
    assert difference(whole_of(wrapped), alone.state_dict()) < AGREE


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("strategy", ["zero-1", "zero-3", "masters"])
@on_each_rank("world4")
def test_what_tensor_ranks_have_whole_stays_the_same_to_the_bit(strategy: str, how: str) -> None:
    """In 16 bits, where no single process has the same sums; but the tensor ranks have."""
    mesh = Mesh(dp=2, tp=2)
    model = gpt().to(torch.bfloat16 if how == "bf16" else torch.float32)
    tensor_parallel(model, mesh.tp, sequence=True)
    wrapped, optimizer = STRATEGIES[strategy](model, mesh.dp, ADAM)
    before = whole_of(wrapped)
    train(wrapped, optimizer, mesh, low=how == "autocast")
    after = whole_of(wrapped)
    assert all(not torch.equal(after[name], x) for name, x in before.items())
    assert all(difference(other, after) == 0 for other in Comm().all_gather_object(after))
