"""A pipeline schedule as programs of ranks, one for each stage."""

from collections.abc import Callable

from labkit.replaying.engine import Compute, Issue, Program, Wait
from labkit.schedules import Action, Schedule


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
