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

from .plans import BEST_MS, JOBS, UNIFORM_MS, Job, Plan, divisors, held_mb, step_ms
from .scenarios import (
    ELEMENT_BYTES,
    MICROBATCHES,
    ROWS,
    WIDTH,
    SavedPair,
    StageRun,
    right_backward,
    right_forward,
    right_step,
    right_weights,
    run_backward,
    run_forward,
)

TOLERANCE = 1e-9
BOUNDARY_BYTES = ROWS * WIDTH * ELEMENT_BYTES  # sent across a stage boundary


# ---- cut(costs, stages)

COSTS = (
    ([1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 1, 1, 1], 4),  # several cuts are optimal
    ([5, 1, 1, 1, 4], 3),
    ([0.2, 1, 1, 1, 1, 1, 1, 1, 1, 2.9], 4),
    ([9, 1, 1, 1], 4),
    ([2, 3, 1], 1),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 4),
)


@exercise(points=2)
def cut(student: Student) -> Iterator[str]:
    """cut(costs, stages): the number of layers per stage that minimizes the highest stage cost."""
    for costs, stages in COSTS:
        sizes = whole_numbers(
            alone(student, list(costs), stages),
            "cut", "a list of whole numbers, one per stage",
        )  # fmt: skip
        answer = f"for costs {costs} on {stages} stage{'s' * (stages > 1)}, your cut is {sizes}"
        if len(sizes) != stages or sum(sizes) != len(costs) or min(sizes) < 1:
            fail(
                f"{answer}.",
                expected=f"{stages} numbers, 1 or more, that add up to {len(costs)} layers",
            )
        best = balance(costs, stages)
        found, right = _slowest(costs, sizes), _slowest(costs, best)
        if found > right + 1e-9:
            fail(
                f"{answer}, and its slowest stage costs {found:g}.",
                expected=f"{right:g}, with {best}",
                hint="A greedy cut fills one stage after another and ignores the layers that "
                "follow. With few layers, try all cuts: itertools.combinations.",
            )
    yield "each layer is on one stage, and each stage has a layer"
    yield f"no cut has a faster slowest stage, for {len(COSTS)} lists of costs"


def _slowest(costs: Any, sizes: list[int]) -> float:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return max(sum(costs[begin:end]) for begin, end in pairwise(ends))


# ---- forward(comm, stage, xs)


@exercise(points=3)
def forward(student: Student) -> Iterator[str]:
    """forward(comm, stage, xs): all forwards of a stage: receive, compute, send."""
    for size in (1, 2, 3):
        ran = run(size, run_forward, student).values
        for rank, stage in enumerate(ran):
            _compare_forward(_where(size, rank), rank, stage.values)
        for rank, stage in enumerate(ran):
            _check_sends(_where(size, rank), stage, "stage(x)", sends=rank < size - 1)
    yield "every micro-batch passes through all stages, on 1 to 3 ranks (rows: 3, 3, 2, 2)"
    yield "each is sent before the next is computed, b · w elements over each boundary"
    yield "x and y are kept and ready for backward"


def _where(size: int, rank: int) -> str:
    return f"on {size} rank{'s' * (size > 1)}, rank {rank}"


