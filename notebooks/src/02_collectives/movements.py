"""Checks of a collective's data movement: the data that each rank ends with, the targets
and bytes of its messages, and the number of steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.course.findings import fail
from labkit.course.ranks import Ran, watch
from labkit.runtime.errors import ranks_text
from labkit.trace.movement import Content, Movement

DRAW_IT = "Draw it: plot.movement(watch_collective(world, {collective!r}, your_function))."


def check_data(
    size: int,
    collective: str,
    student: Callable[..., Any],
    expected: Mapping[tuple[int, int], range],
    hint: str = "",
) -> Movement | None:
    """Fail unless each chunk ends with the data of the ranks in `expected[rank, chunk]`, each once.
    Returns the movement; None if no rank sends."""
    try:
        movement = watch(size, collective, student)
    except ValueError:
        return None
    for (rank, chunk), ranks in expected.items():
        content = movement.frames[-1].held[rank][chunk]
        if content.ranks != tuple(ranks) or not content.is_right_in(chunk):
            fail(
                f"with {size} ranks, rank {rank} ends with {in_words(content, chunk)} in chunk "
                f"{chunk}.",
                expected=f"the data of {ranks_text(tuple(ranks))}, each once",
                hint=f"{hint} {DRAW_IT.format(collective=collective)}".strip(),
            )
    return movement


def in_words(content: Content, chunk: int) -> str:
    """A chunk's content in words: "the data of ranks 0 and 2, with rank 2's added 2 times,"."""
    if not content.counts:
        return "values that are not a sum of the ranks' data"
    if content.is_empty:
        return "nothing"
    words = f"the data of {ranks_text(content.ranks)}"
    if content.chunk is None:
        return f"{words}, from several chunks,"
    if content.chunk != chunk:
        words += f" for chunk {content.chunk}"
    repeated = (x for x in enumerate(content.counts) if x[1] > 1)
    return words + next((f", with rank {rank}'s added {n} times," for rank, n in repeated), "")


def replaced(student: Callable[..., Any], comm: Any, chunks: list[torch.Tensor]) -> list[int]:
    """Call student(comm, chunks) on a rank. Returns the indices of the chunks that were replaced by
    new tensors."""
    given = list(chunks)  # kept alive, so that no new tensor reuses their memory
    student(comm, chunks)
    return [
        i
        for i, (old, new) in enumerate(zip(given, chunks))
        if not isinstance(new, torch.Tensor) or new.data_ptr() != old.data_ptr()
    ]


def check_in_place(ran: Ran) -> list[Any]:
    """The values of ranks that return (value, replaced(...)); fails if a chunk was replaced."""
    for rank, (_, indices) in enumerate(ran.values):
        if indices:
            chunk = f"chunks[{indices[0]}]"
            fail(
                f"rank {rank} replaced chunks[{indices[0]}] with a new tensor.",
                expected="the given tensors, modified in place",
                hint=f"{chunk} += y and {chunk}.copy_(y) write into the tensor; {chunk} = ... only "
                "changes the list.",
            )
    return [value for value, _ in ran.values]


def check_neighbor(ran: Ran) -> None:
    """Fails if a rank sends to any rank except its right neighbor."""
    size = len(ran.events)
    for rank, events in enumerate(ran.events):
        for event in events:
            if event.op == "send" and event.peer != (rank + 1) % size:
                fail(
                    f"rank {rank} of {size} sends to rank {event.peer}.",
                    expected=f"messages to rank {(rank + 1) % size}, its right neighbor, only",
                    hint="In a ring, a rank sends to the right and receives from the left.",
                )


def check_sent(ran: Ran, collective: str, expected: list[int], reason: str) -> None:
    """Fails if a rank does not send `expected` bytes; `reason` explains the number."""
    for rank, (sent_bytes, expected_bytes) in enumerate(zip(ran.sent_bytes, expected)):
        if sent_bytes != expected_bytes:
            fail(
                f"rank {rank} of {len(expected)} sends {sent_bytes:,} bytes.",
                expected=f"{expected_bytes:,} bytes: {reason}",
                hint=DRAW_IT.format(collective=collective),
            )


def check_steps(movement: Movement | None, enough: int) -> None:
    """Fails if the data needs more than `enough` steps."""
    assert movement is not None, "the check of the bytes fails first if no rank sends"
    if (steps := len(movement.frames)) > enough:
        fail(
            f"on {movement.size} ranks your function takes {steps} steps, but {enough} "
            f"{'is' if enough == 1 else 'are'} enough.",
            expected="each rank sends as soon as it has the data",
            hint="Which rank waits for which? isend only starts a message; plot.movement shows the "
            "steps.",
        )
