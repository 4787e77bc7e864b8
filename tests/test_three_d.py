"""Pipeline, data and tensor parallelism together, against one process: tests/three_d_cases.py."""

from collections.abc import Iterator

import pytest
import three_d_cases as cases
from three_d_cases import Case

from labkit import World


@pytest.fixture(scope="module")
def eight() -> Iterator[World]:
    with World(8, timeout_s=30) as world:
        yield world


def held_to_one_process(world: World, some: list[Case]) -> None:
    def run() -> list[cases.Seen | None]:
        return [cases.train(case) for case in some]

    ranks = world.run(run)
    for case, seen in zip(some, zip(*ranks, strict=True), strict=True):
        cases.check(case, list(seen))


def test_the_covering_part_has_every_pair_of_choices() -> None:
    every = set().union(*map(cases.pairs_of, cases.every_case()))
    chosen = cases.covering()
    assert set().union(*map(cases.pairs_of, chosen)) == every
    assert len(chosen) < len(cases.every_case()) / 8


def test_every_pair_of_choices_trains_as_one_process(eight: World) -> None:
    held_to_one_process(eight, cases.covering())


@pytest.mark.slow
def test_what_does_not_divide_or_is_not_trained(eight: World) -> None:
    hard = list(cases.hard_cases().values())
    with World(6, timeout_s=30) as six:
        held_to_one_process(six, [case for case in hard if case.pp == 3])
    held_to_one_process(eight, [case for case in hard if case.pp < 3])


MESHES = sorted({(case.pp, case.dp, case.tp) for case in cases.every_case()})


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "tp"), MESHES, ids=str)
def test_the_whole_grid_trains_as_one_process(eight: World, pp: int, dp: int, tp: int) -> None:
    some = [case for case in cases.every_case() if (case.pp, case.dp, case.tp) == (pp, dp, tp)]
    held_to_one_process(eight, some)
