"""Master weights: a 16-bit model learns what is lost without them, in 12 bytes a parameter."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from labkit import DDP, GPT, MasterWeights, dry_run
from labkit.parallel.common.held import held
from labkit.precision import master as master_weights
from small_models import take_steps
from tables import raises

both = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.slow
@both
def test_small_updates_add_up(dtype: torch.dtype) -> None:
    """An update of 1/4096 is lost beside 1.0 in bf16 and fp16; 4096 of them are 1."""
    ends = []
    for make in (torch.optim.SGD, lambda params, lr: MasterWeights(params, torch.optim.SGD, lr=lr)):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = make([p], lr=2.0**-12)
        for _ in range(4096):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append(p.tolist())
    assert ends == [[1.0] * 3, [0.0] * 3]


def test_the_masters_are_those_of_fp32_training_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    low = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(False)).bfloat16()
    exact = copy.deepcopy(low).float()
    ours = MasterWeights(low.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    torchs = torch.optim.AdamW(exact.parameters(), lr=0.1, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, torchs)]
    for _ in range(4):
        for p, q in zip(low[0].parameters(), exact[0].parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step(), torchs.step()
        for one in schedules:
            one.step()
    for (name, q), piece in zip(exact.named_parameters(), ours.owned(low), strict=True):
        assert piece.name == name and torch.equal(piece.tensor.float(), q)
        assert torch.equal(low.get_parameter(name), q.to(torch.bfloat16))
        assert (piece.optimizer is None) == (not q.requires_grad)


def test_many_chunks_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter a chunk of its own: all are stepped on, once, and no fp32 gradient stays."""
    monkeypatch.setattr(master_weights, "CHUNK_BYTES", 1)
    test_the_masters_are_those_of_fp32_training_with_the_same_gradients()
    some = [ones() for _ in range(3)]
    optimizer = MasterWeights(some, torch.optim.SGD, lr=2.0**-12)
    for p in some:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [x.tolist() for x in optimizer.state] == [[1 - 2.0**-12] * 2] * 3
    assert all(x.grad is None for x in optimizer.state)


def test_a_parameter_thawed_later_is_an_error_and_not_left_untrained() -> None:
    frozen, other = ones().requires_grad_(False), ones()
    optimizer = MasterWeights([frozen, other], torch.optim.SGD, lr=0.1)
    other.grad = torch.ones_like(other)
    optimizer.step()
    frozen.requires_grad_().grad = torch.ones_like(frozen)
    raises(r"1 parameters.*shape \[2\], have gradients now but were frozen when", optimizer.step)


def test_a_model_in_fp32_is_stepped_on_itself() -> None:
    model = nn.Linear(3, 3)
    models = [model, copy.deepcopy(model)]
    optimizers = [
        MasterWeights(models[0].parameters(), torch.optim.Adam, lr=0.1),
        torch.optim.Adam(models[1].parameters(), lr=0.1),
    ]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    assert held(models[0], optimizers[0]) == held(models[1], optimizers[1])


def test_what_is_written_to_the_model_the_masters_take_and_keep_the_rest_exact() -> None:
    p = ones()
    optimizer = MasterWeights([p], torch.optim.SGD, lr=2.0**-12)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[1] = 3.0
    optimizer.step()
    (master,) = optimizer.state
    assert master.tolist() == [1 - 2 * 2.0**-12, 3 - 2.0**-12]


def test_an_optimizer_that_counts_in_its_group_is_refused() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1

    p = ones()
    optimizer = MasterWeights([p], Counts, lr=0.1)
    p.grad = torch.ones_like(p)
    raises("Counts cannot .* changes the option 'step'", optimizer.step)


def test_its_state_is_loaded_into_another_run() -> None:
    def start(seed: int) -> tuple[nn.Module, MasterWeights]:
        torch.manual_seed(seed)
        module = nn.Linear(5, 5).half()
        return module, MasterWeights(module.parameters(), torch.optim.Adam, lr=0.1)

    def train(module: nn.Module, optimizer: MasterWeights) -> None:
        take_steps(optimizer, lambda _: module(torch.ones(2, 5).half()).square().sum(), 3)

    module, optimizer = start(0)
    train(module, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer)
    other, resumed = start(1)
    resumed.param_groups[0]["lr"] = 0.3
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.1, "options are part of the state"
    train(other, resumed)
    assert torch.equal(module.weight, other.weight)
    optimizer.param_groups[0]["lr"] = 0.7  # as a scheduler does after the last step
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.7
    with pytest.raises(ValueError, match="this state is from an optimizer with a different model"):
        MasterWeights(nn.Linear(2, 2).half().parameters(), torch.optim.Adam).load_state_dict(saved)
    raises("added later", resumed.add_param_group, {"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.slow
def test_a_dry_run_of_ddp_with_masters_holds_16_bytes_a_parameter() -> None:
    def train() -> None:
        model = GPT.preset("1M").bfloat16()
        wrapped = DDP(model)
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)
        take_steps(optimizer, lambda _: wrapped(torch.zeros(1, 8, dtype=torch.long)).sum())

    elements = GPT.preset("1M").parameter_count
    parameters, gradients, optimizer, *_ = dry_run(train, ranks=4).ranks[0].memory[-1].held_bytes
    expected = [2 * elements, 2 * elements, 12 * elements]
    assert [parameters, gradients, optimizer] == pytest.approx(expected, rel=0.02)


class UpdatedInBf16(MasterWeights):
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for master in self._masters():
            master.detach().copy_(master.bfloat16())
        return value


def test_a_master_that_is_updated_in_bf16_turns_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MasterWeights", UpdatedInBf16)
    raises("", test_small_updates_add_up, torch.bfloat16, error=AssertionError)
    masters = test_the_masters_are_those_of_fp32_training_with_the_same_gradients
    raises("", masters, error=AssertionError)
