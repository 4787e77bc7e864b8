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
    PART,
    ROWS,
    WIDTH,
    attention_to,
    right_gather,
    scores_of,
    some_attention,
    through_gather,
)

WITHIN = 1e-5


# ---- GatherSequence: forward(ctx, comm, x), backward(ctx, dy)


@exercise(points=3)
def GatherSequence(student: Student) -> Iterator[str]:
    """GatherSequence: all-gather along the sequence, and what its backward must send."""
    for size in (2, 3):
        ran = run(size, through_gather, student)
        part_bytes = 4 * ROWS * PART * WIDTH
        for rank, its in enumerate(ran.values):
            y, dx = right_gather(size, rank)
            if difference(its.y, y, WITHIN):
                fail(
                    f"on {size} ranks, rank {rank}'s output is {difference(its.y, y, WITHIN)}.",
                    hint="All parts [b, s/t, w], beside each other along the sequence, dim 1.",
                )
            _gradient(size, rank, its.dx, dx)
            for name, sent in zip(("forward", "backward"), its.sent_bytes):
                if sent > (size - 1) * part_bytes:
                    ops = its.forward_ops if name == "forward" else its.backward_ops
                    fail(
                        f"on {size} ranks, rank {rank} sends {sent:,.0f} bytes in {name}, with "
                        f"{brief(ops)}.",
                        expected=f"{(size - 1) * part_bytes:,} bytes: (t-1)/t of the whole",
                        hint="An all-reduce gives every rank the sum of everything. How much of "
                        "that does a rank need?",
                    )
    yield "the whole sequence forward, one's part of the summed gradient backward, on 2 and 3 ranks"
    yield "(t-1)/t of the whole sent in each direction"


def _gradient(size: int, rank: int, found: Any, right: Tensor) -> None:
    if found is None:
        fail(
            f"rank {rank} has no gradient of x.",
            hint="backward returns one gradient for each argument of forward: None for comm.",
        )
    if difference(found, right, WITHIN):
        hint = "Each rank used the whole sequence for something else. Whose gradients belong to "
        hint += "your part?"
        alike = isinstance(found, Tensor) and found.shape == right.shape
        if alike and not difference(found * size, right, 1e-4):
            hint = "That is the mean over the ranks. Their losses' sum is what is derived."
        fail(
            f"on {size} ranks, rank {rank}'s gradient is {difference(found, right, WITHIN)}.",
            hint=hint,
        )


# ---- merge(out, L, more_out, more_L)


@exercise(points=3)
def merge(student: Student) -> Iterator[str]:
    """merge(out, L, more_out, more_L): attention to two sets of keys becomes attention to all."""
    for large in (1.0, 60.0):
        scores, v = some_attention(large)
        where = "with large scores, " if large > 1 else ""
        for cut in (1, 4, 11):
            first = attention_to(scores[..., :cut], v[:, :, :cut])
            second = attention_to(scores[..., cut:], v[:, :, cut:])
            found = alone(student, *first, *second)
            several(found, 2, "merge returned", "out and L, a pair")
            _merged(where, found, attention_to(scores, v), large)
    yield "attention to 12 keys from two parts, wherever they are cut"
    yield "for scores whose exp no float32 holds, too"


def _merged(where: str, found: Any, right: Any, large: float) -> None:
    for name, its, good in zip(("L", "out"), reversed(found), reversed(right)):
        if isinstance(its, Tensor) and not bool(torch.isfinite(its).all()):
            fail(
                f"{where}{name} is not finite.",
                hint="exp(100) is more than float32 holds. torch.logaddexp never takes it, and "
                "exp of a difference L - L' is at most 1.",
            )
        if wrong := difference(its, good, 1e-4):
            hint = "L' is the log of the sum of both parts' exp(score)."
            if name == "out":
                hint = "Each part was divided by its own sum: give it the weight of that sum, "
                hint += "exp(L - L')."
            fail(f"{where}{name} is {wrong}.", hint=hint)


# ---- own_positions(length, ranks, rank)


@exercise(points=2)
def own_positions(student: Student) -> Iterator[str]:
    """own_positions(length, ranks, rank): the positions of a rank's tokens."""
    for length, ranks in ((8, 2), (12, 3), (32, 4), (6, 1)):
        shards = [
            whole_numbers(
                alone(student, length, ranks, r),
                "own_positions",
                "a list of positions, whole numbers",
            )
            for r in range(ranks)
        ]
        together = [position for shard in shards for position in shard]
        if sorted(together) != list(range(length)):
            fail(
                f"of {length} tokens on {ranks} ranks, the ranks together have {brief(together)}.",
                expected="each position once",
            )
        if len(set(map(len, shards))) > 1 or len({scores_of(shard) for shard in shards}) > 1:
            fail(
                f"of {length} tokens on {ranks} ranks, the ranks have "
                f"{brief([len(shard) for shard in shards])} tokens and compute "
                f"{brief([scores_of(shard) for shard in shards])} scores.",
                expected="as many on each",
                hint="Of 2n chunks each rank has an early one and a late one.",
            )
        right = split_zigzag(torch.arange(length), ranks, dim=0)
        for rank, (shard, positions) in enumerate(zip(shards, right)):
            if shard != positions.tolist():
                fail(
                    f"of {length} tokens on {ranks} ranks, rank {rank} has other positions.",
                    expected=brief(positions.tolist()),
                    found=brief(shard),
                    hint="Chunks r and 2n-1-r, the early one first.",
                )
    yield "every position once, for 1, 2, 3 and 4 ranks"
    yield "as many tokens and as many scores on each rank"


# ---- choose(job)


def _of_all(most: int) -> float:
    """Exposed time if all jobs take u = `most`, or their largest u below it."""
    return sum(exposed_us(job, max(u for u in choices(job) if u <= most)) for job in JOBS.values())


@exercise(points=3)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): the number of neighbours that swap tokens for heads."""
    total = 0.0
    for name, job in JOBS.items():
        u = alone(student, job)
        if isinstance(u, bool) or not isinstance(u, int) or u not in choices(job):
            fail(
                f"for {name}, choose returned {brief(u)}.",
                expected=f"one of {', '.join(map(str, choices(job)))}, which divide the ranks, the "
                "heads and the key-value heads",
            )
        total += exposed_us(job, u)
    largest = max(max(choices(job)) for job in JOBS.values())
    always = {most: _of_all(most) for most in range(1, largest + 1)}
    if total >= min(always.values()):
        u = min(always, key=lambda most: always[most])
        fail(
            f"a rank waits {total:,.0f} µs, for all jobs together.",
            expected=f"less than the {always[1]:,.0f} µs of rings alone, and than the "
            f"{always[u]:,.0f} µs of the same for all, u = {u} or the largest below that divides",
            hint="What hides behind computing? What goes over the slow wire?",
        )
    yield "every choice divides ranks and heads"
    yield Score(round(total), BEST_US, "µs exposed")
