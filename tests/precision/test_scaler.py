"""The loss scaler in one process: as torch's, and what it says where torch is silent."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from labkit import Fp8Linear, GradScaler, MasterWeights, clip_grad_norm, find_nonfinite
from scaler_contract import check_as_torch, fresh, scaled_step
from small_models import Custom, take_steps
from tables import raises, refusals


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences_end_as_torchs(seed: int) -> None:
    check_as_torch(seed)


def test_a_step_waits_for_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each wait costs the time in which the next kernels could have been issued."""
    waits: list[torch.Tensor] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: (waits.append(x), item(x))[1])
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    assert len(waits) == 0
    scaler.step(optimizer)
    assert len(waits) == 1
    scaler.update()
    assert len(waits) == 1


def low_and_exact(max_norm: float | None, scale: float) -> tuple[list[torch.Tensor], ...]:
    """fp16 masters with tiny gradients, fp32 weights with the exact ones, and the clipped norms."""
    torch.manual_seed(0)
    low = nn.Sequential(nn.Linear(3, 4).half(), nn.Linear(4, 2))  # the second half is fp32
    exact = copy.deepcopy(low).float()
    ours = MasterWeights(low.parameters(), torch.optim.SGD, lr=2.0**16)
    theirs = torch.optim.SGD(exact.parameters(), lr=2.0**16)
    scaler = GradScaler(init_scale=scale)
    scaler.scale(torch.zeros(()))
    norms = []
    for p, q in zip(low.parameters(), exact.parameters(), strict=True):
        scaled = (torch.randn(p.shape) * 2.0**-28 * scale).to(p.dtype)  # fp16 ends at 2^-24
        p.grad, q.grad = scaled, scaled.float() / scale
    if max_norm is not None:
        scaler.unscale_(ours)
        norms = [
            clip_grad_norm(ours, max_norm),
            nn.utils.clip_grad_norm_(exact.parameters(), max_norm),
        ]
    scaler.step(ours)
    theirs.step()
    masters = [piece.tensor for piece in ours.owned(low)]
    return masters, list(exact.parameters()), norms


