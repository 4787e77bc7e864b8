"""Naive model parallelism: one stage computes at a time, all others wait.

    3 stages, 2 micro-batches; F1 is the forward of micro-batch 1, B1 its backward

        stage 0  F0 .. .. .. .. B0 F1 .. .. .. .. B1
        stage 1  .. F0 .. .. B0 .. .. F1 .. .. B1
        stage 2  .. .. F0 B0 .. .. .. .. F1 B1

Each micro-batch goes forward through all stages and back again before the next begins. A stage
holds one of them, and works 1/p of the time: the bubble is m (p - 1)(F + B) for m micro-batches on
p stages, (p - 1)/p of the total, whatever m is. It is what a model moved over several devices layer
by layer (`.to("cuda:1")`) does.

Source: as the baseline of GPipe, arXiv 1811.06965, figure 2b.
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def naive(stages: int, microbatches: int) -> Schedule:
    """The same list for every stage. Raises ValueError for less than 1 of either.

    >>> [str(one) for one in naive(stages=3, microbatches=2)[0]]
    ['F0', 'B0', 'F1', 'B1']
    """
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for k in range(microbatches) for phase in ("forward", "backward")]
        for _ in range(stages)
    ]
