"""What travels between stages: it follows from the schedule alone.

    virtual stage 0  -- activation -->  1  -- activation -->  2       after each forward
                     <--  gradient  --     <--  gradient  --          after each backward or input

Between stages with v chunks it goes round: the last stage's chunk 0 sends to chunk 1 of stage 0.
What one action sends and what another receives is the same `Message`: two that are equal belong
together. The runner sends it, the rules ask whether it can come in time, the replay when.
"""

from typing import NamedTuple

from labkit.schedules.actions import Action, virtual_stage


class Message(NamedTuple):
    """`what`: "activation" or "gradient"; `source` and `target` are virtual stages, whose stages
    (ranks) are `source % stages` and `target % stages`."""

    what: str
    microbatch: int
    source: int
    target: int


def received(action: Action, stage: int, stages: int, chunks: int = 1) -> Message | None:
    """What must have come before a stage can do this; None where it needs nothing from others.

    >>> received(Action("backward", 5), stage=1, stages=4)
    Message(what='gradient', microbatch=5, source=2, target=1)
    """
    virtual = virtual_stage(stage, action.chunk, stages)
    if action.phase == "forward" and virtual > 0:
        return Message("activation", action.microbatch, virtual - 1, virtual)
    if action.phase in ("backward", "input") and virtual < stages * chunks - 1:
        return Message("gradient", action.microbatch, virtual + 1, virtual)
    return None


def sent(action: Action, stage: int, stages: int, chunks: int = 1) -> Message | None:
    """What a stage sends when it has done this; None where nobody waits for it.

    >>> sent(Action("forward", 5, chunk=0), stage=3, stages=4, chunks=2)  # to chunk 1 of stage 0
    Message(what='activation', microbatch=5, source=3, target=4)
    """
    virtual = virtual_stage(stage, action.chunk, stages)
    if action.phase == "forward" and virtual < stages * chunks - 1:
        return Message("activation", action.microbatch, virtual, virtual + 1)
    if action.phase in ("backward", "input") and virtual > 0:
        return Message("gradient", action.microbatch, virtual, virtual - 1)
    return None
