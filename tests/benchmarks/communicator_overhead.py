"""What the communicator adds to a call: an all-reduce in a dry run, where nothing is sent, so that
all the time is the communicator's.
"""

import timeit
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from labkit.bench.harness import titled
from labkit.cli.terminal import print_table
from labkit.comm import Board, listen
from labkit.runtime.attach import leave, on_paper
from labkit.runtime.world import World

CALLS, TRIES = 2000, 15


@dataclass(frozen=True)
class CallTimes:
    """Microseconds of a call: the fastest of several tries, since other programs only add."""

    torch_us: float
    plain_us: float
    checked_us: float
    recorded_us: float


def measure() -> CallTimes:
    """Measured on one rank."""
    with World(1, check=False) as world:
        return world.run(_on_rank)[0]


def _on_rank() -> CallTimes:
    """The rank is of no use afterwards."""
    from labkit.comm import here  # the rank's own: a global of a script would travel as a copy

    def call_us(statement: str) -> float:
        names = {"comm": me.comm, "group": me.comm.group, "x": torch.ones(16)}
        tries = timeit.repeat(statement, globals=names, number=CALLS, repeat=TRIES)
        return min(tries) / CALLS * 1e6

    leave()
    here.board = None
    with on_paper(0, 8) as me, TemporaryDirectory() as folder:
        torch_us = call_us("group.allreduce([x]).wait()")
        plain_us = call_us("comm.all_reduce(x)")
        Board.create(Path(folder) / "board", 8)
        here.board = Board(Path(folder) / "board", 8, rank=0)
        checked_us = call_us("comm.all_reduce(x)")
        here.board = None
        with listen():
            recorded_us = call_us("comm.all_reduce(x)")
    return CallTimes(torch_us, plain_us, checked_us, recorded_us)


def table(times: CallTimes) -> Table:
    """Microseconds of a call, by what is switched on."""
    rows = [
        ("nothing records (World(check=False))", f"{times.plain_us:.1f}", ""),
        ("the same, beyond torch's own call", f"{times.plain_us - times.torch_us:.1f}", "5"),
        ("ranks compared on the board (check=True)", f"{times.checked_us:.1f}", ""),
        ("events recorded", f"{times.recorded_us:.1f}", ""),
        ("torch's own call into the same group", f"{times.torch_us:.1f}", ""),
    ]
    title = "An all-reduce through the communicator, with nothing sent"
    return titled(title, "", ("", "us a call", "aim"), ("",), rows)


if __name__ == "__main__":
    print_table(table(measure()))
