"""Faulty checkpoints must turn the tests red: a test that cannot fail proves nothing."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from checkpoint_cases import load_and_go_on, save_and_go_on
from labkit import RankError, World
from labkit.checkpoints import folders, loading, saving, stored
from labkit.checkpoints.contents import Contents
from test_checkpoint_failures import amid_write, before_pointer, killed, load, save

pytestmark = pytest.mark.slow
Fault = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world


@contextmanager
def instead(place: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """In this block `place.name` is what `make` makes of it."""
    before = getattr(place, name)
    setattr(place, name, make(before))
    try:
        yield
    finally:
        setattr(place, name, before)


def turned_within_its_box() -> AbstractContextManager[None]:
    return instead(saving, "view_of", lambda before: lambda *x: before(*x).flip(-1).clone())


def start_forgotten() -> AbstractContextManager[None]:
    """Every rank reads the beginning of each tensor, as if its piece began there."""

    def forgetful(before: Any) -> Any:
        return lambda self, k, fill, to: before(self, k, dataclasses.replace(fill, start=0), to)

    return instead(stored.Stored, "_items", forgetful)


def state_not_restored() -> AbstractContextManager[None]:
    return instead(loading, "_new_state", lambda before: lambda *_: ({}, []))


def only_moments_restored() -> AbstractContextManager[None]:
    """Of the state, what has a number for each element; `step` begins at 0 again."""

    def partly(before: Any) -> Any:
        def state(of: Any, piece: Any) -> Any:
            made, fills = before(of, piece)
            for key in set(made) & {"step"}:
                made[key] = torch.zeros(())
            return made, [fill for fill in fills if fill.path[-1] != "step"]

        return state

    return instead(loading, "_new_state", partly)


def hyperparameters_not_restored() -> AbstractContextManager[None]:
    return instead(loading, "new_hyperparameters", lambda _: lambda *_: [])


def buffers_not_restored() -> AbstractContextManager[None]:
    def without(before: Any) -> Any:
        return lambda contents: [fill for fill in before(contents) if "seen" not in fill.path]

    return instead(loading, "_weights", without)


def after_load_forgotten() -> AbstractContextManager[None]:
    return instead(Contents, "after_load", lambda _: lambda self: None)


FAULTS = [turned_within_its_box, start_forgotten, state_not_restored, only_moments_restored,
          hyperparameters_not_restored, buffers_not_restored, after_load_forgotten]  # fmt: skip


def check(world: World, fault: Fault | None, folder: pathlib.Path) -> None:
    def run(function: Callable[..., list[float]]) -> list[float]:
        if fault is None:
            return function("zero-1", 2, str(folder))
        with fault():
            return function("zero-1", 2, str(folder))

    expected = world.run(run, save_and_go_on)
    assert world.run(run, load_and_go_on) == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_checkpoint_changes_the_losses(
    pair: World, tmp_path: pathlib.Path, fault: Fault
) -> None:
    with pytest.raises(AssertionError):
        check(pair, fault, tmp_path)


def test_the_check_is_green_on_the_real_one(pair: World, tmp_path: pathlib.Path) -> None:
    check(pair, None, tmp_path)


@pytest.mark.parametrize("number", [0, 6])
def test_a_piece_that_nobody_writes_is_found_when_it_is_saved(
    pair: World, tmp_path: pathlib.Path, number: int
) -> None:
    def lost() -> AbstractContextManager[None]:
        def without(before: Any) -> Any:
            def plan(self: Any) -> Any:
                made = before(self)
                return dataclasses.replace(
                    made, items=made.items[:number] + made.items[number + 1 :]
                )

            return plan

        return instead(saving.PiecePlanner, "create_local_plan", without)

    with pytest.raises(RankError, match="do not make up"):
        check(pair, lost, tmp_path)
    assert not list(tmp_path.iterdir())


def published_before_it_is_written() -> None:
    """The pointer first, then the files."""
    begin = folders.begin

    def too_soon(folder: pathlib.Path, step: int) -> pathlib.Path:
        unfinished = begin(folder, step)
        folders.point_at(unfinished.with_name(unfinished.name.removesuffix(".tmp")))
        return unfinished

    folders.begin = too_soon
    amid_write()


def old_ones_removed_first() -> None:
    begin = folders.begin

    def clearing(folder: pathlib.Path, step: int) -> pathlib.Path:
        for path in folders.standing(folder):
            folders.discard(path)
        return begin(folder, step)

    folders.begin = clearing
    before_pointer()


@pytest.mark.parametrize("order", [published_before_it_is_written, old_ones_removed_first])
def test_a_save_in_the_wrong_order_loses_what_was_there(
    pair: World, tmp_path: pathlib.Path, order: Callable[[], None]
) -> None:
    pair.run(save, tmp_path, 1)
    killed(pair, tmp_path, order, 2)
    with pytest.raises(RankError, match="no finished checkpoint"):
        pair.run(load, tmp_path)
