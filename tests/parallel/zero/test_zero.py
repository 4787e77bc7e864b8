"""ZeRO-1 and 2: single-process training, the formula's bytes, and only this rank's share held."""

import copy
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import CASES, MODELS, OPTIMIZERS, Strategy, check_equal_to_single
from labkit import GPT, Comm, Link, Text, World, ZeroOptimizer, dry_run, listen, loss, record
from labkit.events import CommEvent
from small_models import Custom, difference, take_steps
from tables import raises
from worlds import on_each_rank, on_ranks_of_its_own, world_fixture

SHARDED = {1: ("optimizer_bytes",), 2: ("gradient_bytes", "optimizer_bytes")}


def zero(stage: int, make: Any = ZeroOptimizer, bucket_mb: float = 0.01) -> Strategy:
    def predict(module: nn.Module, size: int, rank: int) -> Any:
        return ZeroOptimizer.predict(module, size, stage, bucket_mb, rank)

    optimizer = partial(make, stage=stage, bucket_mb=bucket_mb)
    return Strategy(lambda module: module, optimizer, predict, SHARDED[stage])


slow = pytest.mark.slow
stages = pytest.mark.parametrize("stage", [1, 2])
SGD = torch.optim.SGD
world = world_fixture(timeout_s=20)
SIZES = [pytest.param(n, marks=slow) if n != 3 else n for n in (1, 2, 3, 4)]
NAMES = [one if one == "adamw" else pytest.param(one, marks=slow) for one in OPTIMIZERS]


@pytest.mark.parametrize("world", SIZES, ids=lambda n: f"{n} ranks", indirect=True)
@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("case", CASES)
@stages
def test_weights_equal_one_process(world: World, stage: int, case: str, optimizer: str) -> None:
    check_equal_to_single(world, zero(stage), case, optimizer)


@pytest.mark.parametrize("case", CASES)
@on_each_rank("world2")
def test_parameters_that_arrive_in_the_next_forward_are_the_same(case: str) -> None:
    states = []
    for overlapped in (True, False):
        torch.manual_seed(0)
        model, text = MODELS[case]().double(), Text()
        options = {"bucket_mb": 0.01, "lr": 0.01, "gather_in": model if overlapped else None}
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, 2, **options)
        for step in range(4):
            batch = text.batch(step, 4, 16).slice(Comm().rank, 2)
            optimizer.zero_grad()
            loss(model(batch.x), batch).backward()
            optimizer.step()
        states.append(model.state_dict())  # waits
    assert difference(*states) == 0


