"""Actions of a pipeline schedule, and the messages between its stages.

    F  forward    of a micro-batch
    B  backward   the gradients of the stage's input and weights, in one action
    I  input      the first half of B: the input gradient, which the previous stage waits for (B in
                  the zero-bubble papers)
    W  weight     the second half of B: the weight gradients, which no stage waits for
    U  update     the stage's optimizer step with this micro-batch's gradient alone

Each of p stages may hold v chunks of the model. Chunk c of stage r is *virtual stage* c p + r; the
last stage's chunk 0 sends to chunk 1 of stage 0.

    virtual stage 0  -- activation -->  1  -- activation -->  2       after each forward
                     <--  gradient  --     <--  gradient  --          after each backward or input
"""

from typing import NamedTuple

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "update": "U"}


class Action(NamedTuple):
    """One computation of a stage. `phase`: "forward", "backward", "input", "weight" or "update".

    >>> str(Action("forward", 3)), str(Action("weight", 0, chunk=1))
    ('F3', 'W0.1')
    """

    phase: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        number = f"{self.microbatch}.{self.chunk}" if self.chunk else f"{self.microbatch}"
        return f"{LETTERS.get(self.phase, self.phase)}{number}"


Schedule = list[list[Action]]  # one list per stage


class Message(NamedTuple):
    """An "activation" or "gradient" (`what`) from virtual stage `source` to `target`."""

    what: str
    microbatch: int
    source: int
    target: int


def received(action: Action, stage: int, stages: int, chunks: int = 1) -> Message | None:
    """The message that `action` waits for, or None.

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
    """The message that `action` sends, or None.

    >>> sent(Action("forward", 5, chunk=0), stage=3, stages=4, chunks=2)  # to chunk 1 of stage 0
    Message(what='activation', microbatch=5, source=3, target=4)
    """
    virtual = virtual_stage(stage, action.chunk, stages)
    if action.phase == "forward" and virtual < stages * chunks - 1:
        return Message("activation", action.microbatch, virtual, virtual + 1)
    if action.phase in ("backward", "input") and virtual > 0:
        return Message("gradient", action.microbatch, virtual, virtual - 1)
    return None


def virtual_stage(stage: int, chunk: int, stages: int) -> int:
    """The virtual stage c p + r.

    >>> virtual_stage(stage=1, chunk=2, stages=4)
    9
    """
    return chunk * stages + stage


def stage_and_chunk(virtual: int, stages: int) -> tuple[int, int]:
    """The inverse of `virtual_stage`.

    >>> stage_and_chunk(9, stages=4)
    (1, 2)
    """
    return virtual % stages, virtual // stages


def chunks_of(schedule: Schedule) -> int:
    """Chunks per stage: the highest chunk index + 1."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


def microbatches_of(schedule: Schedule) -> int:
    """Number of micro-batches: the highest index + 1."""
    return 1 + max((action.microbatch for actions in schedule for action in actions), default=-1)


def check_sizes(stages: int, microbatches: int) -> None:
    """Raises ValueError unless both are integers of at least 1."""
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{what}={number}: choose a whole number, 1 or more")
