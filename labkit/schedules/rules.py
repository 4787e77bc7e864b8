"""The rules of a pipeline, to which `check` holds any schedule, a student's own too.

In this order; the first that is broken is told:

    known actions            phases that exist, micro-batches and chunks counted from 0
    exactly once             each stage does, for each micro-batch on each of its chunks, one
                             forward, and one way back: backward, or input and weight
    one way back             never backward beside input or weight, which would count twice
    all update or none       with an update of a micro-batch, all have one, on all stages
    backward after forward   of the same micro-batch and chunk, in a stage's own order
    weight after input       likewise
    update after backward    likewise; where it is in two halves, after both
    deadlock                 what each action waits for from its neighbours comes in the end.
                             Nobody waits in order to send.
"""

from collections import deque
from collections.abc import Iterator

from labkit.schedules.actions import LETTERS, Action, Schedule, chunks_of, microbatches_of
from labkit.schedules.messages import Message, received, sent

BEFORE = {  # phase -> rule, and what of the same micro-batch and chunk must stand before it
    "backward": ("backward after forward", ("forward",)),
    "input": ("backward after forward", ("forward",)),
    "weight": ("weight after input", ("forward", "input")),
    "update": ("update after backward", ("backward", "input", "weight")),
}


class ScheduleError(ValueError):
    """A schedule that is none. `rule` is the name of the rule that it breaks first, `stage`,
    `position` (counted from 0) and `action` say where; None where there is no such thing, as for
    an action that is missing."""

    def __init__(
        self,
        rule: str,
        message: str,
        stage: int | None = None,
        position: int | None = None,
        action: Action | None = None,
    ):
        super().__init__(rule, message, stage, position, action)  # all, to be sent between ranks
        self.rule, self.stage, self.position, self.action = rule, stage, position, action

    def __str__(self) -> str:
        return f"{self.rule}: {self.args[1]}"


def check(schedule: Schedule, microbatches: int | None = None) -> None:
    """Raise ScheduleError for the first rule that this schedule breaks (see the top of this file).

    `microbatches`: how many there must be; without it, as many as the schedule itself counts."""
    _known_actions(schedule)
    found = microbatches_of(schedule)
    if not schedule or not found:
        raise ScheduleError("exactly once", "this schedule does nothing; it needs stages that act")
    _exactly_once(schedule, found if microbatches is None else microbatches)
    _all_update_or_none(schedule)
    _in_order(schedule)
    done, places = _as_far_as_it_goes(schedule)
    if len(done) < sum(map(len, schedule)):
        raise _deadlock(schedule, places)


def run_order(schedule: Schedule) -> list[tuple[int, int]]:
    """All (stage, position), each after everything that it needs. Raises as `check`."""
    check(schedule)
    return _as_far_as_it_goes(schedule)[0]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """How many activations each stage holds at most, one for each micro-batch and chunk: from its
    forward until its backward, or until "weight", which needs them too.

    With v chunks each is of 1/v of the stage's layers, so v of them are as much as one without.
    """
    peaks = []
    for actions in schedule:
        held = peak = 0
        for action in actions:
            held += (action.phase == "forward") - (action.phase in ("backward", "weight"))
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _known_actions(schedule: Schedule) -> None:
    for stage, position, action in _all(schedule):
        at = f"stage {stage}, position {position}"
        if not isinstance(action, Action):
            raise ScheduleError(
                "known actions", f"{at} has {action!r}; an Action is needed", stage, position
            )
        numbers = (action.microbatch, action.chunk)
        if action.phase not in LETTERS:
            problem = f"phase {action.phase!r}; there are {', '.join(LETTERS)}"
        elif not all(isinstance(one, int) and one >= 0 for one in numbers):
            problem = f"micro-batch {numbers[0]} on chunk {numbers[1]}; both count from 0"
        else:
            continue
        raise ScheduleError("known actions", f"{at} has {problem}", stage, position, action)


