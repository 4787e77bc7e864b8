"""Every data-parallel strategy in a training loop, against one process; and what is DDP's alone."""

import copy
import gc
import time
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import labkit
from data_parallel_contract import CASES, Branching, check_equal_to_single, weights_after
from labkit import DDP, Comm, NaiveDDP, ParameterServer, Single, World, ZeRO3, ZeroOptimizer, listen
from labkit.parallel.common.flat import cut
from small_models import difference, take_steps
from tables import raises
from worlds import on_each_rank, world_fixture

REPLICAS: dict[str, Any] = {
    "NaiveDDP": NaiveDDP,
    "DDP": DDP,
    "small buckets": partial(DDP, bucket_mb=0.001),
    "no overlap": partial(DDP, overlap=False),
}
ZERO_3 = {
    "one unit": partial(ZeRO3, units=lambda _: True),
    "kept whole": partial(ZeRO3, units=lambda _: True, persist_below=100),
}
WRAPPERS = {**REPLICAS, "ParameterServer": ParameterServer, **ZERO_3}
replicas = pytest.mark.parametrize("strategy", REPLICAS)
both = pytest.mark.parametrize("strategy", [NaiveDDP, DDP])
every = pytest.mark.parametrize("strategy", [*WRAPPERS, "zero-1", "zero-2"])
world = world_fixture(sizes=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)], timeout_s=20)


@replicas
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_single_process_training(world: World, strategy: str, case: str) -> None:
    check_equal_to_single(world, REPLICAS[strategy], case)


@pytest.mark.slow
def test_losses_agree_in_float32(world2: World) -> None:
    ours = world2.run(weights_after, DDP, "gpt", dtype=torch.float32)
    with World(1) as one:
        oracle = one.run(weights_after, Single, "gpt", dtype=torch.float32)[0]
    mean = [sum(losses) / 2 for losses in zip(*(run.losses for run in ours))]
    assert mean == pytest.approx(oracle.losses, rel=1e-4)


def built(strategy: str, module: nn.Module, cls: Any = torch.optim.SGD, **options: Any) -> Any:
    """The model and its optimizer, which has what holds gradients back."""
    if strategy in ("zero-1", "zero-2"):
        stage = int(strategy[-1])
        gathers = module if stage == 2 else None
        options = {"stage": stage, "bucket_mb": 1e-4, "gather_in": gathers} | options
        return module, ZeroOptimizer(module.named_parameters(), cls, **options)
    model = WRAPPERS[strategy](module)
    optimizer = cls(model.parameters(), **options)
    return model, model.pull_after(optimizer) if strategy == "ParameterServer" else optimizer


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    state = getattr(model, "full_state_dict", getattr(model, "module", model).state_dict)()
    return {name: x.clone() for name, x in state.items()}


