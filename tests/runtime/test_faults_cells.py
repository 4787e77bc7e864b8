"""Mistakes of an afternoon: after each, the ranks either keep their variables, or say that they do
not, and why is in the error."""

import time
from typing import Any

import pytest
import torch

from labkit import Comm, RankError, World
from tables import cases, raises
from test_failures import assert_works
from worlds import world_fixture

KEPT = "All ranks keep their variables"


world = world_fixture(3, timeout_s=60)


def remember(world: World) -> None:
    world.run_cell("kept = rank + 0.5", "<cell>")


def remembers(world: World) -> bool:
    """Whether the ranks still have the variable and are in step."""
    kept = world.run_cell("globals().get('kept')", "<cell>")
    assert_works(world)
    return kept == [rank + 0.5 for rank in range(world.size)]


def mistake(world: World, source: str, says: str = "", error: Any = RankError) -> Any:
    """The error of a cell."""
    return raises(says, world.run_cell, source, "<cell of the mistake>", error=error)


@pytest.mark.parametrize(
    "source",
    [
        "undefined_name",
        "import sys\nsys.exit()",
        "raise KeyboardInterrupt",
        "raise SystemExit(3)",
        "1 / 0 if rank == 1 else comm.rank",
        "if rank > 0: raise ValueError(rank)",
        "comm.barrier()\n[][1]",
        "dist.all_reduce(torch.ones(2))\n[][1]",
        "if rank < 2: (dist.recv if rank else dist.send)(torch.ones(2), 1 - rank)\n[][1]",
        "if rank < 2: (dist.irecv if rank else dist.isend)(torch.ones(2), 1 - rank).wait()\n[][1]",
        "pair = dist.new_group([0, 1])\nif rank < 2: dist.barrier(pair)\n[][1]",
        "class Lock(Exception):\n    def __reduce__(self): raise TypeError\nraise Lock",
        "import threading\nthreading.Lock()",
        "(x for x in range(3))",
    ],
)
def test_after_an_exception_the_ranks_keep_their_variables(world: World, source: str) -> None:
    remember(world)
    error = mistake(world, source, says=KEPT)
    assert error.kind in ("raised", "unpicklable") and "stopped" not in str(error)
    assert remembers(world)


@pytest.mark.parametrize("condition", ["True", "rank == 1"])
def test_ranks_that_ended_their_process_group_are_replaced(world: World, condition: str) -> None:
    """Scripts for torchrun end so; kept, the ranks could never talk to each other again."""
    world.run_cell(f"if {condition}: dist.destroy_process_group()", "<cell that ends the group>")
    mistake(world, "1 / 0", "the next run starts new ranks")
    assert_works(world)


@pytest.mark.parametrize(
    "source", ["return 3", "await comm", "break", "x = 1\nyield x", "x =", "!ls"]
)
def test_what_python_does_not_compile_never_reaches_a_rank(world: World, source: str) -> None:
    remember(world)
    error = mistake(world, "comm.barrier()\n" + source, error=SyntaxError)
    assert error.lineno == 1 + len(source.splitlines())
    if source in ("x =", "!ls"):  # what the parser refuses; the rest has no text in Python
        assert error.text is not None and error.text.strip() == source
    for text, note in (("await", "asyncio.run"), ("!ls", "commands do not work")):
        assert text not in source or note in error.__notes__[0]
    assert remembers(world)


def early_on_rank_0() -> None:
    if Comm().rank == 0:
        raise ValueError("early")
    time.sleep(1)  # the others still compute, and are waited for


@cases((lambda: {}["missing"], "KeyError: 'missing'"), (early_on_rank_0, "ValueError: early"))
def test_a_functions_exception_keeps_the_ranks_too(fail: Any, says: str, world: World) -> None:
    remember(world)
    raises((says, KEPT), world.run, fail, error=RankError)
    assert remembers(world)


@pytest.mark.parametrize(
    "source",
    [
        "if rank == 1: raise ValueError\ncomm.all_reduce(torch.ones(2))",
        "if rank == 0: comm.isend(torch.ones(2), 1)\nraise ValueError",
        "if rank == 0: comm.broadcast(torch.ones(2), 0, async_op=True)\nraise ValueError",
        "comm.all_reduce(torch.ones(2 + rank))",
        # torch's own operations, which no board sees
        "if rank == 0: work = dist.all_reduce(torch.ones(2), async_op=True)\nraise ValueError",
        "if rank == 1: work = dist.irecv(torch.ones(2), 0)\nraise ValueError",
        "if rank == 0: work = dist.isend(torch.ones(2), 1)\nelse: 1 / 0",
        "work = dist.irecv(torch.ones(2), (rank + 1) % 3)\nraise ValueError",
        "pair = dist.new_group([0, 1])\nif rank == 1: dist.barrier(pair, async_op=True)\n1 / 0",
    ],
)
def test_an_operation_in_flight_costs_the_variables_and_says_so(world: World, source: str) -> None:
    remember(world)
    assert KEPT not in str(mistake(world, source, "All variables on the ranks are lost"))
    assert not remembers(world)


def test_an_unreceived_message_is_in_flight(world: World) -> None:
    """Its sender has returned from `send`; a later receive would get it in place of its own."""

    def unread() -> None:
        if Comm().rank == 0:
            Comm().send(torch.zeros(1), 1)
        raise ValueError("before the receive")

    def message() -> float:
        x = torch.ones(1)
        if Comm().rank == 0:
            Comm().send(x + 1, 1)
        if Comm().rank == 1:
            Comm().recv(x, 0)
        return x.item()

    raises("before the receive", world.run, unread, error=RankError)
    assert world.run(message) == [1, 2, 1]


def test_without_the_board_ranks_are_stopped_after_an_exception() -> None:
    with World(2, check=False) as world:
        remember(world)
        mistake(world, "undefined_name", "All variables on the ranks are lost")
        assert not remembers(world)


def test_ranks_that_left_their_group_do_not_train_alone(world: World) -> None:
    """Scripts end so; whoever goes on is told how, and no rank trains alone in silence."""
    for source in ("Comm()", "labkit.attach().comm", "labkit.DDP(torch.nn.Linear(2, 2))"):
        world.run_cell("dist.destroy_process_group()", "<cell>")
        says = r"destroy_process_group in a World: world.restart\(\) or %ranks reset"
        mistake(world, f"import labkit\nfrom labkit import Comm\n{source}", says)
    assert_works(world)
