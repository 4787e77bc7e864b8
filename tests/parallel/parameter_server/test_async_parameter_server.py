"""The asynchronous parameter server: one process replays its updates to the same weights."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import OPTIMIZERS, Awkward
from labkit import AsyncParameterServer, Comm, RankError, Text, World, listen, loss
from labkit.parallel.parameter_server.asynchronous import Update
from small_models import difference
from tables import cases, raises
from worlds import world_fixture

STEPS = 4  # of each worker


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Awkward().double()


def backward(model: nn.Module, worker: int, step: int) -> None:
    batch = Text().batch(step, rows=2, length=8, seed=worker)
    loss(model(batch.x), batch).backward()


def trained(
    server: Any, optimizer: str, pauses_s: Sequence[float] = (0, 0, 0, 0), **asked: Any
) -> tuple[list[Update], dict[str, torch.Tensor], bool, int]:
    """On a rank: all updates, the weights at the end, whether it has the optimizer, bytes sent."""
    comm = Comm()
    cls, defaults = OPTIMIZERS[optimizer]
    model = server(model_of(comm.rank), cls, **asked, **defaults)

    def work() -> None:
        for step in range(STEPS):
            model.zero_grad()
            time.sleep(pauses_s[comm.rank])
            backward(model, comm.rank, step)
            model.step()

    with listen() as events:
        updates = model.run(work)
    sent = sum(event.payload_bytes for event in events if event.op == "send")
    return updates, weights(model.module), model.optimizer is not None, sent


def replayed(updates: list[Update], optimizer: str) -> dict[str, torch.Tensor]:
    """One process applies each gradient in turn; a worker's k-th update is of its k-th batch."""
    cls, defaults = OPTIMIZERS[optimizer]
    model, stale = model_of(0), model_of(0)
    stepping = cls(model.parameters(), **defaults)
    versions, steps = [weights(model)], dict.fromkeys(range(1, 5), 0)
    for update in updates:
        stale.load_state_dict(versions[update.made_with])
        stale.zero_grad()
        backward(stale, update.worker, steps[update.worker])
        steps[update.worker] += 1
        for parameter, made in zip(model.parameters(), stale.parameters()):
            parameter.grad = None if made.grad is None else made.grad.clone()
        stepping.step()
        versions.append(weights(model))
    return versions[-1]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def check_stale_training(world: World, server: Any, optimizer: str, **asked: Any) -> list[Update]:
    runs = world.run(trained, server, optimizer, **asked)
    updates = runs[0][0]
    workers = world.size - 1
    assert [x.applied_to for x in updates] == list(range(STEPS * workers)), "a version is missing"
    assert all(x.staleness >= 0 for x in updates)
    expected = replayed(updates, optimizer)
    for rank, (reported, trained_weights, has_optimizer, _) in enumerate(runs):
        assert reported == updates, f"rank {rank} reports other updates"
        assert has_optimizer == (rank == 0), "the optimizer is the server's alone"
        off = difference(trained_weights, expected)
        assert off <= 1e-10, f"rank {rank} is off by {off:.1e}"
    return updates


world = world_fixture(4, backend="gloo", timeout_s=20)
ROUND = [1, 2, 3] * STEPS
NAMES = [pytest.param(x, marks=() if x == "adamw" else pytest.mark.slow) for x in OPTIMIZERS]


@pytest.mark.parametrize("optimizer", NAMES)
def test_updates_in_a_given_order_equal_the_oracle(world: World, optimizer: str) -> None:
    """In turns, a gradient is as stale as there are other workers; the first all have version 0."""
    updates = check_stale_training(world, AsyncParameterServer, optimizer, order=ROUND)
    assert [x.worker for x in updates] == ROUND
    assert [x.staleness for x in updates] == [0, 1] + [2] * (3 * STEPS - 2)


