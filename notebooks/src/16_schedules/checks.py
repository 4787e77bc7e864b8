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
    furthest,
    held,
    idle,
    interleaved_after,
    replayed_bubble,
    trained_alone,
    trained_by,
)

HINTS = {
    "known actions": 'A list of actions, as Action("forward", 0).',
    "exactly once": "Each micro-batch has one forward, and one way back, on every stage.",
    "one way back": "Backward is both halves; input and weight are one each.",
    "deadlock": "Follow the circle: one of these must come earlier.",
}


def _is_valid(found: Any, stages: int, microbatches: int) -> Schedule:
    """The schedule; fails if it breaks a rule."""
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
        fail(f"{where}, a rule is broken. {error}.", hint=HINTS.get(error.rule, ""))
    return schedule


def _phases(schedule: Schedule, allowed: tuple[str, ...], hint: str) -> None:
    for stage, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.phase not in allowed:
                fail(
                    f"stage {stage} does {action} at position {position}.",
                    expected=" or ".join(allowed),
                    hint=hint,
                )


def _of_all_stages(student: Any, sizes: Any, *more: Any) -> list[tuple[int, int, Any]]:
    """The student's result for each stage of each size."""

    def ask() -> list[Any]:
        return [(p, m, [student(r, p, m, *more) for r in range(p)]) for p, m in sizes]

    found: list[tuple[int, int, Any]] = alone(ask)
    return found


# ---- my_1f1b(stage, stages, microbatches)


@exercise(points=3)
def my_1f1b(student: Any) -> Iterator[str]:
    """my_1f1b(stage, stages, microbatches): the actions of one stage."""
    for p, m, found in _of_all_stages(student, SIZES):
        schedule = _is_valid(found, p, m)
        _phases(schedule, ("forward", "backward"), "1F1B has neither halves nor updates.")
        most = [min(p - r, m) for r in range(p)]
        for stage, peak in enumerate(peak_in_flight(schedule)):
            if peak > most[stage]:
                fail(
                    f"with {p} stages and {m} micro-batches, stage {stage} holds {peak} of them.",
                    expected=f"no more than min(p - stage, m) = {most[stage]}",
                    hint="When it has that many, a backward must come before the next forward.",
                )
        least = (p - 1) * 3.0
        if idle(schedule) > least:
            fail(
                f"with {p} stages and {m} micro-batches, it idles {idle(schedule):g}.",
                expected=f"(p-1)(F+B) = {least:g}, with F = 1 and B = 2",
                hint="How many forwards does a stage do before its first backward can come?",
            )
    yield "all rules kept, also with fewer micro-batches than stages"
    yield "min(p - stage, m) micro-batches held, on every stage"
    yield "a bubble of (p-1)(F+B)"


# ---- warm_up(stage, stages, microbatches, chunks)


@exercise(points=2)
def warm_up(student: Any) -> Iterator[str]:
    """warm_up(stage, stages, microbatches, chunks): forwards before the first pair."""
    for chunks in (2, 3):
        sizes = ((2, 4), (3, 6), (4, 8), (4, 4))
        for p, m, found in _of_all_stages(student, sizes, chunks):
            where = f"with {p} stages, {m} micro-batches and {chunks} chunks"
            for stage, count in enumerate(found):
                if isinstance(count, bool) or not isinstance(count, int):
                    fail(f"{where}, stage {stage} has {brief(count)}.", expected="a whole number")
                if not 0 <= count <= m * chunks:
                    fail(
                        f"{where}, stage {stage} warms up with {count} forwards.",
                        expected=f"0 to {m * chunks}: it has no more",
                    )
            _warm_up(where, found, p, m, chunks)
    yield "no rule broken, with 2 and 3 chunks, and with as many micro-batches as stages"
    yield "a bubble of (p-1)(F+B)/v where messages cost nothing"
    yield "the shortest step where they take a tenth of a forward, and no more held than that needs"


def _warm_up(where: str, found: list[int], p: int, m: int, chunks: int) -> None:
    schedule = interleaved_after(found, m, chunks)
    best = interleaved(p, m, chunks)
    try:
        check(schedule, m)
    except ScheduleError as error:
        fail(
            f"{where}, warm-ups of {found}: {error}.",
            hint="Before the first backward, its group goes through all chunks of all stages.",
        )
    for message_s, when in ((0.0, "where messages cost nothing"), (MESSAGE_S, "with messages")):
        its, least = idle(schedule, message_s=message_s), idle(best, message_s=message_s)
        if its > least:
            fail(
                f"{where}, warm-ups of {found}: it idles {its:g} {when}.",
                expected=f"{least:g}",
                hint="While a message travels, a stage should have a forward in hand: one more for "
                "each stage that follows."
                if message_s
                else "How many forwards does a stage do before its first backward can come?",
            )
    for stage, (one, good) in enumerate(zip(held(schedule), held(best))):
        if one > good:
            fail(
                f"{where}, stage {stage} warms up with {found[stage]} forwards, and holds {one:g} "
                "micro-batches.",
                expected=f"{good:g}: the step is as short, and it holds less",
            )


