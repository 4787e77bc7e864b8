"""A pipeline schedule as programs of ranks, one for each stage.

A recording of one micro-batch of each distinct stage is enough: `stage_seconds` has its forward and
backward on a cluster; order and messages follow from the schedule.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Program, Timed, Wait, run
from labkit.replaying.microbatches import KIND, span_name
from labkit.replaying.replays import replay, set_times
from labkit.schedules import Action, Message, Schedule, check, chunks_of, received, sent
from labkit.trace import RankTrace, Span, Step, Trace

Seconds = Callable[[int, Action], float] | Mapping[str, float]
"""Seconds of an action: `seconds(stage, action)`, or by its phase: {"forward": 1.0, ...}.
An action on one of v chunks takes 1/v of a stage: the caller divides."""
MessageSeconds = float | Callable[[Message], float]
"""Seconds until a message arrives: the same for all, or by the message."""


def pipeline_programs(
    schedule: Schedule, seconds: Seconds, message_s: MessageSeconds = 0.0
) -> dict[int, Program]:
    """The program of each stage: it waits for the input of each action, runs it, and sends the
    output, which arrives `message_s` later (all latency: several may be in flight at once).

    Raises ScheduleError with the first rule that the schedule breaks, and ValueError for a phase
    without seconds.
    """
    check(schedule)
    stages, chunks = len(schedule), chunks_of(schedule)
    programs: dict[int, Program] = {}
    for stage, actions in enumerate(schedule):
        program: list[Compute | Issue | Wait] = []
        for action in actions:
            needed = received(action, stage, stages, chunks)
            made = sent(action, stage, stages, chunks)
            # A single stage with several chunks makes its own inputs.
            if needed is not None and stages > 1:
                program.append(Wait(needed))
            program.append(Compute(_seconds_of(seconds, stage, action), action))
            if made is not None and stages > 1:
                to = f"to {made.target % stages}"
                late_s = message_s(made) if callable(message_s) else message_s
                program.append(Issue(made, (stage,), 0.0, late_s, to))
        programs[stage] = program
    return programs


def _seconds_of(seconds: Seconds, stage: int, action: Action) -> float:
    if callable(seconds):
        return seconds(stage, action)
    if action.phase not in seconds:
        raise ValueError(
            f"stage {stage} does {action}, and `seconds` has {', '.join(seconds) or 'nothing'}; "
            f"give {action.phase!r} its seconds, too"
        )
    return seconds[action.phase]


def bubble(schedule: Schedule, step_s: float, seconds: Seconds) -> float:
    """The fraction of the step, over all stages, in which nothing is computed: 0 to 1.

    `step_s`: as `pipeline_step_s` returns, or from the first action of any stage to the last.
    """
    busy_s = sum(
        _seconds_of(seconds, stage, one)
        for stage, actions in enumerate(schedule)
        for one in actions
    )
    return 1 - busy_s / (step_s * len(schedule))


def pipeline_step_s(trace: Trace) -> float:
    """The time between steps: the longest that a stage takes, from the begin of its own first
    action to the end of its own last. Zero-bubble schedules end as they begin, one stage after the
    other, and their bubbles are counted in this way (arXiv 2401.10241).

    `trace`: of `pipeline_trace`. Raises ValueError for one without micro-batches.
    """
    spans = [[span for span in one.spans if span.kind == KIND] for one in trace.ranks.values()]
    if not spans or not all(spans):
        raise ValueError("no micro-batches in this trace; `pipeline_trace` makes one that has them")
    return max(max(x.ended_s for x in one) - min(x.began_s for x in one) for one in spans)


def pipeline_trace(
    schedule: Schedule,
    seconds: Seconds,
    message_s: MessageSeconds = 0.0,
    message_bytes: int = 0,
) -> Trace:
    """The step of a pipeline as a trace: stage k is rank k, whose step ends with its last action.
    A span has the phase of its action and is named after its micro-batch, "3", or with several
    chunks "3.1". Raises as `pipeline_programs`."""
    programs = pipeline_programs(schedule, seconds, message_s)
    timed, stages, chunks = run(programs), len(schedule), chunks_of(schedule)
    sent_when: dict[Hashable, tuple[int, Timed]] = {}  # and its number in its direction, as sent
    count = Counter[tuple[int, str]]()
    for stage, program in programs.items():
        for part, when in zip(program, timed[stage], strict=True):
            if isinstance(part, Issue):
                count[stage, part.port] += 1
                sent_when[part.key] = count[stage, part.port], when
    ranks = {}
    for stage, program in programs.items():
        one = RankTrace(stage, stages, steps=[Step(0, 0.0, timed[stage][-1].ended_s)])
        for part, when in zip(program, timed[stage], strict=True):
            if isinstance(part, Compute):
                name = span_name(part.what, chunks)
                one.spans.append(Span(part.what.phase, name, 0, *when, kind=KIND))
                continue
            message: Message = part.key  # type: ignore[assignment]
            is_send = isinstance(part, Issue)
            number, carried = sent_when[message]
            event = CommEvent(
                "send" if is_send else "recv", "pipeline", tuple(range(stages)), stage, number, "",
                (), message_bytes, message_bytes if is_send else 0, blocking=not is_send,
                peer=(message.target if is_send else message.source) % stages,
            )  # fmt: skip
            set_times(event, when.began_s, carried, None if is_send else when)
            one.comms.append(event)
        ranks[stage] = one
    return Trace(ranks, {"what": "pipeline", "world_size": stages})


def stage_seconds(trace: Trace, cluster: Cluster) -> Mapping[str, float]:
    """Seconds of one micro-batch, "forward" and "backward", on a device of the cluster. `trace`: of
    one stage, as `dry_run` records it; the mean over its micro-batches.

    Raises ValueError where there is no forward or no backward, or as `replay`.
    """
    (one,) = replay(trace, cluster).ranks.values()
    seconds, times = {"forward": 0.0, "backward": 0.0}, Counter[str]()
    for span in one.spans:
        if span.depth == 0 and span.phase in seconds:
            seconds[span.phase] += span.ended_s - span.began_s
            times[span.phase] += 1
    if missing := [phase for phase in seconds if not times[phase]]:
        raise ValueError(f"this trace of a stage has no {missing[0]}; record a training step")
    # A stage may be several modules: each backward is one micro-batch.
    return {phase: sum_s / times["backward"] for phase, sum_s in seconds.items()}
