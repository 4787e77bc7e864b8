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
    values = [0.5, -3.25, 7.0, 1.1]  # uneven: no maximum and no whole number is the mean by chance
    for size in (2, 4):
        ran = run(size, lambda comm: student(comm, values[comm.rank]))
        mean = sum(values[:size]) / size
        equal(
            ran.values, [mean] * size, hint="What does all_reduce compute if you do not pass `op`?"
        )
        for rank, ops in enumerate(ran.ops):
            if ops != ["all_reduce"]:
                fail(
                    f"rank {rank} needs more than one operation for it.",
                    expected="one all_reduce",
                    found=", ".join(ops) or "none",
                    hint="The sum of all values is enough to know their mean.",
                )
    yield "the mean on every rank, on 2 and 4 ranks"
    yield "one all-reduce each"


@exercise(points=2)
def swap(student: Student) -> Iterator[str]:
    """swap(comm, x): ranks 0 and 1, 2 and 3, ... return each other's tensor, without deadlock."""
    for size in (2, 4):
        ran = run(size, lambda comm: student(comm, torch.full((1000,), float(comm.rank))))
        right = [torch.full((1000,), float(rank ^ 1)) for rank in range(size)]
        equal(ran.values, right, hint="Receive into a tensor of its own, else x is overwritten.")
        for rank, sent_bytes in enumerate(ran.sent_bytes):
            if sent_bytes != 4000:
                fail(
                    f"rank {rank} sends {sent_bytes:,} bytes.",
                    expected="4,000 bytes: its own tensor, once",
                    hint="Only the partner needs this rank's tensor.",
                )
    yield "each rank returns its partner's tensor, with 1 pair and with 2"
    yield "4,000 bytes sent by each rank, and no hang"


@exercise(points=2)
def my_broadcast(student: Student) -> Iterator[str]:
    """my_broadcast(comm, x): the x of rank 0 reaches every rank, by send and recv alone."""
    for size in (2, 3, 4):

        def play(comm: Any) -> torch.Tensor:
            x = torch.arange(5.0) + 100 * comm.rank
            student(comm, x)
            return x

        ran = run(size, play)
        only_messages(ran, "send and recv")
        hint = "`recv` writes into the tensor that it is given: give it x itself."
        equal(ran.values, [torch.arange(5.0)] * size, what=f"of {size} now holds", hint=hint)
        total, least = sum(ran.sent_bytes), 20 * (size - 1)
        if total < least:
            fail(
                f"{size} ranks send {total:,} bytes together, fewer than the {least:,} of x.",
                expected=f"{size - 1} × 20 bytes, since each rank but the first gets x once",
                hint="Each rank must receive x in a message; it must not create the values itself.",
            )
        if total > least:
            fail(
                f"{size} ranks send {total:,} bytes together, but {least:,} are enough.",
                expected=f"{size - 1} × 20 bytes, since each rank but the first gets x once",
                hint="Which rank sends to a rank that already has x?",
            )
    yield "rank 0's values on every rank, with 2, 3 and 4 ranks"
    yield "the fewest possible bytes: (n - 1) · S in total"


@exercise(points=3)
def find_max(student: Student) -> Iterator[str | Score]:
    """find_max(comm, values): every rank returns (rank, index) of the largest of all values."""
    total = 0
    for every, hint in _draws():
        ran = run(4, lambda comm, rows: student(comm, rows[comm.rank].clone()), every)
        where = int(every.argmax())
        right = (where // every.shape[1], where % every.shape[1])
        equal(ran.values, [right] * 4, hint=hint)
        total = max(total, sum(ran.wire_bytes))
    whole = 4 * 3 * every[0].nbytes
    if total >= whole:
        fail(
            f"the 4 ranks send {total:,} bytes together: everybody sends all its values.",
            expected=f"far fewer than {whole:,}",
            hint="How little must a rank send about its 1,000 values?",
        )
    yield "the position of the largest of 4 × 1,000 values, on every rank, for 6 inputs"
    yield "also if the two largest are adjacent float32 numbers, and if all are negative"
    # Three ranks send a value (4 bytes) to the fourth, which sends them the winner (1 byte);
    # the winner sends the index (2 bytes) to the other three.
    yield Score(total, 3 * 4 + 3 * 1 + 3 * 2, "bytes sent by all ranks")


def _draws() -> Iterator[tuple[torch.Tensor, str]]:
    """Values, row r for rank r, and a hint for a wrong answer to them."""
    draws = [torch.randn(4, 1000, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    for every in draws[:3]:
        yield every, "Return (rank, index) of the largest of all values, the same on every rank."
    for every, winner, second in ((draws[3], 2, 1), (draws[4], 0, 3)):
        every[winner, 700] = 4.7  # the largest, and the float32 just below it
        every[second, 300] = torch.nextafter(every[winner, 700], torch.tensor(0.0))
        yield every, "Here the two largest lie as close as float32 can: a rounded value is too few."
    yield -1 - draws[5].abs(), "Here all values are below zero."
