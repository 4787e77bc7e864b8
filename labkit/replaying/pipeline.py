"""A pipeline schedule as programs of ranks, one for each stage.

One micro-batch of each distinct stage is enough of a record: `stage_seconds` has its forward and
its backward on a cluster, and the schedule says how often and in which order they come.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Program, Wait, run
from labkit.replaying.replays import replay, set_times
from labkit.schedules import Action, Schedule
from labkit.trace import RankTrace, Span, Step, Trace


def pipeline_programs(
    schedule: Schedule, seconds: Callable[[int, Action], float], message_s: float = 0.0
) -> dict[int, Program]:
    """What each stage does: `seconds(stage, action)` for each of its actions; before it, it waits
    for what that needs, and after it sends on what has come out, which is there `message_s` later.
    (The message is all latency: several may be under way to the same stage.)

    Raises ValueError for a schedule that goes backward through what has not gone forward.
    """
    last = len(schedule) - 1
    programs: dict[int, Program] = {}
    for stage, actions in enumerate(schedule):
        program: list[Compute | Issue | Wait] = []
        gone_forward = set()
        for action in actions:
            if action.phase == "forward":
                gone_forward.add(action.microbatch)
            elif action.phase != "backward" or action.microbatch not in gone_forward:
                raise ValueError(f"stage {stage}: {action} is no forward, nor a backward after it")
            forward = action.phase == "forward"
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if 0 <= before <= last:
                program.append(Wait((*action, before, stage)))
            program.append(Compute(seconds(stage, action), action))
            if 0 <= after <= last:
                key = (*action, stage, after)
                program.append(Issue(key, (stage,), 0.0, message_s, f"to {after}"))
        programs[stage] = program
    return programs


def bubble(schedule: Schedule, step_s: float, seconds: Callable[[int, Action], float]) -> float:
    """The part of the step, of all stages together, in which nothing is computed: 0 to 1."""
    busy_s = sum(seconds(stage, one) for stage, actions in enumerate(schedule) for one in actions)
    return 1 - busy_s / (step_s * len(schedule))


def pipeline_trace(
    schedule: Schedule,
    seconds: Callable[[int, Action], float],
    message_s: float = 0.0,
    message_bytes: int = 0,
) -> Trace:
    """The step of a pipeline as a trace: stage k is rank k, whose step ends with its last
    action; a span is named after its micro-batch. Raises as `pipeline_programs` and the clock."""
    programs = pipeline_programs(schedule, seconds, message_s)
    timed = run(programs)
    sent = {
        part.key: when
        for stage, program in programs.items()
        for part, when in zip(program, timed[stage], strict=True)
        if isinstance(part, Issue)
    }
    ranks = {}
    for stage, program in programs.items():
        ended_s = timed[stage][-1].ended_s if program else 0.0
        one = ranks[stage] = RankTrace(stage, len(schedule), steps=[Step(0, 0.0, ended_s)])
        numbers: Counter[Hashable] = Counter()  # of the messages on each way, so far
        for part, when in zip(program, timed[stage], strict=True):
            if isinstance(part, Compute):
                name = str(part.what.microbatch)
                one.spans.append(Span(part.what.phase, name, 0, *when, kind="microbatch"))
                continue
            source, target = way = part.key[-2:]  # type: ignore[index]
            numbers[way] += 1
            one.comms.append(
                CommEvent(
                    "send" if source == stage else "recv", "pipeline", tuple(range(len(schedule))),
                    stage, numbers[way], "", (), message_bytes,
                    message_bytes if source == stage else 0, blocking=source != stage,
                    peer=target if source == stage else source,
                )
            )  # fmt: skip
            wait = when if isinstance(part, Wait) else None
            set_times(one.comms[-1], when.began_s, sent[part.key], wait)
    return Trace(ranks, {"what": "pipeline", "world_size": len(schedule)})


def stage_seconds(trace: Trace, cluster: Cluster) -> Mapping[str, float]:
    """Seconds of the forward and of the backward of one micro-batch, "forward" and "backward", on
    a device of the cluster. `trace`: of one stage, as `dry_run` records it; where it has several
    micro-batches, their mean.

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
