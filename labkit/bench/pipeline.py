"""Step times of labkit's pipeline and of torch.distributed.pipelining with the same schedule, and a
lower bound for both.

    floor     compute of the stages without communication, plus the bubble (`Floor`)
    labkit    Pipeline, over `transport`
    torch     ScheduleGPipe, Schedule1F1B, ..., over gloo

All cases use the same model, stages, batch and micro-batches, and alternate in the same processes.
A step is the forward and backward of the whole batch, without the optimizer.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from labkit.bench import harness, peers
from labkit.bench.harness import Contest, StepTimes, mean_loss
from labkit.comm import Comm
from labkit.data import Batch
from labkit.models import GPT
from labkit.models.gpt import PRESETS
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.parallel.splitting import split
from labkit.replaying.pipeline import pipeline_step_s, pipeline_trace
from labkit.runtime.attach import attach
from labkit.schedules import Action, received, schedule, virtual_stage

ROWS, LENGTH, VOCAB, DEPTH = 16, 64, 1024, 8  # ROWS per batch, DEPTH GPT blocks
CHUNKS = {"interleaved": 2}  # 1 for other schedules
MICROBATCHES = 8
STEPS = 2  # per turn
AIM = 1.0
SCHEDULES = list(peers.PIPELINES)

Step = Callable[[], Tensor | None]
Loss = Callable[[Tensor, Tensor], Tensor]
PipelineStep = Callable[[Tensor, Tensor], Tensor | None]


def batch() -> Batch:
    """The same batch on all ranks."""
    torch.manual_seed(1)
    return harness.random_batch(VOCAB, ROWS, LENGTH)


def stages_of(model: str, name: str, ranks: int) -> list[nn.Module]:
    """The same GPT on every call, split into the schedule's stages. (Untied: torch's pipelines
    cannot sum the gradients of a parameter shared by two ranks.)"""
    torch.manual_seed(0)
    whole = GPT.preset(model, vocab=VOCAB, context=LENGTH, depth=DEPTH, tied=False)
    return split(whole, ranks * CHUNKS.get(name, 1))


def step_of(name: str, stages: list[nn.Module], microbatches: int, loss_fn: Loss) -> PipelineStep:
    """labkit's counterpart of `peers.pipeline`."""
    return Pipeline(stages, None, name, microbatches, loss_fn).step


SIDES = {"": step_of, "torch ": peers.pipeline}  # by the prefix of a case's name


def stepper(side: str, stages: list[nn.Module], name: str, microbatches: int, comm: Comm) -> Step:
    """A step that leaves `.grad` in this rank's stages and returns the loss on the last rank."""
    own, tokens = nn.ModuleList(stages[comm.rank :: comm.size]), batch()
    pipeline = SIDES[side](name, stages, microbatches, mean_loss)

    def step() -> Tensor | None:
        own.zero_grad()
        return pipeline(tokens.x, tokens.y)

    return step


class Floor:
    """A lower bound of the step time: `step_s` over a few turns of `measure`.

    Each action is timed after its message has arrived; the median over turns is used. The floor is
    the step time of a replay of the schedule with these times and instant messages, but at least
    the total compute time divided by the cores: two cores cannot compute four stages at once."""

    def __init__(self, model: str, name: str, microbatches: int, comm: Comm):
        self.comm, chunks = comm, CHUNKS.get(name, 1)
        self.schedule = schedule(name, comm.size, microbatches, chunks)
        self.actions, stages = self.schedule[comm.rank], stages_of(model, name, comm.size)
        tokens = batch()
        ys = tokens.y.chunk(microbatches)

        def loss(output: Tensor, k: int) -> Tensor:
            return mean_loss(output, ys[k]) / microbatches

        self.stages = []
        for chunk in range(chunks):
            index = virtual_stage(comm.rank, chunk, comm.size)
            own = [action for action in self.actions if action.chunk == chunk]
            of_last = loss if index == len(stages) - 1 else None
            stage = VirtualStage(stages[index], index, comm.rank, own, False, None, of_last)
            self.stages.append(stage)
        self.xs, width = tokens.x.chunk(microbatches), PRESETS[model]["width"]
        self.activations = [torch.randn(len(x), LENGTH, width) for x in self.xs]
        self.position = comm.rank, comm.size, chunks

    def time_actions(self) -> list[float]:
        """Seconds per action on this rank."""
        for stage in self.stages:
            stage.module.zero_grad()
        seconds = []
        for action in self.actions:
            message = self._message(action)
            began_s = time.perf_counter()
            self.stages[action.chunk].run(action, message)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    def _message(self, action: Action) -> Tensor | None:
        """The input of an action: a micro-batch, or a dummy message of the correct shape."""
        if received(action, *self.position) is None:
            return self.xs[action.microbatch] if action.phase == "forward" else None
        message = self.activations[action.microbatch].detach().clone()
        return message.requires_grad_(action.phase == "forward")

    def measure(self) -> list[list[float]]:
        """Seconds per action for each stage, timed on at most one rank per core at once."""
        cores = os.cpu_count() or 1
        of_ranks: list[list[float]] = [[] for _ in range(self.comm.size)]
        for first in range(0, self.comm.size, cores):
            self.comm.barrier()
            own_s = self.time_actions() if first <= self.comm.rank < first + cores else []
            for rank, seconds in enumerate(self.comm.all_gather_object(own_s)):
                of_ranks[rank] = seconds or of_ranks[rank]
        return of_ranks

    def step_s(self, turns: Sequence[list[list[float]]]) -> float:
        """The floor in seconds, from the medians of the turns."""
        stages = zip(*turns)
        medians = [[median(action) for action in zip(*stage, strict=True)] for stage in stages]
        return floor_s(self.schedule, medians, os.cpu_count() or 1)


