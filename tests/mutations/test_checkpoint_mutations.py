"""Faulty checkpoints must turn the tests red."""

import dataclasses
import pathlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from checkpoint_cases import load_and_go_on, save_and_go_on
from harness import Change, Replacement, instead, on_ranks, replaces
from labkit import RankError, World
from labkit.checkpoints import folders, loading, saving, stored
from labkit.checkpoints.contents import Contents
from test_checkpoint_failures import MOMENTS, killed, load, save

pytestmark = pytest.mark.slow


@replaces(saving, "placed_boxes")
def flips_within_its_box(real: Any, *args: Any) -> Any:
    return [(box, view.flip(-1).clone()) for box, view in real(*args)]


@replaces(stored.Stored, "_items")
def forgets_the_start(real: Any, self: Any, k: Any, fill: Any, to: Any) -> Any:
    """Every rank reads the beginning of each tensor, as if its slice began there."""
    path, piece = fill
    return real(self, k, (path, dataclasses.replace(piece, start=0)), to)


restores_no_state = instead("restores_no_state", loading, "_new_state", lambda *_: ({}, []))


@replaces(loading, "_new_state")
def restores_only_moments(real: Any, of: Any, piece: Any) -> Any:
    """`step` begins at 0 again."""
    state, fills = real(of, piece)
    for key in set(state) & {"step"}:
        state[key] = torch.zeros(())
    return state, [fill for fill in fills if fill[0][-1] != "step"]


restores_no_hyperparameters = instead(
    "restores_no_hyperparameters", loading, "new_hyperparameters", lambda *_: []
)


@replaces(loading, "_weights")
def restores_no_buffers(real: Any, contents: Any) -> Any:
    return [fill for fill in real(contents) if "seen" not in fill[0]]


forgets_after_load = instead("forgets_after_load", Contents, "after_load", lambda self: None)


def loses_an_item(number: int) -> Replacement:
    """An item of the plan that no rank writes."""

    @replaces(saving.PiecePlanner, "create_local_plan")
    def plan(real: Any, self: Any) -> Any:
        made = real(self)
        return dataclasses.replace(made, items=made.items[:number] + made.items[number + 1 :])

    return plan


def saves_and_loads(world: World, change: Change, folder: pathlib.Path) -> None:
    expected = on_ranks(world, change, save_and_go_on, "zero-1", 2, str(folder))
    loaded = on_ranks(world, change, load_and_go_on, "zero-1", 2, str(folder))
    assert loaded == expected


FAULTS = [flips_within_its_box, forgets_the_start, restores_no_state, restores_only_moments,
          restores_no_hyperparameters, restores_no_buffers, forgets_after_load]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_faulty_checkpoint_changes_the_losses(
    world2: World, tmp_path: pathlib.Path, fault: Replacement
) -> None:
    with pytest.raises(AssertionError):
        saves_and_loads(world2, fault, tmp_path)


def test_without_a_fault_the_losses_are_equal(world2: World, tmp_path: pathlib.Path) -> None:
    saves_and_loads(world2, nullcontext, tmp_path)


@pytest.mark.parametrize("number", [0, 6])
def test_an_item_that_no_rank_writes_is_noticed_at_the_save(
    world2: World, tmp_path: pathlib.Path, number: int
) -> None:
    with pytest.raises(RankError, match="do not make up"):
        saves_and_loads(world2, loses_an_item(number), tmp_path)
    assert not list(tmp_path.iterdir())


def published_before_it_is_written() -> None:
    """The pointer first, then the files."""
    begin = folders.begin

    def too_soon(folder: pathlib.Path, step: int) -> pathlib.Path:
        unfinished = begin(folder, step)
        folders.point_at(unfinished.with_name(unfinished.name.removesuffix(".tmp")))
        return unfinished

    folders.begin = too_soon
    MOMENTS["amid write"]()


def old_ones_removed_first() -> None:
    begin = folders.begin

    def clearing(folder: pathlib.Path, step: int) -> pathlib.Path:
        for path in folders.finished_in(folder):
            folders.discard(path)
        return begin(folder, step)

    folders.begin = clearing
    MOMENTS["before pointer"]()


@pytest.mark.parametrize("order", [published_before_it_is_written, old_ones_removed_first])
def test_a_save_in_the_wrong_order_loses_what_was_there(
    world2: World, tmp_path: pathlib.Path, order: Callable[[], None]
) -> None:
    world2.run(save, tmp_path, 1)
    killed(world2, tmp_path, order, 2)
    with pytest.raises(RankError, match="no finished checkpoint"):
        world2.run(load, tmp_path)
