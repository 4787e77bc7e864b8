"""Faulty checkpoints must turn the tests red."""

import pathlib
from contextlib import nullcontext

import pytest

from checkpoint_cases import load_and_go_on, save_and_go_on
from harness import Change, Edit, around, on_ranks
from labkit import RankError, World
from labkit.checkpoints import folders, saving
from tables import raises
from test_checkpoint_failures import MOMENTS, killed, load, save

pytestmark = pytest.mark.slow


FAULTS = [
    Edit(label, f"labkit.checkpoints.{module}", old, new)
    for module, label, old, new in (
        ("saving", "flips within its box", "box.offsets)] = view", "box.offsets)] = view.flip(-1)"),
        ("stored", "every rank reads from the start of a tensor",
         "path, piece = fill\n        key",
         "path, piece = fill[0], replace(fill[1], start=0)\n        key"),
        ("loading", "restores no state", "if piece.optimizer is None:", "if True:"),
        ("loading", "begins at step 0 again",
         'fills.append((path, whole("", state[key])))', "state[key].zero_()"),
        ("loading", "restores no hyperparameters", "group.update(new)", "pass"),
        ("loading", "restores no buffers", "contents.pieces + buffers if", "contents.pieces if"),
        ("loading", "forgets after_load", "contents.after_load()", "pass"),
    )
]  # fmt: skip


def loses_an_item(number: int) -> Edit:
    """An item of the plan that no rank writes."""
    others = f"SavePlan(self._items[:{number}] + self._items[{number + 1} :],"
    return Edit("loses an item", saving.__name__, "SavePlan(self._items,", others)


def saves_and_loads(world: World, change: Change, folder: pathlib.Path) -> None:
    expected = on_ranks(world, change, save_and_go_on, "zero-1", 2, str(folder))
    loaded = on_ranks(world, change, load_and_go_on, "zero-1", 2, str(folder))
    assert loaded == expected


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_faulty_checkpoint_changes_the_losses(
    world2: World, tmp_path: pathlib.Path, fault: Edit
) -> None:
    raises("", saves_and_loads, world2, fault, tmp_path, error=AssertionError)


def test_without_a_fault_the_losses_are_equal(world2: World, tmp_path: pathlib.Path) -> None:
    saves_and_loads(world2, nullcontext, tmp_path)


@pytest.mark.parametrize("number", [0, 6])
def test_an_item_that_no_rank_writes_is_noticed_at_the_save(
    world2: World, tmp_path: pathlib.Path, number: int
) -> None:
    fault = loses_an_item(number)
    raises("do not make up", saves_and_loads, world2, fault, tmp_path, error=RankError)
    assert not list(tmp_path.iterdir())


MADE = "    unfinished.mkdir()\n"
FOUND = "    folder.mkdir(parents=True, exist_ok=True)\n"
CLEARED = "    for path in finished_in(folder):\n        discard(path)\n"
WRONG_ORDERS = [
    ("the pointer before the files", MADE, f"{MADE}    point_at(folder / name)\n", "amid write"),
    ("old ones removed first", FOUND, FOUND + CLEARED, "before pointer"),
]


@pytest.mark.parametrize(
    ("label", "old", "new", "moment"), WRONG_ORDERS, ids=[label for label, *_ in WRONG_ORDERS]
)
def test_a_save_in_the_wrong_order_loses_what_was_there(
    world2: World, tmp_path: pathlib.Path, label: str, old: str, new: str, moment: str
) -> None:
    world2.run(save, tmp_path, 1)
    fault = Edit(label, folders.__name__, old, new)
    around(world2, fault, killed, tmp_path, MOMENTS[moment], 2)
    raises("not a finished checkpoint", world2.run, load, tmp_path, error=RankError)
