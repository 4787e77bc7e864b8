"""Checks of lab 14, "Sequence and context parallelism"."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, several, whole_numbers
from labkit.course.ranks import alone, run
from labkit.parallel.context.zigzag import split_zigzag

from .hybrid import BEST_US, JOBS, choices, exposed_us
from .scenarios import (
    ROWS,
    TOKENS,
    WIDTH,
    attention,
    example_scores,
    right_gather,
    run_gather,
    score_count,
)

TOLERANCE = 1e-5


# ---- GatherSequence: forward(ctx, comm, x), backward(ctx, dy)


@exercise(points=3)
def GatherSequence(student: Student) -> Iterator[str]:
    """GatherSequence: an all-gather along the sequence, and its backward."""
    for size in (2, 3):
        ran = run(size, run_gather, student)
        shard_bytes = 4 * ROWS * TOKENS * WIDTH
        for rank, result in enumerate(ran.values):
            y, dx = right_gather(size, rank)
            if problem := difference(result.y, y, TOLERANCE):
                fail(
                    f"on {size} ranks, rank {rank}'s output is {problem}.",
                    hint="Concatenate all ranks' shards [b, s/t, w] along the sequence, dim 1.",
                )
            _compare_gradient(size, rank, result.dx, dx)
            for name, sent in zip(("forward", "backward"), result.sent_bytes):
                if sent > (size - 1) * shard_bytes:
                    ops = result.forward_ops if name == "forward" else result.backward_ops
                    fail(
                        f"on {size} ranks, rank {rank} sends {sent:,.0f} bytes in {name}, with "
                        f"{brief(ops)}.",
                        expected=f"{(size - 1) * shard_bytes:,} bytes: (t-1)/t of the whole tensor",
                        hint="An all-reduce gives every rank the whole tensor. Which part "
                        "does a rank need?",
                    )
    yield "forward gathers the sequence, backward reduce-scatters its gradient, on 2 and 3 ranks"
    yield "(t-1)/t of the whole tensor sent in each direction"


def _compare_gradient(size: int, rank: int, found: Any, right: Tensor) -> None:
    if found is None:
        fail(
            f"rank {rank} has no gradient of x.",
            hint="backward returns one gradient for each argument of forward: None for comm.",
        )
    if difference(found, right, TOLERANCE):
        hint = "Each rank has a different gradient of the whole sequence. How do these gradients "
        hint += "combine into the gradient of this rank's shard?"
        same_shape = isinstance(found, Tensor) and found.shape == right.shape
        if same_shape and not difference(found * size, right, 1e-4):
            hint = "That is the mean over the ranks, but the loss is the sum of the ranks' losses."
        fail(
            f"on {size} ranks, rank {rank}'s gradient is {difference(found, right, TOLERANCE)}.",
            hint=hint,
        )


# ---- merge(out, L, more_out, more_L)


@exercise(points=3)
def merge(student: Student) -> Iterator[str]:
    """merge(out, L, more_out, more_L): combines attention over two sets of keys."""
    for large in (1.0, 60.0):
        scores, v = example_scores(large)
        where = "with large scores, " if large > 1 else ""
        for cut in (1, 4, 11):
            first = attention(scores[..., :cut], v[:, :, :cut])
            second = attention(scores[..., cut:], v[:, :, cut:])
            found = alone(student, *first, *second)
            several(found, 2, "merge returned", "a pair (out, L)")
            _compare_merged(where, found, attention(scores, v), large)
    yield "attention over 12 keys, merged from two sets: 1, 4 or 11 keys, and the rest"
    yield "even for scores whose exp overflows float32"


def _compare_merged(where: str, found: Any, right: Any, large: float) -> None:
    for name, tensor, expected in zip(("L", "out"), reversed(found), reversed(right)):
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            fail(
                f"{where}{name} is not finite.",
                hint="exp(100) overflows float32. torch.logaddexp never computes it, and for the "
                "merged L', exp(L - L') is at most 1.",
            )
        if problem := difference(tensor, expected, 1e-4):
            hint = "The merged L' is the log of the sum of exp(score) over both sets of keys."
            if name == "out":
                hint = "Each out was divided by the sum over its own keys: weight it with "
                hint += "exp(L - L'), where L' is the merged L."
            fail(f"{where}{name} is {problem}.", hint=hint)


# ---- own_positions(length, ranks, rank)


@exercise(points=2)
def own_positions(student: Student) -> Iterator[str]:
    """own_positions(length, ranks, rank): the positions of a rank's tokens."""
    for length, ranks in ((8, 2), (12, 3), (32, 4), (6, 1)):
        shards = [
            whole_numbers(
                alone(student, length, ranks, r),
                "own_positions",
                "a list of positions as whole numbers",
            )
            for r in range(ranks)
        ]
        where = f"with {length} tokens on {ranks} ranks"
        positions = [position for shard in shards for position in shard]
        if sorted(positions) != list(range(length)):
            fail(
                f"{where}, the ranks together have positions {brief(positions)}.",
                expected="each position once",
            )
        if len(set(map(len, shards))) > 1 or len({score_count(shard) for shard in shards}) > 1:
            fail(
                f"{where}, the ranks have {brief([len(shard) for shard in shards])} tokens and "
                f"compute {brief([score_count(shard) for shard in shards])} scores.",
                expected="the same numbers on every rank",
                hint="There are 2n chunks: each rank has one early and one late chunk.",
            )
        right = split_zigzag(torch.arange(length), ranks, dim=0)
        for rank, (shard, expected) in enumerate(zip(shards, right)):
            if shard != expected.tolist():
                fail(
                    f"{where}, rank {rank} has the wrong positions.",
                    expected=brief(expected.tolist()),
                    found=brief(shard),
                    hint="Rank r has chunks r and 2n-1-r, the early chunk first.",
                )
    yield "each position on exactly one rank, for 1, 2, 3 and 4 ranks"
    yield "the same number of tokens and of scores on each rank"


# ---- choose(job)


def _total_exposed_us(most: int) -> float:
    """Total exposed time if each job uses its largest valid u up to `most`."""
    return sum(exposed_us(job, max(u for u in choices(job) if u <= most)) for job in JOBS.values())


@exercise(points=3)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): the number of neighbors that exchange tokens for heads."""
    total = 0.0
    for name, job in JOBS.items():
        u = alone(student, job)
        if isinstance(u, bool) or not isinstance(u, int) or u not in choices(job):
            fail(
                f"for {name}, choose returned {brief(u)}.",
                expected=f"one of {', '.join(map(str, choices(job)))}, which divide the numbers of "
                "ranks, heads and key-value heads",
            )
        total += exposed_us(job, u)
    largest = max(max(choices(job)) for job in JOBS.values())
    uniform = {most: _total_exposed_us(most) for most in range(1, largest + 1)}
    if total >= min(uniform.values()):
        u = min(uniform, key=lambda most: uniform[most])
        fail(
            f"for all jobs together, a rank waits {total:,.0f} µs.",
            expected=f"less than {uniform[1]:,.0f} µs, with rings only, and less than "
            f"{uniform[u]:,.0f} µs, where every job has u = {u} or the largest valid u below",
            hint="Which communication overlaps with compute? Which uses the slow network?",
        )
    yield "each u divides the numbers of ranks and heads"
    yield Score(round(total), BEST_US, "µs exposed")
