"""Gradients clipped, set by hand, frozen or thawed before a step: as in torch, or refused."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import labkit
from labkit import DDP, Comm, MasterWeights, World, ZeRO3, ZeroOptimizer, clip_grad_norm
from labkit.parallel.common.sharder import full_state_dict
from shard_cases import optimizer_of, wrapped
from small_models import Custom, difference, take_steps
from tables import raises
from worlds import on_each_rank, world_fixture

SGD, MOMENTUM = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
stages = pytest.mark.parametrize("stage", [1, 2])

world = world_fixture(sizes=[1, 2, 3], timeout_s=60)
pair = world_fixture(2, timeout_s=60)


def fresh(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Tied weights, a frozen layer, odd sizes."""
    torch.manual_seed(seed)
    embed, frozen = nn.Linear(5, 5, bias=False), nn.Linear(5, 5).requires_grad_(False)
    norm, head = nn.LayerNorm(5), nn.Linear(5, 5)
    head.weight = embed.weight
    parts = {"embed": embed, "frozen": frozen, "norm": norm, "head": head}
    return Custom(lambda m, x: m.head(m.norm(m.frozen(m.embed(x)).tanh())), **parts).to(dtype)


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """6 rows divide evenly over 1, 2 and 3 ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 30 * model(x).square().mean()


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.tensor_split(Comm().size)[Comm().rank]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_equal(model: nn.Module, oracle: nn.Module, atol: float = 1e-10) -> None:
    assert difference(full_state_dict(model), oracle.state_dict()) <= atol


def built(strategy: str, frozen: bool = True, seed: int = 0) -> tuple[nn.Module, Any]:
    """`frozen`: whether the optimizer is given the frozen parameters, too."""
    model = wrapped(strategy, fresh(seed))
    params = list(model.parameters()) if frozen else trained(model)
    make = partial(SGD, lr=0.1 + seed, momentum=0.9)
    return model, optimizer_of(strategy, params, make, Comm(), bucket_mb=1e-4)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: model.parameters(),
    "trainable": lambda model: (p for p in model.parameters() if p.requires_grad),
    "model": lambda model: model,
}


@pytest.mark.parametrize("strategy", ["ddp", "naive-ddp", "masters", "zero-1", "zero-2", "zero-3"])
@on_each_rank("world")
def test_parameters_are_clipped_by_the_norm_that_one_process_finds(strategy: str) -> None:
    for form in (*FORMS.values(), None):
        oracle = fresh()
        torchs = SGD(oracle.parameters(), **MOMENTUM)
        model, optimizer = built(strategy)
        for step in range(2):
            optimizer.zero_grad(), torchs.zero_grad()
            for micro in range(2):
                hold = nullcontext() if micro else getattr(model, "no_sync", nullcontext)()
                with hold:
                    loss_of(model, mine(batch(2 * step + micro))).backward()
                loss_of(oracle, batch(2 * step + micro)).backward()
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
            given = form(model) if form else optimizer
            torch.testing.assert_close(clip_grad_norm(given, 0.5), expected)
            optimizer.step(), torchs.step()
        check_equal(model, oracle)


def two_groups(model: Any) -> torch.optim.Optimizer:
    return SGD([{"params": part.parameters()} for part in (model.norm, model.head)], lr=1)


def clips_as_torch() -> None:
    for given, to_torch in (
        (lambda model: model.embed.weight, lambda model: model.embed.weight),
        (lambda model: model.parameters(), lambda model: model.parameters()),
        (two_groups, lambda model: model.parameters()),
    ):
        model, oracle = fresh(), fresh()
        for one in (model, oracle):
            loss_of(one, batch()).backward()
        expected = nn.utils.clip_grad_norm_(to_torch(oracle), 0.5)
        assert torch.equal(clip_grad_norm(given(model), 0.5), expected) and expected > 0.5
        for p, q in zip(trained(model), trained(oracle)):
            assert torch.equal(p.grad, q.grad)


def test_a_tensor_a_model_and_an_optimizer_are_clipped_as_by_torch(pair: World) -> None:
    clips_as_torch()
    pair.run(clips_as_torch)


def test_a_model_with_a_submodule_named_module_is_clipped_as_a_whole() -> None:
    model = nn.Module()
    model.module, model.head = nn.Linear(2, 2), nn.Linear(2, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert clip_grad_norm(model, 1.0).item() == pytest.approx(12**0.5)
    assert model.head.weight.grad is not None and model.head.weight.grad.norm() < 1


@pytest.mark.parametrize("sharder", ["plain", "zero-1", "zero3"])
@on_each_rank("pair")
def test_the_parameters_of_a_pipeline_are_clipped_by_the_norm_of_all_stages(sharder: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(5, 4).double(), nn.Linear(4, 5).double()]
    oracle = copy.deepcopy(nn.Sequential(*layers))
    comm, alone = Comm(), labkit.Mesh(pp=2, dp=1).dp
    if sharder == "zero3":
        layers[comm.rank] = ZeRO3(layers[comm.rank], alone)
    pipe = labkit.Pipeline(layers, comm, microbatches=2, loss_fn=nn.MSELoss())
    optimizer: Any = SGD(pipe.parameters(), lr=0.1)
    if sharder == "zero-1":
        optimizer = ZeroOptimizer(pipe.parameters(), SGD, 1, comm=alone, lr=0.1)
    x = batch()
    pipe.step(x, 30 * x)
    nn.MSELoss()(oracle(x), 30 * x).backward()
    expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm(pipe.parameters(), 0.5), expected)
    optimizer.step(), SGD(oracle.parameters(), lr=0.1).step()
    assert difference(pipe.full_state_dict(), oracle.state_dict()) < 1e-10


@stages
@on_each_rank("world")
def test_after_unscale_bf16_gradients_are_clipped_in_float32(stage: int) -> None:
    def run(by: str) -> torch.Tensor:
        model = fresh(dtype=torch.bfloat16)
        optimizer = ZeroOptimizer(model.parameters(), SGD, stage, lr=0.1)
        scaler = labkit.GradScaler(init_scale=4.0)
        scaler.scale(loss_of(model, mine(batch(dtype=torch.bfloat16)))).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm(optimizer if by == "optimizer" else model.parameters(), 0.5)
        assert norm.dtype == torch.float32 and norm > 0.5
        scaler.step(optimizer)
        return torch.cat([norm.view(1), *(p.detach().float().view(-1) for p in trained(model))])

    assert torch.equal(run("optimizer"), run("parameters"))


def test_an_invalid_list_of_parameters_is_refused() -> None:
    model = fresh()
    loss_of(model, batch()).backward()
    spent = model.parameters()
    SGD(spent, lr=0.1)
    for given in (spent, [], model.named_parameters(), model.state_dict()):
        raises("is empty or has items other than", clip_grad_norm, given, 1.0)


@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3"])
@on_each_rank("pair")
def test_parameters_of_a_sharder_and_others_are_refused(strategy: str) -> None:
    model, _ = built(strategy)
    parameters = trained(getattr(model, "module", model))
    loss_of(model, mine(batch())).backward()
    for given in (parameters[:1], [*parameters, nn.Parameter(torch.ones(1))]):
        raises("are not exactly its parameters; pass the Z", clip_grad_norm, given, 1.0)


def both(stage: int, **options: Any) -> list[tuple[Any, Any, Callable[..., torch.Tensor]]]:
    """A model, its optimizer, and which rows it trains on: with ZeRO this rank's, with SGD all."""
    options = options or MOMENTUM
    model, oracle = fresh(), fresh()
    ours = ZeroOptimizer(model.parameters(), SGD, stage, bucket_mb=1e-4, **options)
    return [(model, ours, mine), (oracle, SGD(oracle.parameters(), **options), lambda x: x)]