def test_one_after_the_other_nothing_is_stale_but_the_first(world: World) -> None:
    alone = [worker for worker in (1, 2, 3) for _ in range(STEPS)]
    updates = check_stale_training(world, AsyncParameterServer, "sgd", order=alone)
    assert [x.staleness for x in updates] == [0, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0]


def test_a_slow_worker_is_staler_and_the_oracle_agrees(world: World) -> None:
    updates = check_stale_training(world, AsyncParameterServer, "adamw", pauses_s=(0, 0, 0, 0.1))
    assert {x.worker for x in updates} == {1, 2, 3}


def test_ranks_that_share_memory_agree_too() -> None:
    with World(3, timeout_s=20) as world:
        check_stale_training(world, AsyncParameterServer, "adamw")


@pytest.mark.parametrize("bound", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bound_is_never_exceeded(world: World, bound: int) -> None:
    """Worker 3 is slow: without a bound the others would be done before its first step."""
    check_bound(world, AsyncParameterServer, bound, pauses_s=(0, 0, 0, 0.1))


def check_bound(world: World, server: Any, bound: int, **asked: Any) -> None:
    updates = check_stale_training(world, server, "sgd", max_staleness=bound, **asked)
    steps = dict.fromkeys((1, 2, 3), 0)
    for update in updates:
        ahead = steps[update.worker] - min(steps.values())
        assert ahead <= bound, f"worker {update.worker} took a step {ahead} ahead"
        steps[update.worker] += 1
        assert update.staleness <= 2 * (2 * bound + 1)
    assert steps == dict.fromkeys((1, 2, 3), STEPS)


def test_a_worker_sends_its_gradients_and_a_header_and_the_server_weights(world: World) -> None:
    runs = world.run(trained, AsyncParameterServer, "sgd", order=ROUND)
    named = [(n, p) for n, p in model_of(0).named_parameters() if p.requires_grad]
    weight_bytes = sum(p.nbytes for _, p in named)
    used_bytes = sum(p.nbytes for n, p in named if not n.startswith("unused"))
    header_bytes = 8 * (1 + len(named))
    for _, _, _, sent in runs[1:]:
        assert sent == STEPS * (used_bytes + header_bytes) + header_bytes  # the last: it is done
    assert runs[0][3] == 3 * STEPS * (weight_bytes + 8)


def test_invalid_arguments_are_refused(world: World) -> None:
    def run(words: str, **asked: Any) -> None:
        raises((words,), AsyncParameterServer, nn.Linear(2, 2), torch.optim.SGD, lr=0.1, **asked)

    world.run(run, "choose 0 or more steps, or None", max_staleness=-1)
    world.run(run, "order has 4, which is not a worker; choose ranks 1 to 3", order=[1, 4])
    world.run(run, "order has 0, which is not a worker", order=[0])
    with World(1) as one:
        one.run(run, "at least 2 ranks are needed")


@pytest.mark.slow
@cases(
    ({"order": [1] * (STEPS + 1)}, "push from worker 1, but it is done"),
    ({"order": [1, 1], "max_staleness": 0}, "worker 1, but it is too far ahead and waits"),
)
def test_an_impossible_order_is_refused(asked: dict[str, Any], says: str) -> None:
    with World(3, timeout_s=20) as world, pytest.raises(RankError, match=says):
        world.run(trained, AsyncParameterServer, "sgd", **asked)


@pytest.mark.parametrize(
    "how", [{"backend": "gloo"}, pytest.param({}, marks=pytest.mark.slow)], ids=["gloo", "shared"]
)
def test_a_worker_that_dies_does_not_hang_the_rest(how: dict[str, Any]) -> None:
    def dies() -> None:
        comm = Comm()
        model = AsyncParameterServer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1, max_staleness=1)

        def work() -> None:
            for step in range(5):
                if comm.rank == 2 and step == 1:
                    raise OSError("the disk is gone")
                model(torch.ones(1, 2)).sum().backward()
                model.step()

        model.run(work)

    with World(3, timeout_s=20, **how) as world:
        raises("disk is gone", world.run, dies, error=RankError)
