"""What the door adds to a call: an all-reduce on paper, where there is nothing behind the door,
so that all the time is the door's.
"""

import timeit
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from labkit.comm import Board, Comm, here, listen
from labkit.runtime.attach import leave, on_paper
from labkit.runtime.world import World

CALLS, TRIES = 2000, 15


@dataclass(frozen=True)
class DoorTimes:
    """Microseconds of a call; the best of several tries, since others only add."""

    torch_us: float
    door_us: float
    checked_us: float
    recorded_us: float


def _measure() -> DoorTimes:
    """On a rank that is going to be thrown away."""
    leave()
    here.board = None
    with on_paper(0, 8) as me:
        return _of_a_call(me.comm)


def _of_a_call(comm: Comm) -> DoorTimes:
    x = torch.ones(16)

    def us_of_a_call(statement: str) -> float:
        names = {"comm": comm, "group": comm.group, "x": x}
        return (
            min(timeit.repeat(statement, globals=names, number=CALLS, repeat=TRIES)) / CALLS * 1e6
        )

    torch_us = us_of_a_call("group.allreduce([x]).wait()")
    door_us = us_of_a_call("comm.all_reduce(x)")
    with TemporaryDirectory() as folder:
        Board.create(Path(folder) / "board", 8)
        here.board = Board(Path(folder) / "board", 8, rank=0)
        checked_us = us_of_a_call("comm.all_reduce(x)")
        here.board = None
    with listen():
        recorded_us = us_of_a_call("comm.all_reduce(x)")
    return DoorTimes(torch_us, door_us, checked_us, recorded_us)


def bench_door() -> DoorTimes:
    """Measure on one rank."""
    with World(1, check=False) as world:
        return world.run(_measure)[0]


def table(found: DoorTimes) -> Table:
    """What `bench_door` found."""
    shown = Table(title="An all-reduce through the door, nothing behind it", title_justify="left")
    for name in ("", "us a call", "aim"):
        shown.add_column(name, justify="left" if not name else "right")
    shown.add_row("nothing records (World(check=False))", f"{found.door_us:.1f}", "")
    on_top_us = found.door_us - found.torch_us
    shown.add_row("the same, on top of torch's own call", f"{on_top_us:.1f}", "5")
    shown.add_row("ranks compared on the board (check=True)", f"{found.checked_us:.1f}", "")
    shown.add_row("events recorded", f"{found.recorded_us:.1f}", "")
    shown.add_row("torch's own call into the same group", f"{found.torch_us:.1f}", "")
    return shown