@on_ranks_of_its_own(2, link=Link(gbps=0.1))
def test_a_part_of_the_model_called_directly_waits_for_what_it_reads() -> None:
    # It reads the weights of a child that it does not call, as attention does.
    child = nn.Linear(300, 300, bias=False)
    part = Custom(lambda m, x: nn.functional.linear(x, m.child.weight), child=child)
    model = nn.Sequential(nn.Linear(300, 300), part)
    optimizer = ZeroOptimizer(model.parameters(), SGD, bucket_mb=0.1, gather_in=model, lr=1.0)
    x = torch.ones(1, 300)
    before = part(x).detach()
    model(x).sum().backward()
    optimizer.step()
    now = part(x).detach()
    optimizer.wait()
    assert (now - before).abs().max() > 0 and torch.equal(now, part(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@on_each_rank("world2")
def test_two_models_may_use_the_same_names() -> None:
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizer = ZeroOptimizer([{"params": m.named_parameters()} for m in models], SGD, lr=1.0)
    before = [model.weight.detach().clone() for model in models]
    x = torch.full((1, 2), 1.0 + 2 * Comm().rank)  # gradients of 1 and 3: their mean is 2
    sum(model(x).sum() for model in models).backward()
    optimizer.step()
    for was, model in zip(before, models, strict=True):
        assert float((was - model.weight).detach().mean()) == pytest.approx(2.0)


@stages
@on_each_rank("world2")
def test_a_rank_keeps_only_its_own_gradients(stage: int) -> None:
    module = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, stage, bucket_mb=0.003)
    module(torch.ones(2, 30)).sum().backward()
    assert sum(x.numel() for x in optimizer.gradient_pieces()[0]) == 930
    whole = sum(bucket.flat.numel() for bucket in optimizer._buckets if bucket.flat is not None)
    assert whole == (1860 if stage == 1 else 0)
    optimizer.step()
    freed = [p.grad.untyped_storage().nbytes() == 0 for p in module.parameters()]
    assert freed == [stage == 2] * 4


def test_gradients_leave_while_backward_runs_and_parameters_come_while_forward_does() -> None:
    """On a slow wire, by the order of events; of stage 2, at most two buckets are whole. `at`: when
    the first layer's forward began, its gradient was made, and the step was over."""

    def run(stage: int, gathers: bool) -> tuple[list[CommEvent], dict[str, float], int]:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        options = {"bucket_mb": 0.02, "lr": 0.1, "gather_in": model if gathers else None}
        optimizer = ZeroOptimizer(model.parameters(), SGD, stage, **options)
        at: dict[str, float] = {}
        whole = 0

        def made(p: torch.Tensor) -> None:
            nonlocal whole
            at["backward"] = time.monotonic()
            whole = max(whole, sum(b.flat is not None for b in optimizer._buckets))

        for layer in model:
            layer.weight.register_post_accumulate_grad_hook(made)
        model[0].register_forward_pre_hook(lambda *_: at.update(forward=time.monotonic()))
        with listen() as events:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            at["step"] = time.monotonic()
            model(torch.ones(1, 64))
        return events, at, whole

    with World(2, link=Link(gbps=0.1)) as world:
        for stage, gathers in ((1, False), (2, True)):
            for events, at, whole in world.run(run, stage, gathers):
                out = [e for e in events if e.op == "reduce_scatter"]
                back = [e for e in events if e.op == "all_gather"]
                assert len(out) == len(back) == 4
                assert sum(e.issued_s < at["backward"] for e in out) == 3
                assert [e.blocking for e in out] == [False, False, False, True]
                assert sum(e.wait_ended_s > at["step"] for e in back) == (4 if gathers else 0)
                if gathers:  # the last layer's parameters come after the first layer's forward
                    assert max(e.wait_ended_s for e in back) > at["forward"]
                    assert whole <= 3  # two on their way, and the one that fills


class Signs(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.data.sub_(group["lr"] * p.grad.sign())


class ByNorm(Signs):
    """Not elementwise: the step depends on the norm of the whole gradient."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(0.01 * p.grad / p.grad.norm())


class CountsInItsGroup(Signs):
    """Elementwise, but what it counts is one number for all parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()


NO_STATE_OF_ITS_OWN = ("SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "NAdam",
                       "RAdam", "Rprop", "ASGD")  # fmt: skip


@on_each_rank("world2")
def test_each_elementwise_optimizer_works_as_in_one_process() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator())
    for cls in [getattr(torch.optim, name) for name in NO_STATE_OF_ITS_OWN] + [Signs]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        oracle = copy.deepcopy(module)
        ours = ZeroOptimizer(module.parameters(), cls, 2, lr=0.01)
        torchs = cls(oracle.parameters(), lr=0.01)
        for _ in range(3):
            ours.zero_grad(), torchs.zero_grad()
            module(x[Comm().rank]).square().mean().backward()
            oracle(x.flatten(0, 1)).square().mean().backward()
            ours.step(), torchs.step()
        assert difference(module.state_dict(), oracle.state_dict()) < 1e-10, cls


@on_each_rank("world2")
def test_an_optimizer_that_needs_whole_tensors_is_refused_by_name() -> None:
    """Also where a lambda makes it, or where an optimizer is given in place of its class."""
    parameters = [nn.Linear(3, 3).weight]
    whole = [getattr(torch.optim, n, None) for n in ("LBFGS", "SparseAdam", "Muon")]
    for cls, reason in (
        (CountsInItsGroup, "its step changes the option"),
        (torch.optim.Adafactor, "its update of a matrix"),
        *((cls, "") for cls in (*filter(None, whole), ByNorm)),
    ):
        for make in (cls, lambda params, cls=cls: cls(params)):
            message = str(raises((reason,), ZeroOptimizer, parameters, make))
            assert message.startswith(f"{cls.__name__} cannot be sharded: ")
            assert message.endswith(f"or {cls.__name__} under DDP")
    words = "'AdamW' object is not callable", "use an optimizer class"
    raises(words, ZeroOptimizer, parameters, torch.optim.AdamW(parameters))


@stages
@on_each_rank("world2")
def test_schedulers_groups_clipping_and_closures_work_as_in_one_process(stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    oracle = copy.deepcopy(module)

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        decayed, others = list(of[0].named_parameters()), list(of[2].named_parameters("2"))
        return [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.3}]

    ours = ZeroOptimizer(groups(module), torch.optim.AdamW, stage, bucket_mb=1e-4, lr=0.1)
    torchs = torch.optim.AdamW(groups(oracle), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (ours, torchs)]
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    with warnings.catch_warnings(action="error"):
        for _ in range(4):
            ours.zero_grad(), torchs.zero_grad()
            module(x[Comm().rank]).square().sum().backward()
            (oracle(x.flatten(0, 1)).square().sum() / 2).backward()
            norm = ours.clip_grad_norm_(0.1)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
            torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
            ours.step(), torchs.step()
            for schedule in schedules:
                schedule.step()
    assert [g["lr"] for g in ours.inner.param_groups] == [g["lr"] * 2 for g in torchs.param_groups]

    def closure() -> torch.Tensor:
        ours.zero_grad()
        value = module(x[Comm().rank]).sum()
        value.backward()
        return value

    assert ours.step(closure).requires_grad
    take_steps(torchs, lambda _: oracle(x.flatten(0, 1)).sum() / 2, 1)
    assert difference(module.state_dict(), oracle.state_dict()) < 1e-10


@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_each_rank("world2")
def test_the_state_of_a_rank_is_loaded_into_another_run(stage: int, dtype: torch.dtype) -> None:
    def start(seed: int) -> tuple[nn.Module, ZeroOptimizer]:
        torch.manual_seed(seed)
        module = nn.Linear(5, 5, dtype=dtype)
        return module, ZeroOptimizer(module.parameters(), torch.optim.Adam, stage, lr=0.1)

    def train(module: nn.Module, optimizer: ZeroOptimizer) -> None:
        x = torch.full((2, 5), Comm().rank + 1, dtype=dtype)
        take_steps(optimizer, lambda _: module(x).square().sum(), 3)

    module, optimizer = start(0)
    train(module, optimizer)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(module, optimizer)
    other, resumed = start(1)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed)
    raises("checkpoint", resumed.load_state_dict, {**saved[1], "whose": [0, 7]})
    assert difference(module.state_dict(), other.state_dict()) == 0


