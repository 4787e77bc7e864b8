"""Runs lab 15's answers on ranks, and computes the results of a single process."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import detached, drawn
from labkit.replaying.pipeline import bubble, pipeline_step_s, pipeline_trace
from labkit.schedules import gpipe

ROWS, MICROBATCHES, WIDTH = 10, 4, 6  # 3, 3, 2 and 2 rows
ELEMENT_BYTES = 8  # float64


def stage_of(rank: int) -> nn.Sequential:
    """The layers of stage `rank`, whichever rank builds them."""
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    with torch.no_grad():
        for i, parameter in enumerate(stage.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=100 + 10 * rank + i, dtype=torch.float64))
    return stage


def batch() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The micro-batches of x and of the targets, each [rows, WIDTH]."""
    x, y = (drawn(ROWS, WIDTH, seed=seed, dtype=torch.float64) for seed in (1, 2))
    return x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES)


def rows_of() -> list[int]:
    """Rows per micro-batch."""
    return [len(x) for x in batch()[0]]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """The mean loss over the rows."""
    return (y - target).square().sum(1).mean()


class StageRun(NamedTuple):
    """A rank's run of the student's function. `sent_before[k]`: the number of sends
    started before the k-th computation."""

    values: Any
    sent_before: list[int]
    sent_bytes: float


# ---- forward(comm, stage, xs)


class SavedPair(NamedTuple):
    """A pair (x, y) that forward keeps, and whether backward can use it."""

    x: Tensor
    y: Tensor
    requires_grad: bool  # of x
    has_graph: bool  # of y
    reaches_x: bool  # a backward from y would leave a gradient in x.grad


def run_forward(comm: Any, student: Student) -> StageRun:
    """The student's forward: `values` has a SavedPair for each micro-batch."""
    stage, before = stage_of(comm.rank), list[int]()
    xs = list(batch()[0]) if comm.rank == 0 else [torch.full_like(x, 7.0) for x in batch()[0]]
    with listen() as events:
        stage.register_forward_pre_hook(lambda *_: before.append(_sends(events)))
        pairs = student(comm, stage, xs)
    sent = float(sum(event.bus_bytes for event in events if event.op == "send"))
    values = [_saved_pair(pair) for pair in pairs] if _are_pairs(pairs) else detached(pairs)
    return StageRun(values, before, sent)


def right_forward(rank: int) -> list[tuple[Tensor, Tensor]]:
    """x and y of each micro-batch on this stage."""
    xs = list(batch()[0])
    for stage in range(rank):
        xs = [stage_of(stage)(x).detach() for x in xs]
    return [(x, stage_of(rank)(x).detach()) for x in xs]


def _are_pairs(found: Any) -> bool:
    if not isinstance(found, (list, tuple)):
        return False
    return all(
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(isinstance(x, Tensor) for x in pair)
        for pair in found
    )


def _saved_pair(pair: Any) -> SavedPair:
    x, y = pair
    requires_grad, has_graph, reaches_x = x.requires_grad, y.grad_fn is not None, False
    if requires_grad and has_graph and x.is_leaf:
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)
        reaches_x = dx is not None
    return SavedPair(x.detach(), y.detach(), requires_grad, has_graph, reaches_x)


# ---- backward(comm, kept, losses, rows)


def run_backward(comm: Any, student: Student) -> StageRun:
    """The student's backward, after correct forwards: `values` has this stage's gradients."""
    stage, before = stage_of(comm.rank), list[int]()
    kept, losses = [], []
    for k, (x, _) in enumerate(right_forward(comm.rank)):
        x.requires_grad_(comm.rank > 0)
        y = stage(x)
        kept.append((x, y))
        if comm.rank == comm.size - 1:
            losses.append(loss_of(y, batch()[1][k]))
    with listen() as events:
        for _, y in kept:
            y.register_hook(lambda _: before.append(_sends(events)))
        student(comm, kept, losses, rows_of())
    sent = float(sum(event.bus_bytes for event in events if event.op == "send"))
    return StageRun([p.grad for p in stage.parameters()], before, sent)


def right_backward(size: int, rank: int, weights: Sequence[float]) -> list[Tensor]:
    """A stage's gradients in one process, if the loss of micro-batch k has weight weights[k]."""
    stages = [stage_of(r) for r in range(size)]
    model = nn.Sequential(*stages)
    for weight, x, y in zip(weights, *batch(), strict=True):
        (weight * loss_of(model(x), y)).backward()
    gradients = [p.grad for p in stages[rank].parameters()]
    return [g for g in gradients if g is not None]


def right_weights() -> list[float]:
    """Each micro-batch's fraction of the rows."""
    return [rows / ROWS for rows in rows_of()]


def _sends(events: list[Any]) -> int:
    return sum(event.op == "send" for event in events)


# ---- step(forward_ms, backward_ms, microbatches)


def right_step(
    forward_ms: Sequence[float], backward_ms: Sequence[float], microbatches: int
) -> tuple[float, float]:
    """The replayed time of a step and its bubble."""
    schedule = gpipe(len(forward_ms), microbatches)
    of_phase = {"forward": forward_ms, "backward": backward_ms}
    trace = pipeline_trace(schedule, lambda stage, action: of_phase[action.phase][stage])
    step = pipeline_step_s(trace)
    return step, bubble(schedule, step, lambda stage, action: of_phase[action.phase][stage])
