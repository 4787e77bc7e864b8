"""Runs of lab 14's answers on ranks, and the results of a single process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import detached, drawn

ROWS, PART, WIDTH = 2, 3, 4  # of each rank: x [b, s/t, w]


# ---- GatherSequence


class Gathered(NamedTuple):
    """A rank's results and messages with the student's function."""

    y: Any
    dx: Any
    forward_ops: list[str]
    backward_ops: list[str]
    sent_bytes: list[float]  # forward, backward


def part_of_x(rank: int) -> Tensor:
    """This rank's part of the sequence."""
    return drawn(ROWS, PART, WIDTH, seed=20 + rank)


def gradient_of(rank: int, size: int) -> Tensor:
    """The output gradient on this rank, for the whole sequence; it differs between ranks."""
    return drawn(ROWS, PART * size, WIDTH, seed=40 + rank)


def through_gather(comm: Any, student: Student) -> Gathered:
    """The student's function on a rank, forward and backward."""
    x = part_of_x(comm.rank).requires_grad_()
    with listen() as first:
        y = student.apply(comm, x)  # type: ignore[attr-defined]
    with listen() as second:
        if isinstance(y, Tensor) and y.requires_grad and y.shape == (ROWS, PART * comm.size, WIDTH):
            y.backward(gradient_of(comm.rank, comm.size))
    names = [[event.op for event in events] for events in (first, second)]
    sent = [float(sum(event.bus_bytes for event in events)) for events in (first, second)]
    return Gathered(detached(y), x.grad, names[0], names[1], sent)


def right_gather(size: int, rank: int) -> tuple[Tensor, Tensor]:
    """The whole sequence, and this rank's part of its summed gradient."""
    y = torch.cat([part_of_x(r) for r in range(size)], dim=1)
    whole = torch.stack([gradient_of(r, size) for r in range(size)]).sum(0)
    return y, whole.chunk(size, dim=1)[rank]


# ---- merge


def some_attention(large: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scores [b, h, r, keys] and v [b, h, keys, e] of 12 keys."""
    return drawn(2, 3, 5, 12, seed=60) * large, drawn(2, 3, 12, 4, seed=61)


def attention_to(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: out [b, h, r, e] and L [b, h, r]."""
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# ---- own_positions


def scores_of(positions: list[int]) -> int:
    """The number of scores of these queries under a causal mask."""
    return sum(position + 1 for position in positions)