# ---- zb_h1(stage, stages, microbatches)


@exercise(points=3)
def zb_h1(student: Any) -> Iterator[str]:
    """zb_h1(stage, stages, microbatches): the actions of one stage, backward in halves."""
    for p, m, found in _of_all_stages(student, ((1, 2), (2, 4), (3, 3), (4, 8))):
        schedule = _is_valid(found, p, m)
        where = f"with {p} stages and {m} micro-batches"
        _phases(
            schedule, ("forward", "input", "weight"),
            'Action("backward", k) is both halves at once.',
        )  # fmt: skip
        for stage, peak in enumerate(peak_in_flight(schedule)):
            if peak > p:
                fail(
                    f"{where}, stage {stage} holds {peak} micro-batches.",
                    expected=f"p = {p} at most",
                    hint="A micro-batch is held until its weight half, so W may not wait for ever.",
                )
        for costs, weight in ((None, 1.0), (SHORT_W, 0.5)):
            least = (p - 1) * (2 - weight)
            its = idle(schedule, costs) if costs else idle(schedule)
            if its > least:
                fail(
                    f"{where}, it idles {its:g}, where F = I = 1 and W = {weight:g}.",
                    expected=f"(p-1)(F+I-W) = {least:g}",
                    hint="The stage before waits for I, and nobody for W. How late may W be on "
                    "stage r, if it holds p micro-batches and not p - r?",
                )
    yield "all rules kept"
    yield "p micro-batches held, as on 1F1B's first stage"
    yield "a bubble of (p-1)(F+I-W), for long and for short W"


# ---- invent(job)

BEST = 37  # per mille of the time, idle: halves and chunks together (wrong_answers.py)


def _bubbles(schedules: dict[str, Schedule]) -> float:
    """The mean bubble over the jobs, in per mille."""
    each = [replayed_bubble(schedules[name], job.costs) for name, job in JOBS.items()]
    return 1000 * sum(each) / len(each)


@exercise(points=4)
def invent(student: Any) -> Iterator[str | Score]:
    """invent(job): any schedule that fits the job's memory and idles less than 1F1B."""
    schedules = {}
    for name, found in zip(JOBS, alone(lambda: [student(job) for job in JOBS.values()])):
        schedules[name] = _fits(name, JOBS[name], found)
    warm(4, first_backward)
    for name, schedule in schedules.items():
        _weights(name, run(4, trained_by, schedule).values)
    yield "all rules kept, and no stage holds more than it may"
    yield "less idle than 1F1B, in each job"
    yield "on 4 ranks, the weights of a single process after a step"
    yield Score(round(_bubbles(schedules)), BEST, "per mille of the time idle")


def _fits(name: str, job: Job, found: Any) -> Schedule:
    several(found, job.stages, f"for {name}, invent returned", f"{job.stages} lists")
    schedule = _is_valid(found, job.stages, job.microbatches)
    _phases(
        schedule, ("forward", "backward", "input", "weight"),
        "An update in the middle is another training: weights of one step, for all micro-batches.",
    )  # fmt: skip
    if LAYERS % (job.stages * chunks_of(schedule)):
        fail(
            f"for {name}, it has {chunks_of(schedule)} chunks on each stage.",
            expected=f"1 or 2: the model that runs has {LAYERS} layers",
        )
    for stage, most in enumerate(held(schedule)):
        if most > job.held:
            fail(
                f"for {name}, stage {stage} holds {most:g} micro-batches.",
                expected=f"{job.held} at most",
                hint="A forward is held until its backward, or its weight half.",
            )
    plain = replayed_bubble(one_f_one_b(job.stages, job.microbatches), job.costs)
    its = replayed_bubble(schedule, job.costs)
    if its >= plain:
        fail(
            f"for {name}, {its:.1%} of the time is idle.",
            expected=f"less than 1F1B's {plain:.1%}",
            hint="What can a stage do while it waits, that nobody waits for?",
        )
    assert microbatches_of(schedule) <= ROWS
    return schedule


def _weights(name: str, of_ranks: list[dict[str, Tensor]]) -> None:
    """Fails unless all ranks together have the weights of one process."""
    if wrong := furthest(of_ranks, trained_alone()):
        fail(f"for {name}, run on 4 ranks: {wrong}.", expected="the weights of a single process")