def _compare_forward(where: str, rank: int, found: Any) -> None:
    right = right_forward(rank)
    if not isinstance(found, list) or len(found) != MICROBATCHES:
        what = f"{len(found)} pairs" if isinstance(found, list) else brief(found)
        fail(
            f"{where} returned {what}.",
            expected=f"a list of {MICROBATCHES} pairs (x, y), one per micro-batch",
        )
    if not all(isinstance(pair, SavedPair) for pair in found):
        fail(f"{where} returned a list of {kind(found[0])}.", expected="pairs (x, y) of tensors")
    for k, (kept, (right_x, right_y)) in enumerate(zip(found, right)):
        for name, tensor, expected in (("x", kept.x, right_x), ("y", kept.y, right_y)):
            if problem := difference(tensor, expected, TOLERANCE):
                hint = "Only rank 0 has the batch. Other ranks receive into the tensors in xs."
                if rank == 0:
                    hint = "y is stage(x)."
                fail(f"{where}, micro-batch {k}: {name} is {problem}.", hint=hint)
        if rank and not kept.requires_grad:
            fail(
                f"{where}, micro-batch {k}: x does not require a gradient.",
                hint="A received tensor has no graph. The previous stage waits for the gradient "
                "of x, so backward must compute it: x.requires_grad_().",
            )
        if not kept.has_graph:
            fail(
                f"{where}, micro-batch {k}: y has no graph, so backward cannot run.",
                hint="Keep y with its graph; send y.detach().",
            )
        if rank and not kept.reaches_x:
            fail(
                f"{where}, micro-batch {k}: backward from y leaves no gradient in x.grad.",
                hint="Receive into x, then x.requires_grad_(), then stage(x) with the same tensor: "
                "a copy of x, or requires_grad_() after stage(x), is not in the graph of y.",
            )


def _check_sends(where: str, stage: StageRun, call: str, sends: bool) -> None:
    """Fails unless each micro-batch is computed once, and sent before the next is computed."""
    if (count := len(stage.sent_before)) != MICROBATCHES:
        fail(
            f"{where} computes {call} {count} time{'s' * (count != 1)}.",
            expected=f"{MICROBATCHES} times, once per micro-batch",
        )
    if sends and any(sent < k for k, sent in enumerate(stage.sent_before)):
        late, sent = next((k, sent) for k, sent in enumerate(stage.sent_before) if sent < k)
        fail(
            f"{where} starts micro-batch {late} after only {sent} send{'s' * (sent != 1)}.",
            expected=f"{late}: send each micro-batch as soon as it is computed",
            hint="A neighbor waits for it. Receive, compute and send each micro-batch in turn.",
        )
    expected_bytes = BOUNDARY_BYTES if sends else 0
    if stage.sent_bytes != expected_bytes:
        why = f"{ROWS} rows of {WIDTH} elements of 8 bytes" if sends else "no stage waits for it"
        fail(f"{where} sends {stage.sent_bytes:,.0f} bytes.", expected=f"{expected_bytes:,}: {why}")


# ---- backward(comm, kept, losses, rows)


@exercise(points=3)
def backward(student: Student) -> Iterator[str]:
    """backward(comm, kept, losses, rows): all backwards of a stage, the loss weighted by rows."""
    for size in (1, 2, 3):
        ran = run(size, run_backward, student).values
        for rank, stage in enumerate(ran):
            _compare_gradients(_where(size, rank), size, rank, stage.values)
        for rank, stage in enumerate(ran):
            _check_sends(_where(size, rank), stage, "backward through y", sends=rank > 0)
    yield "gradients of the batch's mean loss, on 1 to 3 ranks (micro-batch rows: 3, 3, 2, 2)"
    yield "each gradient is sent before the next is computed, b · w elements over each boundary"


WEIGHTS = {
    "Every micro-batch has weight 1, but a sum of means is not the mean of the batch.": [1.0] * 4,
    "Every micro-batch has weight 1/m, but they have 3, 3, 2 and 2 rows.": [0.25] * 4,
    "You divide twice: by the number of rows, and by m.": [w / 4 for w in right_weights()],
    "You multiply each mean by its rows; also divide by the batch's rows.": [3.0, 3.0, 2.0, 2.0],
}


def _compare_gradients(where: str, size: int, rank: int, found: list[Any]) -> None:
    right = right_backward(size, rank, right_weights())
    for i, (name, gradient, expected) in enumerate(
        zip(("weight", "bias"), found, right, strict=True)
    ):
        if gradient is None:
            fail(
                f"{where}: the {name} has no gradient.",
                hint="On the last rank, backward starts at the loss; on other ranks at y, with the "
                "received gradient: y.backward(dy).",
            )
        if problem := difference(gradient, expected, TOLERANCE):
            hint = "Does each received gradient belong to the micro-batch of this y?"
            for reason, weights in WEIGHTS.items():
                if not difference(gradient, right_backward(size, rank, weights)[i], TOLERANCE):
                    hint = reason
            factor = float((gradient * expected).sum() / expected.square().sum())
            fail(
                f"{where}: the gradient of the {name} is {problem}; on average, it is "
                f"{factor:.3g} × the correct gradient.",
                hint=hint,
            )


