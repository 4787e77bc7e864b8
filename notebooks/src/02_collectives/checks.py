"""Checks of lab 02, "Collectives"."""

from collections.abc import Iterator
from typing import Any

import torch

from labkit.comm.collectives.costs import cost, rounds
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import equal, fail
from labkit.course.ranks import only_messages, run, watch
from labkit.trace.movement import Movement

from .movements import each_sends, ends_with, in_place, only_to_the_right, replaced, takes_steps

SIZES = ([4, 4], [4, 4, 4], [4, 4, 4, 4], [5, 4, 3])  # of the ranks' chunks
ALPHA_US, SIZE_BYTES, BYTES_PER_US = 10, 600_000, 10_000  # of the open exercise: 10 GB/s


@exercise(points=2)
def my_reduce_scatter(student: Student) -> Iterator[str]:
    """my_reduce_scatter(comm, chunks): chunks[rank] becomes the sum, around a ring."""
    for sizes in SIZES:
        size = len(sizes)
        ran = run(size, _scattered, student, sizes)
        only_messages(ran)
        values = in_place(ran)
        hint = "Which chunk must this rank receive in the last step?"
        own_sums = {(rank, rank): range(size) for rank in range(size)}
        movement = ends_with(size, "reduce_scatter", _on_chunks(student), own_sums, hint)
        right = [sum(_values(rank, sizes)[own] for rank in range(size)) for own in range(size)]
        what = f"of {size} now holds in its own chunk"
        equal(values, right, what, hint)
        only_to_the_right(ran)
        its_bytes = [4 * (sum(sizes) - own) for own in sizes]
        each_sends(ran, "reduce_scatter", its_bytes, "every chunk but its own, once")
        takes_steps(movement, size - 1)
    yield "the sum of chunk r on rank r, for 2, 3 and 4 ranks, also if chunks differ in size"
    yield "n - 1 steps, each rank to its right neighbor, (n - 1)/n · S bytes"


def _scattered(comm: Any, student: Student, sizes: list[int]) -> tuple[torch.Tensor, list[int]]:
    chunks = _values(comm.rank, sizes)
    others = replaced(student, comm, chunks)
    return chunks[comm.rank], others


@exercise(points=2)
def my_all_gather(student: Student) -> Iterator[str]:
    """my_all_gather(comm, chunks): chunk r of rank r reaches every rank, around a ring."""
    for sizes in SIZES:
        size = len(sizes)
        ran = run(size, _gathered, student, sizes)
        only_messages(ran)
        values = in_place(ran)
        hint = "Pass on the chunk that has just arrived, and overwrite what was there."
        every = {(r, c): range(c, c + 1) for r in range(size) for c in range(size)}
        movement = ends_with(size, "all_gather", _on_chunks(student), every, hint)
        right = torch.cat([_values(rank, sizes)[rank] for rank in range(size)])
        what = f"of {size} now holds in its chunks"
        equal(values, [right] * size, what, hint)
        only_to_the_right(ran)
        after = [sizes[(rank + 1) % size] for rank in range(size)]
        its_bytes = [4 * (sum(sizes) - other) for other in after]
        each_sends(ran, "all_gather", its_bytes, "every chunk but one, once")
        takes_steps(movement, size - 1)
    yield "all chunks on all ranks, for 2, 3 and 4 ranks, also if chunks differ in size"
    yield "n - 1 steps, each rank to its right neighbor, (n - 1)/n · S bytes"


def _gathered(comm: Any, student: Student, sizes: list[int]) -> tuple[torch.Tensor, list[int]]:
    every = _values(comm.rank, sizes)
    chunks = [chunk if k == comm.rank else chunk.fill_(7.0) for k, chunk in enumerate(every)]
    others = replaced(student, comm, chunks)
    return torch.cat(chunks), others


