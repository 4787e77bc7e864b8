"""Checks of lab 15, "Pipelines"."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from operator import index
from typing import Any

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, kind, several, whole_numbers
from labkit.course.ranks import alone, run
from labkit.parallel.splitting import balance

from .plans import BEST_MS, JOBS, ONE_FOR_ALL_MS, Job, Plan, divisors, held_mb, step_ms
from .scenarios import (
    MICROBATCHES,
    ONE_BYTES,
    ROWS,
    WIDTH,
    Kept,
    Ran,
    right_backward,
    right_forward,
    right_step,
    right_weights,
    through_backward,
    through_forward,
)

WITHIN = 1e-9
BOUNDARY_BYTES = ROWS * WIDTH * ONE_BYTES  # all micro-batches over one boundary, one way


# ---- cut(costs, stages)

COSTS = (
    ([1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 1, 1, 1], 4),  # several cuts are best
    ([5, 1, 1, 1, 4], 3),
    ([0.2, 1, 1, 1, 1, 1, 1, 1, 1, 2.9], 4),
    ([9, 1, 1, 1], 4),
    ([2, 3, 1], 1),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 4),
)


@exercise(points=2)
def cut(student: Student) -> Iterator[str]:
    """cut(costs, stages): how many layers each stage gets, the slowest as fast as possible."""
    for costs, stages in COSTS:
        sizes = whole_numbers(
            alone(student, list(costs), stages),
            "cut", "a list of whole numbers, one for each stage",
        )  # fmt: skip
        what = f"costs {costs} on {stages} stage{'s' * (stages > 1)}: your cut is {sizes}"
        if len(sizes) != stages or sum(sizes) != len(costs) or min(sizes) < 1:
            fail(
                f"{what}.",
                expected=f"{stages} numbers from 1 on, together {len(costs)} layers",
            )
        best = balance(costs, stages)
        found, right = _slowest(costs, sizes), _slowest(costs, best)
        if found > right + 1e-9:
            fail(
                f"{what}, and its slowest stage costs {found:g}.",
                expected=f"{right:g}, as {best} has",
                hint="Whoever fills a stage as far as it goes does not see what comes. With few "
                "layers, try all cuts: itertools.combinations.",
            )
    yield "every layer on a stage, and on every stage a layer"
    yield f"no cut makes the slowest stage faster, for {len(COSTS)} lists of costs"


def _slowest(costs: Any, sizes: list[int]) -> float:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return max(sum(costs[begin:end]) for begin, end in pairwise(ends))


# ---- forward(comm, stage, xs)


@exercise(points=3)
def forward(student: Student) -> Iterator[str]:
    """forward(comm, stage, xs): all forwards of a stage: receive, compute, send."""
    for size in (1, 2, 3):
        ran = run(size, through_forward, student).values
        for rank, its in enumerate(ran):
            _forward_values(_where(size, rank), rank, its.values)
        for rank, its in enumerate(ran):
            _computed_and_sent(_where(size, rank), its, "stage(x)", sends=rank < size - 1)
    yield "every micro-batch through all stages, on 1, 2 and 3 ranks, with 3, 3, 2 and 2 rows"
    yield "each sent on before the next is computed, b · w numbers over each boundary"
    yield "x and y kept, ready for backward"


def _where(size: int, rank: int) -> str:
    return f"on {size} rank{'s' * (size > 1)}, rank {rank}"


def _forward_values(where: str, rank: int, found: Any) -> None:
    right = right_forward(rank)
    if not isinstance(found, list) or len(found) != MICROBATCHES:
        what = f"{len(found)} pairs" if isinstance(found, list) else brief(found)
        fail(
            f"{where} returned {what}.",
            expected=f"a list of {MICROBATCHES} pairs (x, y), one for each micro-batch",
        )
    if not all(isinstance(one, Kept) for one in found):
        fail(f"{where} returned a list of {kind(found[0])}.", expected="pairs (x, y) of tensors")
    for k, (kept, (right_x, right_y)) in enumerate(zip(found, right)):
        for name, its, good in (("x", kept.x, right_x), ("y", kept.y, right_y)):
            if wrong := difference(its, good, WITHIN):
                hint = "Only rank 0 has the batch. The others' xs are places to receive into."
                if rank == 0:
                    hint = "y is stage(x)."
                fail(f"{where}, micro-batch {k}: {name} is {wrong}.", hint=hint)
        if rank and not kept.wants:
            fail(
                f"{where}, micro-batch {k}: x does not require a gradient.",
                hint="What comes over the wire has no history. Backward must end at x, whose "
                "gradient the stage before waits for: x.requires_grad_().",
            )
        if not kept.has_graph:
            fail(
                f"{where}, micro-batch {k}: y has no graph, and nothing can go backward.",
                hint="Keep y itself; Comm sends its numbers alone.",
            )
        if rank and not kept.arrives:
            fail(
                f"{where}, micro-batch {k}: backward from y leaves nothing in x.grad.",
                hint="First receive into x, then x.requires_grad_(), then stage(x) with this very "
                "x: what asks later, or is a copy, is not in the graph of y.",
            )


def _computed_and_sent(where: str, its: Ran, what: str, sends: bool) -> None:
    """Fails unless each micro-batch is computed once, and sent before the next is computed."""
    if len(its.sent_before) != MICROBATCHES:
        fail(
            f"{where} computes {len(its.sent_before)} times, with {what}.",
            expected=f"{MICROBATCHES} times, once for each micro-batch",
        )
    if sends and any(sent < i for i, sent in enumerate(its.sent_before)):
        place = next(i for i, sent in enumerate(its.sent_before) if sent < i)
        fail(
            f"{where} begins to compute micro-batch {place} and has sent {its.sent_before[place]}.",
            expected=f"{place} sent: each goes on its way as soon as it is there",
            hint="The neighbour waits for it. Receive, compute, send, then the next.",
        )
    wanted = BOUNDARY_BYTES if sends else 0
    if its.sent_bytes != wanted:
        fail(
            f"{where} sends {its.sent_bytes:,.0f} bytes.",
            expected=f"{wanted:,}: "
            + (f"{ROWS} rows of {WIDTH} numbers, each of 8 bytes" if sends else "nobody waits"),
        )


# ---- backward(comm, kept, losses, rows)


@exercise(points=3)
def backward(student: Student) -> Iterator[str]:
    """backward(comm, kept, losses, rows): all backwards of a stage, the loss weighted by rows."""
    for size in (1, 2, 3):
        ran = run(size, through_backward, student).values
        for rank, its in enumerate(ran):
            _gradients(_where(size, rank), size, rank, its.values)
        for rank, its in enumerate(ran):
            _computed_and_sent(_where(size, rank), its, "a backward through y", sends=rank > 0)
    yield "the gradients of the whole batch's mean, on 1, 2 and 3 ranks, with 3, 3, 2 and 2 rows"
    yield "each gradient sent back before the next is computed, b · w numbers over each boundary"


WEIGHTS = {
    "Every micro-batch counts 1: the sum of means is not the mean of the batch.": [1.0] * 4,
    "Every micro-batch counts 1/m, and they have 3, 3, 2 and 2 rows.": [0.25] * 4,
    "It is divided twice: by rows, and by m once more.": [w / 4 for w in right_weights()],
    "Each mean is multiplied by its rows: what are all rows together?": [3.0, 3.0, 2.0, 2.0],
}


def _gradients(where: str, size: int, rank: int, found: list[Any]) -> None:
    right = right_backward(size, rank, right_weights())
    for name, its, good in zip(("weight", "bias"), found, right, strict=True):
        if its is None:
            fail(
                f"{where}: its {name} has no gradient.",
                hint="On the last rank backward begins at the loss, on the others at y, with the "
                "gradient that came: y.backward(dy).",
            )
        if difference(its, good, WITHIN):
            hint = "Does each gradient belong to the micro-batch whose y goes backward with it?"
            for words, weights in WEIGHTS.items():
                its_right = right_backward(size, rank, weights)[("weight", "bias").index(name)]
                if not difference(its, its_right, WITHIN):
                    hint = words
            factor = float((its * good).sum() / good.square().sum())
            fail(
                f"{where}: the gradient of its {name} is {difference(its, good, WITHIN)}; by "
                f"length {factor:.3g} × the right one.",
                hint=hint,
            )


# ---- step(forward_ms, backward_ms, microbatches)

STAGES = (
    ([1.0] * 4, [2.0] * 4, 4),
    ([1.0] * 4, [2.0] * 4, 16),
    ([3.0], [5.0], 2),
    ([1.0, 1.0, 3.0], [2.0, 2.0, 6.0], 5),
    ([2.0, 1.0, 1.0, 1.5], [3.0, 4.0, 2.0, 3.0], 6),
    ([4.0, 1.0], [1.0, 7.0], 1),
)


@exercise(points=2)
def step(student: Student) -> Iterator[str]:
    """step(forward_ms, backward_ms, microbatches): length and bubble of a step, before it runs."""
    for forward_ms, backward_ms, m in STAGES:
        found = alone(student, list(forward_ms), list(backward_ms), m)
        several(found, 2, "step returned", "(ms of the step, bubble): a pair")
        right = right_step(forward_ms, backward_ms, m)
        at = f"forward {forward_ms}, backward {backward_ms} ms, {m} micro-batches"
        if wrong := difference(found[0], right[0], 1e-9):
            hint = "One micro-batch goes through all stages, and m-1 more come out behind it: how "
            hint += "far apart? Forward and backward, each by itself."
            fail(f"{at}: the step is {wrong}.", hint=hint)
        if wrong := difference(found[1], right[1], 1e-9):
            p, busy = len(forward_ms), m * (sum(forward_ms) + sum(backward_ms))
            hint = "Of p stages for the whole step, what do they compute?"
            if not difference(found[1], right[0] * p / busy - 1, 1e-9):
                hint = "That is a part of the time of computing; a part of the total is asked for."
            fail(f"{at}: the bubble is {wrong}.", hint=hint)
    yield f"what the replay finds for {len(STAGES)} pipelines, of equal and of unequal stages"


# ---- plan(job)


@exercise(points=3)
def plan(student: Student) -> Iterator[str | Score]:
    """plan(job): the cut, the number of micro-batches, and whether to recompute."""
    total = 0.0
    for name, job in JOBS.items():
        its = _plan_of(name, job, alone(student, job))
        if (held := held_mb(job, its)) > job.budget_mb:
            fail(
                f"for {name}, {brief(tuple(its))} holds {held:,.0f} MB on a stage.",
                expected=f"at most {job.budget_mb:,.0f} MB",
                hint="A stage holds the whole batch before its first backward, or its inputs.",
            )
        total += step_ms(job, its)
    if total >= ONE_FOR_ALL_MS - 1e-6:
        fail(
            f"all steps together take {total:,.0f} ms.",
            expected=f"less than {ONE_FOR_ALL_MS:,.0f}, which the same m and the same answer to "
            "recompute for all jobs can have",
            hint="What does a job gain by more micro-batches, and what does it pay?",
        )
    yield "every plan is within its budget"
    yield Score(round(total), BEST_MS, "ms")


def _plan_of(name: str, job: Job, found: Any) -> Plan:
    wanted = (
        f"(layers of each of {job.stages} stages, m that divides {job.rows} rows, True or False)"
    )
    with suppress(TypeError, ValueError):
        layers, m, recompute = found
        sizes = [index(one) for one in layers]
        fits = len(sizes) == job.stages and sum(sizes) == len(job.row_ms) and min(sizes) >= 1
        if fits and m in divisors(job.rows) and recompute in (True, False):
            return Plan(sizes, int(m), bool(recompute))
    fail(f"for {name}, plan returned {brief(found)}.", expected=wanted)
