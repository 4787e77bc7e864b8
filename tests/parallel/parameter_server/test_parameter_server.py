"""The synchronous parameter server: equal to one process, the server's link, the server's memory.

`check_served` is the contract; test_parameter_server_mutations.py turns it on faulty servers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import AGREE, LENGTH, MODELS, ROWS, STEPS
from labkit import Comm, ParameterServer, RankError, Single, Text, World, dry_run, listen, loss
from labkit.clusters import cluster
from labkit.holdings import Footprint
from labkit.parallel.common.held import held
from labkit.recipes import RECIPES
from labkit.replaying import replay
from labkit.trace import split_of
from worlds import on_each_rank, world_fixture

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
}


@dataclass
class Run:
    weights: dict[str, torch.Tensor]
    held: Footprint
    bus_bytes: int  # of one step
    sent_bytes: int  # put on the wire by this rank in one step
    transports: set[str]


def trained(strategy: Callable[[nn.Module], nn.Module], case: str, optimizer: str) -> Run:
    """On a rank: `STEPS` steps in float64, each rank from another start."""
    comm = Comm()
    torch.manual_seed(100 * comm.rank)
    module = MODELS[case]().double()
    model = strategy(module)
    steps = OPTIMIZERS[optimizer](model.parameters())
    if isinstance(model, ParameterServer):
        steps = model.pull_after(steps)
    text, bus, sent = Text(), [], []
    for step in range(STEPS):
        whole = text.batch(step, ROWS if step < STEPS - 1 else 3, LENGTH)
        batch = whole.slice(comm.rank, comm.size)
        steps.zero_grad()
        with listen() as events:
            loss(model(batch.x), batch).backward()
            steps.step()
        bus.append(sum(event.bus_bytes for event in events))
        sent.append(sum(event.wire_bytes for event in events))
    assert len(set(bus)) == 1, f"the bytes of a step change: {bus}"
    weights = {name: x.detach().clone() for name, x in module.state_dict().items()}
    transports = {event.transport for event in events}
    return Run(weights, held(module, steps), bus[0], sent[0], transports)


@cache
def alone(case: str, optimizer: str) -> Run:
    with World(1) as one:
        return one.run(trained, Single, case, optimizer)[0]


def check_served(
    world: World, strategy: Callable[[nn.Module], nn.Module], case: str, optimizer: str
) -> None:
    """The contract. Raises AssertionError, telling what is broken."""
    oracle = alone(case, optimizer)
    n, runs = world.size, world.run(trained, strategy, case, optimizer)
    for name, expected in oracle.weights.items():
        for rank, run in enumerate(runs):
            if expected.numel():
                off = float((run.weights[name] - expected).abs().max())
                assert off <= AGREE, f"{name} of rank {rank} is off by {off:.1e}"
    served = ParameterServer.predict(MODELS[case]().double(), n)
    for rank, run in enumerate(runs):
        assert run.bus_bytes == served.bus_bytes, f"rank {rank}: {run.bus_bytes} bytes"
        assert run.held.parameter_bytes == oracle.held.parameter_bytes
        assert run.held.gradient_bytes == (oracle.held.gradient_bytes if rank == 0 else 0)
        assert run.held.optimizer_bytes == (oracle.held.optimizer_bytes if rank == 0 else 0)
    grads = served.bus_bytes / (2 * (n - 1)) if n > 1 else 0
    if n > 1 and runs[0].transports == {"gloo"}:  # ranks that share memory send nothing
        assert [run.sent_bytes for run in runs] == [(n - 1) * grads] + (n - 1) * [grads]


SIZES = [pytest.param(n, marks=() if n == 3 else pytest.mark.slow) for n in (1, 2, 3, 4)]


world = world_fixture(sizes=SIZES, backend="gloo", timeout_s=20)


CASES = [
    pytest.param("awkward", name, marks=() if name == "AdamW" else pytest.mark.slow)
    for name in OPTIMIZERS
] + [pytest.param("gpt", "AdamW")]


@pytest.mark.parametrize(("case", "optimizer"), CASES, ids=lambda x: x)
def test_it_equals_a_single_process_in_weights_bytes_and_memory(
    world: World, case: str, optimizer: str
) -> None:
    check_served(world, ParameterServer, case, optimizer)


def test_ranks_that_share_memory_end_with_the_same_weights(world2: World) -> None:
    check_served(world2, ParameterServer, "awkward", "AdamW")


def test_the_formula_is_the_mean_of_what_the_ranks_hold(world2: World) -> None:
    runs = world2.run(trained, ParameterServer, "gpt", "AdamW")
    predicted = ParameterServer.predict(MODELS["gpt"]().double(), 2)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert sum(getattr(run.held, name) for run in runs) / 2 == getattr(predicted, name)


def linear(x: torch.Tensor, strategy: bool = True) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    if not strategy:
        return module, torch.optim.SGD(module.parameters(), lr=0.1)
    model = ParameterServer(module)
    return model, model.pull_after(torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize("held_back", [0, 3])
@on_each_rank("world2")
def test_several_backwards_before_a_step_add_as_in_one_process(held_back: int) -> None:
    """With and without `no_sync`: shares are divided when they are made, and once."""
    inputs = torch.randn(4, 2, 5, 3, dtype=torch.float64, generator=torch.Generator())
    model, optimizer = linear(inputs)
    alone, alone_optimizer = linear(inputs, strategy=False)
    with listen() as events:
        for k in range(4):
            x = inputs[k, Comm().rank]
            if k < held_back:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
            alone(inputs[k].flatten(0, 1)).square().mean().backward()
    optimizer.step()
    alone_optimizer.step()
    events = len(events)
    weight = model.module.weight.detach()
    expected = alone.weight.detach()
    assert events == 2 * (4 - held_back)  # weight and bias
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-14)


def test_clipping_on_the_server_clips_for_all(world2: World) -> None:
    def clipped() -> tuple[torch.Tensor, float, torch.Tensor]:
        inputs = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator())
        model, optimizer = linear(inputs)
        model(inputs[Comm().rank]).square().mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        alone, alone_optimizer = linear(inputs, strategy=False)
        alone(inputs.flatten(0, 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        alone_optimizer.step()
        return model.module.weight.detach(), norm, alone.weight.detach()

    (mine, norm, right), (other, nothing, _) = world2.run(clipped)
    torch.testing.assert_close(mine, right)
    assert torch.equal(mine, other) and norm > 0.01 and nothing == 0


class Branching(nn.Module):
    """`deep` is used by rank 1 alone, `nobody` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.deep, self.nobody = (nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        return self.deep(x) if Comm().rank == 1 else x  # type: ignore[no-any-return]


def test_a_parameter_one_rank_uses_is_averaged_and_an_unused_one_has_no_gradient(
    world2: World,
) -> None:
    def gradients() -> dict[str, torch.Tensor | None]:
        torch.manual_seed(0)
        model = ParameterServer(Branching())
        model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        return {name: p.grad for name, p in model.module.named_parameters()}

    server, worker = world2.run(gradients)
    assert server["deep.bias"] is not None and server["deep.bias"].tolist() == [1.0] * 3  # 2 / 2
    assert server["nobody.weight"] is None
    assert not any(gradient is not None for gradient in worker.values())


def test_buffers_follow_the_server_and_a_freed_wrapper_leaves_the_module_alone(
    world2: World,
) -> None:
    def run() -> tuple[float, bool]:
        torch.manual_seed(Comm().rank)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model = ParameterServer(module)
        optimizer = model.pull_after(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
        model(torch.zeros(5, 3))
        mean = float(module[1].running_mean.sum())
        plain = copy.deepcopy(module)
        del model
        optimizer.zero_grad()
        with listen() as events:
            for one in (module, plain):
                one(torch.ones(5, 3)).square().sum().backward()
            optimizer.step()
        same = torch.equal(module[0].weight.grad, plain[0].weight.grad)  # type: ignore[arg-type]
        return mean, same and not events

    (mean, alone), (other, other_alone) = world2.run(run)
    assert mean == other and alone and other_alone


# --- bad input ---


def test_models_that_cannot_be_served_are_refused_on_every_rank(world2: World) -> None:
    def told(what: str) -> str:
        try:
            module: nn.Module = nn.Linear(3, 2 + (what == "shapes") * Comm().rank)
            model = ParameterServer(module)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if what == "twice":
                ParameterServer(module)
            if what != "no optimizer":
                model.pull_after(optimizer)
            if what == "changed":
                module.bias.requires_grad_(False)
            model(torch.ones(1, 3)).sum().backward()
        except ValueError as error:
            return str(error)
        return ""

    for what, says in {
        "shapes": "the ranks have different models: parameter 0 is weight",
        "twice": "weight belongs to a ParameterServer already",
        "no optimizer": "no optimizer brings the weights back",
        "changed": "bias was frozen after the module was wrapped",
    }.items():
        for message in world2.run(told, what):
            assert says in message, what


def test_a_rank_that_dies_does_not_leave_the_server_waiting() -> None:
    def dies() -> None:
        model, optimizer = linear(torch.empty(0))
        for step in range(3):
            if Comm().rank == 1 and step == 1:
                raise OSError("the disk is gone")
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()

    with World(2, timeout_s=20) as world, pytest.raises(RankError, match="the disk is gone"):
        world.run(dies)


# --- the server's link ---


def step_s(strategy: str, ranks: int) -> float:
    """Of a step on a described cluster, replayed from a recording without data."""

    def train() -> None:
        module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
        model, optimizer = RECIPES[strategy].build(module, Comm(), 1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 1024)).sum().backward()
            optimizer.step()

    where = replace(cluster("selene"), nodes=ranks, devices_per_node=1)
    return split_of(replay(dry_run(train, ranks=ranks), where)).step_s


def test_a_step_grows_with_every_rank_that_comes_and_that_of_ddp_does_not() -> None:
    served = {n: step_s("parameter-server", n) for n in (2, 4, 8, 16)}
    ring = {n: step_s("ddp", n) for n in (2, 4, 8, 16)}
    per_rank_s = (served[16] - served[8]) / 8
    for fewer, more in ((2, 4), (4, 8)):
        grows_s = served[more] - served[fewer]
        assert grows_s == pytest.approx((more - fewer) * per_rank_s, rel=0.01)
    assert served[16] > 10 * served[2]
    assert ring[16] < 2 * ring[2]  # 2(n-1)/n: from 1 to at most 2 times the bytes