@exercise(points=2)
def my_all_reduce(student: Student) -> Iterator[str]:
    """my_all_reduce(comm, x): x becomes the sum of all ranks' x, in place, around a ring."""
    for size, numel in ((2, 8), (4, 12), (3, 7), (4, 3), (6, 11)):
        ran = run(size, _reduced, student, numel)
        only_messages(ran)
        every = {(r, c): range(size) for r in range(size) for c in range(size)}
        hint = "Are the chunks views of x itself, and n of them that make up all of x?"
        movement = ends_with(size, "all_reduce", student, every, hint)
        right = sum(_values(rank, [numel])[0] for rank in range(size))
        what = f"of {size} now holds, for an x of {numel} elements,"
        equal(ran.values, [right] * size, what, hint)
        for rank, value in enumerate(ran.values):
            if not torch.equal(value, ran.values[0]):
                fail(
                    f"ranks 0 and {rank} hold sums that differ in the last bits.",
                    expected="the same bits on all ranks",
                    hint="Each chunk is added up on one rank only; the others get a copy.",
                )
        total, least = sum(ran.sent_bytes), 2 * (size - 1) * 4 * numel
        if total != least:
            fail(
                f"{size} ranks send {total:,} bytes together for an x of {4 * numel} bytes.",
                expected=f"2(n-1) · S = {least:,}",
                hint="The reduce-scatter sends (n-1) · S bytes, and the all-gather as many.",
            )
        if numel % size == 0:
            each_sends(ran, "all_reduce", [least // size] * size, "2(n-1)/n · S")
        takes_steps(movement, 2 * (size - 1))
    yield "the sum on 2 to 6 ranks, bitwise identical, also for 3 elements on 4 ranks"
    yield "2(n-1)/n · S bytes from each rank, in 2(n-1) steps"


def _reduced(comm: Any, student: Student, numel: int) -> torch.Tensor:
    (x,) = _values(comm.rank, [numel])
    student(comm, x)
    return x


@exercise(points=2)
def my_tree(student: Student) -> Iterator[str]:
    """my_tree(comm, x, root): the x of `root` reaches every rank, by a binomial tree."""
    for size, root in ((2, 0), (4, 0), (3, 2), (7, 4)):
        ran = run(size, _sent_from, student, root)
        right = _values(root, [5])[0]
        what = f"of {size} now holds, with root {root},"
        equal(ran.values, [right] * size, what, hint="Count positions from the root.")
        only_messages(ran)
        if (total := sum(ran.sent_bytes)) != 20 * (size - 1):
            fail(
                f"{size} ranks send {total:,} bytes together.",
                expected=f"{size - 1} × 20 bytes, since each rank but the root gets x once",
                hint="Who sends to a rank that has x already?",
            )

        def from_root(comm: Any, x: torch.Tensor, root: int = root) -> None:
            student(comm, x, root)

        takes_steps(watch(size, "broadcast", from_root, root), rounds(size))
    yield "the root's values on every rank, with 2 to 7 ranks, for several roots"
    yield "(n - 1) · S bytes in all, in ⌈log₂ n⌉ steps"


def _sent_from(comm: Any, student: Student, root: int) -> torch.Tensor:
    (x,) = _values(comm.rank, [5])
    student(comm, x, root)
    return x


@exercise(points=1)
def crossover_bytes(student: Student) -> Iterator[str]:
    """crossover_bytes(n, alpha_s, beta_s_per_byte): where ring and tree take the same time."""
    for n, alpha_s, beta in (
        (4, 5e-3, 80e-9),
        (8, 1e-5, 2e-11),
        (6, 2e-6, 1e-10),
        (1024, 1e-5, 2e-11),
    ):
        (found, _) = run(2, lambda comm, *args: student(*args), n, alpha_s, beta).values
        ring, tree = cost("all_reduce", "ring", n, n), cost("all_reduce", "tree", n, n)
        more_bytes = (tree.sent_bytes - ring.sent_bytes) / n  # as a share of S
        right = (ring.steps - tree.steps) * alpha_s / (more_bytes * beta)
        hint = "Set both formulas equal, and solve for S. ⌈log₂ n⌉ is a whole number."
        if isinstance(found, (int, float)) and not found > 0:
            fail(
                f"on {n} ranks you find {found:g} bytes, but a size is above 0.",
                hint="The ring has more steps and fewer bytes: watch the signs.",
            )
        what = f"says for n={n}, alpha_s={alpha_s:g}, beta_s_per_byte={beta:g}:"
        equal([found], [right], what, hint=hint, within=max(1e-6, 1 / right))  # a byte
    yield "the size at which both take the same time, on 4, 6, 8 and 1,024 ranks"


@exercise(points=3)
def my_best_broadcast(student: Student) -> Iterator[str | Score]:
    """my_best_broadcast(comm, x): 600,000 bytes from rank 0 to 5 others, as fast as possible."""
    ran = run(6, _reduced, student, 600)
    right = _values(0, [600])[0]
    equal(ran.values, [right] * 6, "of 6 now holds", hint="Have all pieces reached all ranks?")
    only_messages(ran)
    movement = watch(6, "broadcast", student)
    us = modelled_us(movement)
    tree_us = rounds(6) * (ALPHA_US + SIZE_BYTES // BYTES_PER_US)
    if us >= tree_us:
        messages = [one for frame in movement.frames for one in frame.messages]
        hint = "Split x into pieces, so that a rank forwards a piece while the next arrives."
        if max(len(one.contents) for one in messages) < movement.size:
            hint = (
                "You cut x. Now draw it: who has a piece and does not send? comm.send waits until "
                "it has arrived, comm.isend does not."
            )
        fail(
            f"it takes {us} µs in the model, no less than the tree's {tree_us} µs.",
            expected="less: the tree sends all of x in each of its steps",
            hint=hint,
        )
    yield "rank 0's values on all 6 ranks"
    yield f"less than the {tree_us} µs of the tree"
    # P pieces need at least P + ceil(log2 n) - 1 steps, and 3 of them do best here: Träff and
    # Ripke, "Optimal broadcast for fully connected processor-node networks", 2008.
    best = min(
        (p + rounds(6) - 1) * (ALPHA_US + SIZE_BYTES // BYTES_PER_US // p) for p in (1, 2, 3, 6)
    )
    yield Score(us, best, "µs in the alpha-beta model")


def modelled_us(movement: Movement) -> int:
    """Microseconds of a movement of 600,000 bytes: each step takes as long as its longest message,
    10 µs plus its bytes at 10 GB/s."""
    chunk_us = SIZE_BYTES // BYTES_PER_US // movement.size
    longest = [max(len(one.contents) for one in frame.messages) for frame in movement.frames]
    return sum(ALPHA_US + chunks * chunk_us for chunks in longest)


# ---- shared by these checks


def _values(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    """Random values of a rank, split into chunks, so that no sum is right by chance."""
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(sum(sizes), generator=generator).split(sizes))


def _on_chunks(student: Student) -> Student:
    return lambda comm, x: student(comm, list(x.split(1)))
