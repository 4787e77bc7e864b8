"""What a pipeline schedule is made of.

A schedule says for each stage what it computes, in which order. What travels follows from it: the
forward of a micro-batch needs the activations of the stage before, its backward the gradient of
the stage after (`messages.py`). No torch, no times, no ranks.

    F  forward    of a micro-batch
    B  backward   the gradients of its input and of the weights, in one
    I  input      the first half of that: the gradient of the input, which the stage before waits
                  for (B in the zero-bubble papers)
    W  weight     the second half: the gradient of the weights, which nobody waits for
    U  update     the optimizer's step of this stage with the gradient of this micro-batch alone

With v chunks, each of p stages has v pieces of the model, and the model goes round v times: chunk
c of stage r is *virtual stage* c p + r. Of 2 stages with 2 chunks, stage 0 has the virtual stages 0
and 2, stage 1 has 1 and 3.
"""

from typing import NamedTuple

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "update": "U"}


class Action(NamedTuple):
    """One thing that a stage computes for a micro-batch on one of its chunks. `phase`: "forward",
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


def virtual_stage(stage: int, chunk: int, stages: int) -> int:
    """Where in the model chunk `chunk` of a stage stands: c p + r.

    >>> virtual_stage(stage=1, chunk=2, stages=4)
    9
    """
    return chunk * stages + stage


def stage_and_chunk(virtual: int, stages: int) -> tuple[int, int]:
    """Who has this virtual stage: the stage and its chunk.

    >>> stage_and_chunk(9, stages=4)
    (1, 2)
    """
    return virtual % stages, virtual // stages


def chunks_of(schedule: Schedule) -> int:
    """How many chunks each stage has: 1 more than the highest number of a chunk."""
    return 1 + max((one.chunk for actions in schedule for one in actions), default=0)


def microbatches_of(schedule: Schedule) -> int:
    """How many micro-batches there are: 1 more than the highest number of a micro-batch."""
    return 1 + max((one.microbatch for actions in schedule for one in actions), default=-1)


def check_sizes(stages: int, microbatches: int) -> None:
    """Raise ValueError for numbers that make no pipeline."""
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{what}={number}: a pipeline has a whole number of them, at least 1")
