"""A tensor-parallel GPT under strategies on a mesh: trained, clipped, saved as one process."""

import pathlib
from functools import cache, partial
from typing import Any

import pytest
import torch

from labkit import (
    GPT,
    Comm,
    Mesh,
    Recompute,
    Text,
    World,
    ZeRO3,
    autocast,
    clip_grad_norm,
    load_checkpoint,
    save_checkpoint,
)
from labkit import loss as loss_of
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from shard_cases import STRATEGIES, whole_of
from small_models import difference
from tensor_contract import model_of
from worlds import on_each_rank

AGREE = 1e-10
MAX_NORM = 0.5
ADAM = partial(torch.optim.AdamW, lr=1e-2)
EARLY, LATE = range(3), range(3, 5)


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """257 tokens: one row of padding on 2 ranks, 3 on 4."""
    return model_of(seed, **{"vocab": 257, "width": 16, "heads": 4, **changes})


def build(strategy: str, mesh: Mesh, sequence: bool, seed: int = 0, **changes: Any) -> Any:
    model = tensor_parallel(gpt(seed, **changes), mesh.tp, sequence=sequence)
    return STRATEGIES[strategy](model, mesh.dp, ADAM)


def train(
    model: Any, optimizer: Any, mesh: Mesh | None, steps: range, low: bool = False
) -> list[float]:
    """The norms of the gradients before they are clipped. Each step has 4 rows of 8 tokens."""
    text, norms = Text(), []
    for step in steps:
        batch = text.batch(step, 4, 8)
        if mesh is not None:
            batch = batch.slice(mesh.dp.rank, mesh.dp.size)
        optimizer.zero_grad()
        with autocast(enabled=low):
            value = loss_of(model(batch.x), batch)
        value.backward()
        sharded = isinstance(model, ZeRO3)
        clip = model.clip_grad_norm_ if sharded else partial(clip_grad_norm, optimizer)
        norms.append(float(clip(MAX_NORM)))
        optimizer.step()
    return norms


State = dict[str, torch.Tensor]


@cache
def alone(steps: int, **changes: Any) -> tuple[State, list[float]]:
    model = gpt(**changes)
    norms = train(model, ADAM(model.parameters()), None, range(steps))
    return model.state_dict(), norms


@pytest.mark.parametrize(
    ("changes", "recompute"), [({"tied": False}, False), ({"kv_heads": 2}, False), ({}, True)]
)
def test_harder_models_too(world4: World, changes: dict[str, Any], recompute: bool) -> None:
    def run() -> float:
        mesh = Mesh(dp=2, tp=2)
        model = tensor_parallel(gpt(**changes), mesh.tp, sequence=True)
        if recompute:
            Recompute(model, what="full")
        wrapped, optimizer = STRATEGIES["zero-3"](model, mesh.dp, ADAM)
        norms = train(wrapped, optimizer, mesh, EARLY)
        assert norms == pytest.approx(expected, abs=AGREE)
        return difference(whole_of(wrapped), weights)

    weights, expected = alone(3, **changes)
    assert min(expected) > MAX_NORM  # each step is clipped
    assert all(off < AGREE for off in world4.run(run))


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("strategy", ["zero-1", "zero-3", "masters"])
@on_each_rank("world4")
def test_what_is_whole_on_all_tensor_ranks_stays_the_same_to_the_bit(
    strategy: str, how: str
) -> None:
    """In 16 bits, where no single process has the same sums; but the tensor ranks have."""
    mesh = Mesh(dp=2, tp=2)
    model = gpt().to(torch.bfloat16 if how == "bf16" else torch.float32)
    tensor_parallel(model, mesh.tp, sequence=True)
    wrapped, optimizer = STRATEGIES[strategy](model, mesh.dp, ADAM)
    before = whole_of(wrapped)
    train(wrapped, optimizer, mesh, EARLY, low=how == "autocast")
    after = whole_of(wrapped)
    assert all(not torch.equal(after[name], x) for name, x in before.items())
    assert all(difference(other, after) == 0 for other in Comm().all_gather_object(after))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-2", "zero-3"])
def test_a_checkpoint_goes_on_in_other_layouts_and_in_a_plain_model(
    world4: World, strategy: str, tmp_path: pathlib.Path
) -> None:
    def save() -> None:
        mesh = Mesh(dp=2, tp=2)
        model, optimizer = build(strategy, mesh, sequence=True)
        train(model, optimizer, mesh, EARLY)
        save_checkpoint(tmp_path, model, optimizer, step=3)

    def go_on(other: str, axes: dict[str, int], sequence: bool) -> float:
        mesh = Mesh(**axes)
        model, optimizer = build(other, mesh, sequence, seed=1)
        load_checkpoint(tmp_path, model, optimizer)
        train(model, optimizer, mesh, LATE)
        return difference(whole_of(model), weights)

    weights, _ = alone(5)
    world4.run(save)
    plain = gpt(seed=2)
    optimizer = ADAM(plain.parameters())
    load_checkpoint(tmp_path, plain, optimizer)
    train(plain, optimizer, None, LATE)
    assert difference(plain.state_dict(), weights) < AGREE
    for other in (("plain", {"dp": 1, "tp": 4}, False), ("zero-3", {"dp": 2, "tp": 2}, True)):
        assert all(off < AGREE for off in world4.run(go_on, *other))
