"""Checks of lab 00, "Your machine is a cluster"."""

from collections.abc import Iterator
from typing import Any

import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import equal, fail
from labkit.course.ranks import only_messages, run


@exercise(points=1)
def average(student: Student) -> Iterator[str]:
    """average(comm, value): every rank gets the mean of all values, from one all-reduce."""
    values = [0.5, -3.25, 7.0, 1.1]  # their mean is neither a maximum nor an integer
    for size in (2, 4):
        ran = run(size, lambda comm: student(comm, values[comm.rank]))
        mean = sum(values[:size]) / size
        equal(
            ran.values, [mean] * size, hint="What does all_reduce compute if you do not pass `op`?"
        )
        for rank, ops in enumerate(ran.ops):
            if ops != ["all_reduce"]:
                fail(
                    f"rank {rank} does not compute the mean with one all_reduce.",
                    expected="one all_reduce",
                    found=", ".join(ops) or "none",
                    hint="The sum of all values gives you their mean.",
                )
    yield "every rank returns the mean, on 2 and 4 ranks"
    yield "each rank calls one all-reduce"


@exercise(points=2)
def swap(student: Student) -> Iterator[str]:
    """swap(comm, x): ranks 0 and 1, 2 and 3, ... exchange their tensors, without deadlock."""
    for size in (2, 4):
        ran = run(size, lambda comm: student(comm, torch.full((1000,), float(comm.rank))))
        expected = [torch.full((1000,), float(rank ^ 1)) for rank in range(size)]
        equal(
            ran.values, expected, hint="Receive into a new tensor: receiving into x overwrites it."
        )
        for rank, sent_bytes in enumerate(ran.sent_bytes):
            if sent_bytes != 4000:
                fail(
                    f"rank {rank} sends {sent_bytes:,} bytes.",
                    expected="4,000 bytes: its tensor, once",
                    hint="Only the partner needs this rank's tensor.",
                )
    yield "each rank returns its partner's tensor, with one pair and with two"
    yield "each rank sends 4,000 bytes, without deadlock"


@exercise(points=2)
def my_broadcast(student: Student) -> Iterator[str]:
    """my_broadcast(comm, x): rank 0's x reaches every rank, with send and recv alone."""
    for size in (2, 3, 4):

        def play(comm: Any) -> torch.Tensor:
            x = torch.arange(5.0) + 100 * comm.rank
            student(comm, x)
            return x

        ran = run(size, play)
        only_messages(ran, "send and recv")
        hint = "`recv` writes into the tensor that you pass: pass x itself."
        equal(ran.values, [torch.arange(5.0)] * size, what=f"of {size} now holds", hint=hint)
        total, least = sum(ran.sent_bytes), 20 * (size - 1)
        if total < least:
            fail(
                f"{size} ranks send {total:,} bytes in total, but at least {least:,} are needed.",
                expected=f"{size - 1} × 20 bytes: each rank except rank 0 receives x once",
                hint="Each rank must receive x in a message, not create its values.",
            )
        if total > least:
            fail(
                f"{size} ranks send {total:,} bytes in total, but {least:,} are enough.",
                expected=f"{size - 1} × 20 bytes: each rank except rank 0 receives x once",
                hint="Which rank sends to a rank that already has x?",
            )
    yield "every rank has rank 0's values, on 2, 3 and 4 ranks"
    yield "the fewest possible bytes: (n - 1) · S in total"


@exercise(points=3)
def find_max(student: Student) -> Iterator[str | Score]:
    """find_max(comm, values): every rank returns (rank, index) of the global maximum."""
    total = 0
    for rows, hint in _inputs():
        ran = run(4, lambda comm, rows: student(comm, rows[comm.rank].clone()), rows)
        place = int(rows.argmax())
        expected = (place // rows.shape[1], place % rows.shape[1])
        equal(ran.values, [expected] * 4, hint=hint)
        total = max(total, sum(ran.wire_bytes))
    all_bytes = 4 * 3 * rows[0].nbytes
    if total >= all_bytes:
        fail(
            f"the 4 ranks send {total:,} bytes in total: each rank sends all its values.",
            expected=f"far fewer than {all_bytes:,}",
            hint="How much must other ranks know about a rank's 1,000 values?",
        )
    yield "every rank returns the position of the largest of 4 × 1,000 values, for 6 inputs"
    yield "even if the two largest are adjacent in float32, and if all values are negative"
    # Three ranks send their maximum (4 bytes) to the fourth, which sends them the rank of the
    # largest (1 byte); that rank sends the index (2 bytes) to the other three.
    yield Score(total, 3 * 4 + 3 * 1 + 3 * 2, "bytes sent by all ranks")


def _inputs() -> Iterator[tuple[torch.Tensor, str]]:
    """Inputs [rank, value], each with the hint for a wrong answer."""
    draws = [torch.randn(4, 1000, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    for rows in draws[:3]:
        yield rows, "Return (rank, index) of the largest of all values, on every rank."
    for rows, winner, second in ((draws[3], 2, 1), (draws[4], 0, 3)):
        rows[winner, 700] = 4.7  # the largest, and the next smaller float32
        rows[second, 300] = torch.nextafter(rows[winner, 700], torch.tensor(0.0))
        yield (
            rows,
            "Here the two largest values are adjacent in float32: a rounded value is not enough.",
        )
    yield -1 - draws[5].abs(), "Here all values are negative."
