"""Naive model parallelism, and GPipe: schedules that fill the pipeline and drain it.

Naive: each micro-batch goes forward through all stages and back before the next begins.

    3 stages, 2 micro-batches; F1 is the forward of micro-batch 1, B1 its backward

        stage 0  F0 .. .. .. .. B0 F1 .. .. .. .. B1
        stage 1  .. F0 .. .. B0 .. .. F1 .. .. B1
        stage 2  .. .. F0 B0 .. .. .. .. F1 B1

A stage holds one of them, and works 1/p of the time: the bubble is m (p - 1)(F + B) for m
micro-batches on p stages, (p - 1)/p of the total, whatever m is. So does a model moved over several
devices layer by layer (`.to("cuda:1")`).

GPipe: all forwards, then all backwards.

    3 stages, 4 micro-batches

        stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3
        stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3

While stage 1 has micro-batch 0, stage 0 goes on with micro-batch 1. What is left is filling and
draining, a bubble of (p - 1)(F + B): the more micro-batches m, the smaller its part, (p - 1)/(m +
p - 1) of the total. But each stage holds the activations of all m. (GPipe's own backwards run last
in, first out; bubble and memory are the same.)

Source: GPipe, arXiv 1811.06965, figure 2b (naive) and section 2.3; as here, arXiv 2104.04473,
figure 3.
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def naive(stages: int, microbatches: int) -> Schedule:
    """The same list for every stage. Raises ValueError for less than 1 of either.

    >>> [str(action) for action in naive(stages=3, microbatches=2)[0]]
    ['F0', 'B0', 'F1', 'B1']
    """
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for k in range(microbatches) for phase in ("forward", "backward")]
        for _ in range(stages)
    ]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """The same list for every stage. Raises ValueError for less than 1 of either.

    >>> [str(action) for action in gpipe(stages=3, microbatches=2)[0]]
    ['F0', 'F1', 'B0', 'B1']
    """
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for phase in ("forward", "backward") for k in range(microbatches)]
        for _ in range(stages)
    ]
