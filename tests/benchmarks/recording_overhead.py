"""What recording adds to a training step: the same DDP steps, recorded and not, in turns.

The step is the default one of `labkit run`, on 1, 2 and 4 ranks; and a short one, since recording
costs the same for every step of a model.

Two ratios: of the step's wall-clock time, and of the CPU time of the training thread, which does
not depend on how ranks share the cores. Both average the faster half of all steps: other programs
make some steps slow, and none fast.
"""

import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table

from labkit.bench.data_parallel import LENGTH, ROWS, stepper
from labkit.bench.harness import take_turns, titled
from labkit.cli.terminal import print_table
from labkit.parallel import DDP
from labkit.runtime.attach import attach
from labkit.runtime.world import World
from labkit.trace.recording import record
from labkit.training import DTYPES, Task

WARM_UP = 40  # turns, at most
STEPS = 4  # timed in one recording
TASK = Task()


@dataclass(frozen=True)
class Case:
    """A step to measure: so many rows of 64 tokens on each rank."""

    model: str
    ranks: int
    rows: int
    dtype: str


CASES = (
    *(Case(TASK.model, ranks, TASK.rows // ranks, TASK.dtype) for ranks in (1, 2, 4)),
    Case("3.4M", 2, TASK.rows // 2, TASK.dtype),
    Case("1M", 1, ROWS, "float32"),
)


class Seconds(NamedTuple):
    """Of one step: wall-clock time, and CPU time."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Overhead:
    """Mean seconds of the faster half of the steps."""

    case: Case
    plain: Seconds
    recorded: Seconds

    @property
    def ratio(self) -> float:
        return self.recorded.wall_s / self.plain.wall_s

    @property
    def cpu_ratio(self) -> float:
        return self.recorded.cpu_s / self.plain.cpu_s


def measure(cases: tuple[Case, ...] = CASES, turns: int = 20) -> list[Overhead]:
    """Each case on ranks of its own."""
    overheads = []
    for case in cases:
        with World(case.ranks, check=False) as world:
            plain, recorded = world.run(_on_rank, case, turns)[0]
        overheads.append(Overhead(case, _faster_half(plain), _faster_half(recorded)))
    return overheads


def _on_rank(case: Case, turns: int) -> tuple[list[Seconds], list[Seconds]]:
    """Seconds of this rank's steps, plain and recorded; in each turn a few of both."""
    comm = attach().comm
    step = stepper(DDP, case.model, case.rows, DTYPES[case.dtype])

    def timed() -> Seconds:
        comm.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        step()
        cpu_s = time.thread_time() - began_cpu_s
        comm.barrier()
        return Seconds(time.perf_counter() - began_s, cpu_s)

    def steps_inside(block: Callable[[], Any]) -> list[Seconds]:
        with block():
            step()  # a new recording finds Python's caches cold, which is no part of a step's cost
            return [timed() for _ in range(STEPS)]

    kinds = {"plain": partial(steps_inside, nullcontext), "recorded": partial(steps_inside, record)}
    for turn in range(WARM_UP):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        take_turns(kinds, 1)
        pages = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        comm.all_reduce(pages, op="max")
        if turn > 3 and pages < 100:
            break  # page faults would hide the difference

    samples = take_turns(kinds, turns, f"{case.model} {case.dtype} on {comm.size} ranks")
    return list(chain(*samples["plain"])), list(chain(*samples["recorded"]))


def _faster_half(samples: list[Seconds]) -> Seconds:
    half = (len(samples) + 1) // 2
    return Seconds(*(fmean(sorted(column)[:half]) for column in zip(*samples)))


def table(overheads: list[Overhead]) -> Table:
    """A row for each case, with both ratios."""
    rows = [
        (
            *map(str, (x.case.model, x.case.dtype, x.case.ranks, x.case.rows)),
            *(f"{seconds.wall_s * 1e3:.2f}" for seconds in (x.plain, x.recorded)),
            f"{x.ratio:.3f}",
            f"{x.cpu_ratio:.3f}",
        )
        for x in overheads
    ]
    title = f"A DDP step recorded over plain, rows of {LENGTH} tokens a rank (aim: below 1.02)"
    names = ("model", "dtype", "ranks", "rows", "plain, ms", "recorded, ms", "ratio", "CPU")
    return titled(title, "", names, (), rows)


if __name__ == "__main__":
    print_table(table(measure()))
