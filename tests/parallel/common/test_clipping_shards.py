"""Clipping and loss scaling under tensor parallelism: one norm and one decision, as one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from labkit import (
    Comm,
    GradScaler,
    MasterWeights,
    Mesh,
    World,
    ZeroOptimizer,
    clip_grad_norm,
)
from labkit.comm import listen
from labkit.parallel.common.shards import Shard, mark_shard, shard_of
from shard_cases import STRATEGIES, Model, alone, built, cut, fresh, loss_of, whole_of
from small_models import difference
from tables import raises
from worlds import on_each_rank

AGREE = 1e-10
NORMS = (2.0, 1.0, float("inf"))
SGD = partial(torch.optim.SGD, lr=0.1)
DP_TP = {"dp": 2, "tp": 2}


def clipped_step(
    strategy: str, axes: dict[str, int], norm_type: float, max_norm: float, scaled: bool = False
) -> tuple[float, float]:
    """How far the norm, and the weights after a step, are from those of torch in one process."""
    mesh = Mesh(**axes)
    model, optimizer = built(strategy, mesh, SGD)
    scaler = GradScaler(enabled=scaled)
    scaler.scale(loss_of(model, 0, mesh.dp)).backward()
    scaler.unscale_(optimizer)
    given = list(model.parameters()) if strategy == "plain" else optimizer
    clip = model.clip_grad_norm_ if strategy == "zero-3" else partial(clip_grad_norm, given)
    norm = clip(max_norm, norm_type)
    scaler.step(optimizer)

    single, single_optimizer = alone(SGD)
    loss_of(single, 0, None).backward()
    expected = nn.utils.clip_grad_norm_(single.parameters(), max_norm, norm_type)
    single_optimizer.step()
    assert norm.dtype == expected.dtype
    far = difference(whole_of(model), single.state_dict())
    return float((norm - expected).abs() / expected), far


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensor_ranks_clip_as_one_process(request: Any, size: int, norm_type: float) -> None:
    world = request.getfixturevalue(f"world{size}")
    for max_norm in (0.01, 100.0):
        for far in world.run(clipped_step, "plain", {"dp": 1, "tp": size}, norm_type, max_norm):
            assert max(far) < AGREE


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "plain"])
def test_every_strategy_clips_as_one_process(world4: World, strategy: str, scaled: bool) -> None:
    for norm_type in NORMS:
        for far in world4.run(clipped_step, strategy, DP_TP, norm_type, 0.01, scaled):
            assert max(far) < AGREE


@on_each_rank("world4")
def test_pieces_cut_at_other_places_on_the_tensor_ranks() -> None:
    """A data-parallel rank may have pieces of shards on one tensor rank and none on the other."""
    mesh = Mesh(**DP_TP)
    start, stop = ((0, 7), (7, 8))[mesh.tp.rank]
    module = nn.Linear(1, 8, bias=True).double()
    module.weight = nn.Parameter(torch.arange(8.0).double().view(8, 1)[start:stop].clone())
    mark_shard(module.weight, Shard(mesh.tp, 0, start, stop, 8))
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, comm=mesh.dp, lr=1)
    (module.weight.square().sum() / 2 + module.bias.sum() * 0 + module.bias[0]).backward()
    expected = (sum(k * k for k in range(8)) + 1) ** 0.5
    assert float(clip_grad_norm(optimizer, 1.0)) == pytest.approx(expected, abs=AGREE)


def wanted(dtype: torch.dtype) -> Model:
    """A model whose weights stand for gradients: multiples of 1/64, exact in 16 bits."""
    known = fresh(seed=3)
    with torch.no_grad():
        for p in known.parameters():
            p.copy_((p * 8).round().clamp(-15, 15) / 64)
    return known.to(dtype)


def with_gradients(model: nn.Module, like: nn.Module) -> torch.Tensor:
    pairs = zip(model.parameters(), like.parameters(), strict=True)
    return torch.stack([(p * g).sum(dtype=torch.float32) for p, g in pairs]).sum()


@pytest.mark.parametrize("strategy", ["masters", "zero-1", "zero-2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_each_rank("world4")
def test_16_bit_gradients_are_clipped_by_the_norm_of_all(strategy: str, dtype: torch.dtype) -> None:
    mesh = Mesh(**DP_TP)
    for norm_type in NORMS:
        model, optimizer = built(strategy, mesh, SGD, dtype=dtype)
        scaler = GradScaler(init_scale=16.0)
        scaler.scale(with_gradients(model, cut(wanted(dtype), mesh.tp))).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm(optimizer, 0.5, norm_type)
        scaler.step(optimizer)

        masters = fresh().to(dtype).float()
        with_gradients(masters, wanted(torch.float32)).backward()
        expected = nn.utils.clip_grad_norm_(masters.parameters(), 0.5, norm_type)
        SGD(masters.parameters()).step()
        weights = whole_of(model)
        for name, x in masters.state_dict().items():
            off = ((weights[name].float() - x) / x.abs().clamp(0.1)).abs().max()
            assert off <= torch.finfo(dtype).eps, "rounded to the dtype: at most one bit apart"
        assert float(norm / expected) == pytest.approx(1, abs=1e-6)


@on_each_rank("world4")
def test_one_number_travels_over_each_axis() -> None:
    """8 bytes for the shards, 8 for what is whole: two over dp together, one over tp."""
    mesh = Mesh(**DP_TP)
    model, optimizer = built("zero-1", mesh, SGD)
    loss_of(model, 0, mesh.dp).backward()
    with listen() as events:
        clip_grad_norm(optimizer, 1.0)
    sent = [(event.op, event.payload_bytes, len(event.ranks)) for event in events]
    assert sent == [("all_reduce", 16, 2), ("all_reduce", 8, 2)]


@on_each_rank("world2")
def test_without_marks_nothing_travels_that_did_not() -> None:
    model = fresh()
    loss_of(model, 0, None).backward()
    with listen() as events:
        clip_grad_norm(MasterWeights(model.parameters(), torch.optim.SGD, lr=1), 1.0)
    assert len(events) == 0


def spoiled_step(scaler: GradScaler, model: nn.Module, optimizer: Any, dp: Comm) -> None:
    """One of rank 3's shards has an inf among its gradients."""
    scaler.scale(loss_of(model, 0, dp)).backward()
    if hasattr(optimizer, "gradient_pieces"):
        pieces = optimizer.gradient_pieces()[0]
    else:
        pieces = [p.grad for p in model.parameters() if p.grad is not None and shard_of(p)]
    if Comm().rank == 3:
        next(x for x in pieces if x.numel()).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_each_rank("world4")
def test_an_inf_in_one_shard_makes_all_skip(strategy: str) -> None:
    mesh = Mesh(**({"dp": 1, "tp": 4} if strategy == "plain" else DP_TP))
    model, optimizer = built(strategy, mesh, SGD)
    before = whole_of(model)
    scaler = GradScaler(init_scale=8.0)
    spoiled_step(scaler, model, optimizer, mesh.dp)
    assert scaler.get_scale() == 4.0 and scaler.skipped == 1
    assert difference(whole_of(model), before) == 0


@on_each_rank("world4")
def test_a_scaler_over_the_replicas_alone_is_refused() -> None:
    mesh = Mesh(**DP_TP)
    for strategy in ("plain", "ddp", "zero-1", "zero-3"):
        model, optimizer = built(strategy, mesh, SGD)
        scaler = GradScaler(comm=mesh.dp)
        scaler.scale(loss_of(model, 0, mesh.dp)).backward()
        raises("are sharded over ranks .* with a comm of all these ranks", scaler.step, optimizer)
