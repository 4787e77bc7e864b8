"""The synchronous parameter server: equal to one process, the server's link and memory."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import MODELS, OPTIMIZERS, Strategy, check_equal_to_single
from labkit import Comm, ParameterServer, RankError, World, dry_run, listen
from labkit.clusters import cluster
from labkit.holdings import Footprint
from labkit.recipes import RECIPES
from labkit.replaying import replay
from labkit.trace import split_of
from small_models import take_steps
from tables import raises
from worlds import on_each_rank, world_fixture


def served(server: Any = ParameterServer) -> Strategy:
    """As the contract wants it: gradients and the optimizer's state are rank 0's alone."""
    made: list[Any] = []

    def wrap(module: nn.Module) -> Any:
        made[:] = [server(module)]
        return made[0]

    def optimizer(groups: Any, cls: Any, **options: Any) -> Any:
        return made[0].pull_after(cls(groups, **options))

    def predict(module: nn.Module, size: int, rank: int) -> Footprint:
        mean, here = ParameterServer.predict(module, size), size * (rank == 0)
        return replace(mean, **{name: getattr(mean, name) * here for name in sharded})

    sharded = ("gradient_bytes", "optimizer_bytes")
    return Strategy(wrap, optimizer, predict, sharded, first_agrees=False)


SIZES = [pytest.param(n, marks=() if n == 3 else pytest.mark.slow) for n in (1, 2, 3, 4)]
world = world_fixture(sizes=SIZES, backend="gloo", timeout_s=20)
CASES = [
    pytest.param("awkward", name, marks=() if name == "adamw" else pytest.mark.slow)
    for name in OPTIMIZERS
] + [pytest.param("gpt", "adamw")]


@pytest.mark.parametrize(("case", "optimizer"), CASES, ids=lambda x: x)
def test_weights_bytes_and_memory_are_right(world: World, case: str, optimizer: str) -> None:
    runs, n = check_equal_to_single(world, served(), case, optimizer), world.size
    assert all(run.held.gradient_bytes + run.held.optimizer_bytes == 0 for run in runs[1:])
    bus_bytes = ParameterServer.predict(MODELS[case]().double(), n).bus_bytes
    assert [run.sent_bytes for run in runs] == [bus_bytes] * n
    grads = bus_bytes / (2 * (n - 1)) if n > 1 else 0
    assert [run.wire_bytes for run in runs] == [(n - 1) * grads] + (n - 1) * [grads]


def test_ranks_that_share_memory_end_with_the_same_weights(world2: World) -> None:
    check_equal_to_single(world2, served(), "awkward")


@on_each_rank("world2")
def test_clipping_on_the_server_clips_for_all() -> None:
    inputs = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator())
    torch.manual_seed(0)
    alone = nn.Linear(3, 2).double()
    model = ParameterServer(copy.deepcopy(alone))
    optimizer = model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
    model(inputs[Comm().rank]).square().mean().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    optimizer.step()
    alone(inputs.flatten(0, 1)).square().mean().backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.module.weight, alone.weight)
    assert norm > 0.01 if Comm().rank == 0 else norm == 0


@on_each_rank("world2")
def test_buffers_follow_the_server_and_a_freed_wrapper_leaves_the_module_alone() -> None:
    torch.manual_seed(Comm().rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = ParameterServer(module)
    optimizer = model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    model(torch.zeros(5, 3))
    mean, other = Comm().all_gather_object(float(module[1].running_mean.sum()))
    assert mean == other
    plain = copy.deepcopy(module)
    del model
    optimizer.zero_grad()
    with listen() as events:
        for layers in (module, plain):
            layers(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad) and not events


@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval mode"])
@on_each_rank("world2")
def test_models_that_cannot_be_served_are_refused_on_every_rank(training: bool) -> None:
    for frozen, words in ((True, "bias was unfrozen"), (False, "bias was frozen after")):
        module = nn.Linear(3, 1)
        module.bias.requires_grad_(not frozen)
        model = ParameterServer(module).train(training)
        raises("no optimizer pulls the weights", model(torch.ones(2, 3)).sum().backward)
        model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
        module.bias.requires_grad_(frozen)
        raises(words, lambda model=model: model(torch.ones(2, 3)).sum().backward())


def test_a_rank_that_dies_does_not_leave_the_server_waiting() -> None:
    def dies() -> None:
        model = ParameterServer(nn.Linear(3, 2))
        optimizer = model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            if Comm().rank == 1 and step == 1:
                raise OSError("the disk is gone")
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    with World(2, timeout_s=20) as world, pytest.raises(RankError, match="the disk is gone"):
        world.run(dies)


def step_s(strategy: str, ranks: int) -> float:
    """Of a step on a described cluster, replayed from a recording without data."""

    def train() -> None:
        module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
        model, optimizer = RECIPES[strategy].build(module, Comm(), 1e-3)
        take_steps(optimizer, lambda _: model(torch.ones(8, 1024)).sum())

    where = replace(cluster("selene"), nodes=ranks, devices_per_node=1)
    return split_of(replay(dry_run(train, ranks=ranks), where)).step_s


def test_a_step_grows_with_every_rank_that_comes_and_that_of_ddp_does_not() -> None:
    served = {n: step_s("parameter-server", n) for n in (2, 4, 8, 16)}
    per_rank_s = (served[16] - served[8]) / 8
    for fewer, more in ((2, 4), (4, 8)):
        assert served[more] - served[fewer] == pytest.approx((more - fewer) * per_rank_s, rel=0.01)
    assert served[16] > 10 * served[2]
    assert step_s("ddp", 16) < 2 * step_s("ddp", 2)  # 2(n-1)/n: from 1 to at most 2 times
