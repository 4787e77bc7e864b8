"""Bad input to a pipeline: an error that names stage, micro-batch and rank, and never a hang."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit import DDP, Comm, CommError, Mesh, RankError, World
from labkit.parallel.paced_stage import PacedStage
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.virtual_stage import StageError, VirtualStage
from labkit.parallel.splitting import split
from labkit.schedules import Action, ScheduleError, schedule
from pipeline_cases import gpt
from small_models import Custom
from tables import cases, raises
from worlds import on_each_rank, on_ranks_of_its_own


def stages(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(count)]


def make(*args: Any, **how: Any) -> Pipeline:
    return Pipeline(*args, **{"loss_fn": F.mse_loss, "microbatches": 2, **how})


X = torch.ones(4, 3)
SGD = torch.optim.SGD


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fewer stages than ranks": (
        lambda: make(stages(1)),
        "1 stages are not divisible by 2 ranks; pass 2 stages, one per rank, or a multiple of 2"),
    "stages that do not divide": (
        lambda: make(stages(3)), "3 stages are not divisible by 2 ranks"),
    "other chunks": (
        lambda: make(stages(4), schedule="interleaved", chunks=3),
        "4 stages on 2 ranks are 2 chunks per rank, not chunks=3; pass 6 stages"),
    "chunks for a schedule without": (
        lambda: make(stages(4)), "1f1b has one chunk of the model"),
    "a model instead of stages": (
        lambda: make(gpt()),
        "stages has type GPT; pass a list of modules, one per stage, as split(model, 2) returns"),
    "no module": (
        lambda: make([nn.Tanh(), torch.tanh]), "stage 1 has type builtin_function_or_method"),
    "an unknown schedule": (
        lambda: make(stages(), schedule="2f2b"), "'2f2b'"),
    "too few micro-batches": (
        lambda: make(stages(), schedule="zb-h2"), "zb-h2"),
    "no micro-batch": (
        lambda: make(stages(), microbatches=0), "microbatches=0"),
    "too few rows": (
        lambda: make(stages(), microbatches=5).step(X, X),
        "a batch of 4 rows cannot be split into 5 micro-batches of at least 1 row"),
    "x that is none": (
        lambda: make(stages()).step(None, X),
        "x has type NoneType; pass the batch [rows, ...], the same on every rank"),
    "no loss": (
        lambda: make(stages(), loss_fn=None),
        "rank 1 has the last stage, 1, and computes the loss, but loss_fn was passed on no rank"),
    "a loss on the wrong stage": (
        lambda: make(stages(), loss_fn=None if Comm().rank else F.mse_loss),
        "but loss_fn was passed on rank 0; pass loss_fn on rank 1"),
    "a schedule of other stages": (
        lambda: make(stages(), schedule=schedule("gpipe", 3, 2)),
        "the schedule has 3 stages, but there are 2 ranks"),
    "a schedule of more chunks": (
        lambda: make(stages(), schedule=schedule("interleaved", 2, 2, 2)),
        "the schedule has 2 chunks per rank, but there are 2 stages for 2 ranks; pass 4"),
    "a schedule of other micro-batches": (
        lambda: make(stages(), schedule=schedule("gpipe", 2, 3), microbatches=2),
        "there are 2 micro-batches"),
    "two schedules": (
        lambda: make(stages(), schedule="gpipe" if Comm().rank else "1f1b"),
        "ranks 0 and 1 have different schedules: on stage 1, position 1, rank 1 has F1, rank 0 has "
        "B0"),
    "two numbers of micro-batches": (
        lambda: make(stages(), microbatches=2 + Comm().rank),
        "ranks 0 and 1 have different schedules"),
    "two models": (
        lambda: make([nn.Linear(3, 3 + Comm().rank), nn.Linear(3, 3)]),
        "stage 0 differs between ranks: rank 1 has weight [4, 3] float32, rank 0 has "
        "weight [3, 3] float32"),
    "an update without an optimizer": (
        lambda: make(stages(), schedule="pipedream"),
        "this schedule updates the weights after each micro-batch, so it needs the optimizer"),
    "an optimizer without an update": (
        lambda: make(stages(), optimizer=lambda ps: SGD(ps, 0.1)),
        "this schedule has no updates, so optimizer= would never step"),
    "updates of a tied parameter": (
        lambda: make([tied := nn.Linear(3, 3), tied], schedule="pipedream", optimizer=SGD),
        "a parameter is tied across ranks, but this schedule updates stages at different times"),
    "updates in DDP": (
        lambda: make([DDP(stage, Mesh(pp=2, dp=1).dp) for stage in stages()],
                     schedule="pipedream", optimizer=SGD),
        "a stage is wrapped in DDP, which averages gradients once per step"),
}  # fmt: skip


@on_each_rank("world2")
def test_all_ranks_refuse_it() -> None:
    for name, (run, expected) in REFUSED.items():
        try:
            raises((expected,), run)
        except BaseException as error:
            error.add_note(f"the case: {name}")
            raise


@on_each_rank("world2")
def test_a_broken_schedule_is_refused_with_its_first_broken_rule() -> None:
    lists = schedule("1f1b", 2, 2)
    lists[0][0], lists[0][1] = lists[0][1], lists[0][0]  # F1 F0: still a schedule
    lists[1] = [Action("backward", 0), *(one for one in lists[1] if one != ("backward", 0, 0))]
    rule = "stage 1 runs B0 at position 0, before its F0 at position 1"
    error = raises(rule, make, stages(), schedule=lists, error=ScheduleError)
    assert error.rule == "backward after forward"


def with_more() -> nn.Module:
    ends = {name: nn.Tanh() for name in ("embed", "head", "extra")}
    return Custom(lambda m, x: x, **ends, blocks=nn.ModuleList(stages(3)))


@cases(
    (
        lambda: split(nn.Sequential(*stages(2)), 3),
        "stages=3: each stage needs at least one of the 2 layers",
    ),
    (lambda: split(gpt(2), 3), "stages=3: each stage needs at least one of the 2 blocks"),
    (
        lambda: split(stages(2), 3, [1, 1]),
        "stages=3: each stage needs at least one of the 2 layers",
    ),
    (lambda: split(stages(2), 0), "stages=0: each stage needs at least one of the 2 layers"),
    (lambda: split(stages(2), 2, [1]), "1 costs for 2 layers (0, 1); pass one per layer"),
    (lambda: split(nn.Linear(2, 2), 2), "split cannot find the layers of Linear"),
    (lambda: split(with_more(), 2), "but Custom also has extra; pass"),
    (lambda: PacedStage(-1), "forward_s=-1: choose 0 seconds or more"),
    (lambda: PacedStage(1, 2, 3), "weight_s=-1"),
    (lambda: PacedStage(1, 2, 0.5, 0.5), "do not add up to backward_s=2"),
)
def test_what_cannot_be_cut_or_paced_is_refused(run: Callable[[], Any], expected: str) -> None:
    raises((expected,), run)


def returns(make: Callable[[torch.Tensor], Any]) -> nn.Module:
    return Custom(lambda m, x: make(x * m.weight), weight=nn.Parameter(torch.ones(3)))


def a_shape_of_each_micro_batch() -> None:
    widths = iter([3, 2])
    make([returns(lambda x: x[:, : next(widths)]), nn.Tanh()], schedule="gpipe").step(X, X)


def a_parameter_frozen_meanwhile() -> None:
    pipe = make(stages())
    pipe.step(X, X)
    next(pipe.parameters()).requires_grad_(False)
    pipe.step(X, X)


ON_A_RANK: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "stages that do not meet": (
        lambda: make([nn.Linear(3, 5), nn.Linear(3, 3)]).step(X, X), (1,),
        "stage 1 (rank 1), micro-batch 0: Linear cannot take [2, 5] float32 from stage 0: "),
    "two outputs": (
        lambda: make([returns(lambda x: (x, x)), nn.Linear(3, 3)]).step(X, X), (0,),
        "stage 0 (rank 0), micro-batch 0: its output has type tuple"),
    "rows that vanish": (
        lambda: make([returns(lambda x: x.flatten()), nn.Linear(3, 3)]).step(X, X), (0,),
        "stage 0 (rank 0), micro-batch 0: its output has shape [6], but the "
        "micro-batch has 2 rows"),
    "a shape of each micro-batch": (
        a_shape_of_each_micro_batch, (0,),
        "stage 0 (rank 0), micro-batch 1: its output is float32 [rows, 2], but was float32 "
        "[rows, 3] before"),
    "a loss that is no scalar": (
        lambda: make(stages(), loss_fn=lambda out, y: out - y).step(X, X), (1,),
        "stage 1 (rank 1), micro-batch 0: loss_fn returned a value of shape [2, 3]; return"),
    "targets of other rows": (
        lambda: make(stages()).step(X, X[:3]), (1,),
        "rank 1 has the last stage and computes the loss, but y has 3 rows and x has 4 rows"),
    "a parameter frozen meanwhile": (
        a_parameter_frozen_meanwhile, (0, 1), "weight was frozen after the module was wrapped"),
    "other batches": (
        lambda: make(stages()).step(X[: 4 - Comm().rank], X[: 4 - Comm().rank]), (),
        "the batch of a pipeline"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_RANK)
def test_one_rank_says_it_and_no_rank_hangs(world2: World, name: str) -> None:
    run, ranks, expected = ON_A_RANK[name]
    assert raises((expected,), world2.run, run, error=RankError).ranks == ranks


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_ends_the_run() -> None:
    """At its third micro-batch. The world names it; the ranks that waited do not hang."""

    def dies(stage: Any, x: torch.Tensor) -> torch.Tensor:
        stage.times += 1
        if stage.times == 3 and Comm().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def run() -> None:
        make([nn.Linear(3, 3), Custom(dies, times=0), nn.Linear(3, 3)], microbatches=4).step(X, X)

    with World(3, timeout_s=15) as world:
        assert raises("SIGKILL", world.run, run, error=RankError).ranks == (1,)


@pytest.mark.slow
@on_ranks_of_its_own(2, timeout_s=2, check=False)
def test_a_message_that_does_not_come_is_named() -> None:
    pipe = make(stages(), microbatches=4, schedule="gpipe")
    if Comm().rank == 1:
        pipe._p2p.send = lambda message, x: None
        with suppress(CommError):
            pipe.step(X, X)
        return
    words = ("stage 0 (rank 0) waited for the gradient of micro-batch 0 from stage 1 (rank 1), "
             "which did not arrive: recv failed")  # fmt: skip
    raises((words,), pipe.step, X, X, error=CommError)
    words = "the last step of this pipeline failed"
    raises((words,), pipe.step, X, X, error=RuntimeError)


def test_the_error_of_a_stage_keeps_its_cause() -> None:
    stage = VirtualStage(nn.Linear(3, 3), 2, 1, [Action("forward", 4)], False, None, None)
    words = "stage 2 (rank 1), micro-batch 4"
    error = raises((words,), stage.run, Action("forward", 4), torch.ones(1, 2), error=StageError)
    assert isinstance(error.__cause__, RuntimeError)
