"""Checks of lab 16, "Schedules"."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from labkit.course.exercise import Score, exercise
from labkit.course.findings import brief, fail, no_return, several
from labkit.course.ranks import alone, first_backward, run, warm
from labkit.schedules import (
    Schedule,
    ScheduleError,
    check,
    chunks_of,
    interleaved,
    microbatches_of,
    one_f_one_b,
    peak_in_flight,
)

from .scenarios import (
    JOBS,
    LAYERS,
    MESSAGE_S,
    ROWS,
    SHORT_W,
    SIZES,
    Job,
    held,
    idle,
    interleaved_after,
    replayed_bubble,
    train_alone,
    train_by,
    weight_error,
)

HINTS = {
    "known actions": 'Return a list of actions such as Action("forward", 0).',
    "exactly once": "Every stage runs one forward and one backward for each micro-batch.",
    "one backward": "backward is both halves; input is one half, weight the other.",
    "deadlock": "Follow the cycle: one of these actions must come earlier.",
}


def _validated(found: Any, stages: int, microbatches: int) -> Schedule:
    """The student's lists as a schedule; fails if it breaks a rule."""
    where = f"with {stages} stages and {microbatches} micro-batches"
    for stage, actions in enumerate(found):
        if not isinstance(actions, (list, tuple)):
            fail(
                f"{where}, stage {stage} has {brief(actions)}.",
                expected="a list of actions",
                hint=no_return(actions),
            )
    schedule = [list(actions) for actions in found]
    try:
        check(schedule, microbatches)
    except ScheduleError as error:
        fail(f"{where}, the schedule breaks a rule: {error}.", hint=HINTS.get(error.rule, ""))
    return schedule


def _check_phases(schedule: Schedule, allowed: tuple[str, ...], hint: str) -> None:
    for stage, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.phase not in allowed:
                fail(
                    f"stage {stage} runs {action} at position {position}.",
                    expected=" or ".join(allowed),
                    hint=hint,
                )


def _lists_of_all_stages(student: Any, sizes: Any, *more: Any) -> list[tuple[int, int, Any]]:
    """The student's results for all stages, for each pair of sizes."""

    def ask() -> list[Any]:
        return [(p, m, [student(r, p, m, *more) for r in range(p)]) for p, m in sizes]

    found: list[tuple[int, int, Any]] = alone(ask)
    return found


# ---- my_1f1b(stage, stages, microbatches)


@exercise(points=3)
def my_1f1b(student: Any) -> Iterator[str]:
    """my_1f1b(stage, stages, microbatches): the actions of one stage."""
    for p, m, found in _lists_of_all_stages(student, SIZES):
        schedule = _validated(found, p, m)
        _check_phases(schedule, ("forward", "backward"), "1F1B has no half backwards or updates.")
        most = [min(p - r, m) for r in range(p)]
        for stage, peak in enumerate(peak_in_flight(schedule)):
            if peak > most[stage]:
                fail(
                    f"with {p} stages and {m} micro-batches, stage {stage} holds {peak} of them.",
                    expected=f"no more than min(p - stage, m) = {most[stage]}",
                    hint="A stage that holds that many runs a backward before the next forward.",
                )
        least = (p - 1) * 3.0
        if idle(schedule) > least:
            fail(
                f"with {p} stages and {m} micro-batches, stages are idle for {idle(schedule):g}.",
                expected=f"(p-1)(F+B) = {least:g}, with F = 1 and B = 2",
                hint="How many forwards does a stage run before its first backward can start?",
            )
    yield "the schedule follows all rules, even with fewer micro-batches than stages"
    yield "every stage holds at most min(p - stage, m) micro-batches"
    yield "the bubble is (p-1)(F+B)"


# ---- warm_up(stage, stages, microbatches, chunks)


@exercise(points=2)
def warm_up(student: Any) -> Iterator[str]:
    """warm_up(stage, stages, microbatches, chunks): forwards before the first 1F1B pair."""
    for chunks in (2, 3):
        sizes = ((2, 4), (3, 6), (4, 8), (4, 4))
        for p, m, found in _lists_of_all_stages(student, sizes, chunks):
            where = f"with {p} stages, {m} micro-batches and {chunks} chunks"
            for stage, count in enumerate(found):
                if isinstance(count, bool) or not isinstance(count, int):
                    what = f"warm_up({stage}, ...) returned {brief(count)}"
                    fail(f"{where}, {what}.", expected="a whole number")
                if not 0 <= count <= m * chunks:
                    fail(
                        f"{where}, stage {stage} warms up with {count} forwards.",
                        expected=f"0 to {m * chunks}, the number of its forwards",
                    )
            _check_warm_ups(where, found, p, m, chunks)
    yield "the schedule follows all rules, with 2 and 3 chunks, even with only p micro-batches"
    yield "the bubble is (p-1)(F+B)/v if messages are free"
    yield "the step is the shortest if a message takes a tenth of a forward, with the least memory"


