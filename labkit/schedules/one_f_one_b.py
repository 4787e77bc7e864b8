"""1F1B: after a warm-up, each stage does one forward, one backward, in turns.

    3 stages, 4 micro-batches; F2 is the forward of micro-batch 2, B2 its backward

        stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3

Each stage holds the activations of no more than (stages - stage) micro-batches, however many
there are; with GPipe, which does all forwards first, it is all of them. The bubble is the same:
(p - 1)(F + B) for p stages.

Source: PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, section 2.2.1.
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """The actions of each stage. Raises ValueError for less than 1 of either.

    >>> [str(one) for one in one_f_one_b(stages=3, microbatches=4)[1]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    """
    check_sizes(stages, microbatches)
    schedule = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        actions = [Action("forward", k) for k in range(warm_up)]
        for k in range(microbatches - warm_up):
            actions += [Action("forward", warm_up + k), Action("backward", k)]
        actions += [Action("backward", k) for k in range(microbatches - warm_up, microbatches)]
        schedule.append(actions)
    return schedule
