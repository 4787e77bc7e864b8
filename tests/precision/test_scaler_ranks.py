"""The loss scaler on ranks: under each strategy the same decisions, scales and weights as alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

from labkit import (
    DDP,
    Comm,
    GradScaler,
    World,
    ZeRO3,
    ZeroOptimizer,
    listen,
    load_checkpoint,
    save_checkpoint,
)
from labkit.runtime.errors import RankError
from scaler_contract import check_equal_to_single, fresh, scaled_step
from tables import raises
from worlds import on_each_rank

STRATEGIES = ("ddp", "zero-1", "zero-2", "zero-3")
both = pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["fp64", "fp16"])


@both
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_decide_as_a_single_process(
    world2: World, strategy: str, dtype: torch.dtype
) -> None:
    check_equal_to_single(world2, strategy, dtype, culprit=1)
    check_equal_to_single(world2, strategy, dtype, max_norm=0.05)


@pytest.mark.slow
@both
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_ranks_decide_as_a_single_process(
    world3: World, strategy: str, dtype: torch.dtype
) -> None:
    check_equal_to_single(world3, strategy, dtype, culprit=2)
    check_equal_to_single(world3, strategy, dtype, parts=2, max_norm=0.05, culprit=1)


def spoiled_step(comm: Comm, scaler: GradScaler) -> tuple[bool, float]:
    """A step with an inf on rank 1: whether the weights stayed, and the next scale."""
    model, x, optimizer, _ = fresh()
    scaler.scale(model(x).sum()).backward()
    if comm.rank == 1:
        model.bias.grad[0] = torch.inf
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, model.weight), scaler.get_scale()


@on_each_rank("world2")
def test_one_number_travels_in_a_step() -> None:
    model, x, _, scaler = fresh()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, 2, lr=0.1)
    scaler.scale(model(x).sum()).backward()
    with listen() as events:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    events = [(event.op, event.payload_bytes) for event in events]
    assert [e for e in events if "gather" not in e[0]] == [("all_reduce", 4)]


@on_each_rank("world2")
def test_the_ranks_of_a_smaller_group_decide_for_themselves() -> None:
    comm = Comm()
    scaler = GradScaler(comm=[comm.subgroup([rank]) for rank in range(comm.size)][comm.rank])
    assert spoiled_step(comm, scaler) == [(False, 65536.0), (True, 32768.0)][comm.rank]
    wrapped = ZeRO3(nn.Linear(3, 3))
    scaler.scale(wrapped(fresh()[1]).sum()).backward()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    raises(r"ZeRO3 spans ranks \[0, 1\], but the scaler spans only", scaler.step, optimizer)


@on_each_rank("world2")
def test_its_state_is_saved_and_loaded_with_a_checkpoint(tmp_path: Path) -> None:
    model, x, optimizer, scaler = fresh(growth_interval=5)
    wrapped, other = DDP(model), GradScaler()
    for step in range(3):
        optimizer.zero_grad()
        scaled_step(scaler, wrapped(x).sum() * (1e38 if step == 0 else 1.0), optimizer)
    save_checkpoint(tmp_path, wrapped, optimizer, extra={"scaler": scaler.state_dict()})
    other.load_state_dict(load_checkpoint(tmp_path, wrapped, optimizer).extra["scaler"])
    assert other.get_scale() == 32768.0
    assert scaler.state_dict() == other.state_dict()
    assert other.state_dict()["_growth_tracker"] == 2


def test_ranks_that_step_differently_are_reported(world2: World) -> None:
    def scales_differ() -> None:
        model, x, optimizer, scaler = fresh(init_scale=2.0 ** (10 + Comm().rank))
        wrapped = DDP(model)  # kept alive: its hooks average in backward
        scaler.scale(wrapped(x).sum()).backward()
        if Comm().rank == 0:
            words = "^GradScaler: the scale is 1024 on this rank and 2048 on another; create "
            words += "the same scaler and load the same state on every rank$"
            raises(words, scaler.step, optimizer)
        else:
            scaler.step(optimizer)

    world2.run(scales_differ)

    def one_steps_alone() -> None:
        model, x, optimizer, scaler = fresh()
        wrapped = DDP(model)
        scaler.scale(wrapped(x).sum()).backward()
        if Comm().rank == 0:
            scaler.step(optimizer)
        wrapped(x).sum().backward()

    raises("all_reduce", world2.run, one_steps_alone, error=RankError)


@on_each_rank("world2")
def test_no_gradient_on_any_rank_is_reported_and_on_one_rank_it_is_not() -> None:
    model, x, optimizer, scaler = fresh()
    scaler.scale(x.sum())
    raises("no parameter of this optimizer has a gradient", scaler.step, optimizer)
    scaler = GradScaler()
    value = scaler.scale(model(x).sum())
    if Comm().rank == 0:
        value.backward()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, model.weight) == (Comm().rank == 1)


def test_a_scaler_made_before_there_were_ranks_decides_with_them(world2: World) -> None:
    scaler = GradScaler()
    assert world2.run(lambda: spoiled_step(Comm(), scaler)) == [(True, 32768.0)] * 2


@on_each_rank("world2")
def test_the_model_of_a_zero_optimizer_is_not_unscaled_past_it() -> None:
    model, x, _, scaler = fresh()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, 2, lr=0.1)
    scaler.scale(model(x).sum()).backward()
    raises("a ZeroOptimizer owns the gradients of this model", scaler.unscale_, model)
    optimizer.clip_grad_norm_(1.0)
    raises("clipped while still multiplied by the scale", scaler.step, optimizer)


@on_each_rank("world2")
def test_a_factor_is_used_once() -> None:
    for stage in (1, 2):
        model, x, _, scaler = fresh(init_scale=8.0)
        model.half()
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage, lr=1.0)
        for scaled in (True, False):
            optimizer.zero_grad()
            before = model.bias.detach().clone()
            loss = model(x.half()).float().sum()
            scaler.scale(loss).backward() if scaled else loss.backward()
            scaler.step(optimizer) if scaled else optimizer.step()
        assert torch.allclose(model.bias, before - 4, rtol=0, atol=0.01)


@on_each_rank("world2")
def test_a_bad_loss_on_one_rank_is_reported_there_and_skipped_everywhere() -> None:
    model, x, optimizer, scaler = fresh()
    x[0] = torch.nan if Comm().rank else 1.0
    wrapped = DDP(model)
    scaler.scale(wrapped(x).sum()).backward()
    before = model.weight.detach().clone()
    if Comm().rank == 0:
        scaler.step(optimizer)
    else:
        words = ("the loss was nan before scaling", "find_nonfinite")
        raises(words, scaler.step, optimizer)
    scaler.update()
    assert torch.equal(before, model.weight) and scaler.get_scale() == 32768.0
