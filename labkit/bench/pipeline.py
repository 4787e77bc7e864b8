"""A step of labkit's pipeline beside torch.distributed.pipelining's by the same schedule, and the
floor of both: what the stages compute, and the bubble.

    floor     each stage's computing without communication, and the bubble (pipeline_floor.py)
    labkit    Pipeline, over `transport`
    torch     ScheduleGPipe, Schedule1F1B, ..., over gloo

All have the same model in the same stages, the same batch and micro-batches, and take turns in the
same processes. A step is forward and backward of the whole batch; the optimizer's is the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.table import Table
from torch import Tensor, nn

from labkit.bench import harness, peers
from labkit.bench.harness import Contest, StepTimes
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
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.runtime.attach import attach
from labkit.schedules import schedule

MICROBATCHES = 8
STEPS = 2  # in a turn
AIM = 1.0
SCHEDULES = list(peers.PIPELINES)

Step = Callable[[], Tensor | None]


def ours(stages: list[nn.Module], name: str, microbatches: int, comm: Comm) -> Step:
    """A step of labkit's; it leaves `.grad`, and returns the loss on the last rank."""
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


def over_floor(times: StepTimes, name: str) -> float:
    """The median step by this schedule, over its floor."""
    return times.ms(name) / 1e3 / times.figures["floor_s"][name]


def _on_rank(model: str, names: Sequence[str], microbatches: int, turns: int) -> StepTimes:
    comm = attach().comm
    floors = {name: Floor(model, name, microbatches, comm) for name in names}
    steps: dict[str, Step] = {}
    for name in names:
        for side, case in ((ours, name), (theirs, f"torch {name}")):
            steps[case] = side(stages_of(model, name, comm.size), name, microbatches, comm)
    for _ in range(2):
        for step in (*steps.values(), *(floor.time_actions for floor in floors.values())):
            step()
    cases: dict[str, Callable[[], float | None]] = {
        case: partial(harness.seconds_of, step, STEPS, comm.barrier, comm.barrier)
        for case, step in steps.items()
    }
    cases |= {f"floor {name}": floor.measure for name, floor in floors.items()}
    samples = harness.take_turns(cases, turns, f"{model} on {comm.size} ranks")
    return StepTimes(
        {"ranks": comm.size, "model": model, "microbatches": microbatches},
        {case: [x for x in samples[case] if x is not None] for case in steps},
        [Contest(name, f"torch {name}", AIM) for name in names],
        {"floor_s": {name: floor.step_s() for name, floor in floors.items()}},
    )


def bench_pipeline(
    only: Sequence[str] = (),
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    microbatches: int = MICROBATCHES,
    turns: int = 20,
    transport: str | None = None,
) -> list[StepTimes]:
    """Time each schedule for each number of ranks and model.

    Raises ValueError for a schedule that torch lacks, a model that is none of labkit's presets, and
    micro-batches or ranks that do not fit.
    """
    harness.check_names(only, SCHEDULES, "no schedule {!r} is timed")
    names = [name for name in SCHEDULES if not only or name in only]
    if not 1 <= microbatches <= ROWS or ROWS % microbatches:
        raise ValueError(
            f"{microbatches} micro-batches of {ROWS} rows: torch needs equal ones; choose a divisor"
        )
    for size in ranks:
        for name in names:
            if size * CHUNKS.get(name, 1) > DEPTH:
                raise ValueError(f"{name} on {size} ranks: the model has {DEPTH} blocks to split")
            schedule(name, size, microbatches, CHUNKS.get(name, 1))
            if microbatches < size:
                raise ValueError(f"{microbatches} micro-batches: torch needs one a rank, {size}")
    return harness.on_worlds(_on_rank, ranks, models, transport, names, microbatches, turns)


def table(measured: Sequence[StepTimes]) -> Table:
    """A row for each schedule, with its ratio and its aim."""
    counts = sorted({times.about["microbatches"] for times in measured})
    return harness.contest_table(
        measured,
        f"A step of a pipeline, {ROWS} x {LENGTH} tokens in {' or '.join(map(str, counts))} "
        f"micro-batches, {DEPTH} blocks, in ms",
        "Floor: the stages' computing, measured without communication, and the bubble of the "
        "schedule; torch: torch.distributed.pipelining over gloo. Ratio: labkit to torch, median "
        "and quartiles of the turns. Over: labkit's median to that of the floor.",
        ("floor", lambda times, x: f"{times.figures['floor_s'][x.ours] * 1e3:.1f}"),
        ("over", lambda times, x: f"{over_floor(times, x.ours):.2f}"),
    )


def save(measured: Sequence[StepTimes], path: str | Path) -> Path:
    """Write everything as JSON."""
    sizes = {"rows": ROWS, "length": LENGTH, "depth": DEPTH, "vocab": VOCAB}
    return harness.save(measured, path, **sizes)
