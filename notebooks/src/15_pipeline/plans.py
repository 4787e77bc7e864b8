"""Jobs of a pipeline: what a cut, a number of micro-batches and recompute take and hold.

    layers   3  1 1 1 1 1 1 1 1  4      a cut of 10 layers into 4 stages, [2, 3, 3, 2]
            ├──4──┤├─3──┤├─3──┤├─5─┤     the slowest stage is what each micro-batch waits for

The schedule is GPipe. All stages have the forwards of m micro-batches behind them before the first
backward, so a stage holds the whole batch: all that backward needs, or with recompute its inputs,
and one micro-batch more while that goes backward.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Job(NamedTuple):
    """One step of `rows` rows on `stages` ranks with `budget_mb` each."""

    row_ms: Sequence[float]  # of each layer: forward of one row; backward takes twice as long
    weights_mb: Sequence[float]  # of each layer: parameters, gradients, optimizer state
    kept_mb: Sequence[float]  # of each layer: what backward needs of one row
    input_mb: float  # the input of any layer, one row
    rows: int
    stages: int
    start_ms: float  # what each forward and each backward takes, however few rows it has
    budget_mb: float


class Plan(NamedTuple):
    """How many layers each stage has, into how many micro-batches the rows go, and whether a stage
    keeps its inputs alone, and computes each forward again before its backward."""

    layers: Sequence[int]
    microbatches: int
    recompute: bool


def _same(
    n: int, ms: float, weights_mb: float, kept_mb: float
) -> tuple[list[float], list[float], list[float]]:
    return [ms] * n, [weights_mb] * n, [kept_mb] * n


JOBS = {
    "equal layers, much memory": Job(*_same(8, 1.0, 100.0, 8.0), 1.0, 32, 4, 3.0, 1000.0),
    "a head of a large vocabulary": Job(
        [0.1, *[1.0] * 8, 3.0], [300.0, *[100.0] * 8, 300.0], [1.0, *[8.0] * 8, 12.0],
        1.0, 32, 4, 1.0, 1300.0,
    ),
    "long rows, little memory": Job(*_same(12, 2.0, 50.0, 30.0), 2.0, 24, 4, 1.0, 700.0),
    "a table that fills its rank": Job(
        [0.2, *[1.0] * 9], [900.0, *[150.0] * 9], [1.0, *[10.0] * 9], 1.0, 16, 4, 2.0, 1000.0
    ),
}  # fmt: skip

BEST_MS = 1_659  # of all jobs' steps together: no plans within the budgets take less
ONE_FOR_ALL_MS = 2130.2  # the same, with one m and one answer to recompute for all jobs


def times_ms(job: Job, plan: Plan) -> tuple[list[float], list[float]]:
    """Of each stage, forward and backward of one micro-batch."""
    rows = job.rows / plan.microbatches
    forward = [job.start_ms + rows * row_ms for row_ms in _of_stages(job.row_ms, plan)]
    backward = [job.start_ms + 2 * rows * row_ms for row_ms in _of_stages(job.row_ms, plan)]
    if plan.recompute:
        backward = [f + b for f, b in zip(forward, backward, strict=True)]
    return forward, backward


def step_ms(job: Job, plan: Plan) -> float:
    """The whole step: a micro-batch goes through all stages, and each of the others is behind the
    one before by what the slowest stage takes; so forward, and so back."""
    m = plan.microbatches
    return sum(sum(one) + (m - 1) * max(one) for one in times_ms(job, plan))


def held_mb(job: Job, plan: Plan) -> float:
    """The most that any stage holds."""
    rows = job.rows / plan.microbatches
    held = []
    for weights, kept in zip(
        _of_stages(job.weights_mb, plan), _of_stages(job.kept_mb, plan), strict=True
    ):
        activations = job.rows * job.input_mb + rows * kept if plan.recompute else job.rows * kept
        held.append(weights + activations)
    return max(held)


def divisors(rows: int) -> list[int]:
    """The numbers of micro-batches that leave them alike."""
    return [m for m in range(1, rows + 1) if rows % m == 0]


def _of_stages(of_layers: Sequence[float], plan: Plan) -> list[float]:
    ends = [0, *accumulate(plan.layers)]
    return [sum(of_layers[begin:end]) for begin, end in pairwise(ends)]
