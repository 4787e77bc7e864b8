"""What recording adds to a training step: the same DDP steps, recorded and not, in turns.

The step is the one `labkit run` does when nothing else is asked for, on as many ranks; and, since
recording costs the same for every step of a model, a short one.

Two ratios: of the time a step takes, and of the processor time of the thread that trains, which
does not feel how ranks that outnumber the cores are put on them. Both are of the faster half of all
steps: what else a machine does makes some of them slow, and none fast.
"""

import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table

from labkit.bench.data_parallel import LENGTH, ROWS, stepper
from labkit.parallel import DDP
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World
from labkit.trace.recording import record
from labkit.training import DTYPES, Task

SETTLING = 40  # turns, at most
STEPS = 4  # timed in one recording
TASK = Task()


@dataclass(frozen=True)
class Case:
    """A step to measure, of so many rows of 64 tokens on each rank."""

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
    """Of one step: on the wall, and of the processor."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class RecordingTimes:
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


def _turns(case: Case, turns: int) -> tuple[list[Seconds], list[Seconds]]:
    """On each rank: seconds of its steps, plain and recorded, some of each a turn."""
    comm = attach().comm
    step = stepper(DDP, case.model, case.rows, DTYPES[case.dtype])

    def timed() -> Seconds:
        comm.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        step()
        cpu_s = time.thread_time() - began_cpu_s
        comm.barrier()
        return Seconds(time.perf_counter() - began_s, cpu_s)

    def some(block: Callable[[], Any]) -> list[Seconds]:
        with block():
            step()  # when a recording begins, Python's caches are cold: no part of a step's cost
            return [timed() for _ in range(STEPS)]

    def some_of_each(turn: int) -> dict[Callable[[], Any], list[Seconds]]:
        kinds = (nullcontext, record) if turn % 2 else (record, nullcontext)
        return {block: some(block) for block in kinds}

    for turn in range(SETTLING):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        some_of_each(turn)
        pages = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        comm.all_reduce(pages, op="max")
        if turn > 3 and pages < 100:
            break  # a step that has to ask the system for memory would hide what is looked for

    label = f"{case.model} {case.dtype} on {comm.size} ranks"
    found = [some_of_each(turn) for turn in progress(range(turns), label)]
    plain = [seconds for turn in found for seconds in turn[nullcontext]]
    return plain, [seconds for turn in found for seconds in turn[record]]


def _faster_half(seconds: list[Seconds]) -> Seconds:
    half = (len(seconds) + 1) // 2
    return Seconds(*(fmean(sorted(one)[:half]) for one in zip(*seconds)))


def bench_recording(cases: tuple[Case, ...] = CASES, turns: int = 20) -> list[RecordingTimes]:
    """Time each case."""
    found = []
    for case in cases:
        with World(case.ranks, check=False) as world:
            plain, recorded = world.run(_turns, case, turns)[0]
        found.append(RecordingTimes(case, _faster_half(plain), _faster_half(recorded)))
    return found


def table(found: list[RecordingTimes]) -> Table:
    """What `bench_recording` found, with the ratios."""
    shown = Table(
        title=f"A DDP step recorded over plain, rows of {LENGTH} tokens a rank (aim: below 1.02)",
        title_justify="left",
    )
    names = ("model", "dtype", "ranks", "rows", "plain, ms", "recorded, ms", "ratio", "processor")
    for name in names:
        shown.add_column(name, justify="right")
    for one in found:
        case = one.case
        times = [f"{s * 1e3:.2f}" for s in (one.plain.wall_s, one.recorded.wall_s)]
        what = (case.model, case.dtype, str(case.ranks), str(case.rows))
        shown.add_row(*what, *times, f"{one.ratio:.3f}", f"{one.cpu_ratio:.3f}")
    return shown