def _check_warm_ups(where: str, found: list[int], p: int, m: int, chunks: int) -> None:
    schedule = interleaved_after(found, m, chunks)
    best = interleaved(p, m, chunks)
    try:
        check(schedule, m)
    except ScheduleError as error:
        fail(
            f"{where}, with warm-ups of {found}: {error}.",
            hint="Before the first backward, a group of micro-batches passes through all chunks of "
            "all stages.",
        )
    for message_s, when in ((0.0, "if messages are free"), (MESSAGE_S, "if messages take time")):
        idle_time, least = idle(schedule, message_s=message_s), idle(best, message_s=message_s)
        if idle_time > least:
            fail(
                f"{where}, with warm-ups of {found}, stages are idle for {idle_time:g} {when}.",
                expected=f"{least:g}",
                hint="While a message travels, a stage needs a forward to compute: one more "
                "forward for each stage that follows."
                if message_s
                else "How many forwards does a stage run before its first backward can start?",
            )
    for stage, (most, enough) in enumerate(zip(held(schedule), held(best))):
        if most > enough:
            fail(
                f"{where}, stage {stage} warms up with {found[stage]} forwards and holds {most:g} "
                "micro-batches.",
                expected=f"{enough:g}: with fewer forwards, the step takes no longer",
            )


# ---- zb_h1(stage, stages, microbatches)


@exercise(points=3)
def zb_h1(student: Any) -> Iterator[str]:
    """zb_h1(stage, stages, microbatches): the actions of one stage, with split backwards."""
    for p, m, found in _lists_of_all_stages(student, ((1, 2), (2, 4), (3, 3), (4, 8))):
        schedule = _validated(found, p, m)
        where = f"with {p} stages and {m} micro-batches"
        _check_phases(
            schedule, ("forward", "input", "weight"),
            'Action("backward", k) is both halves: split it.',
        )  # fmt: skip
        for stage, peak in enumerate(peak_in_flight(schedule)):
            if peak > p:
                fail(
                    f"{where}, stage {stage} holds {peak} micro-batches.",
                    expected=f"at most p = {p}",
                    hint="A stage holds a micro-batch until its W, so W cannot come that late.",
                )
        for costs, weight in ((None, 1.0), (SHORT_W, 0.5)):
            least = (p - 1) * (2 - weight)
            idle_time = idle(schedule, costs) if costs else idle(schedule)
            if idle_time > least:
                fail(
                    f"{where}, stages are idle for {idle_time:g}, if F = I = 1 and W = {weight:g}.",
                    expected=f"(p-1)(F+I-W) = {least:g}",
                    hint="The previous stage waits for I, but no stage waits for W. How late can W "
                    "be on stage r, if it may hold p micro-batches instead of p - r?",
                )
    yield "the schedule follows all rules"
    yield "every stage holds at most p micro-batches, like the first stage of 1F1B"
    yield "the bubble is (p-1)(F+I-W), for long and for short W"


# ---- invent(job)

BEST = 37  # per mille idle, reached with split backwards and chunks (wrong_answers.py)


def _mean_bubble_per_mille(schedules: dict[str, Schedule]) -> float:
    """The mean bubble over the jobs, in per mille."""
    bubbles = [replayed_bubble(schedules[name], job.costs) for name, job in JOBS.items()]
    return 1000 * sum(bubbles) / len(bubbles)


@exercise(points=4)
def invent(student: Any) -> Iterator[str | Score]:
    """invent(job): any schedule that fits the job's memory and has less idle time than 1F1B."""
    schedules = {}
    for name, found in zip(JOBS, alone(lambda: [student(job) for job in JOBS.values()])):
        schedules[name] = _check_job(name, JOBS[name], found)
    warm(4, first_backward)
    for name, schedule in schedules.items():
        _check_weights(name, run(4, train_by, schedule).values)
    yield "the schedules follow all rules and stay within their jobs' memory"
    yield "less idle time than 1F1B in each job"
    yield "after a step on 4 ranks, the weights equal those of a single process"
    yield Score(round(_mean_bubble_per_mille(schedules)), BEST, "per mille of the time idle")


def _check_job(name: str, job: Job, found: Any) -> Schedule:
    several(found, job.stages, f"for {name}, invent returned", f"{job.stages} lists")
    schedule = _validated(found, job.stages, job.microbatches)
    _check_phases(
        schedule, ("forward", "backward", "input", "weight"),
        "An update within the step changes training: all micro-batches need the same weights.",
    )  # fmt: skip
    if LAYERS % (job.stages * chunks_of(schedule)):
        fail(
            f"for {name}, each stage has {chunks_of(schedule)} chunks.",
            expected=f"1 or 2: the model has {LAYERS} layers",
        )
    for stage, most in enumerate(held(schedule)):
        if most > job.held:
            fail(
                f"for {name}, stage {stage} holds {most:g} micro-batches.",
                expected=f"at most {job.held}",
                hint="A stage holds a micro-batch until its backward, or until its W.",
            )
    plain = replayed_bubble(one_f_one_b(job.stages, job.microbatches), job.costs)
    bubble = replayed_bubble(schedule, job.costs)
    if bubble >= plain:
        fail(
            f"for {name}, stages are idle for {bubble:.1%} of the time.",
            expected=f"less than 1F1B's {plain:.1%}",
            hint="Which half of a backward can fill idle time, because no other stage needs it?",
        )
    assert microbatches_of(schedule) <= ROWS
    return schedule


def _check_weights(name: str, of_ranks: list[dict[str, Tensor]]) -> None:
    """Fails unless all ranks together have the weights of one process."""
    if problem := weight_error(of_ranks, train_alone()):
        expected = "the weights of a single process"
        fail(f"for {name}, after a step on 4 ranks: {problem}.", expected=expected)
