"""Runs lab 14's answers on ranks, and computes the results of a single process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import detached, drawn

ROWS, TOKENS, WIDTH = 2, 3, 4  # per rank: x [b, s/t, w]


# ---- GatherSequence


class GatherRun(NamedTuple):
    """A rank's results and collectives with the student's function."""

    y: Any
    dx: Any
    forward_ops: list[str]
    backward_ops: list[str]
    sent_bytes: list[float]  # forward, backward


def sequence_shard(rank: int) -> Tensor:
    """This rank's shard of the sequence."""
    return drawn(ROWS, TOKENS, WIDTH, seed=20 + rank)


def output_gradient(rank: int, size: int) -> Tensor:
    """The output gradient on this rank, for the whole sequence; it differs between ranks."""
    return drawn(ROWS, TOKENS * size, WIDTH, seed=40 + rank)


def run_gather(comm: Any, student: Student) -> GatherRun:
    """The student's function on a rank, forward and backward."""
    x = sequence_shard(comm.rank).requires_grad_()
    with listen() as in_forward:
        y = student.apply(comm, x)  # type: ignore[attr-defined]
    with listen() as in_backward:
        shape = (ROWS, TOKENS * comm.size, WIDTH)
        if isinstance(y, Tensor) and y.requires_grad and y.shape == shape:
            y.backward(output_gradient(comm.rank, comm.size))
    phases = (in_forward, in_backward)
    forward, backward = ([event.op for event in events] for events in phases)
    sent_bytes = [float(sum(event.bus_bytes for event in events)) for events in phases]
    return GatherRun(detached(y), x.grad, forward, backward, sent_bytes)


def right_gather(size: int, rank: int) -> tuple[Tensor, Tensor]:
    """The whole sequence, and this rank's shard of its summed gradient."""
    y = torch.cat([sequence_shard(r) for r in range(size)], dim=1)
    whole = torch.stack([output_gradient(r, size) for r in range(size)]).sum(0)
    return y, whole.chunk(size, dim=1)[rank]


# ---- merge


def example_scores(large: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scores [b, h, r, keys] and v [b, h, keys, e] for 12 keys."""
    return drawn(2, 3, 5, 12, seed=60) * large, drawn(2, 3, 12, 4, seed=61)


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over these keys only: out [b, h, r, e] and L [b, h, r]."""
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# ---- own_positions


def score_count(positions: list[int]) -> int:
    """The number of scores that queries at these positions compute under a causal mask."""
    return sum(position + 1 for position in positions)
