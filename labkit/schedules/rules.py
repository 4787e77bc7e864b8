"""The rules that every schedule, including a custom one, must follow.

`check` reports the first violation, in this order:

    known actions            phases that exist, micro-batches and chunks counted from 0
    exactly once             each stage runs one forward per micro-batch and chunk, and one
                             backward, whole or as its halves, input and weight
    one backward             a whole backward or its halves, not both: gradients would count twice
    all update or none       every micro-batch has an update on every stage, or none has one
    backward after forward   of the same micro-batch and chunk, on each stage
    weight after input       of the same micro-batch and chunk
    update after backward    or after both halves of backward
    deadlock                 every message that an action waits for arrives (sends do not block)
"""

from collections import deque
from itertools import product

from labkit.schedules.actions import (
    LETTERS,
    Action,
    Message,
    Schedule,
    chunks_of,
    microbatches_of,
    received,
    sent,
)

BEFORE = {  # phase -> rule, and the earlier phases of the same micro-batch and chunk
    "backward": ("backward after forward", ("forward",)),
    "input": ("backward after forward", ("forward",)),
    "weight": ("weight after input", ("forward", "input")),
    "update": ("update after backward", ("backward", "input", "weight")),
}


class ScheduleError(ValueError):
    """Raised for an invalid schedule: the first violated `rule`, and the `stage`, `position` (from
    0) and `action` of the violation, each None if unknown (as for a missing action)."""

    def __init__(
        self, rule: str, message: str, stage: int | None = None, position: int | None = None,
        action: Action | None = None,
    ):  # fmt: skip
        super().__init__(rule, message, stage, position, action)  # all, for pickling
        self.rule, self.stage, self.position, self.action = rule, stage, position, action

    def __str__(self) -> str:
        return f"{self.rule}: {self.args[1]}"


def check(schedule: Schedule, microbatches: int | None = None) -> None:
    """Raises ScheduleError for the first violation; `microbatches` is the expected number."""
    _known_actions(schedule)
    count = microbatches_of(schedule)
    if not schedule or not count:
        raise ScheduleError(
            "exactly once", "this schedule has no actions; pass a list of actions for each stage"
        )
    _exactly_once(schedule, count if microbatches is None else microbatches)
    _all_update_or_none(schedule)
    _in_order(schedule)
    done, places = _simulate(schedule)
    if len(done) < sum(map(len, schedule)):
        raise _deadlock(schedule, places)


