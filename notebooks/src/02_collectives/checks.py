"""Checks of lab 02, "Collectives"."""

from collections.abc import Iterator
from typing import Any

import torch

from labkit.comm.collectives.costs import cost, rounds
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import equal, fail
from labkit.course.ranks import only_messages, run, watch
from labkit.trace.movement import Movement

from .movements import check_data, check_in_place, check_neighbor, check_sent, check_steps, replaced

CHUNK_SIZES = ([4, 4], [4, 4, 4], [4, 4, 4, 4], [5, 4, 3])  # elements per chunk
ALPHA_US, SIZE_BYTES, BYTES_PER_US = 10, 600_000, 10_000  # for the open exercise: 10 GB/s


@exercise(points=2)
def my_reduce_scatter(student: Student) -> Iterator[str]:
    """my_reduce_scatter(comm, chunks): chunks[rank] becomes its sum over all ranks, by a ring."""
    for sizes in CHUNK_SIZES:
        size = len(sizes)
        ran = run(size, _run_reduce_scatter, student, sizes)
        only_messages(ran)
        values = check_in_place(ran)
        hint = "Which chunk must this rank receive in the last step?"
        own_sums = {(rank, rank): range(size) for rank in range(size)}
        movement = check_data(size, "reduce_scatter", _on_chunks(student), own_sums, hint)
        expected = [sum(_values(rank, sizes)[own] for rank in range(size)) for own in range(size)]
        what = f"of {size} now holds in its own chunk"
        equal(values, expected, what, hint)
        check_neighbor(ran)
        expected_bytes = [4 * (sum(sizes) - own) for own in sizes]
        check_sent(ran, "reduce_scatter", expected_bytes, "every chunk except its own, once")
        check_steps(movement, size - 1)
    yield "rank r has the sum of chunk r, on 2, 3 and 4 ranks, even if chunks differ in size"
    yield "n - 1 steps; each rank sends (n - 1)/n · S bytes to its right neighbor"


def _run_reduce_scatter(
    comm: Any, student: Student, sizes: list[int]
) -> tuple[torch.Tensor, list[int]]:
    chunks = _values(comm.rank, sizes)
    others = replaced(student, comm, chunks)
    return chunks[comm.rank], others


@exercise(points=2)
def my_all_gather(student: Student) -> Iterator[str]:
    """my_all_gather(comm, chunks): chunk r of rank r reaches every rank, by a ring."""
    for sizes in CHUNK_SIZES:
        size = len(sizes)
        ran = run(size, _run_all_gather, student, sizes)
        only_messages(ran)
        values = check_in_place(ran)
        hint = "Forward the chunk that just arrived, and overwrite the old values."
        everywhere = {(r, c): range(c, c + 1) for r in range(size) for c in range(size)}
        movement = check_data(size, "all_gather", _on_chunks(student), everywhere, hint)
        expected = torch.cat([_values(rank, sizes)[rank] for rank in range(size)])
        what = f"of {size} now holds in its chunks"
        equal(values, [expected] * size, what, hint)
        check_neighbor(ran)
        right_sizes = [sizes[(rank + 1) % size] for rank in range(size)]
        expected_bytes = [4 * (sum(sizes) - other) for other in right_sizes]
        reason = "every chunk except its right neighbor's, once"
        check_sent(ran, "all_gather", expected_bytes, reason)
        check_steps(movement, size - 1)
    yield "every rank has all chunks, on 2, 3 and 4 ranks, even if chunks differ in size"
    yield "n - 1 steps; each rank sends (n - 1)/n · S bytes to its right neighbor"


def _run_all_gather(
    comm: Any, student: Student, sizes: list[int]
) -> tuple[torch.Tensor, list[int]]:
    values = _values(comm.rank, sizes)
    chunks = [chunk if k == comm.rank else chunk.fill_(7.0) for k, chunk in enumerate(values)]
    others = replaced(student, comm, chunks)
    return torch.cat(chunks), others


