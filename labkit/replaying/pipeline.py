"""A pipeline schedule as one program per stage and as spans in a trace.

One recorded micro-batch per distinct stage is enough: `stage_seconds` returns the stage's forward
and backward times on a cluster, and the schedule determines the order and the messages.

    recorded on stage 1     forward  forward  backward  forward  backward  ...
    actions of stage 1      F0       F1       B0        F2       B1        ...
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Program, Timed, Wait, run
from labkit.replaying.replays import replay, set_times
from labkit.schedules import Action, Message, Schedule, check, chunks_of, parse, received, sent
from labkit.schedules.actions import LETTERS
from labkit.trace import RankTrace, Span, Step, Trace

Seconds = Callable[[int, Action], float] | Mapping[str, float]
"""Seconds per action: a function `seconds(stage, action)`, or a dict like {"forward": 1.0, ...}.
With v chunks, an action covers 1/v of a stage, so the caller divides the stage's time by v."""
MessageSeconds = float | Callable[[Message], float]
"""Seconds until a message arrives: one value, or a function of the message."""
KIND = "microbatch"  # kind of the spans that represent actions
NEXT_S = 1e-4  # longest gap between spans that count as consecutive
RECORDED_AS = {
    "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "update": "optimizer",
}  # fmt: skip


def pipeline_programs(
    schedule: Schedule, seconds: Seconds, message_s: MessageSeconds = 0.0
) -> dict[int, Program]:
    """One program per stage. For each action, a stage waits for the input, computes, and sends the
    output, which arrives `message_s` later (pure latency: messages may overlap). Raises
    ScheduleError for the first rule the schedule breaks, ValueError if `seconds` lacks a phase."""
    check(schedule)
    stages, chunks = len(schedule), chunks_of(schedule)
    programs: dict[int, Program] = {}
    for stage, actions in enumerate(schedule):
        program: list[Compute | Issue | Wait] = []
        for action in actions:
            needed = received(action, stage, stages, chunks)
            output = sent(action, stage, stages, chunks)
            # A single stage with several chunks produces its own inputs.
            if needed is not None and stages > 1:
                program.append(Wait(needed))
            program.append(Compute(_seconds_of(seconds, stage, action), action))
            if output is not None and stages > 1:
                latency_s = message_s(output) if callable(message_s) else message_s
                port = f"to {output.target % stages}"
                program.append(Issue(output, (stage,), 0.0, latency_s, port))
        programs[stage] = program
    return programs


def _seconds_of(seconds: Seconds, stage: int, action: Action) -> float:
    if callable(seconds):
        return seconds(stage, action)
    if action.phase not in seconds:
        raise ValueError(
            f"stage {stage} runs {action}, but `seconds` has no {action.phase!r}, only "
            f"{', '.join(seconds) or 'an empty dict'}; add it"
        )
    return seconds[action.phase]


def bubble(schedule: Schedule, step_s: float, seconds: Seconds) -> float:
    """The mean idle fraction of the stages, 0 to 1. `step_s` is the result of `pipeline_step_s`, or
    the time from the first action to the last action over all stages."""
    stages = enumerate(schedule)
    busy_s = sum(_seconds_of(seconds, stage, x) for stage, actions in stages for x in actions)
    return 1 - busy_s / (step_s * len(schedule))


def pipeline_step_s(trace: Trace) -> float:
    """Step time: the maximum over stages of the time from first to last action, as defined for
    zero-bubble schedules (arXiv 2401.10241). Raises ValueError if a rank has no micro-batches."""
    spans = [[x for x in rank.spans if x.kind == KIND] for rank in trace.ranks.values()]
    if not spans or not all(spans):
        raise ValueError("no micro-batches in this trace; see pipeline_trace or by_microbatch")
    return max(max(x.ended_s for x in own) - min(x.began_s for x in own) for own in spans)


def pipeline_trace(
    schedule: Schedule,
    seconds: Seconds,
    message_s: MessageSeconds = 0.0,
    message_bytes: int = 0,
) -> Trace:
    """Simulate one step as a trace: rank k runs stage k; its step ends with its last action. Every
    action becomes a span of its phase, named "3" for micro-batch 3, or "3.1" for chunk 1 if there
    are several chunks. Raises the same errors as `pipeline_programs`."""
    programs = pipeline_programs(schedule, seconds, message_s)
    timed, stages, chunks = run(programs), len(schedule), chunks_of(schedule)
    transfers: dict[Hashable, tuple[int, Timed]] = {}  # key -> sequence number, times
    count = Counter[tuple[int, str]]()
    for stage, program in programs.items():
        for part, when in zip(program, timed[stage], strict=True):
            if isinstance(part, Issue):
                count[stage, part.port] += 1
                transfers[part.key] = count[stage, part.port], when
    ranks = {}
    for stage, program in programs.items():
        rank_trace = RankTrace(stage, stages, steps=[Step(0, 0.0, timed[stage][-1].ended_s)])
        for part, when in zip(program, timed[stage], strict=True):
            if isinstance(part, Compute):
                name = span_name(part.what, chunks)
                rank_trace.spans.append(Span(part.what.phase, name, 0, *when, kind=KIND))
                continue
            message: Message = part.key  # type: ignore[assignment]
            is_send = isinstance(part, Issue)
            number, carried = transfers[message]
            event = CommEvent(
                "send" if is_send else "recv", "pipeline", tuple(range(stages)), stage, number, "",
                (), message_bytes, message_bytes if is_send else 0, blocking=not is_send,
                peer=(message.target if is_send else message.source) % stages,
            )  # fmt: skip
            set_times(event, when.began_s, carried, None if is_send else when)
            rank_trace.comms.append(event)
        ranks[stage] = rank_trace
    return Trace(ranks, {"what": "pipeline", "world_size": stages})


