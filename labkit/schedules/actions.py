"""What a pipeline schedule is made of, and what travels between its stages.

    F  forward    of a micro-batch
    B  backward   the gradients of its input and of the weights, in one
    I  input      the first half of that: the gradient of the input, which the stage before waits
                  for (B in the zero-bubble papers)
    W  weight     the second half: the gradient of the weights, which no stage waits for
    U  update     the optimizer's step of this stage with the gradient of this micro-batch alone

With v chunks, each of p stages has v pieces of the model, and the model goes round v times: chunk
c of stage r is *virtual stage* c p + r, and the last stage's chunk 0 sends to chunk 1 of stage 0.

    virtual stage 0  -- activation -->  1  -- activation -->  2       after each forward
                     <--  gradient  --     <--  gradient  --          after each backward or input

What one action sends and another receives is the same `Message`.
"""

from typing import NamedTuple

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "update": "U"}


class Action(NamedTuple):
    """One computation of a stage for a micro-batch on one of its chunks. `phase`: "forward",
    "backward", "input", "weight" or "update".

    >>> str(Action("forward", 3)), str(Action("weight", 0, chunk=1))
    ('F3', 'W0.1')
    """

    phase: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        number = f"{self.microbatch}.{self.chunk}" if self.chunk else f"{self.microbatch}"
        return f"{LETTERS.get(self.phase, self.phase)}{number}"


Schedule = list[list[Action]]  # of stage 0, 1, ...


class Message(NamedTuple):
    """`what`: "activation" or "gradient"; `source` and `target` are virtual stages, whose stages
    (ranks) are `source % stages` and `target % stages`."""

    what: str
    microbatch: int
    source: int
    target: int


def received(action: Action, stage: int, stages: int, chunks: int = 1) -> Message | None:
    """What must arrive before a stage can do this; None where it needs nothing from others.

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
    """What a stage sends after this action; None where no other stage waits for it.

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
    """The place of a stage's chunk in the model: c p + r.

    >>> virtual_stage(stage=1, chunk=2, stages=4)
    9
    """
    return chunk * stages + stage


def stage_and_chunk(virtual: int, stages: int) -> tuple[int, int]:
    """The stage that has this virtual stage, and its chunk.

    >>> stage_and_chunk(9, stages=4)
    (1, 2)
    """
    return virtual % stages, virtual // stages


def chunks_of(schedule: Schedule) -> int:
    """Chunks of each stage: 1 more than the highest number of a chunk."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


def microbatches_of(schedule: Schedule) -> int:
    """Micro-batches: 1 more than the highest number of one."""
    return 1 + max((action.microbatch for actions in schedule for action in actions), default=-1)


def check_sizes(stages: int, microbatches: int) -> None:
    """Raises ValueError for numbers that make no pipeline."""
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{what}={number}: a pipeline has a whole number of them, at least 1")
