"""Lab 15's jobs: formulas equal the replayed schedule, and no plan is best for all jobs."""

import math
from collections import defaultdict
from itertools import accumulate, pairwise

import pytest

from labkit.labs.lab_15.plans import (
    BEST_MS,
    JOBS,
    UNIFORM_MS,
    Job,
    Plan,
    divisors,
    held_mb,
    step_ms,
    times_ms,
)
from labkit.labs.lab_15.wrong_answers import all_plans
from labkit.parallel.splitting import balance
from labkit.replaying import pipeline_step_s, pipeline_trace
from labkit.schedules import gpipe, peak_in_flight


def replayed_ms(job: Job, plan: Plan) -> float:
    of_phase = dict(zip(("forward", "backward"), times_ms(job, plan), strict=True))
    schedule = gpipe(job.stages, plan.microbatches)
    return pipeline_step_s(pipeline_trace(schedule, lambda stage, x: of_phase[x.phase][stage]))


@pytest.mark.parametrize("name", JOBS)
def test_time_and_memory_of_a_plan_are_those_of_its_schedule(name: str) -> None:
    job = JOBS[name]
    for plan in list(all_plans(job))[::97]:
        assert step_ms(job, plan) == pytest.approx(replayed_ms(job, plan))
        rows = job.rows / plan.microbatches
        (in_flight,) = set(peak_in_flight(gpipe(job.stages, plan.microbatches)))
        stages_mb = []
        for begin, end in pairwise(accumulate(plan.layers, initial=0)):
            kept_mb = rows * sum(job.kept_mb[begin:end])
            inputs_mb = rows * job.input_mb
            own_mb = in_flight * inputs_mb + kept_mb if plan.recompute else in_flight * kept_mb
            stages_mb.append(sum(job.weights_mb[begin:end]) + own_mb)
        assert held_mb(job, plan) == pytest.approx(max(stages_mb))


def test_no_plan_is_the_best_for_all_jobs() -> None:
    """The best cut, number of micro-batches and recompute differ between jobs."""
    best = {
        name: min(
            (plan for plan in all_plans(job) if held_mb(job, plan) <= job.budget_mb),
            key=lambda plan: step_ms(job, plan),
        )
        for name, job in JOBS.items()
    }
    assert {plan.recompute for plan in best.values()} == {False, True}
    assert len({plan.microbatches for plan in best.values()}) >= 3
    table = JOBS["a table that fills its rank"]
    assert best["a table that fills its rank"].layers != tuple(balance(table.row_ms, table.stages))
    total_ms = sum(step_ms(JOBS[name], plan) for name, plan in best.items())
    assert round(total_ms) == BEST_MS < 0.8 * UNIFORM_MS


def test_the_best_uniform_choice() -> None:
    """Each job has its best cut; all share the number of micro-batches and recompute."""
    shortest: dict[tuple[int, bool], dict[str, float]] = defaultdict(dict)
    for name, job in JOBS.items():
        for plan in all_plans(job):
            if held_mb(job, plan) <= job.budget_mb:
                of_jobs = shortest[plan.microbatches, plan.recompute]
                of_jobs[name] = min(of_jobs.get(name, math.inf), step_ms(job, plan))
    totals = [sum(of_jobs.values()) for of_jobs in shortest.values() if len(of_jobs) == len(JOBS)]
    assert min(totals) == pytest.approx(UNIFORM_MS)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