@stages
@on_each_rank("world2")
def test_loss_scaling_is_refused_on_every_rank(stage: int) -> None:
    """Also where only one rank's gradients are inf, and where `unscale_` is called first."""
    for unscaled in (False, True):
        model = nn.Linear(2, 2)
        optimizer = ZeroOptimizer(model.parameters(), SGD, stage, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x = torch.ones(1, 2) if Comm().rank else torch.full((1, 2), torch.inf)
        scaler.scale(model(x).sum()).backward()
        call = scaler.unscale_ if unscaled else scaler.step
        raises(("not torch.amp's", "labkit.GradScaler"), call, optimizer)
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()  # without it, all is well
        assert torch.equal(before - 0.1, model.weight)


@stages
@on_each_rank("world2")
def test_gradients_of_no_sync_alone_are_refused(stage: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = ZeroOptimizer(model.parameters(), SGD, stage, lr=0.1)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        model(torch.ones(1, 2)).sum().backward()
    for use in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        raises("`no_sync`", use)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    with optimizer.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()


@on_each_rank("world2")
def test_bad_arguments_are_refused_on_every_rank() -> None:
    def zero(**options: Any) -> Any:
        return ZeroOptimizer(nn.Linear(2, 2).named_parameters(), SGD, **options)

    def changed(how: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = ZeroOptimizer(model.named_parameters(), SGD)
        how(model)
        model(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()

    def other_memory(model: Any) -> None:
        model[1].weight.data = model[1].weight.data.clone()

    frozen, more = nn.Parameter(torch.ones(1), False), {"params": [nn.Parameter(torch.ones(1))]}
    for make, message in [
        (lambda: zero(stage=3), "stage=3"),
        (lambda: zero(bucket_mb=0), "bucket_mb=0"),
        (lambda: ZeroOptimizer([frozen], SGD), "pass at least one parameter"),
        (lambda: zero().add_param_group(more), "added later"),
        (lambda: changed(other_memory), "1.weight has moved since"),
        (lambda: changed(lambda model: model.bfloat16()), "0.weight has moved since"),
    ]:
        raises((message,), make)


@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_each_rank("world2")
def test_a_second_backward_after_a_step_is_refused(stage: int, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    optimizer = ZeroOptimizer(module.parameters(), SGD, stage, lr=0.1)
    value = module(torch.ones(1, 2, dtype=dtype)).sum()
    value.backward(retain_graph=True)
    optimizer.step()
    raises("modified by an inplace operation", value.backward, error=RuntimeError)


def train_1m(stage: int, dtype: str, bucket_mb: float = 0.5) -> None:
    model = GPT.preset("1M").to(getattr(torch, dtype))
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage, bucket_mb=bucket_mb)
    x = torch.zeros(1, 8, dtype=torch.long)
    take_steps(optimizer, lambda _: model(x).float().logsumexp(-1).sum())


@slow
@stages
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 2), ("float32", 64)])
def test_memory_is_the_formula_within_2_percent(stage: int, dtype: str, ranks: int) -> None:
    """Bytes a parameter, of 2 ranks recorded and of 64 on paper."""
    if ranks == 2:
        with World(2) as world, record(detail_step=1) as trace:
            world.run(train_1m, stage, dtype)
    else:
        trace = dry_run(train_1m, stage, dtype, ranks=ranks)
    weight, gradient, optimizer = (2, 2, 12) if dtype == "bfloat16" else (4, 4, 8)
    expected = [weight, gradient / (ranks if stage == 2 else 1), optimizer / ranks]
    for rank in trace.ranks.values():
        held = [nbytes / GPT.preset("1M").parameter_count for nbytes in rank.memory[-1].held_bytes]
        assert held[:3] == pytest.approx(expected, rel=0.02)


@slow
def test_whole_gradients_in_stage_2_are_a_few_buckets() -> None:
    """Two on their way and the one that fills; in fp32, what the optimizer sees is one bucket's."""
    trace = dry_run(train_1m, 2, "bfloat16", ranks=64, bucket_mb=0.1)
    numbers = GPT.preset("1M").parameter_count
    largest = max(p.numel() for p in GPT.preset("1M").parameters())
    gradients = [point.held_bytes[1] for point in trace.ranks[0].memory]
    assert max(gradients) <= 2 * numbers / 64 * 1.02 + 3 * 2 * largest < 2 * numbers