# ---- step(forward_ms, backward_ms, microbatches)

PIPELINES = (
    ([1.0] * 4, [2.0] * 4, 4),
    ([1.0] * 4, [2.0] * 4, 16),
    ([3.0], [5.0], 2),
    ([1.0, 1.0, 3.0], [2.0, 2.0, 6.0], 5),
    ([2.0, 1.0, 1.0, 1.5], [3.0, 4.0, 2.0, 3.0], 6),
    ([4.0, 1.0], [1.0, 7.0], 1),
)


@exercise(points=2)
def step(student: Student) -> Iterator[str]:
    """step(forward_ms, backward_ms, microbatches): the predicted time and bubble of a step."""
    for forward_ms, backward_ms, m in PIPELINES:
        found = alone(student, list(forward_ms), list(backward_ms), m)
        several(found, 2, "step returned", "a pair: (step_ms, bubble)")
        right = right_step(forward_ms, backward_ms, m)
        where = f"with forward {forward_ms} ms, backward {backward_ms} ms, {m} micro-batches"
        if problem := difference(found[0], right[0], 1e-9):
            hint = "The first micro-batch passes through all stages; m-1 more leave the last stage "
            hint += "after it: at what interval? Treat forward and backward separately."
            fail(f"{where}: the step time is {problem}.", hint=hint)
        if problem := difference(found[1], right[1], 1e-9):
            p, busy = len(forward_ms), m * (sum(forward_ms) + sum(backward_ms))
            hint = "p stages have p times the step time. For how much of that time do they compute?"
            if not difference(found[1], right[0] * p / busy - 1, 1e-9):
                hint = "That is idle time over compute time; divide by the total time instead."
            fail(f"{where}: the bubble is {problem}.", hint=hint)
    yield f"the same as a replay, for {len(PIPELINES)} pipelines with equal and unequal stages"


# ---- plan(job)


@exercise(points=3)
def plan(student: Student) -> Iterator[str | Score]:
    """plan(job): the cut into stages, the number of micro-batches, and whether to recompute."""
    total = 0.0
    for name, job in JOBS.items():
        plan = _plan_of(name, job, alone(student, job))
        if (held := held_mb(job, plan)) > job.budget_mb:
            fail(
                f"for {name}, a stage of plan {brief(tuple(plan))} holds {held:,.0f} MB.",
                expected=f"at most {job.budget_mb:,.0f} MB",
                hint="Before its first backward, a stage holds the activations of the whole batch; "
                "with recompute, only its inputs.",
            )
        total += step_ms(job, plan)
    if total >= UNIFORM_MS - 1e-6:
        fail(
            f"the steps of all jobs take {total:,.0f} ms in total.",
            expected=f"less than {UNIFORM_MS:,.0f}, the best if all jobs share m and recompute",
            hint="What does a job gain from more micro-batches, and what do they cost?",
        )
    yield "every plan is within its memory budget"
    yield Score(round(total), BEST_MS, "ms")


def _plan_of(name: str, job: Job, found: Any) -> Plan:
    expected = (
        f"(layers of each of {job.stages} stages, an m that divides {job.rows} rows, True or False)"
    )
    with suppress(TypeError, ValueError):
        layers, m, recompute = found
        sizes = [index(size) for size in layers]
        valid = len(sizes) == job.stages and sum(sizes) == len(job.row_ms) and min(sizes) >= 1
        if valid and m in divisors(job.rows) and recompute in (True, False):
            return Plan(sizes, int(m), bool(recompute))
    fail(f"for {name}, plan returned {brief(found)}.", expected=expected)
