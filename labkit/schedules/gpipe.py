"""GPipe: all forwards, then all backwards.

    3 stages, 4 micro-batches; F2 is the forward of micro-batch 2, B2 its backward

        stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3
        stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3

While stage 1 has micro-batch 0, stage 0 goes on with micro-batch 1. What is left is filling and
draining, a bubble of (p - 1)(F + B) for p stages: the more micro-batches m, the smaller its part,
(p - 1)/(m + p - 1) of the total. But each stage holds the activations of all m.

Backwards come in the order of the forwards here. (GPipe's own go the other way round, last in,
first out; bubble and memory are the same.)

Source: GPipe, arXiv 1811.06965, section 2.3; as here, arXiv 2104.04473, figure 3.
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def gpipe(stages: int, microbatches: int) -> Schedule:
    """The same list for every stage. Raises ValueError for less than 1 of either.

    >>> [str(one) for one in gpipe(stages=3, microbatches=2)[0]]
    ['F0', 'F1', 'B0', 'B1']
    """
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for phase in ("forward", "backward") for k in range(microbatches)]
        for _ in range(stages)
    ]
