"""A step of labkit's pipeline against torch.distributed.pipelining's, by the same schedule, and
against the floor: what the stages compute, and the bubble.

    floor     each stage's computing without communication, and the bubble (pipeline_floor.py)
    labkit    Pipeline, over `transport`
    torch     ScheduleGPipe, Schedule1F1B, ..., over gloo

All have the same model, cut alike, the same batch and micro-batches, and take turns in the same
processes. A step is forward and backward of the whole batch; the optimizer's would be the same.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from labkit.bench import peers
from labkit.bench.data_parallel import Contest, Steps
from labkit.bench.pipeline_floor import (
    CHUNKS,
    DEPTH,
    LENGTH,
    ROWS,
    VOCAB,
    Floor,
    batch,
    loss_of,
    stages_of,
)
from labkit.comm import Comm
from labkit.foreign import write_json
from labkit.models.gpt import PRESETS
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World
from labkit.schedules import schedule

MICROBATCHES = 8
STEPS = 2  # in a turn
AIM = 1.0
SCHEDULES = list(peers.PIPELINES)

Step = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Found(Steps):
    """Seconds of a step of each side, one entry a turn: "1f1b", "torch 1f1b"."""

    microbatches: int
    floors_s: dict[str, float]  # of each schedule

    def over(self, name: str) -> float:
        """The median step by this schedule, to its floor."""
        return median(self.seconds[name]) / self.floors_s[name]


def contest(name: str) -> Contest:
    """Of one schedule."""
    return Contest(name, f"torch {name}", AIM)


def ours(stages: list[nn.Module], name: str, microbatches: int, comm: Comm) -> Step:
    """A step of labkit's; it leaves `.grad`, and gives the loss on the last rank."""
    pipeline = Pipeline(stages, comm, name, microbatches, loss_of)
    x, y = batch()

    def step() -> Tensor | None:
        pipeline.zero_grad()
        return pipeline.step(x, y)

    return step


def theirs(stages: list[nn.Module], name: str, microbatches: int, comm: Comm) -> Step:
    """A step of torch's."""
    own = nn.ModuleList(stages[comm.rank :: comm.size])
    pipeline = peers.pipeline(name, stages, microbatches, loss_of)
    x, y = batch()

    def step() -> Tensor | None:
        own.zero_grad()
        return pipeline(x, y)

    return step


def _turns(
    model: str, names: Sequence[str], microbatches: int, turns: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """On each rank: seconds of a step of each side, one entry a turn; and the floors."""
    comm = attach().comm
    sides: dict[str, Step] = {}
    floors = {name: Floor(model, name, microbatches, comm) for name in names}
    for name in names:
        for side, key in ((ours, name), (theirs, f"torch {name}")):
            sides[key] = side(stages_of(model, name, comm.size), name, microbatches, comm)
    for _ in range(2):
        for step in sides.values():
            step()
        for floor in floors.values():
            floor.timed()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for turn in progress(range(turns), f"{model} on {comm.size} ranks"):
        first = turn % len(order)
        for name in [*order[first:], *order[:first]]:
            comm.barrier()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                sides[name]()
            comm.barrier()
            seconds[name].append((time.perf_counter() - began_s) / STEPS)
        for floor in floors.values():
            floor.measure()
    return seconds, {name: floor.step_s() for name, floor in floors.items()}


def bench_pipeline(
    only: Sequence[str] = (),
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    microbatches: int = MICROBATCHES,
    turns: int = 20,
    transport: str | None = None,
) -> list[Found]:
    """Time each schedule for each number of ranks and each model; torch's go over gloo, ours over
    `transport`, as a `World` has it here when None.

    Raises ValueError for a schedule that torch has not, a model that is none of labkit's presets,
    and micro-batches or ranks that do not fit.
    """
    names = names_of(only)
    if unknown := [model for model in models if model not in PRESETS]:
        raise ValueError(f"no model {unknown[0]!r}; choose of {', '.join(PRESETS)}")
    if not 1 <= microbatches <= ROWS or ROWS % microbatches:
        raise ValueError(
            f"{microbatches} micro-batches of {ROWS} rows: torch wants them even; choose a divisor"
        )
    for size in ranks:
        for name in names:
            if size * CHUNKS.get(name, 1) > DEPTH:
                raise ValueError(f"{name} on {size} ranks: the model has {DEPTH} blocks to cut")
            schedule(name, size, microbatches, CHUNKS.get(name, 1))
            if microbatches < size:
                raise ValueError(f"{microbatches} micro-batches: torch wants one a rank, {size}")
    found = []
    for size in ranks:
        with World(size, check=False, transport=transport) as world:
            for model in models:
                seconds, floors_s = world.run(_turns, model, names, microbatches, turns)[0]
                found.append(Found(size, model, seconds, microbatches, floors_s))
    return found


def names_of(only: Sequence[str]) -> list[str]:
    """Those of these schedules that torch has, too; all if none is named. Raises ValueError."""
    if unknown := [name for name in only if name not in SCHEDULES]:
        raise ValueError(f"no schedule {unknown[0]!r} is timed; choose of {', '.join(SCHEDULES)}")
    return [name for name in SCHEDULES if not only or name in only]


def table(found: Sequence[Found]) -> Table:
    """What `bench_pipeline` found: a row for each schedule, with its ratio and its aim."""
    counts = sorted({one.microbatches for one in found})
    shown = Table(
        title=f"A step of a pipeline, {ROWS} x {LENGTH} tokens in "
        f"{' or '.join(map(str, counts))} micro-batches, {DEPTH} blocks, in ms",
        caption="Floor: the stages' computing, measured without communication, and the bubble of "
        "the schedule; torch: torch.distributed.pipelining over gloo. Ratio: labkit to torch, "
        "median and quartiles of the turns. Over: labkit's median to that of the floor.",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for name in (
        "model",
        "ranks",
        "schedule",
        "floor",
        "labkit",
        "torch",
        "ratio",
        "",
        "aim",
        "over",
    ):
        justify: Literal["left", "right"] = "left" if name in ("model", "schedule") else "right"
        shown.add_column(name, justify=justify, no_wrap=True)
    for one in found:
        for name in _timed(one):
            low, middle, high = one.ratio(contest(name))
            shown.add_row(
                one.model, str(one.ranks), name, f"{one.floors_s[name] * 1e3:.1f}",
                f"{one.ms(name):.1f}", f"{one.ms(f'torch {name}'):.1f}", f"{middle:.2f}",
                f"{low:.2f}-{high:.2f}", f"{AIM:.2f}",
                f"{one.over(name):.2f}",
            )  # fmt: skip
        shown.add_section()
    return shown


def _timed(one: Found) -> list[str]:
    return [name for name in SCHEDULES if name in one.seconds]


def save(found: Sequence[Found], path: str | Path) -> Path:
    """Write all that was measured as JSON."""
    steps = [
        {
            "ranks": one.ranks,
            "model": one.model,
            "microbatches": one.microbatches,
            "step_s": one.seconds,
            "floor_s": one.floors_s,
            "ratios": {
                name: {
                    "quartiles": one.ratio(contest(name)),
                    "aim": AIM,
                    "over_floor": one.over(name),
                }
                for name in _timed(one)
            },
        }
        for one in found
    ]
    about = {
        "torch": torch.__version__, "cores": os.cpu_count(), "rows": ROWS, "length": LENGTH,
        "depth": DEPTH, "vocab": VOCAB,
    }  # fmt: skip
    return write_json(path, {"about": about, "steps": steps})
