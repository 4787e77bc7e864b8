"""What recording adds to a training step: the same DDP steps, recorded and not, in turns.

The step is the one `labkit run` does when nothing else is asked for, on as many ranks; and, since
recording costs the same for every step of a model, a short one.
"""

import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from rich.table import Table

from labkit.bench.ddp import LENGTH, ROWS, stepper
from labkit.parallel import DDP
from labkit.recording import record
from labkit.training import DTYPES, Task
from labkit.world import World, attach, progress

SETTLING = 40  # turns, at most
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


@dataclass(frozen=True)
class RecordingTimes:
    """Seconds of a step, median over turns, and the ratios of neighbouring turns."""

    case: Case
    plain_s: float
    recorded_s: float
    ratio: float
    low: float  # quartiles of the ratio
    high: float


def _turns(case: Case, turns: int) -> tuple[list[float], list[float]]:
    """On each rank: seconds of a step, plain and recorded, one of each a turn."""
    comm = attach().comm
    step = stepper(DDP, case.model, case.rows, DTYPES[case.dtype])

    def timed(block: Callable[[], Any]) -> float:
        with block():
            step()  # when a recording begins, Python's caches are cold: no part of a step's cost
            comm.barrier()
            began_s = time.perf_counter()
            step()
            comm.barrier()
            return time.perf_counter() - began_s

    def one_of_each(turn: int) -> dict[Callable[[], Any], float]:
        kinds = (nullcontext, record) if turn % 2 else (record, nullcontext)
        return {block: timed(block) for block in kinds}

    for turn in range(SETTLING):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        one_of_each(turn)
        pages = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        comm.all_reduce(pages, op="max")
        if turn > 3 and pages < 100:
            break  # a step that has to ask the system for memory would hide what is looked for

    label = f"{case.model} {case.dtype} on {comm.size} ranks"
    found = [one_of_each(turn) for turn in progress(range(turns), label)]
    return [turn[nullcontext] for turn in found], [turn[record] for turn in found]


def bench_recording(cases: tuple[Case, ...] = CASES, turns: int = 40) -> list[RecordingTimes]:
    """Time each case."""
    found = []
    for case in cases:
        with World(case.ranks, check=False) as world:
            plain, recorded = world.run(_turns, case, turns)[0]
        ratios = [with_it / without for without, with_it in zip(plain, recorded)]
        low, middle, high = quantiles(ratios, n=4)
        found.append(RecordingTimes(case, median(plain), median(recorded), middle, low, high))
    return found


def table(found: list[RecordingTimes]) -> Table:
    """What `bench_recording` found, with the ratios."""
    shown = Table(
        title=f"A DDP step recorded, rows of {LENGTH} tokens (aim: below 1.02)",
        title_justify="left",
    )
    names = ("model", "dtype", "ranks", "rows a rank", "plain, ms", "recorded, ms")
    for name in (*names, "recorded / plain", "quartiles"):
        shown.add_column(name, justify="right")
    for one in found:
        case = one.case
        times = [f"{s * 1e3:.2f}" for s in (one.plain_s, one.recorded_s)]
        quartiles = f"{one.low:.3f} to {one.high:.3f}"
        what = (case.model, case.dtype, str(case.ranks), str(case.rows))
        shown.add_row(*what, *times, f"{one.ratio:.3f}", quartiles)
    return shown
