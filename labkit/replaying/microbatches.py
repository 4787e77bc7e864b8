"""Which action of a pipeline's schedule each span of a trace is.

    recorded on stage 1     forward  forward  backward  forward  backward  ...
    its list of actions     F0       F1       B0        F2       B1        ...

A stage does its list in order, so the k-th outermost span of computing is the k-th action. Then a
recorded step can be told, and drawn, as the schedule was before it ran.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from labkit.schedules import Action, Schedule, chunks_of, parse
from labkit.schedules.actions import LETTERS
from labkit.trace import RankTrace, Span, Trace

KIND = "microbatch"  # of a span that is an action
RECORDED_AS = {
    "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "update": "optimizer",
}  # fmt: skip


class TimedAction(NamedTuple):
    """An action, and when it was."""

    action: Action
    began_s: float
    ended_s: float


def action_of(span: Span) -> Action:
    """What a span of kind "microbatch" is."""
    return parse(LETTERS[span.phase] + span.module)[0]


def by_microbatch(trace: Trace, schedule: Schedule) -> Trace:
    """The trace of a recorded pipeline with one span for each action of `schedule`, as
    `pipeline_trace` has them: of its phase and named after its micro-batch, "3", with several
    chunks "3.1". What was inside of these is left out. Rank k has done the list of stage k, once in
    every step.

    Raises ValueError where the ranks are not the stages, or where one has computed other things
    than its list.
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
            spans += list(_named(one, schedule[rank], chunks_of(schedule)))
        phases = {RECORDED_AS[action.phase] for action in schedule[rank]}
        spans += [x for x in _outermost(one) if x.phase not in phases]
        ranks[rank] = replace(one, spans=sorted(spans, key=lambda x: x.began_s))
    return replace(trace, ranks=ranks)


def _named(one: RankTrace, actions: list[Action], chunks: int) -> Iterator[Span]:
    """Its spans, each a copy with the name of its action."""
    phases = {RECORDED_AS[action.phase] for action in actions}
    spans = [x for x in _outermost(one) if x.phase in phases and x.ended_s]
    place = number = 0
    while place < len(spans) or number % len(actions):
        action = actions[number % len(actions)]
        began_s = spans[place].began_s if place < len(spans) else 0.0
        while (  # the forward that is computed again for this backward
            RECORDED_AS[action.phase] == "backward"
            and place + 1 < len(spans)
            and [x.phase for x in spans[place : place + 2]] == ["forward", "backward"]
        ):
            place += 1
        span = spans[place] if place < len(spans) else None
        if span is None or span.phase != RECORDED_AS[action.phase]:
            raise ValueError(
                f"rank {one.rank}: action {number % len(actions)} of its list is {action}, and "
                f"what was recorded is {f'{span.phase} of {span.kind}' if span else 'nothing more'}"
                f"; this trace is not of steps by this schedule"
            )
        name = str(action.microbatch) + f".{action.chunk}" * (chunks > 1)
        yield replace(span, phase=action.phase, module=name, began_s=began_s, kind=KIND)
        place, number = place + 1, number + 1


def _outermost(one: RankTrace) -> list[Span]:
    """What it computed, in order. The loss is a span of its own until backward begins; on the
    stages before the last that is a wait."""
    spans = [x for x in one.spans if x.depth == 0 and x.phase != "user" and x.kind != "loss"]
    return sorted(spans, key=lambda x: x.began_s)


def timed_actions(trace: Trace) -> list[list[TimedAction]]:
    """Of each stage, what it did when; of a trace whose spans are named after micro-batches, as
    `by_microbatch` and `pipeline_trace` give.

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
