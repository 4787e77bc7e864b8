"""A GPT cut by `tensor_parallel`, with a data-parallel strategy around it, on a mesh: trained,
clipped, saved and loaded as one in a single process."""

import copy
import pathlib
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from labkit import (
    GPT,
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
from worlds import on_each_rank

AGREE = 1e-10
MAX_NORM = 0.5
ADAM = partial(torch.optim.AdamW, lr=1e-2)
EARLY, LATE = range(3), range(3, 5)
WRAPPED = [name for name in STRATEGIES if name != "plain"]
SLOW = {"masters", "zero-1"}


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """257 tokens: one row of padding on 2 ranks, 3 on 4. No bias is 0 and no norm 1."""
    torch.manual_seed(seed)
    sizes = {"vocab": 257, "width": 16, "depth": 2, "heads": 4, "context": 16, **changes}
    model = GPT(**sizes).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.ndim == 1 else p.mul_(4)
    return model


def build(strategy: str, mesh: Mesh, sequence: bool, seed: int = 0, **changes: Any) -> Any:
    model = tensor_parallel(gpt(seed, **changes), mesh.tp, sequence=sequence)
    return STRATEGIES[strategy](model, mesh.dp, ADAM)


def train(
    model: nn.Module, optimizer: Any, mesh: Mesh | None, steps: range, low: bool = False
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
        if isinstance(model, ZeRO3):
            norms.append(float(model.clip_grad_norm_(MAX_NORM)))
        else:
            norms.append(float(clip_grad_norm(optimizer, MAX_NORM)))
        optimizer.step()
    return norms


State = dict[str, torch.Tensor]


@cache
def alone(steps: int, **changes: Any) -> tuple[State, list[float]]:
    """The weights after some steps in a single process, and the norms."""
    model = gpt(**changes)
    norms = train(model, ADAM(model.parameters()), None, range(steps))
    return model.state_dict(), norms


def off(model: nn.Module, expected: State) -> float:
    """The largest difference of a weight."""
    found = whole_of(model)
    assert found.keys() == expected.keys()
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


@pytest.mark.parametrize(
    ("strategy", "sequence"),
    [pytest.param(name, way, marks=pytest.mark.slow if name in SLOW else ())
     for name in WRAPPED for way in (False, True)],
)  # fmt: skip
def test_every_strategy_trains_and_clips_as_a_single_process(
    world4: World, strategy: str, sequence: bool
) -> None:
    def run() -> tuple[float, list[float]]:
        mesh = Mesh(dp=2, tp=2)
        model, optimizer = build(strategy, mesh, sequence)
        norms = train(model, optimizer, mesh, EARLY)
        return off(model, weights), norms

    weights, expected = alone(3)
    assert min(expected) > MAX_NORM  # each step is clipped
    for far, norms in world4.run(run):
        assert far < AGREE
        assert norms == pytest.approx(expected, abs=AGREE)


@pytest.mark.parametrize("what", [{"untied": True}, {"kv_heads": 2}, {"recompute": True}])
def test_harder_models_too(world4: World, what: dict[str, Any]) -> None:
    changes = {"kv_heads": what["kv_heads"]} if "kv_heads" in what else {}
    if "untied" in what:
        changes = {"tied": False}

    weights, _ = alone(3, **changes)

    def run() -> float:
        mesh = Mesh(dp=2, tp=2)
        model = tensor_parallel(gpt(**changes), mesh.tp, sequence=True)
        if "recompute" in what:
            Recompute(model, what="full")
        wrapped, optimizer = STRATEGIES["zero-3"](model, mesh.dp, ADAM)
        train(wrapped, optimizer, mesh, EARLY)
        return off(wrapped, weights)

    for far in world4.run(run):
        assert far < AGREE


@on_each_rank("world2")
def test_a_copy_is_a_model_of_its_own_over_the_same_ranks() -> None:
    mesh = Mesh(dp=1, tp=2)
    model = tensor_parallel(gpt(), mesh.tp)
    copied = copy.deepcopy(model)
    x = Text().batch(0, 2, 8).x
    before = model(x)
    with torch.no_grad():
        model.head.weight.zero_()
    assert copied.head.weight is copied.embed.tokens.weight  # type: ignore[union-attr]
    assert torch.equal(copied(x), before) and off(copied, gpt().state_dict()) == 0


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("strategy", ["zero-1", "zero-3", "masters"])
def test_what_is_whole_on_all_tensor_ranks_stays_the_same_to_the_bit(
    world4: World, strategy: str, how: str
) -> None:
    """In 16 bits, where no single process has the same sums; but the tensor ranks have."""

    def run() -> dict[str, torch.Tensor]:
        mesh = Mesh(dp=2, tp=2)
        model = gpt().to(torch.bfloat16 if how == "bf16" else torch.float32)
        tensor_parallel(model, mesh.tp, sequence=True)
        wrapped, optimizer = STRATEGIES[strategy](model, mesh.dp, ADAM)
        before = whole_of(wrapped)
        train(wrapped, optimizer, mesh, EARLY, low=how == "autocast")
        after = whole_of(wrapped)
        assert all(not torch.equal(after[name], x) for name, x in before.items())
        return after

    first, *others = world4.run(run)
    for other in others:
        for name, x in first.items():
            assert torch.equal(other[name], x), name


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
        return off(model, weights)

    weights, _ = alone(5)
    world4.run(save)
    plain = gpt(seed=2)
    optimizer = ADAM(plain.parameters())
    load_checkpoint(tmp_path, plain, optimizer)
    train(plain, optimizer, None, LATE)
    assert off(plain, weights) < AGREE
    for other in (("plain", {"dp": 1, "tp": 4}, False), ("zero-3", {"dp": 2, "tp": 2}, True)):
        for far in world4.run(go_on, *other):
            assert far < AGREE
