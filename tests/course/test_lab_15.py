"""Lab 15's jobs: what a plan is said to take is what the schedule takes, and each can be won."""

from itertools import pairwise

import pytest

from labkit.labs.lab_15.plans import (
    JOBS,
    Job,
    Plan,
    best_ms,
    divisors,
    held_mb,
    one_for_all_ms,
    plans,
    step_ms,
    times_ms,
)
from labkit.replaying import pipeline_step_s, pipeline_trace
from labkit.schedules import balance, gpipe, peak_in_flight


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
    assert sum(best_ms(job) for job in JOBS.values()) < 0.8 * one_for_all_ms()
    for name, plan in best.items():
        assert step_ms(JOBS[name], plan) == best_ms(JOBS[name])


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
