"""Lab 15's jobs: what a plan is said to take is what the schedule takes, and each can be won."""

import math
from collections import defaultdict
from itertools import pairwise

import pytest

from labkit.labs.lab_15.plans import (
    BEST_MS,
    JOBS,
    ONE_FOR_ALL_MS,
    Job,
    Plan,
    divisors,
    held_mb,
    step_ms,
    times_ms,
)
from labkit.labs.lab_15.wrong_answers import plans
from labkit.parallel.splitting import balance
from labkit.replaying import pipeline_step_s, pipeline_trace
from labkit.schedules import gpipe, peak_in_flight


def a_few(job: Job) -> list[Plan]:
    return list(plans(job))[::97]


def replayed_ms(job: Job, plan: Plan) -> float:
    of_phase = dict(zip(("forward", "backward"), times_ms(job, plan), strict=True))
    schedule = gpipe(job.stages, plan.microbatches)
    return pipeline_step_s(pipeline_trace(schedule, lambda stage, x: of_phase[x.phase][stage]))


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_takes_what_its_schedule_takes(name: str) -> None:
    job = JOBS[name]
    for plan in a_few(job):
        assert step_ms(job, plan) == pytest.approx(replayed_ms(job, plan))


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_holds_what_its_schedule_has_in_flight(name: str) -> None:
    job = JOBS[name]
    for plan in a_few(job):
        rows = job.rows / plan.microbatches
        (in_flight,) = set(peak_in_flight(gpipe(job.stages, plan.microbatches)))
        ends = [0] + [sum(plan.layers[: i + 1]) for i in range(job.stages)]
        stages = []
        for begin, end in pairwise(ends):
            kept = rows * sum(job.kept_mb[begin:end])
            mine = in_flight * rows * job.input_mb + kept if plan.recompute else in_flight * kept
            stages.append(sum(job.weights_mb[begin:end]) + mine)
        assert held_mb(job, plan) == pytest.approx(max(stages))


def test_no_answer_is_the_best_for_all_jobs() -> None:
    """What is to be chosen differs: the cut, the number of micro-batches, whether to recompute."""
    best = {
        name: min(
            (plan for plan in plans(job) if held_mb(job, plan) <= job.budget_mb),
            key=lambda plan: step_ms(job, plan),
        )
        for name, job in JOBS.items()
    }
    assert {plan.recompute for plan in best.values()} == {False, True}
    assert len({plan.microbatches for plan in best.values()}) >= 3
    table = JOBS["a table that fills its rank"]
    assert best["a table that fills its rank"].layers != tuple(balance(table.row_ms, table.stages))
    total_ms = sum(step_ms(JOBS[name], plan) for name, plan in best.items())
    assert round(total_ms) == BEST_MS < 0.8 * ONE_FOR_ALL_MS


def test_what_one_choice_for_all_jobs_can_have() -> None:
    """Each job cut as well as can be, with the same micro-batches and recompute for all."""
    shortest: dict[tuple[int, bool], dict[str, float]] = defaultdict(dict)
    for name, job in JOBS.items():
        for plan in plans(job):
            if held_mb(job, plan) <= job.budget_mb:
                of_jobs = shortest[plan.microbatches, plan.recompute]
                of_jobs[name] = min(of_jobs.get(name, math.inf), step_ms(job, plan))
    totals = [sum(of_jobs.values()) for of_jobs in shortest.values() if len(of_jobs) == len(JOBS)]
    assert min(totals) == pytest.approx(ONE_FOR_ALL_MS)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