def check_accumulation(strategy: str, held_back: int) -> None:
    """Two steps of four backwards, the first ones held back (`no_sync`): sent only afterwards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    oracle = copy.deepcopy(module)
    model, optimizer = built(strategy, module, torch.optim.Adam, lr=0.1)
    torchs = torch.optim.Adam(oracle.parameters(), lr=0.1)
    holds = optimizer if isinstance(optimizer, ZeroOptimizer) else model
    inputs = torch.randn(2, 4, 2, 5, 3, dtype=torch.float64)  # [step, micro, rank, row, ...]
    for step in range(2):
        optimizer.zero_grad(), torchs.zero_grad()
        for micro in range(4):
            x = inputs[step, micro]
            with listen() as events, holds.no_sync() if micro < held_back else nullcontext():
                model(x[Comm().rank]).square().mean().backward()
            assert (len(events) == 0) == (micro < held_back)
            oracle(x.flatten(0, 1)).square().mean().backward()
        optimizer.step(), torchs.step()
    assert difference(state_of(model), oracle.state_dict()) < 1e-10


@every
def test_accumulation_is_the_sum_of_means(world2: World, strategy: str) -> None:
    for held_back in (0,) if strategy in ZERO_3 else (0, 3):  # which has no `no_sync`
        world2.run(check_accumulation, strategy, held_back)


@every
@on_each_rank("world2")
def test_a_parameter_is_averaged_if_any_rank_used_it_and_else_left_alone(strategy: str) -> None:
    """With weight decay, a step on one that nobody used would be seen."""
    torch.manual_seed(0)
    module = Branching()
    before = state_of(module)
    model, optimizer = built(strategy, module, lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3).double(), deep=Comm().rank == 0).sum().backward()
    optimizer.step()
    after = state_of(model)
    assert all(difference(state, after) == 0 for state in Comm().all_gather_object(after))
    for name, x in after.items():
        assert torch.equal(x, before[name]) == name.startswith("nobody")
    expected = before["both.bias"] - 0.1 * (torch.ones(3) + 0.1 * before["both.bias"])  # 2 / 2
    torch.testing.assert_close(after["both.bias"], expected)


@every
@on_each_rank("world2")
def test_an_error_in_backward_does_not_spoil_the_next_step(strategy: str) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    oracle = copy.deepcopy(module)
    hook = module[0].weight.register_hook(fail)
    model, optimizer = built(strategy, module, lr=1.0)
    raises("on purpose", model(torch.ones(1, 3).double()).sum().backward, error=RuntimeError)
    hook.remove()
    torchs = torch.optim.SGD(oracle.parameters(), lr=1.0)
    take_steps(optimizer, lambda _: model(torch.full((1, 3), Comm().rank + 1.0).double()).sum())
    take_steps(torchs, lambda _: oracle(torch.full((1, 3), 1.5).double()).sum())
    assert difference(state_of(model), oracle.state_dict()) < 1e-12


@every
@on_each_rank("world2")
def test_a_dropped_model_is_freed(strategy: str) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].weight = module[1].weight
    options = {"gather_in": module} if strategy.startswith("zero-") else {}
    model, optimizer = built(strategy, module, torch.optim.Adam, lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    alive = [weakref.ref(x) for x in (module, model, optimizer)]
    if isinstance(model, ZeRO3):
        alive += [weakref.ref(flat.share) for unit in model.units for flat in unit.flats]
    del module, model, optimizer, options
    gc.collect()
    assert [one() for one in alive] == [None] * len(alive)


@every
@on_each_rank("world2")
def test_what_cannot_be_trained_is_refused(strategy: str) -> None:
    def wrap(module: nn.Module) -> Any:
        return built(strategy, module, lr=0.1)

    def sparse() -> None:
        model, optimizer = wrap(nn.Embedding(5, 2, sparse=True))
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    nothing = "empty parameter list" if strategy[:5] == "zero-" else "no trainable parameter"
    raises((nothing,), wrap, nn.ReLU())
    for kind in ("shape", "frozen"):
        module = nn.Linear(2, 2 + Comm().rank * (kind == "shape"))
        nn.init.constant_(module.weight, Comm().rank)  # all ranks have one seed
        module.requires_grad_(kind == "shape" or Comm().rank == 0)
        before = state_of(module)
        raises(("parameter 0 is weight", "on rank 0 and "), wrap, module)
        assert difference(state_of(module), before) == 0, "refused before anything was sent"
    module = nn.Linear(2, 2)
    model, optimizer = wrap(module)
    owner = type(optimizer if model is module else model).__name__
    raises((f"0.weight already belongs to a {owner}",), wrap, nn.Sequential(module))
    if strategy not in ZERO_3:
        raises("sparse=False", sparse, error=(TypeError, ValueError))


@both
@on_each_rank("world2")
def test_batch_norm_buffers_follow_rank_0(strategy: Any) -> None:
    torch.manual_seed(Comm().rank)
    norm = nn.BatchNorm1d(4)
    model = strategy(nn.Sequential(nn.Linear(3, 4), norm))
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
    model(torch.zeros(5, 3))  # the same on all ranks, after rank 0's statistics came
    assert int(norm.num_batches_tracked) == 4
    first, second = Comm().all_gather_object(dict(norm.named_buffers()))
    assert difference(first, second) == 0


@on_each_rank("world2")
def test_eval_and_no_grad_forwards_send_nothing() -> None:
    model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with listen() as events:
        with torch.no_grad():
            model(torch.zeros(5, 3))
        model.eval()
        model(torch.zeros(5, 3))
    assert len(events) == 0


@replicas
@on_each_rank("world4")
def test_a_gradient_of_zero_is_not_taken_for_unused(strategy: str) -> None:
    """Of rank 0 alone: -0.0 in every place; and the smallest fp16 number below zero, which divided
    by 4 ranks is -0.0."""
    for dtype, factors, expected in (
        (torch.float32, [-0.0, -0.0], [0.0, 0.0]),
        (torch.float16, [-6e-8, 1.0], [0.0, 0.25]),
    ):
        module, other = (nn.Linear(2, 1, bias=False, dtype=dtype) for _ in range(2))
        model = REPLICAS[strategy](nn.ModuleList([module, other]))
        value = other(torch.ones(1, 2, dtype=dtype)).sum()
        if Comm().rank == 0:
            value = value + (module.weight * torch.tensor([factors], dtype=dtype)).sum()
        value.backward()
        del model
        assert module.weight.grad is not None and module.weight.grad.tolist() == [expected]


def test_buckets_are_filled_last_parameter_first_and_by_dtype() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 1, 2, 9)]
    parameters.insert(1, nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    buckets = cut(parameters, bucket_bytes=12)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[9], [2, 1], [4], [3]]
    assert [{p.dtype for p in bucket} for bucket in buckets].count({torch.float64}) == 1


def test_buckets_leave_while_backward_still_runs() -> None:
    """On a slow wire: the first bucket is on its way before the first layer's gradient is made."""

    def run(overlap: bool) -> tuple[list[Any], float]:
        layers = [nn.Linear(64, 64) for _ in range(4)]
        made: list[float] = []
        layers[0].weight.register_post_accumulate_grad_hook(lambda _: made.append(time.monotonic()))
        model = DDP(nn.Sequential(*layers), bucket_mb=0.02, overlap=overlap)
        with listen() as events:
            model(torch.ones(1, 64)).sum().backward()
        return [event for event in events if event.op == "all_reduce"], made[0]

    with World(2, link=labkit.Link(gbps=0.1)) as world:
        for events, made_s in world.run(run, True):
            assert len(events) == 4
            assert sum(event.issued_s < made_s for event in events) == 3
            assert [event.blocking for event in events] == [False, False, False, True]
        for events, made_s in world.run(run, False):
            assert all(event.issued_s > made_s for event in events)


