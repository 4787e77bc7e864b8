"""Pipeline jobs: step time and memory for a cut, a number of micro-batches, and recompute or not.

    layers   3  1 1 1 1 1 1 1 1  4      a cut of 10 layers into 4 stages, [2, 3, 3, 2]
            ├──4──┤├─3──┤├─3──┤├─5─┤     every micro-batch waits for the slowest stage

The schedule is GPipe. All stages finish the forwards of m micro-batches before the first backward,
so a stage holds the activations of the whole batch; with recompute, it holds the inputs of the
batch and the activations of one micro-batch during its backward.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Job(NamedTuple):
    """One step of `rows` rows on `stages` ranks with `budget_mb` each."""

    row_ms: Sequence[float]  # per layer: forward of one row; backward takes twice as long
    weights_mb: Sequence[float]  # per layer: parameters, gradients, optimizer state
    kept_mb: Sequence[float]  # per layer: activations that backward needs, per row
    input_mb: float  # the input of any layer, per row
    rows: int
    stages: int
    start_ms: float  # fixed cost of each forward and each backward
    budget_mb: float


class Plan(NamedTuple):
    """The number of layers per stage, the number of micro-batches, and whether stages keep only
    their inputs and recompute each forward before its backward."""

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

BEST_MS = 1_659  # minimum within the budgets, summed over the jobs' steps
UNIFORM_MS = 2130.2  # the minimum if all jobs share m and recompute


def times_ms(job: Job, plan: Plan) -> tuple[list[float], list[float]]:
    """Each stage's forward and backward time for one micro-batch."""
    rows = job.rows / plan.microbatches
    forward = [job.start_ms + rows * row_ms for row_ms in _of_stages(job.row_ms, plan)]
    backward = [job.start_ms + 2 * rows * row_ms for row_ms in _of_stages(job.row_ms, plan)]
    if plan.recompute:
        backward = [f + b for f, b in zip(forward, backward, strict=True)]
    return forward, backward


def step_ms(job: Job, plan: Plan) -> float:
    """Time of a step: the first micro-batch passes through all stages, and the other micro-batches
    follow at the slowest stage's interval; first forward, then backward."""
    m = plan.microbatches
    return sum(sum(stages_ms) + (m - 1) * max(stages_ms) for stages_ms in times_ms(job, plan))


def held_mb(job: Job, plan: Plan) -> float:
    """The memory of the stage that holds the most."""
    rows = job.rows / plan.microbatches
    held = []
    for weights, kept in zip(
        _of_stages(job.weights_mb, plan), _of_stages(job.kept_mb, plan), strict=True
    ):
        activations = job.rows * job.input_mb + rows * kept if plan.recompute else job.rows * kept
        held.append(weights + activations)
    return max(held)


def divisors(rows: int) -> list[int]:
    """The numbers of micro-batches that divide the rows."""
    return [m for m in range(1, rows + 1) if rows % m == 0]


def _of_stages(of_layers: Sequence[float], plan: Plan) -> list[float]:
    ends = [0, *accumulate(plan.layers)]
    return [sum(of_layers[begin:end]) for begin, end in pairwise(ends)]