def stage_seconds(trace: Trace, cluster: Cluster) -> Mapping[str, float]:
    """Mean "forward" and "backward" seconds per micro-batch on a device of the cluster, from a
    trace of one stage (`dry_run`). Raises ValueError if a phase is missing or `replay` fails."""
    (rank_trace,) = replay(trace, cluster).ranks.values()
    seconds, times = {"forward": 0.0, "backward": 0.0}, Counter[str]()
    for span in rank_trace.spans:
        if span.depth == 0 and span.phase in seconds:
            seconds[span.phase] += span.ended_s - span.began_s
            times[span.phase] += 1
    if missing := [phase for phase in seconds if not times[phase]]:
        raise ValueError(f"this trace of a stage has no {missing[0]} pass; record a training step")
    # A stage may consist of several modules, but runs one backward per micro-batch.
    return {phase: sum_s / times["backward"] for phase, sum_s in seconds.items()}


# ---- spans and actions


class TimedAction(NamedTuple):
    """An action of a schedule, with its begin and end times."""

    action: Action
    began_s: float
    ended_s: float


def span_name(action: Action, chunks: int) -> str:
    """The span name: "3" for micro-batch 3, or "3.1" for chunk 1 if there are several chunks."""
    return str(action.microbatch) + f".{action.chunk}" * (chunks > 1)


def action_of(span: Span) -> Action:
    """The action that a span of kind "microbatch" represents."""
    return parse(LETTERS[span.phase] + span.module)[0]


def by_microbatch(trace: Trace, schedule: Schedule) -> Trace:
    """A recorded pipeline with one span per action of `schedule`, as in `pipeline_trace`; nested
    spans are dropped. Raises ValueError unless rank k ran stage k's actions in order."""
    if sorted(trace.ranks) != list(range(len(schedule))):
        raise ValueError(
            f"the schedule has {len(schedule)} stages, but the trace has ranks "
            f"{sorted(trace.ranks)}; record one rank for each stage"
        )
    ranks = {}
    for rank, rank_trace in trace.ranks.items():
        spans = [span for span in rank_trace.spans if span.phase == "user"]
        if schedule[rank]:
            spans += list(_named(rank_trace, schedule))
        phases = {RECORDED_AS[action.phase] for action in schedule[rank]}
        spans += [x for x in _outermost(rank_trace) if x.phase not in phases and x.kind != "loss"]
        ranks[rank] = replace(rank_trace, spans=sorted(spans, key=lambda x: x.began_s))
    return replace(trace, ranks=ranks)


def _named(rank_trace: RankTrace, schedule: Schedule) -> Iterator[Span]:
    """Copies of a rank's spans, named after their actions."""
    actions, chunks = schedule[rank_trace.rank], chunks_of(schedule)
    phases = [RECORDED_AS[action.phase] for action in actions]
    ended = [x for x in _outermost(rank_trace) if x.ended_s and x.kind != "loss"]
    spans = [x for x in ended if x.phase in phases]
    is_last = rank_trace.rank == len(schedule) - 1
    ends = [is_last and x.phase == "forward" and x.chunk == chunks - 1 for x in actions]
    recorded = Counter(span.phase for span in spans)
    rounds = recorded["backward"] / max(phases.count("backward"), 1)  # number of recorded steps
    loss_is_module = recorded["forward"] == rounds * (phases.count("forward") + sum(ends))
    place = number = 0
    while place < len(spans) or number % len(actions):
        k = number % len(actions)
        action, in_loss = actions[k], ends[k]
        of_action = spans[place : place + 1 + (in_loss and loss_is_module)]
        if [x.phase for x in of_action] != [phases[k]] * max(len(of_action), 1):
            last = of_action[-1] if of_action else None
            what = f"{last.phase} of {last.kind or 'the model'}" if last else "no more spans"
            raise ValueError(
                f"rank {rank_trace.rank}: action {k} of the schedule is {action}, but the trace "
                f"has {what}; pass the schedule that was run"
            )
        place, number = place + len(of_action), number + 1
        ended_s = of_action[-1].ended_s
        is_next = actions[number % len(actions)] == action._replace(phase="backward")
        if in_loss and is_next and place < len(spans):  # the backward pass starts at the loss
            losses = [x.ended_s for x in rank_trace.spans if x.kind == "loss"]
            began_s = spans[place].began_s
            ended_s = max([ended_s, *(x for x in losses if 0 <= began_s - x < NEXT_S)])
        yield replace(
            of_action[0], phase=action.phase, module=span_name(action, chunks), ended_s=ended_s,
            kind=KIND, depth=0,
        )  # fmt: skip


def _outermost(rank_trace: RankTrace) -> list[Span]:
    """The outermost spans, in time order. A "loss" span covers the time from forward to
    backward, which every stage but the last spends waiting."""
    spans = [x for x in rank_trace.spans if x.depth == 0 and x.phase != "user"]
    return sorted(spans, key=lambda x: x.began_s)


def timed_actions(trace: Trace) -> list[list[TimedAction]]:
    """The timed actions of each stage. Raises ValueError for a trace without micro-batch spans."""
    stages = []
    for rank in sorted(trace.ranks):
        spans = sorted(trace.ranks[rank].spans, key=lambda x: x.began_s)
        actions = [x for x in spans if x.kind == KIND]
        stages.append([TimedAction(action_of(x), x.began_s, x.ended_s) for x in actions])
    if not any(stages):
        raise ValueError(
            "no span of this trace is named after a micro-batch; name them with the schedule that "
            "was run: by_microbatch(trace, schedule)"
        )
    return stages
