"""Scores lab 16's schedules, and runs them on ranks.

A replay scores a schedule by its idle time and by the peak number of micro-batches on a stage.

    idle    of one stage, in units of time: the step time minus the stage's compute time
    step    the longest time on any stage, from its first action to the last
    held    the micro-batches whose activations a stage holds; each of v chunks counts as 1/v
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from labkit.replaying.pipeline import bubble, pipeline_step_s, pipeline_trace
from labkit.schedules import Action, Schedule, chunks_of, peak_in_flight

UNITS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
SHORT_W = {"forward": 1.0, "backward": 1.5, "input": 1.0, "weight": 0.5}
MESSAGE_S = 0.1  # in units of a stage's forward
SIZES = ((1, 3), (2, 5), (3, 3), (4, 8), (4, 2))  # stages, micro-batches
LAYERS, WIDTH, ROWS = 8, 6, 8  # of the model trained on ranks


class Job(NamedTuple):
    """A pipeline to schedule: its sizes, the memory of a stage, and the cost of each phase."""

    stages: int
    microbatches: int
    held: int  # the maximum number of micro-batches on a stage
    forward: float
    input: float
    weight: float

    @property
    def costs(self) -> dict[str, float]:
        """The cost of each phase; backward is the sum of both halves."""
        return {
            "forward": self.forward, "backward": self.input + self.weight,
            "input": self.input, "weight": self.weight,
        }  # fmt: skip


JOBS = {
    "the memory of 1F1B": Job(4, 8, 4, 1, 1, 1),
    "one micro-batch more": Job(4, 8, 5, 1, 1, 1),
    "almost twice the memory": Job(4, 8, 7, 1, 1, 1),
    "short gradients of weights": Job(4, 8, 6, 2, 2, 1),
}


def replayed_bubble(schedule: Schedule, costs: Mapping[str, float]) -> float:
    """The idle fraction of a step, over all stages: 0 to 1."""
    chunks = chunks_of(schedule)
    seconds = {phase: cost / chunks for phase, cost in costs.items()}
    step_s = pipeline_step_s(pipeline_trace(schedule, seconds))
    return max(0.0, bubble(schedule, step_s, seconds))


def idle(schedule: Schedule, costs: Mapping[str, float] = UNITS, message_s: float = 0.0) -> float:
    """Idle time of a stage per step, in units of time (mean over the stages)."""
    chunks = chunks_of(schedule)
    seconds = {phase: cost / chunks for phase, cost in costs.items()}
    step_s = pipeline_step_s(pipeline_trace(schedule, seconds, message_s))
    return round(step_s * bubble(schedule, step_s, seconds), 6)


def held(schedule: Schedule) -> list[float]:
    """For each stage, the peak number of micro-batches whose activations it holds."""
    return [peak / chunks_of(schedule) for peak in peak_in_flight(schedule)]


# ---- interleaved, with any warm-up


def interleaved_after(warm_ups: Sequence[int], microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B; stage r runs `warm_ups[r]` forwards before its first pair."""
    stages = len(warm_ups)
    groups = range(0, microbatches, stages)
    forwards = [(k, c) for g in groups for c in range(chunks) for k in range(g, g + stages)]
    backwards = [(k, chunks - 1 - c) for k, c in forwards]
    schedule: Schedule = []
    for warm_up in warm_ups:
        actions = [Action("forward", *chunk) for chunk in forwards[:warm_up]]
        for ahead, back in zip(forwards[warm_up:], backwards):
            actions += [Action("forward", *ahead), Action("backward", *back)]
        cool_down = backwards[len(forwards) - warm_up :]
        schedule.append(actions + [Action("backward", *chunk) for chunk in cool_down])
    return schedule


# ---- on ranks


def layers() -> nn.Sequential:
    """A model in float64, the same on all ranks."""
    torch.manual_seed(16)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks).double()


def batch() -> tuple[Tensor, Tensor]:
    """x and y [rows, width], the same on all ranks."""
    g = torch.Generator().manual_seed(17)
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=g) for _ in range(2))
    return x, y


def train(model: nn.Module, parameters: Any, step: Any) -> dict[str, Tensor]:
    """The weights after a step of gradient descent."""
    step(*batch())
    with torch.no_grad():
        for p in parameters:
            p -= 0.5 * p.grad
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_by(comm: Any, schedule: Schedule) -> dict[str, Tensor]:
    """This rank's weights after a step with this schedule."""
    stages = split(layers(), comm.size * chunks_of(schedule))
    pipeline = Pipeline(stages, comm, schedule, loss_fn=F.mse_loss)
    weights = train(pipeline, pipeline.parameters(), pipeline.step)
    return {name.removeprefix("module."): p for name, p in weights.items()}


def train_alone() -> dict[str, Tensor]:
    """The weights of a single process after the same step."""
    model = layers()

    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    return train(model, model.parameters(), step)


def weight_error(found: Sequence[Mapping[str, Tensor]], right: Mapping[str, Tensor]) -> str:
    """The weight furthest from its single-process value; "" if all weights match."""
    names = [name for weights in found for name in weights]
    if sorted(names) != sorted(right):
        return f"the ranks have {len(names)} weights, but the model has {len(right)}"
    errors = {
        name: (float((p - right[name]).abs().max()), rank)
        for rank, weights in enumerate(found)
        for name, p in weights.items()
    }
    name = max(errors, key=lambda weight: errors[weight])
    error, rank = errors[name]
    return f"{name} on rank {rank} is off by {error:.2g}" if error > 1e-10 else ""
