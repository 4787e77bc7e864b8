"""ZeRO-1 and 2: single-process training, the bytes of the formula, and nothing held that is not
this rank's."""

import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel_contract import CASES, MODELS, OPTIMIZERS, Strategy, check_equal_to_single
from torch import nn

from labkit import Comm, Link, Text, World, ZeroOptimizer, listen, loss
from labkit.events import CommEvent
from labkit.parallel.footprint import Footprint

SHARDED = {1: ("optimizer_bytes",), 2: ("gradient_bytes", "optimizer_bytes")}


def unwrapped(module: nn.Module) -> nn.Module:
    return module


def zero(
    stage: int, make: Any = ZeroOptimizer, bucket_mb: float = 0.01, **options: Any
) -> Strategy:
    """ZeRO as the contract wants it, in several buckets."""

    def predict(module: nn.Module, size: int, rank: int) -> Footprint:
        return ZeroOptimizer.predict(module, size, stage, bucket_mb, rank)

    optimizer = partial(make, stage=stage, bucket_mb=bucket_mb)
    return Strategy(unwrapped, optimizer, predict, SHARDED[stage])


slow = pytest.mark.slow
stages = pytest.mark.parametrize("stage", [1, 2])


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, timeout_s=20) as world:
        yield world


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=20) as world:
        yield world


SIZES = [pytest.param(n, marks=slow) if n != 3 else n for n in (1, 2, 3, 4)]
NAMES = [one if one == "adamw" else pytest.param(one, marks=slow) for one in OPTIMIZERS]


@pytest.mark.parametrize("world", SIZES, ids=lambda n: f"{n} ranks", indirect=True)
@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("case", CASES)
@stages
def test_weights_equal_single_process_training(
    world: World, stage: int, case: str, optimizer: str
) -> None:
    check_equal_to_single(world, zero(stage), case, optimizer)


def test_parameters_that_arrive_in_the_next_forward_are_the_same(pair: World) -> None:
    def run(case: str, overlapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, text = MODELS[case]().double(), Text()
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, 2, bucket_mb=0.01, lr=0.01,
            gather_in=model if overlapped else None,
        )  # fmt: skip
        for step in range(4):
            batch = text.batch(step, 4, 16).slice(Comm().rank, 2)
            optimizer.zero_grad()
            loss(model(batch.x), batch).backward()
            optimizer.step()
        return list(model.state_dict().values())  # waits

    for case in CASES:
        for mine, other in zip(pair.run(run, case, True), pair.run(run, case, False), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def test_accumulation_is_the_sum_of_means(pair: World) -> None:
    """Three backwards before a step, held back (`no_sync`) or not, with a second step after."""

    def run(stage: int, quiet: bool) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
        comm = Comm()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        oracle = copy.deepcopy(module)
        ours = ZeroOptimizer(module.parameters(), torch.optim.Adam, stage, bucket_mb=1e-4, lr=0.1)
        torchs = torch.optim.Adam(oracle.parameters(), lr=0.1)
        inputs = torch.randn(2, 3, 2, 5, 3, dtype=torch.float64)  # [step, micro, rank, row, ...]
        sent = []
        for step in range(2):
            ours.zero_grad(), torchs.zero_grad()
            for micro in range(3):
                x = inputs[step, micro]
                hold = ours.no_sync() if quiet and micro < 2 else nullcontext()
                with listen() as events, hold:
                    module(x[comm.rank]).square().mean().backward()
                sent.append(len(events))
                oracle(x.flatten(0, 1)).square().mean().backward()
            ours.step(), torchs.step()
        return module.state_dict(), oracle.state_dict(), sent

    for stage in (1, 2):
        for quiet in (False, True):
            for ours, oracle, sent in pair.run(run, stage, quiet):
                for name, x in ours.items():
                    torch.testing.assert_close(x, oracle[name], rtol=0, atol=1e-10)
                assert (sent[:2] == [0, 0]) == quiet and sent[2] > 1


class Branching(nn.Module):
    """`both` is used by rank 0 alone, `nobody` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.both, self.nobody = (nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        x = self.always(x)
        return self.both(x) if deep else x  # type: ignore[no-any-return]


@stages
def test_a_parameter_is_stepped_on_if_any_rank_used_it(pair: World, stage: int) -> None:
    """With weight decay, a step on one that nobody used would be seen."""

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        module = Branching()
        before = {name: x.clone() for name, x in module.state_dict().items()}
        optimizer = ZeroOptimizer(
            module.parameters(), torch.optim.SGD, stage, lr=0.1, weight_decay=0.1
        )
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(2, 3).double(), deep=Comm().rank == 0).sum().backward()
        optimizer.step()
        return before, module.state_dict()

    (before, mine), (_, other) = pair.run(run)
    for name, x in mine.items():
        assert torch.equal(x, other[name])
        assert torch.equal(x, before[name]) == name.startswith("nobody")
    expected = before["both.bias"] - 0.1 * (torch.ones(3) + 0.1 * before["both.bias"])  # 2 / 2
    torch.testing.assert_close(mine["both.bias"], expected)


@stages
def test_what_is_not_this_ranks_is_not_kept(pair: World, stage: int) -> None:
    def run() -> tuple[list[bool], int, int]:
        module = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, stage, bucket_mb=0.003)
        module(torch.ones(2, 30)).sum().backward()
        mine = sum(x.numel() for x in optimizer.gradient_pieces()[0])
        whole = sum(b.gradients.numel() for b in optimizer._buckets if b.gradients is not None)
        optimizer.step()
        return [p.grad is None for p in module.parameters()], mine, whole

    for without, mine, whole in pair.run(run):
        assert without == [stage == 2] * 4
        assert (mine, whole) == (930, 1860 if stage == 1 else 0)


def test_gradients_leave_while_backward_runs_and_parameters_come_while_forward_does() -> None:
    """On a slow wire, by the order of events; of stage 2, at most two buckets are whole."""

    def run(stage: int, gathers: bool) -> tuple[list[CommEvent], dict[str, float], int]:
        layers = [nn.Linear(64, 64) for _ in range(4)]
        model = nn.Sequential(*layers)
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.SGD, stage, bucket_mb=0.02, lr=0.1,
            gather_in=model if gathers else None,
        )  # fmt: skip
        at: dict[str, float] = {}
        whole = 0

        def made(p: torch.Tensor) -> None:
            nonlocal whole
            at["first gradient made"] = time.monotonic()
            whole = max(whole, sum(b.gradients is not None for b in optimizer._buckets))

        for layer in layers:
            layer.weight.register_post_accumulate_grad_hook(made)
        layers[0].register_forward_pre_hook(
            lambda *_: at.__setitem__("first forward", time.monotonic())
        )
        with listen() as events:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            at["step over"] = time.monotonic()
            model(torch.ones(1, 64))
        return events, at, whole

    with World(2, link=Link(gbps=0.1)) as world:
        for stage, gathers in ((1, False), (2, True)):
            for events, at, whole in world.run(run, stage, gathers):
                out = [e for e in events if e.op == "reduce_scatter"]
                back = [e for e in events if e.op == "all_gather"]
                assert len(out) == len(back) == 4
                assert sum(e.issued_s < at["first gradient made"] for e in out) == 3
                assert [e.blocking for e in out] == [False, False, False, True]
                late = sum(e.wait_ended_s > at["step over"] for e in back)
                assert late == (4 if gathers else 0)
                if gathers:  # the last layer's parameters come after the first layer's forward
                    assert max(e.wait_ended_s for e in back) > at["first forward"]
                    assert whole <= 3  # two on their way, and the one that fills
