"""Which action of a pipeline's schedule each span of a trace is.

recorded on stage 1     forward  forward  backward  forward  backward  ...
its list of actions     F0       F1       B0        F2       B1        ...
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from labkit.schedules import Action, Schedule, chunks_of, parse
from labkit.schedules.actions import LETTERS
from labkit.trace import RankTrace, Span, Trace

KIND = "microbatch"  # of a span that is an action
NEXT_S = 1e-4  # the longest gap to a span that follows at once
RECORDED_AS = {
    "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "update": "optimizer",
}  # fmt: skip


class TimedAction(NamedTuple):
    """An action, and when it ran."""

    action: Action
    began_s: float
    ended_s: float


def span_name(action: Action, chunks: int) -> str:
    """ "3" for micro-batch 3, or with several chunks "3.1"."""
    return str(action.microbatch) + f".{action.chunk}" * (chunks > 1)


def action_of(span: Span) -> Action:
    """The action of a span of kind "microbatch"."""
    return parse(LETTERS[span.phase] + span.module)[0]


def by_microbatch(trace: Trace, schedule: Schedule) -> Trace:
    """The trace of a recorded pipeline with one span for each action of `schedule`, as
    `pipeline_trace` has them: with the action's phase, named after its micro-batch, "3", or with
    several chunks "3.1". Spans inside these are left out. Rank k has run the list of stage k, once
    in every step.

    Raises ValueError where the ranks are not the stages, or a rank has run another list.
    """
    if sorted(trace.ranks) != list(range(len(schedule))):
        raise ValueError(
            f"a schedule of {len(schedule)} stages, and a trace of ranks {sorted(trace.ranks)}: "
            f"each rank is one stage; record all of them"
        )
    ranks = {}
    for rank, one in trace.ranks.items():
        spans = [span for span in one.spans if span.phase == "user"]
        if schedule[rank]:
            spans += list(_named(one, schedule))
        phases = {RECORDED_AS[action.phase] for action in schedule[rank]}
        spans += [x for x in _outermost(one) if x.phase not in phases and x.kind != "loss"]
        ranks[rank] = replace(one, spans=sorted(spans, key=lambda x: x.began_s))
    return replace(trace, ranks=ranks)


def _named(one: RankTrace, schedule: Schedule) -> Iterator[Span]:
    """Its spans, each a copy with the name of its action."""
    actions, chunks = schedule[one.rank], chunks_of(schedule)
    phases = [RECORDED_AS[action.phase] for action in actions]
    spans = [x for x in _outermost(one) if x.phase in phases and x.ended_s and x.kind != "loss"]
    is_last = one.rank == len(schedule) - 1
    ends = [is_last and x.phase == "forward" and x.chunk == chunks - 1 for x in actions]  # in loss
    recorded = Counter(span.phase for span in spans)
    rounds = recorded["backward"] / max(phases.count("backward"), 1)  # how often the list was run
    loss_is_module = recorded["forward"] == rounds * (phases.count("forward") + sum(ends))
    place = number = 0
    while place < len(spans) or number % len(actions):
        k = number % len(actions)
        action, in_loss = actions[k], ends[k]
        found = spans[place : place + 1 + (in_loss and loss_is_module)]
        if [x.phase for x in found] != [phases[k]] * max(len(found), 1):
            what = f"{found[-1].phase} of {found[-1].kind or 'all'}" if found else "nothing more"
            raise ValueError(
                f"rank {one.rank}: action {k} of its list is {action}, and "
                f"what was recorded is {what}; this trace is not of steps by this schedule"
            )
        place, number = place + len(found), number + 1
        ended_s = found[-1].ended_s
        if in_loss and actions[number % len(actions)] == action._replace(phase="backward"):
            ended_s = max([ended_s, *_losses_before(one, spans[place:])])
        yield replace(
            found[0], phase=action.phase, module=span_name(action, chunks), ended_s=ended_s,
            kind=KIND, depth=0,
        )  # fmt: skip


def _losses_before(one: RankTrace, following: Sequence[Span]) -> list[float]:
    """When the loss was computed from which this backward begins."""
    return [
        x.ended_s
        for x in one.spans
        if x.kind == "loss" and following and 0 <= following[0].began_s - x.ended_s < NEXT_S
    ]


def _outermost(one: RankTrace) -> list[Span]:
    """What the rank computed, in order. (The time between the last forward and backward is recorded
    as "loss": on the stages before the last it is a wait.)"""
    spans = [x for x in one.spans if x.depth == 0 and x.phase != "user"]
    return sorted(spans, key=lambda x: x.began_s)


def timed_actions(trace: Trace) -> list[list[TimedAction]]:
    """The actions of each stage, from a trace whose spans are named after micro-batches, as
    `by_microbatch` and `pipeline_trace` return.

    Raises ValueError where no span is.
    """
    found = [
        [
            TimedAction(action_of(span), span.began_s, span.ended_s)
            for span in sorted(trace.ranks[rank].spans, key=lambda x: x.began_s)
            if span.kind == KIND
        ]
        for rank in sorted(trace.ranks)
    ]
    if not any(found):
        raise ValueError(
            "no span of this trace is named after a micro-batch: give the schedule that was run, "
            "as in by_microbatch(trace, schedule)"
        )
    return found
