"""Pipeline, data and tensor parallelism together, against one process (three_d_cases.py)."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import three_d_cases as cases
from labkit import DDP, Comm, GradScaler, Mesh, RankError, World, ZeRO3, ZeroOptimizer
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from tables import raises
from three_d_cases import Case
from worlds import on_each_rank, world_fixture

eight = world_fixture(8, timeout_s=30)


def held_to_one_process(world: World, some: list[Case]) -> None:
    ranks = world.run(lambda: [cases.train(case) for case in some])
    for case, seen in zip(some, zip(*ranks, strict=True), strict=True):
        cases.check(case, list(seen))


def test_the_covering_part_has_every_pair_of_choices() -> None:
    every = set().union(*map(cases.pairs_of, cases.every_case()))
    chosen = cases.covering()
    assert set().union(*map(cases.pairs_of, chosen)) == every
    assert len(chosen) < len(cases.every_case()) / 8


@pytest.mark.slow
def test_every_pair_of_choices_trains_as_one_process(eight: World) -> None:
    held_to_one_process(eight, cases.covering())


MESHES = sorted({(case.pp, case.dp, case.tp) for case in cases.every_case()})


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "tp"), MESHES, ids=str)
def test_the_whole_grid_trains_as_one_process(eight: World, pp: int, dp: int, tp: int) -> None:
    some = [case for case in cases.every_case() if (case.pp, case.dp, case.tp) == (pp, dp, tp)]
    held_to_one_process(eight, some)


@pytest.mark.slow
def test_what_does_not_divide_or_is_not_trained(eight: World) -> None:
    hard = cases.hard_cases()
    with World(6, timeout_s=30) as six:
        held_to_one_process(six, [case for case in hard if case.pp == 3])
    held_to_one_process(eight, [case for case in hard if case.pp < 3])


X = torch.ones(2, 4, dtype=torch.int64)


def pipe_of(mesh: Mesh, stages: Any = None, schedule: str = "1f1b", **how: Any) -> Pipeline:
    """A tied GPT, if no stages are given."""
    stages = stages or split(cases.model(Case()), 2)
    return Pipeline(stages, mesh.pp, schedule, 2, cases.Weighted(), **how)


def stage_2_in_halves(mesh: Mesh) -> None:
    pipe = pipe_of(mesh, schedule="zb-h1")
    zero = ZeroOptimizer(pipe.parameters(), torch.optim.SGD, 2, mesh.dp, lr=0.1)
    pipe.step(X, X)
    zero.step()


def stage_1_without_a_flush(mesh: Mesh) -> None:
    zero = partial(ZeroOptimizer, optimizer_cls=torch.optim.SGD, stage=1, comm=mesh.dp, lr=0.1)
    pipe_of(mesh, split(cases.model(Case(tied=False)), 2), "pipedream", optimizer=zero)


def two_owners_on_a_rank(mesh: Mesh) -> None:
    tied = nn.Linear(3, 3)
    stages = [tied, nn.Linear(3, 3), nn.Sequential(nn.ReLU(), tied), nn.Linear(3, 3)]
    pipe_of(mesh, stages, "interleaved", chunks=2, wrap=lambda one: DDP(one, mesh.dp))


ALL = "ranks 0, 1, 2 and 3 raised ValueError: "
REFUSED: dict[str, tuple[Any, str]] = {
    "stages_in_zero3": (
        lambda mesh: pipe_of(mesh, wrap=lambda one: ZeRO3(one, mesh.dp)),
        ALL + "head.weight [11, 8] of stage 1 is tied across stages, but one stage uses ZeRO3,"),
    "stage_2_in_halves": (
        stage_2_in_halves,
        ALL + "a ZeroOptimizer with stage=2 sends and frees gradients in every backward"),
    "stage_1_without_a_flush": (
        stage_1_without_a_flush,
        ALL + "a ZeroOptimizer averages gradients once per step, but this schedule"),
    "two_owners_on_a_rank": (
        two_owners_on_a_rank,
        ALL + "stages 0 and 2 are both on rank 0 and share a parameter"),
    "scaler_of_a_stage": (
        lambda mesh: pipe_of(mesh).step(X, X, scaler=GradScaler(comm=mesh.dp)),
        "the scaler only [0, 1], so some stages would skip a step"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(world4: World, name: str) -> None:
    run, words = REFUSED[name]
    raises((words,), world4.run, lambda: run(cases.mesh_of(2, 2, 1)), error=RankError)


@on_each_rank("eight")
def test_the_ends_of_each_line_are_a_group() -> None:
    """The embedding groups: one for each line of stages, made by all ranks at once."""
    rank, ends = Comm().rank, Mesh(pp=4, tp=2).pp.subgroup([0, 3])
    assert (ends is None) == (2 <= rank < 6)
    if ends is not None:
        x = torch.full((2,), float(rank))
        ends.all_reduce(x)
        assert ends.ranks == (rank % 6, rank % 6 + 6) and x.tolist() == [sum(ends.ranks)] * 2
