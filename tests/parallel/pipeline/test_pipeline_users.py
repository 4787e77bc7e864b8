"""Modules used twice, in-place changes, recompute, freezing, hooks, autocast in a pipeline."""

import weakref
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import Edit, Mutation, instead, noticed, on_ranks
from labkit import DDP, Mesh, RankError, World, ZeRO3, listen
from labkit.memory.edits import recompute
from labkit.parallel.pipeline import virtual_stage
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.stages import Layers
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.parallel.splitting import layers_of, measure_costs, split
from labkit.precision.autocasting import autocast
from labkit.schedules import parse_schedule
from pipeline_cases import without_collector
from small_models import Custom, take_steps
from tables import raises
from worlds import on_each_rank


def stages(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    each = [(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(count)]
    return [nn.Sequential(*layers).double() for layers in each]


def batch(rows: int = 8, width: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(rows, width).double(), torch.randn(rows, width).double()


def test_layers_may_be_used_twice_and_have_any_name() -> None:
    layer, names = nn.Linear(4, 4), ["layers", "together", "head"]
    twice = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 4))
    named = nn.Sequential(OrderedDict({name: nn.Linear(4, 4) for name in names}))
    x = torch.randn(3, 4)
    for model, expected in ((twice, ["0", "1", "2", "3", "4"]), (named, names)):
        first, last = cut = split(model, 2)
        assert torch.equal(last(first(x)), model(x))
        assert [*first.layers, *last.layers] == list(layers_of(model)) == expected
        assert Layers.together(cut, [0, 1]).state_dict().keys() == model.state_dict().keys()


def test_names_of_two_layers_are_refused() -> None:
    encoder, decoder = nn.Sequential(*stages()), nn.Sequential(*stages())
    cut = split(encoder, 2) + split(decoder, 2)
    for own in ([0, 2], [0], [3]):
        raises(
            "stages 0 and 2 have different layers with the same name, 0", Layers.together, cut, own
        )
    dropouts = [Layers({"0": nn.Dropout()}) for _ in range(2)]
    raises(
        "stages 0 and 1 have different layers with the same name, 0", Layers.together, dropouts, [0]
    )
    again = split(encoder, 2) + split(encoder, 2)
    assert list(Layers.together(again, [0, 2]).parameters()) == list(encoder[0].parameters())
    one = nn.Linear(4, 4)
    assert len(list(Layers.together([one, nn.Tanh(), one], [0, 2]).parameters())) == 2


def test_costs_are_measured_of_layers_with_side_effects() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), norm)
    x = torch.randn(3, 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, state = x.clone(), deepcopy(model.state_dict())
    assert all(0 < cost < 1e9 for cost in measure_costs(model, x))
    assert torch.equal(x, before)
    assert all(p.grad is not None and (p.grad == 1).all() for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


sgd = partial(torch.optim.SGD, lr=0.1)


def stepped(given: list[nn.Module], schedule: Any = "1f1b", comm: Any = None, **how: Any) -> Any:
    x, y = (rows.float() for rows in batch())
    return Pipeline(given, comm, schedule, None, F.mse_loss, **how).step(x, y)


REFUSED: dict[str, tuple[Any, str]] = {
    "in place": (
        lambda: stepped([nn.Linear(4, 4), Custom(
            lambda m, x: m.layer(x.mul_(2)), layer=nn.Linear(4, 4))]),
        "stage 1 (rank 1), micro-batch 0: Custom changes in place a tensor that needs a "
        "gradient: a parameter or its input from stage 0"),
    "ZeRO-3 in halves": (
        lambda: stepped([ZeRO3(nn.Linear(4, 4), comm=Mesh(dp=2).dp)], "zb-h1", Mesh(pp=1, dp=2).pp),
        "stage 0 uses ZeRO3 (on rank 0)"),
    "updates in halves": (
        lambda: stepped(stages(), parse_schedule("F0 I0 W0 U0\n" * 2), optimizer=sgd),
        "this schedule splits backwards (I, W) and updates weights between the halves (U)"),
    "updates of a shared parameter": (
        lambda: stepped([*(shared := stages()), *shared],
                        parse_schedule("F0 F0.1 B0.1 U0.1 B0 U0\n" * 2), optimizer=sgd),
        "0.weight of stage 2 is also a parameter of stage 0, but this schedule updates"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_stages_are_refused(world2: World, what: str) -> None:
    job, told = REFUSED[what]
    raises((told,), world2.run, job, error=RankError)


def again(module: nn.Module, kind: str) -> Any:
    def forward(stage: Any, x: Tensor) -> Any:
        if kind == "labkit":
            return recompute(stage.module, x) * stage.later
        return checkpoint(stage.module, x, use_reentrant=False) * stage.later

    return Custom(forward, module=module, later=0.5)  # a name that the pipeline uses, too


@on_each_rank("world2")
def test_halves_with_recompute_and_hooks() -> None:
    """A stage that recomputes has halves all the same; hooks of parameters get gradients alone."""
    x, y = batch()
    for kind in ("labkit", "torch"):
        for outside in (False, True):
            whole = nn.Sequential(*(again(one, kind) for one in stages()))
            F.mse_loss(whole(x), y).backward()
            given = [again(one, kind) for one in stages()]
            pipe = Pipeline(given, None, "zb-h1", 4, F.mse_loss, recompute=outside)
            hooked: list[bool] = []
            for p in pipe.parameters():
                p.register_hook(lambda g, to=hooked: to.append(g is not None))
            pipe.step(x, y)
            expected = {name: p.grad for name, p in whole.named_parameters()}
            for name, p in pipe.module.named_parameters():
                torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
            assert hooked and all(hooked)
            assert [one.later for one in given] == [0.5, 0.5]


@on_each_rank("world2")
def test_halves_put_off_what_is_computed_again() -> None:
    pipe = Pipeline([again(one, "labkit") for one in stages()], None, "zb-h1", 4, F.mse_loss)
    real, seen = VirtualStage._backward, []

    def backward(self: Any, flight: Any, dy: Any, k: int) -> Any:
        found = real(self, flight, dy, k)
        seen.append(len(flight.later))
        return found

    with patch.object(VirtualStage, "_backward", backward):
        pipe.step(*batch())
    assert seen == [2] * 4


def in_fp32(module: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False), autocast(enabled=False):
        return module.layer(x.float())


def backward_is_outside_of_autocast() -> None:
    """torch's, seen by matmuls in C++, and labkit's, seen by those of deferred weights."""
    torch.manual_seed(0)
    given: list[nn.Module] = [nn.Linear(64, 64), Custom(in_fp32, layer=nn.Linear(64, 64))]
    x, y = (one.float() for one in batch(8, 64))
    regions = partial(torch.autocast, "cpu", torch.bfloat16), partial(autocast, torch.bfloat16)
    for name, region in product(("1f1b", "zb-h1"), regions):
        whole = nn.Sequential(*deepcopy(given))
        for one, wanted in zip(x.split(2), y.split(2), strict=True):
            with region():
                loss = F.mse_loss(whole(one), wanted) / 4
            loss.backward()
        grads = {n: p.grad for n, p in whole.named_parameters()}
        for again in (False, True):
            pipe = Pipeline(deepcopy(given), None, name, 4, F.mse_loss, recompute=again)
            with region():
                pipe.step(x, y)
            for n, p in pipe.module.named_parameters():
                off = (p.grad - grads[n]).norm() / grads[n].norm()
                assert off <= 1e-5, (name, region, again, n)


def a_stage_in_ddp_is_entered_once() -> None:
    """Computed again, it sends as many gradients, and copies no buffers within backward."""
    mesh, counts = Mesh(pp=1, dp=2), []
    x, y = batch()
    for again in (False, True):
        stage = stages(1)[0]
        stage.register_buffer("seen", torch.zeros(1))
        whole = nn.Sequential(deepcopy(stage))
        F.mse_loss(whole(x), y).backward()
        replica = DDP(stage, mesh.dp, bucket_mb=1e-4)
        pipe = Pipeline([replica], mesh.pp, "1f1b", 2, F.mse_loss, recompute=again)
        mine = mesh.dp.rank
        for _ in range(2):
            pipe.zero_grad()
            with listen() as events:
                pipe.step(x.split(4)[mine], y.split(4)[mine])
            counts.append([one.op for one in events])
            for p, wanted in zip(pipe.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad, wanted.grad)
    assert counts[0] == counts[2] and counts[1] == counts[3], counts


@pytest.mark.parametrize("check", [backward_is_outside_of_autocast, a_stage_in_ddp_is_entered_once])
def test_what_a_stage_does_in_backward(world2: World, check: Any) -> None:
    world2.run(check)


@on_each_rank("world2")
def test_a_dropped_pipeline_is_freed() -> None:
    pipe = Pipeline(stages(), None, "1f1b", 4, F.mse_loss)
    pipe.step(*batch())
    with without_collector():
        held = weakref.ref(pipe)
        del pipe
        assert held() is None


@pytest.mark.parametrize("frozen", [0, 1])
@on_each_rank("world2")
def test_a_frozen_stage_among_updates(frozen: int) -> None:
    """It updates nothing; the other trains as if alone, by each micro-batch's own mean."""
    x, y = batch(6)
    given = stages()
    given[frozen].requires_grad_(False)
    whole = nn.Sequential(*deepcopy(given))
    optimizer = sgd([p for p in whole.parameters() if p.requires_grad])
    schedule = parse_schedule("\n".join(["F0 B0 U0 F1 B1 U1 F2 B2 U2"] * 2))
    pipe = Pipeline(given, None, schedule, None, F.mse_loss, optimizer=sgd)
    with patch.object(pipe._optimizer, "step", wraps=pipe._optimizer.step) as steps:
        pipe.step(x, y)
    assert steps.call_count == 3  # whoever records a step finds each action
    rows = [slice(k, k + 2) for k in (0, 2, 4)]
    take_steps(optimizer, lambda step: F.mse_loss(whole(x[rows[step]]), y[rows[step]]), 3)
    state = whole.state_dict()
    for name, p in pipe.module.named_parameters():
        torch.testing.assert_close(p, state[name], check_stride=False, msg=name)


goes_back_inside_autocast = instead(
    "goes_back_inside_autocast", virtual_stage, "_without_autocast", lambda x: nullcontext()
)
enters_ddp_again = Edit(
    "enters_ddp_again", virtual_stage.__name__, "torch._C._current_graph_task_id() != -1", "False"
)
FAULTS = [
    Mutation(goes_back_inside_autocast, backward_is_outside_of_autocast),
    Mutation(enters_ddp_again, a_stage_in_ddp_is_entered_once),
]
test_a_fault_is_found = pytest.mark.slow(noticed(FAULTS, on_ranks, RankError, size=2))