@exercise(points=2)
def my_all_reduce(student: Student) -> Iterator[str]:
    """my_all_reduce(comm, x): x becomes the sum of all ranks' x, in place, by a ring."""
    for size, numel in ((2, 8), (4, 12), (3, 7), (4, 3), (6, 11)):
        ran = run(size, _run_in_place, student, numel)
        only_messages(ran)
        everywhere = {(r, c): range(size) for r in range(size) for c in range(size)}
        hint = "Are the chunks n views of x that cover all of x?"
        movement = check_data(size, "all_reduce", student, everywhere, hint)
        expected = sum(_values(rank, [numel])[0] for rank in range(size))
        what = f"of {size} now holds, for an x of {numel} elements,"
        equal(ran.values, [expected] * size, what, hint)
        for rank, value in enumerate(ran.values):
            if not torch.equal(value, ran.values[0]):
                fail(
                    f"the sums on ranks 0 and {rank} differ in the last bits.",
                    expected="bitwise identical sums on all ranks",
                    hint="Only one rank adds up a chunk; the others receive its result.",
                )
        total, least = sum(ran.sent_bytes), 2 * (size - 1) * 4 * numel
        if total != least:
            fail(
                f"{size} ranks send {total:,} bytes in total for an x of {4 * numel} bytes.",
                expected=f"2(n-1) · S = {least:,}",
                hint="The reduce-scatter sends (n-1) · S bytes, and so does the all-gather.",
            )
        if numel % size == 0:
            check_sent(ran, "all_reduce", [least // size] * size, "2(n-1)/n · S")
        check_steps(movement, 2 * (size - 1))
    yield "bitwise identical sums on 2 to 6 ranks, even for 3 elements on 4 ranks"
    yield "each rank sends 2(n-1)/n · S bytes in 2(n-1) steps"


def _run_in_place(comm: Any, student: Student, numel: int) -> torch.Tensor:
    (x,) = _values(comm.rank, [numel])
    student(comm, x)
    return x


@exercise(points=2)
def my_tree(student: Student) -> Iterator[str]:
    """my_tree(comm, x, root): the root's x reaches every rank, by a binomial tree."""
    for size, root in ((2, 0), (4, 0), (3, 2), (7, 4)):
        ran = run(size, _run_from_root, student, root)
        expected = _values(root, [5])[0]
        what = f"of {size} now holds, with root {root},"
        equal(ran.values, [expected] * size, what, hint="Number the ranks from the root.")
        only_messages(ran)
        if (total := sum(ran.sent_bytes)) != 20 * (size - 1):
            fail(
                f"{size} ranks send {total:,} bytes in total.",
                expected=f"{size - 1} × 20 bytes: each rank except the root receives x once",
                hint="Which rank sends to a rank that already has x?",
            )

        def from_root(comm: Any, x: torch.Tensor, root: int = root) -> None:
            student(comm, x, root)

        check_steps(watch(size, "broadcast", from_root, root), rounds(size))
    yield "every rank has the root's values, on 2 to 7 ranks, for several roots"
    yield "(n - 1) · S bytes in total, in ⌈log₂ n⌉ steps"


def _run_from_root(comm: Any, student: Student, root: int) -> torch.Tensor:
    (x,) = _values(comm.rank, [5])
    student(comm, x, root)
    return x


@exercise(points=1)
def crossover_bytes(student: Student) -> Iterator[str]:
    """crossover_bytes(n, alpha_s, beta_s_per_byte): the size at which ring and tree cross over."""
    for n, alpha_s, beta in (
        (4, 5e-3, 80e-9),
        (8, 1e-5, 2e-11),
        (6, 2e-6, 1e-10),
        (1024, 1e-5, 2e-11),
    ):
        (crossover, _) = run(2, lambda comm, *args: student(*args), n, alpha_s, beta).values
        ring, tree = cost("all_reduce", "ring", n, n), cost("all_reduce", "tree", n, n)
        more_bytes = (tree.sent_bytes - ring.sent_bytes) / n  # per byte of x
        expected = (ring.steps - tree.steps) * alpha_s / (more_bytes * beta)
        hint = "Set the two formulas equal, and solve for S. ⌈log₂ n⌉ is an integer."
        if isinstance(crossover, (int, float)) and not crossover > 0:
            fail(
                f"on {n} ranks your crossover is {crossover:g} bytes, but a size must be positive.",
                hint="The ring has more steps and fewer bytes: watch the signs.",
            )
        what = f"returned for n={n}, alpha_s={alpha_s:g}, beta_s_per_byte={beta:g}:"
        # tolerance: one byte
        equal([crossover], [expected], what, hint=hint, within=max(1e-6, 1 / expected))
    yield "the crossover size on 4, 6, 8 and 1,024 ranks"


@exercise(points=3)
def my_best_broadcast(student: Student) -> Iterator[str | Score]:
    """my_best_broadcast(comm, x): 600,000 bytes from rank 0 to 5 ranks, as fast as possible."""
    ran = run(6, _run_in_place, student, 600)
    expected = _values(0, [600])[0]
    equal(ran.values, [expected] * 6, "of 6 now holds", hint="Has every chunk reached every rank?")
    only_messages(ran)
    movement = watch(6, "broadcast", student)
    us = modeled_us(movement)
    tree_us = rounds(6) * (ALPHA_US + SIZE_BYTES // BYTES_PER_US)
    if us >= tree_us:
        messages = [message for frame in movement.frames for message in frame.messages]
        hint = "Split x into chunks, so that a rank forwards one while the next arrives."
        if max(len(message.contents) for message in messages) < movement.size:
            hint = (
                "You split x. Now draw it: which rank has a chunk and does not send it? comm.send "
                "waits until the chunk has arrived; comm.isend does not."
            )
        fail(
            f"your broadcast takes {us} µs in the model, no less than the tree's {tree_us} µs.",
            expected="less: the tree sends all of x in each step",
            hint=hint,
        )
    yield "all 6 ranks have rank 0's values"
    yield f"faster than the tree's {tree_us} µs"
    # P chunks need at least P + ceil(log2 n) - 1 steps, and P = 3 is best here: Träff and
    # Ripke, "Optimal broadcast for fully connected processor-node networks", 2008.
    best = min(
        (p + rounds(6) - 1) * (ALPHA_US + SIZE_BYTES // BYTES_PER_US // p) for p in (1, 2, 3, 6)
    )
    yield Score(us, best, "µs in the alpha-beta model")


def modeled_us(movement: Movement) -> int:
    """Microseconds of a movement of 600,000 bytes: each step takes as long as its longest message,
    10 µs plus its bytes at 10 GB/s."""
    chunk_us = SIZE_BYTES // BYTES_PER_US // movement.size
    longest = [
        max(len(message.contents) for message in frame.messages) for frame in movement.frames
    ]
    return sum(ALPHA_US + chunks * chunk_us for chunks in longest)


# ---- shared by these checks


def _values(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    """A rank's values, split into chunks; random, so that no wrong sum passes by chance."""
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(sum(sizes), generator=generator).split(sizes))


def _on_chunks(student: Student) -> Student:
    return lambda comm, x: student(comm, list(x.split(1)))