@replicas
@on_each_rank("world2")
def test_replicas_start_as_rank_0s(strategy: str) -> None:
    """From the moment of wrapping: before any forward."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    module = made(Comm().rank)
    REPLICAS[strategy](module)
    assert difference(module.state_dict(), made(0).state_dict()) == 0


@on_each_rank("world2")
def test_plain_torch_loop_works_unchanged_and_without_warnings() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        model = DDP(nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            for set_to_none in (True, False):
                optimizer.zero_grad(set_to_none=set_to_none)
                model(torch.ones(2, 3)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    assert [str(one.message) for one in caught] == []


@both
@on_each_rank("world2")
def test_the_parameters_of_a_wrapped_module_stay(strategy: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = strategy(module)
    module[1].bias = nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    words = "1.bias was replaced by another tensor after the module was wrapped"
    raises((words,), model, torch.ones(1, 2))


@on_each_rank("world2")
def test_single_refuses_a_larger_world() -> None:
    raises("2 ranks", Single, nn.Linear(1, 1), Comm())


@on_each_rank("world2")
def test_a_refused_bucket_size_leaves_the_module_free_and_unchanged() -> None:
    def zero(module: nn.Module, bucket_mb: float) -> ZeroOptimizer:
        return ZeroOptimizer(module.parameters(), torch.optim.SGD, bucket_mb=bucket_mb, lr=0.1)

    for wrap in (DDP, zero):
        module = nn.Linear(1, 1)
        before = state_of(module)
        try:
            wrap(module, bucket_mb=0)
        except ValueError as error:  # kept, with what the constructor had made
            kept = error
        assert "bucket_mb=0" in str(kept) and difference(state_of(module), before) == 0
        wrap(module, bucket_mb=25)
