"""Checks of collectives: which rank sent what to which, in how many steps, and whose numbers each
rank holds at the end.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.course.findings import fail
from labkit.course.ranks import Ran, watch
from labkit.runtime.errors import ranks_text
from labkit.trace.movement import Content, Movement

PICTURE = "Draw it: plot.movement(watch_collective(world, {collective!r}, your_function))."


def ends_with(
    size: int,
    collective: str,
    student: Callable[..., Any],
    wanted: Mapping[tuple[int, int], range],
    hint: str = "",
) -> Movement | None:
    """Fail unless (rank, chunk) of `wanted` ends with the numbers of those ranks, each once; `hint`
    says where to look, besides the picture. Returns the movement; None where nothing was sent."""
    try:
        movement = watch(size, collective, student)
    except ValueError:
        return None
    for (rank, chunk), ranks in wanted.items():
        content = movement.frames[-1].held[rank][chunk]
        if content.ranks != tuple(ranks) or not content.is_right_in(chunk):
            fail(
                f"of {size} ranks, rank {rank} ends with {in_words(content, chunk)} in chunk "
                f"{chunk}.",
                expected=f"the numbers of {ranks_text(tuple(ranks))}, each once",
                hint=f"{hint} {PICTURE.format(collective=collective)}".strip(),
            )
    return movement


def in_words(content: Content, chunk: int) -> str:
    """What is in a chunk: "the numbers of ranks 0 and 2, those of rank 2 twice"."""
    if not content.counts:
        return "what is no sum of the ranks' numbers"
    if content.is_empty:
        return "nothing"
    words = f"the numbers of {ranks_text(content.ranks)}"
    if content.chunk is None:
        return f"{words}, from several chunks,"
    if content.chunk != chunk:
        words += f" for chunk {content.chunk}"
    often = (x for x in enumerate(content.counts) if x[1] > 1)
    return words + next((f", those of rank {rank} {n} times," for rank, n in often), "")


def replaced(student: Callable[..., Any], comm: Any, chunks: list[torch.Tensor]) -> list[int]:
    """Call student(comm, chunks) on a rank. Returns the indices of the chunks that were replaced by
    other tensors."""
    given = list(chunks)  # kept alive, so that no other tensor gets their memory
    student(comm, chunks)
    return [
        number
        for number, (old, new) in enumerate(zip(given, chunks))
        if not isinstance(new, torch.Tensor) or new.data_ptr() != old.data_ptr()
    ]


def in_place(ran: Ran) -> list[Any]:
    """The values of ranks that return (value, replaced(...)). Fails where a chunk was replaced."""
    for rank, (_, others) in enumerate(ran.values):
        if others:
            chunk = f"chunks[{others[0]}]"
            fail(
                f"on rank {rank} chunk {others[0]} is another tensor than the one you were given.",
                expected="the tensors you were given, with other numbers in them",
                hint=f"{chunk} += y and {chunk}.copy_(y) write into it; {chunk} = ... only puts "
                "another into the list.",
            )
    return [value for value, _ in ran.values]


def only_to_the_right(ran: Ran) -> None:
    """Fails where a rank sends to another than the next one."""
    size = len(ran.events)
    for rank, events in enumerate(ran.events):
        for event in events:
            if event.op == "send" and event.peer != (rank + 1) % size:
                fail(
                    f"rank {rank} of {size} sends to rank {event.peer}.",
                    expected=f"messages to rank {(rank + 1) % size} only, its right neighbor",
                    hint="In a ring a rank knows two others: it sends to one and hears the other.",
                )


def each_sends(ran: Ran, collective: str, right: list[int], words: str) -> None:
    """Fails where a rank does not send `right` bytes; `words` say why it should."""
    for rank, (sent_bytes, right_bytes) in enumerate(zip(ran.sent_bytes, right)):
        if sent_bytes != right_bytes:
            fail(
                f"rank {rank} of {len(right)} sends {sent_bytes:,} bytes.",
                expected=f"{right_bytes:,} bytes: {words}",
                hint=PICTURE.format(collective=collective),
            )


def takes_steps(movement: Movement | None, right: int) -> None:
    """Fails where the data needs more steps than `right`."""
    assert movement is not None, "the bytes have been counted"
    if (steps := len(movement.frames)) > right:
        fail(
            f"on {movement.size} ranks it takes {steps} steps, but {right} "
            f"{'is' if right == 1 else 'are'} enough.",
            expected="every rank that has something to send does so at once",
            hint="Who waits for whom? isend starts a message and goes on; plot.movement shows it.",
        )