def _exactly_once(schedule: Schedule, microbatches: int) -> None:
    chunks = chunks_of(schedule)
    for stage, actions in enumerate(schedule):
        first: dict[Action, int] = {}
        for position, action in enumerate(actions):
            if action in first:
                raise ScheduleError(
                    "exactly once",
                    f"stage {stage} does {action} at position {first[action]} and again at "
                    f"position {position}",
                    stage, position, action,
                )  # fmt: skip
            if action.microbatch >= microbatches:
                raise ScheduleError(
                    "exactly once",
                    f"stage {stage} does {action} at position {position}, and there are "
                    f"{microbatches} micro-batches, counted from 0",
                    stage, position, action,
                )  # fmt: skip
            first[action] = position
        for chunk in range(chunks):
            for k in range(microbatches):
                _complete(stage, k, chunk, first)


def _complete(stage: int, microbatch: int, chunk: int, position: dict[Action, int]) -> None:
    """Forward, and one way back, of one micro-batch on one chunk."""
    forward, backward, inputs, weight = (
        Action(phase, microbatch, chunk) for phase in ("forward", "backward", "input", "weight")
    )
    back = [one for one in (backward, inputs, weight) if one in position]
    missing = None
    if forward not in position:
        missing = f"{forward}"
    elif not back:
        missing = f"{backward} (nor {inputs} and {weight})"
    elif back in ([inputs], [weight]):
        (has,) = back
        missing = f"{weight if has == inputs else inputs}, the other half of {has}"
    if missing:
        what = f"stage {stage} never does {missing}"
        raise ScheduleError("exactly once", what, stage)
    if backward in back and len(back) > 1:
        at = position[back[1]]
        raise ScheduleError(
            "one way back",
            f"stage {stage} does {back[1]} at position {at}, and {backward}, which is both halves, "
            f"at position {position[backward]}",
            stage, at, back[1],
        )  # fmt: skip


def _all_update_or_none(schedule: Schedule) -> None:
    wanted = {one for actions in schedule for one in actions if one.phase == "update"}
    for stage, actions in enumerate(schedule):
        if wanted and (missing := sorted(_forwards_as_updates(actions) - set(actions))):
            raise ScheduleError(
                "all update or none",
                f"stage {stage} never does {missing[0]}, and others have their update: a weight's "
                "gradient belongs to one micro-batch, or to all of them",
                stage,
            )


def _forwards_as_updates(actions: list[Action]) -> set[Action]:
    return {Action("update", *one[1:]) for one in actions if one.phase == "forward"}


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
                        f"stage {stage} does {action} at position {position}, before its {needed} "
                        f"at position {place[needed]}",
                        stage, position, action,
                    )  # fmt: skip


def _as_far_as_it_goes(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """What can be done, each after what it waits for; and where each stage then stands."""
    stages, chunks = len(schedule), chunks_of(schedule)
    done: list[tuple[int, int]] = []
    places = [0] * stages
    there: set[Message] = set()
    waiting: dict[Message, int] = {}
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        while places[stage] < len(schedule[stage]):
            action = schedule[stage][places[stage]]
            needed = received(action, stage, stages, chunks)
            if needed is not None and needed not in there:
                waiting[needed] = stage
                break
            done.append((stage, places[stage]))
            places[stage] += 1
            message = sent(action, stage, stages, chunks)
            if message is not None:
                there.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
    return done, places


def _deadlock(schedule: Schedule, places: list[int]) -> ScheduleError:
    """Who waits for whom, in a circle. Nothing is missing here, so each waits for one who waits."""
    stages, chunks = len(schedule), chunks_of(schedule)
    begin = next(s for s, actions in enumerate(schedule) if places[s] < len(actions))
    stage, told = begin, dict[int, str]()
    while stage not in told:
        action = schedule[stage][places[stage]]
        message = received(action, stage, stages, chunks)
        assert message is not None
        other = message.source % stages
        needed = next(
            one
            for one in schedule[other][places[other] :]
            if sent(one, other, stages, chunks) == message
        )
        told[stage] = (
            f"stage {stage}, position {places[stage]}: {action} waits for {needed} of stage "
            f"{other}, which comes after {schedule[other][places[other]]} there"
        )
        stage = other
    circle = list(told)[list(told).index(stage) :]
    words = [told[one] for one in circle]
    if len(words) > 6:
        words = [*words[:3], f"... ({len(words) - 5} more)", *words[-2:]]
    action = schedule[stage][places[stage]]
    return ScheduleError("deadlock", "; ".join(words), stage, places[stage], action)


def _all(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for stage, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            yield stage, position, action