def test_gradients_that_fp16_cannot_hold_reach_the_masters() -> None:
    masters, exact, _ = low_and_exact(None, 2.0**16)
    for x, y in zip(masters, exact, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("max_norm", [2.0**-29, 1.0])
def test_they_are_clipped_without_a_rounding_to_fp16(max_norm: float) -> None:
    masters, exact, norms = low_and_exact(max_norm, 2.0**16)
    assert torch.allclose(*norms, rtol=1e-6, atol=0)
    for x, y in zip(masters, exact, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-7)


def test_fp32_gradients_of_16_bit_parameters_are_unscaled_once() -> None:
    """As where the gradients of micro-batches are added up in fp32."""
    model, _, optimizer, scaler = fresh(torch.float16, lr=1.0, init_scale=8.0)
    model.weight.grad_dtype = None
    model.weight.grad = torch.full((2, 3), 8.0)
    model.bias.grad = torch.full((2,), 8.0, dtype=torch.float16)
    scaler.scale(torch.zeros(()))
    before = [piece.tensor.clone() for piece in optimizer.owned(model)]
    scaler.step(optimizer)
    for piece, x in zip(optimizer.owned(model), before, strict=True):
        assert torch.equal(piece.tensor, x - 1)


@pytest.mark.parametrize("before", ["a step", "a step that is skipped", "unscale_ alone"])
def test_a_factor_does_not_outlive_update(before: str) -> None:
    """A plain step after it takes gradients for what they are. Unscaled and not stepped: as where a
    user looks at the norm and leaves the step out."""
    model, x, optimizer, scaler = fresh(torch.float16, lr=1.0, init_scale=8.0)
    scaler.scale(model(x).float().sum()).backward()
    if before == "a step that is skipped":
        model.weight.grad[0] = torch.nan
    (scaler.unscale_ if before == "unscale_ alone" else scaler.step)(optimizer)
    scaler.update()
    assert optimizer.gradient_factor is None
    bias = optimizer.owned(model)[1].tensor.clone()
    take_steps(optimizer, lambda _: model(x).float().sum(), 1)
    assert torch.equal(optimizer.owned(model)[1].tensor, bias - 4)


def test_an_optimizer_without_gradients_does_not_hold_the_others_up() -> None:
    model, x, optimizer, _ = fresh()
    idle = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scaler = GradScaler(init_scale=4.0, growth_interval=1)
    without = "no parameter of this optimizer has a gradient"
    for scale in (4.0, 8.0):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(idle)
        scaler.step(optimizer)
        raises(without, scaler.step, idle)
        scaler.update()
        assert scaler.get_scale() == 2 * scale
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(idle)
    raises(without, scaler.update)
    optimizer.zero_grad()
    scaled_step(scaler, model(x).sum(), optimizer)  # and the next step begins anew


def test_16_bit_gradients_of_another_optimizer_or_changed_while_scaled_are_refused() -> None:
    model, x, _, scaler = fresh(torch.float16)
    scaler.scale(model(x).float().mean()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(r"SGD has float16 gradients.*MasterWeights\(params", scaler.step, optimizer)
    model, x, optimizer, scaler = fresh(torch.float16)
    scaler.scale(model(x).float().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    raises(r"changed after unscale_.*labkit's clip_grad_norm", scaler.step, optimizer)


def test_the_order_of_calls_is_held() -> None:
    model, x, optimizer, scaler = fresh()
    again = r"unscaled since the last update\(\)"
    raises(r"no step since the last update\(\); call step first", scaler.update)
    model(x).sum().backward()
    raises(r"step: nothing has been scaled", scaler.step, optimizer)
    raises(r"unscale_: nothing has been scaled", scaler.unscale_, optimizer)
    raises(r"scale\(float\): the loss must be a tensor", scaler.scale, 1.0)
    for given in (model, optimizer):  # unscaled by either, it is unscaled
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(given)
        assert model.bias.grad.tolist() == [4.0, 4.0]
        raises(again, scaler.unscale_, optimizer)
        raises(again, scaler.unscale_, model)
        raises("a closure", scaler.step, optimizer, lambda: None)
        before = model.bias.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(model.bias, before - 0.1 * torch.full((2,), 4.0))
        raises(r"has stepped since the last update\(\)", scaler.step, optimizer)
        raises(again, scaler.unscale_, optimizer)
        scaler.update()
    raises("nothing has been scaled", scaler.step, optimizer)


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_clipping_before_unscaling_is_refused(by: str) -> None:
    model, x, optimizer, scaler = fresh(init_scale=1024.0)
    for _ in range(2):  # the second time, what was clipped in the first is not held against it
        scaled_step(scaler, model(x).sum(), optimizer, max_norm=0.1)
    scaler.scale(torch.zeros(()))
    for p in model.parameters():  # as a collective may write: past torch's count of what is written
        p.grad.numpy().fill(1024.0)
    scaler.step(optimizer)
    scaler.update()
    clip_grad_norm(optimizer, 0.1)  # then a backward adds to what was clipped
    scaled_step(scaler, model(x).sum(), optimizer)
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm(model if by == "model" else optimizer, 0.1)
    for call in (scaler.unscale_, scaler.step):
        raises("multiplied by the scale, 1024.*unscale_", call, optimizer)


test_arguments_that_cannot_be_are_refused = refusals(
    lambda options: GradScaler(**options),
    ({"init_scale": 0.0}, "scale=0.0; choose a finite number above 0"),
    ({"init_scale": "cuda"}, "uses the device of the gradients; omit the device"),
    ({"init_scale": -1.0}, "scale=-1.0; choose a finite number"),
    ({"init_scale": float("nan")}, "scale=nan; choose a finite number"),
    ({"init_scale": float("inf")}, "scale=inf; choose a finite number"),
    ({"growth_factor": 1.0}, "growth_factor=1.0; choose a number above 1"),
    ({"backoff_factor": 1.0}, "backoff_factor=1.0; choose a number in"),
    ({"backoff_factor": 0.0}, "backoff_factor=0.0; choose a number in"),
    ({"growth_interval": 0}, "growth_interval=0; choose 1 step or more"),
)


def test_foreign_state_is_refused_and_changes_nothing() -> None:
    scaler = GradScaler(init_scale=4.0)
    before = scaler.state_dict()
    for state, words in (
        ({}, "this state has nothing"),
        ({"scale": 1.0}, "this state has scale"),
        (nn.Linear(1, 1).state_dict(), "this state has weight, bias"),
        ({**before, "scale": -2.0}, "scale=-2.0"),
        ({**before, "_growth_tracker": -1}, "_growth_tracker=-1"),
    ):
        raises(words, scaler.load_state_dict, state)
        assert scaler.state_dict() == before


def test_a_scaler_that_is_not_enabled_does_nothing() -> None:
    model, x, optimizer, _ = fresh()
    scaler, value = GradScaler(enabled=False), model(x).sum()
    assert scaler.scale(value) is value and scaler.get_scale() == 1.0
    value.backward()
    before = model.bias.detach().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert torch.equal(model.bias, before - 0.4) and scaler.state_dict() == {}
    assert not scaler.is_enabled() and GradScaler().is_enabled()


def test_scaling_many_and_a_new_scale() -> None:
    scaler = GradScaler(init_scale=8.0)
    one, (two, three) = scaler.scale([torch.ones(2), (torch.ones(()), torch.ones(1).double())])
    assert one.tolist() == [8.0, 8.0] and two.item() == three.item() == 8.0
    assert scaler.scale(torch.tensor(1e4).half()).item() == 80_000  # fp16 ends at 65504
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0
    raises("scale=-1.0", scaler.update, -1.0)


def run_bad(scaler: GradScaler, gradient: float, value: float = 1.0) -> torch.Tensor:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(torch.tensor(value))
    p.grad = torch.full_like(p, gradient)
    scaler.step(optimizer)
    scaler.update()
    return p


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_was_bad_before_it_was_scaled_is_named(value: float) -> None:
    scaler = GradScaler(init_scale=4.0)
    words = rf"the loss was {value} before scaling.*same autocast region"
    raises(words, run_bad, scaler, torch.nan, value)
    scaler.update()
    assert scaler.get_scale() == 2.0, "it was skipped all the same"
    assert run_bad(scaler, torch.inf).tolist() == [1.0, 1.0], "a gradient alone is no such case"
    silent = GradScaler(init_scale=4.0, skip_bad_losses=True)
    assert run_bad(silent, torch.nan, value).tolist() == [1.0, 1.0]
    assert silent.get_scale() == 2.0 and silent.skipped == 1
    with pytest.raises(ValueError, match="the loss was nan"):  # one of several, not a single number
        scaler.scale([torch.ones(2), torch.tensor([1.0, torch.nan])])
        run_bad(scaler, torch.nan)


def test_a_scale_that_backs_off_for_ever_is_reported() -> None:
    scaler = GradScaler()
    for _ in range(19):
        run_bad(scaler, torch.inf)
    assert scaler.get_scale() == 2.0**-3
    raises("20 steps in a row.*down to 0.0625.*same autocast region", run_bad, scaler, torch.inf)
    large = GradScaler(init_scale=2.0**100)
    for _ in range(30):
        run_bad(large, torch.inf)  # it still has far to go
    run_bad(GradScaler(init_scale=0.5), torch.inf)  # below 1, and the first
    raises("21 steps in a row", run_bad, scaler, torch.inf)
    run_bad(scaler, 1.0)
    run_bad(scaler, torch.inf)  # in a row: one good step, and it counts anew


def test_where_nan_begins_is_named() -> None:
    def message(*given: Any, **named: Any) -> str:
        return find_nonfinite(*given, **named) or ""

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
    x = torch.ones(2, 3)
    assert find_nonfinite(model, x) is None
    bad = x.clone()
    bad[1, 2] = torch.nan
    argument = "argument 0 of the model has 1 NaN among 6 elements, the first at [1, 2]"
    assert message(model, bad).startswith(argument)
    assert "input of the model has 1 NaN" in message(model, input=bad)
    with torch.no_grad():
        model[1][1].weight[0, 1] = torch.inf
    assert "the parameter 1.1.weight has 1 inf among 9" in message(model, x)
    divides = Custom(lambda self, x: {"fine": x, "bad": x / (x - x)})
    broken = nn.Sequential(nn.Linear(3, 3), divides)
    assert message(broken, x).startswith("the output of 1 (Custom) has 6 inf among 6 elements")
    large = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).half()
    with torch.no_grad():
        large[0].bias.fill_(6e4), large[0].weight.fill_(6e4)
    assert "the output of 0 (Linear)" in message(large, x.half())
    assert "float16 ends at 6.55e+04" in message(large, x.half())
    layers = {"first": nn.Linear(3, 3), "last": nn.Linear(3, 3)}
    between = message(Custom(lambda self, x: self.last(self.first(x).abs() / 0), **layers), x)
    assert between.startswith("the input of last (Linear) has 6 inf") and "no module" in between
    assert not model._forward_hooks and not divides._forward_hooks
    masked = nn.Linear(3, 3)
    masked.register_buffer("mask", torch.full((2,), -torch.inf))
    assert find_nonfinite(masked, x) is None
    masked.mask.fill_(torch.nan)
    assert "the buffer mask has 2 NaN" in message(masked, x)


def test_keyword_arguments_of_modules_are_looked_at() -> None:
    part = Custom(lambda self, x, *, shift: x + shift.nan_to_num())
    whole = Custom(lambda self, x: self.part(x, shift=x / 0), part=part)
    message = find_nonfinite(whole, torch.ones(2)) or ""
    assert message.startswith("the input of part (Custom) has 2 inf")


def test_looking_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), Fp8Linear(nn.Linear(3, 3), history=2))
    before = copy.deepcopy(dict(model.named_buffers()))
    value = model[0](torch.randn(4, 3)).sum()
    assert find_nonfinite(model, torch.randn(4, 3) * 1e3) is None
    value.backward()
    for name, x in model.named_buffers():
        if not name.startswith("0."):
            assert torch.equal(x, before[name]), name
    assert int(model[0].num_batches_tracked) == 1, "of the one forward that was no look"
    state = torch.get_rng_state()
    find_nonfinite(nn.Dropout(), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_it_decides_as_on_the_cpu(dtype: torch.dtype) -> None:
    ends: list[Any] = []
    for device in ("cpu", "cuda"):
        model, x, *_ = fresh()
        model, x = model.to(device, dtype), x.to(device, dtype)
        optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
        scaler = GradScaler(init_scale=64.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model(x).float().square().mean()).backward()
            if step == 3:
                model.weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            clip_grad_norm(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
        ends.append((scaler.state_dict(), model.weight.float().cpu()))
    assert ends[0][0] == ends[1][0]
    assert torch.allclose(ends[0][1], ends[1][1], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_waited_for_once() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    scaler, x = GradScaler(), torch.ones(2, 8, device="cuda")
    for _ in range(2):
        scaler.scale(model(x).sum()).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.unscale_(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.step(optimizer)
        scaler.update()