@stages
@on_each_rank("world")
def test_what_needs_the_whole_gradient_is_refused_where_a_rank_has_a_share(stage: int) -> None:
    (model, ours, _), (oracle, torchs, _) = pair = both(stage)
    for net, _, rows in pair:
        loss_of(net, rows(batch())).backward()
    p = model.embed.weight

    def replace() -> None:
        p.grad = p.grad * 0.5

    for name, change in {
        "linalg_vector_norm": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "_foreach_norm": lambda: nn.utils.clip_grad_norm_(trained(model), 1.0, foreach=True),
        "clamp_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "mul_": lambda: p.grad.mul_(0.5),
        "mul": replace,
        "add_": lambda: p.grad.add_(torch.randn_like(p)),
        "detach": lambda: p.grad.data.norm(),
    }.items():
        message = str(raises(("labkit.clip_grad_norm",), change))
        assert message.startswith(f"{name} on the `.grad` of a ZeroOptimizer's parameter")
    raises(("`.grad`",), SGD(model.parameters(), lr=1.0).step)  # another optimizer
    for g in (*ours.gradient_pieces()[0], *(q.grad for q in trained(oracle))):
        g.mul_(0.5)
    ours.step(), torchs.step()
    check_equal(model, oracle)


@stages
@pytest.mark.parametrize("zero", [True, False], ids=["zero_grad", ""])
@on_each_rank("world")
def test_gradients_set_by_hand_are_averaged_by_the_step(stage: int, zero: bool) -> None:
    pair = both(stage)
    for model, optimizer, rows in pair:
        for step in range(3):
            if zero:
                optimizer.zero_grad()
            gradients = torch.autograd.grad(loss_of(model, rows(batch(step))), trained(model))
            for p, g in zip(trained(model), gradients):
                p.grad = g
            if isinstance(optimizer, ZeroOptimizer):
                clip_grad_norm(optimizer, 0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    check_equal(pair[0][0], pair[1][0])


@stages
@on_each_rank("world")
def test_a_gradient_set_by_hand_replaces_what_backward_left(stage: int) -> None:
    pair = both(stage)
    for model, optimizer, rows in pair:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rows(batch(step))).backward()
            model.embed.weight.grad = torch.arange(25.0).double().view(5, 5)
            model.norm.bias.grad = None
            optimizer.step()
    check_equal(pair[0][0], pair[1][0])