def run_order(schedule: Schedule) -> list[tuple[int, int]]:
    """All (stage, position) pairs in a valid execution order. Raises ScheduleError like `check`."""
    check(schedule)
    return _simulate(schedule)[0]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Peak number of stored activations per stage, counted per micro-batch and chunk (1/v of the
    stage's layers). Activations are stored until backward or, if it is split, until "weight"."""
    peaks = []
    for actions in schedule:
        held = peak = 0
        for action in actions:
            held += (action.phase == "forward") - (action.phase in ("backward", "weight"))
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _known_actions(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            known = action if isinstance(action, Action) else None
            if known is None:
                problem = f"{action!r}; pass an Action"
            elif action.phase not in LETTERS:
                problem = f"phase {action.phase!r}; choose one of {', '.join(LETTERS)}"
            elif not all(isinstance(n, int) and n >= 0 for n in action[1:]):
                problem = (
                    f"micro-batch {action.microbatch} on chunk {action.chunk}; both count from 0"
                )
            else:
                continue
            text = f"stage {stage}, position {position} has {problem}"
            raise ScheduleError("known actions", text, stage, position, known)


def _exactly_once(schedule: Schedule, microbatches: int) -> None:
    for stage, actions in enumerate(schedule):
        first: dict[Action, int] = {}
        for position, action in enumerate(actions):
            problem = ""
            if action in first:
                problem = f"{first[action]} and again at position {position}"
            elif action.microbatch >= microbatches:
                problem = f"{position}, but there are {microbatches} micro-batches, counted from 0"
            if problem:
                text = f"stage {stage} runs {action} at position {problem}"
                raise ScheduleError("exactly once", text, stage, position, action)
            first[action] = position
        for chunk, k in product(range(chunks_of(schedule)), range(microbatches)):
            _complete(stage, k, chunk, first)


def _complete(stage: int, microbatch: int, chunk: int, position: dict[Action, int]) -> None:
    """Raises ScheduleError unless a micro-batch has one forward and one backward on a chunk."""
    forward, backward, inputs, weight = (
        Action(phase, microbatch, chunk) for phase in ("forward", "backward", "input", "weight")
    )
    back = [action for action in (backward, inputs, weight) if action in position]
    missing = ""
    if forward not in position:
        missing = f"{forward}"
    elif not back:
        missing = f"{backward} (nor {inputs} and {weight})"
    elif back in ([inputs], [weight]):
        missing = f"{weight if back == [inputs] else inputs}, the other half of {back[0]}"
    if missing:
        raise ScheduleError("exactly once", f"stage {stage} never runs {missing}", stage)
    if backward in back and len(back) > 1:
        at = position[back[1]]
        raise ScheduleError(
            "one backward",
            f"stage {stage} runs {back[1]} at position {at}, but also {backward}, which includes "
            f"both halves, at position {position[backward]}",
            stage, at, back[1],
        )  # fmt: skip


def _all_update_or_none(schedule: Schedule) -> None:
    if not any(action.phase == "update" for actions in schedule for action in actions):
        return
    for stage, actions in enumerate(schedule):
        updates = {a._replace(phase="update") for a in actions if a.phase == "forward"}
        if missing := sorted(updates - {*actions}):
            raise ScheduleError(
                "all update or none",
                f"stage {stage} never runs {missing[0]}, but other micro-batches have an update; "
                "add an update for every micro-batch, or for none",
                stage,
            )


def _in_order(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule):
        place = {action: position for position, action in enumerate(actions)}
        for position, action in enumerate(actions):
            rule, phases = BEFORE.get(action.phase, ("", ()))
            for phase in phases:
                needed = action._replace(phase=phase)
                if place.get(needed, -1) > position:
                    raise ScheduleError(
                        rule,
                        f"stage {stage} runs {action} at position {position}, before its {needed} "
                        f"at position {place[needed]}",
                        stage, position, action,
                    )  # fmt: skip


def _simulate(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the actions that can run, in order, and each stage's next position."""
    stages, chunks = len(schedule), chunks_of(schedule)
    done: list[tuple[int, int]] = []
    places = [0] * stages
    arrived: set[Message | None] = {None}
    waiting: dict[Message | None, int] = {}
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        while places[stage] < len(schedule[stage]):
            action = schedule[stage][places[stage]]
            needed = received(action, stage, stages, chunks)
            if needed not in arrived:
                waiting[needed] = stage
                break
            done.append((stage, places[stage]))
            places[stage] += 1
            message = sent(action, stage, stages, chunks)
            arrived.add(message)
            if message in waiting:
                ready.append(waiting.pop(message))
    return done, places


def _deadlock(schedule: Schedule, places: list[int]) -> ScheduleError:
    """The error for a cycle of stages, each waiting for the next; no action is missing."""
    stages, chunks = len(schedule), chunks_of(schedule)
    stage = next(s for s, actions in enumerate(schedule) if places[s] < len(actions))
    waits: dict[int, str] = {}
    while stage not in waits:
        action = schedule[stage][places[stage]]
        message = received(action, stage, stages, chunks)
        assert message is not None
        other = message.source % stages
        behind = schedule[other][places[other] :]
        needed = next(a for a in behind if sent(a, other, stages, chunks) == message)
        waits[stage] = (
            f"stage {stage}, position {places[stage]}: {action} waits for {needed} of stage "
            f"{other}, which comes after {behind[0]} there"
        )
        stage = other
    cycle = list(waits.values())[list(waits).index(stage) :]
    if len(cycle) > 6:
        cycle = [*cycle[:3], f"... ({len(cycle) - 5} more)", *cycle[-2:]]
    action = schedule[stage][places[stage]]
    return ScheduleError("deadlock", "; ".join(cycle), stage, places[stage], action)
