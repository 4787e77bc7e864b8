"""What a pipeline schedule is made of.

A schedule says for each stage what it computes, in which order. What travels follows from it: the
forward of a micro-batch needs the activations of the stage before, its backward the gradient of
the stage after. No torch, no times, no ranks.
"""

from typing import NamedTuple


class Action(NamedTuple):
    """One thing that a stage computes: the "forward" or "backward" of a micro-batch."""

    phase: str
    microbatch: int
    chunk: int = 0


Schedule = list[list[Action]]  # of stage 0, 1, ...


def check_sizes(stages: int, microbatches: int) -> None:
    """Raise ValueError for numbers that make no pipeline."""
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if number < 1:
            raise ValueError(f"{what}={number}: a pipeline has at least 1")