def floor_s(actions: Sequence[Sequence[Action]], taken: list[list[float]], cores: int) -> float:
    """Step seconds for `actions` of durations `taken` (both by stage), at least compute / cores."""
    seconds_of = {
        (stage, action): seconds
        for stage, listed in enumerate(actions)
        for action, seconds in zip(listed, taken[stage], strict=True)
    }
    trace = pipeline_trace([list(listed) for listed in actions], lambda *key: seconds_of[key])
    busy_s = sum(map(sum, taken))
    return max(pipeline_step_s(trace), busy_s / min(cores, len(taken)))


def over_floor(times: StepTimes, name: str) -> float:
    """The schedule's median step time divided by its floor."""
    return times.ms(name) / 1e3 / times.figures["floor_s"][name]


def _on_rank(model: str, names: Sequence[str], microbatches: int, turns: int) -> StepTimes:
    comm = attach().comm
    floors = {name: Floor(model, name, microbatches, comm) for name in names}
    steps: dict[str, Step] = {}
    for name in names:
        for side in SIDES:
            stages = stages_of(model, name, comm.size)
            steps[side + name] = stepper(side, stages, name, microbatches, comm)
    for _ in range(2):
        for step in (*steps.values(), *(floor.time_actions for floor in floors.values())):
            step()
    cases: dict[str, Callable[[], Any]] = {
        case: partial(harness.seconds_of, step, STEPS, comm.barrier, comm.barrier)
        for case, step in steps.items()
    }
    cases |= {f"floor {name}": floor.measure for name, floor in floors.items()}
    samples = harness.take_turns(cases, turns, f"{model} on {comm.size} ranks")
    sizes = {"rows": ROWS, "length": LENGTH, "depth": DEPTH, "vocab": VOCAB}
    return StepTimes(
        {"ranks": comm.size, "model": model, "microbatches": microbatches, **sizes},
        {case: samples[case] for case in steps},
        [Contest(name, f"torch {name}", AIM) for name in names],
        {"floor_s": {name: x.step_s(samples[f"floor {name}"]) for name, x in floors.items()}},
    )


def bench_pipeline(
    only: Sequence[str] = (),
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    microbatches: int = MICROBATCHES,
    turns: int = 20,
    transport: str | None = None,
) -> list[StepTimes]:
    """Time each schedule on each number of ranks, for each model.

    Raises ValueError for a schedule that torch lacks, an unknown preset, or invalid sizes."""
    harness.check_names(only, SCHEDULES, "no benchmark of schedule {!r}")
    names = [name for name in SCHEDULES if not only or name in only]
    if not 1 <= microbatches <= ROWS or ROWS % microbatches:
        raise ValueError(f"microbatches={microbatches}: choose a divisor of {ROWS} rows")
    for size in ranks:
        for name in names:
            if size * CHUNKS.get(name, 1) > DEPTH:
                raise ValueError(
                    f"ranks={size}: {DEPTH} blocks are too few for {name}; choose fewer"
                )
            schedule(name, size, microbatches, CHUNKS.get(name, 1))
            if microbatches < size:
                raise ValueError(f"microbatches={microbatches}: torch needs {size} or more")
    return harness.on_worlds(_on_rank, ranks, models, transport, names, microbatches, turns)


def table(measured: Sequence[StepTimes]) -> Table:
    """One row per schedule, with its ratio and aim."""
    counts = sorted({times.about["microbatches"] for times in measured})
    return harness.contest_table(
        measured,
        f"Pipeline step, {ROWS} x {LENGTH} tokens in {' or '.join(map(str, counts))} "
        f"micro-batches, {DEPTH} blocks, in ms",
        "Floor: compute of the stages, measured without communication, plus the bubble of the "
        "schedule; torch: torch.distributed.pipelining over gloo. Ratio: labkit / torch, median "
        "and quartiles of the turns. Over: labkit's median / floor.",
        ("floor", lambda times, x: f"{times.figures['floor_s'][x.ours] * 1e3:.1f}"),
        ("over", lambda times, x: f"{over_floor(times, x.ours):.2f}"),
    )