@stages
@on_each_rank("world")
def test_a_backward_adds_to_a_gradient_set_by_hand(stage: int) -> None:
    pair = both(stage)
    for model, optimizer, rows in pair:
        x = rows(batch())
        model.embed.weight.grad = torch.ones(5, 5).double()
        model.norm.bias.grad = torch.ones(5).double()
        loss_of(model, x).backward()
        model.norm.bias.grad = None  # what two backwards have left is dropped
        loss_of(model, x).backward()
        torch.autograd.grad(loss_of(model, x), trained(model))  # changes nothing
        optimizer.step()
    check_equal(pair[0][0], pair[1][0])


DROPS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
}


@stages
@pytest.mark.parametrize("quiet", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("drop", DROPS)
@on_each_rank("world")
def test_gradients_dropped_between_backwards_are_gone(stage: int, quiet: bool, drop: str) -> None:
    pair = both(stage, weight_decay=0.1, lr=0.1)
    for model, optimizer, rows in pair:
        no_sync = getattr(optimizer, "no_sync", nullcontext)
        for _ in range(2):
            for micro in range(3):
                with no_sync() if quiet and micro < 2 else nullcontext():
                    loss_of(model, rows(batch(micro))).backward()
                if micro == 0:
                    DROPS[drop](model, optimizer)
            optimizer.step()
            DROPS[drop](model, optimizer)
        if not quiet:
            optimizer.step()  # on zeros, weight decay counts
    check_equal(pair[0][0], pair[1][0])


@stages
@on_each_rank("world")
def test_a_parameter_frozen_for_a_while_is_not_trained_meanwhile(stage: int) -> None:
    pair = both(stage)
    for model, optimizer, rows in pair:
        for step in range(5):
            model.norm.requires_grad_(step not in (1, 2))
            optimizer.zero_grad()
            loss_of(model, rows(batch(step))).backward()
            optimizer.step()
    check_equal(pair[0][0], pair[1][0])


@stages
@on_each_rank("world")
def test_a_parameter_thawed_later_is_refused_at_the_first_step(stage: int) -> None:
    words = ("1 parameters, the first of shape [5, 5], have gradients now but were frozen when",
             "create it after requires_grad_(True)")  # fmt: skip
    (model, ours, _), _ = both(stage)
    before = model.embed.weight.detach().clone()
    model.frozen.weight.requires_grad_(True)
    loss_of(model, mine(batch())).backward()
    raises(words, ours.step)
    model.zero_grad()
    model.frozen.weight.sum().backward()  # nothing that the optimizer trains takes part
    raises(words, ours.step)
    assert torch.equal(before, model.embed.weight)


@stages
@on_each_rank("world")
def test_a_gradient_set_by_hand_in_bf16_steps_on_the_master(stage: int) -> None:
    model, oracle = fresh(dtype=torch.bfloat16), fresh(dtype=torch.bfloat16)
    ours = ZeroOptimizer(model.parameters(), torch.optim.Adam, stage, lr=0.01)
    masters = MasterWeights(oracle.parameters(), torch.optim.Adam, lr=0.01)

    def closure(one: nn.Module) -> None:
        for p in trained(one):
            p.grad = torch.ones_like(p)

    for _ in range(3):
        ours.step(lambda: closure(model)), masters.step(lambda: closure(oracle))
    check_equal(model, oracle, atol=0.0)


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3"])
@pytest.mark.parametrize("saved_all", [True, False])
@on_each_rank("pair")
def test_a_checkpoint_loads_whether_or_not_its_optimizer_had_the_frozen_parameters(
    strategy: str, saved_all: bool, tmp_path: Path
) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        take_steps(optimizer, lambda step: loss_of(model, mine(batch(step))))

    model, optimizer = built(strategy, saved_all)
    train(model, optimizer)
    labkit.save_checkpoint(tmp_path, model, optimizer)
    train(model, optimizer)
    other, resumed = built(strategy, not saved_all, seed=1)
    labkit.load_checkpoint(tmp_path, other, resumed)
    assert resumed.param_groups[0]["lr"] == 0.1
    train(other, resumed)
    assert difference(full_state_dict(model), full_state_dict(other)) == 0


@on_each_rank("pair")
def test_a_checkpoint_without_state_of_a_trained_parameter_is_refused(tmp_path: Path) -> None:
    model = DDP(fresh())
    labkit.save_checkpoint(tmp_path, model, SGD(trained(model), **MOMENTUM))
    other = DDP(fresh().requires_grad_(True))
    optimizer, words = SGD(other.parameters(), lr=0.1), "it lacks frozen.weight, frozen.b"
    raises((words,), labkit.load_checkpoint, tmp_path, other, optimizer)
