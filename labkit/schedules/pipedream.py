"""PipeDream: 1F1B without a flush. Each stage updates its weights after each backward.

    3 stages, 4 micro-batches

        stage 0  F0 F1 F2 .. .. B0 U0 F3 B1 U1 .. B2 U2 .. B3 U3
        stage 1  .. F0 F1 .. B0 U0 F2 B1 U1 F3 B2 U2 .. B3 U3
        stage 2  .. .. F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3

U0 is the step of the optimizer with the gradient of micro-batch 0. Nobody waits for the others
before it, so one minibatch follows the other, and the bubble is paid once, at the very beginning
and end. The price is that weights are *stale*: on stage 0, the forward of micro-batch 3 above uses
weights that know of micro-batch 0 alone, though micro-batches 1 and 2 came before it. Stage r of p
is p - 1 - r updates behind. A backward needs the weights of its own forward, so a stage keeps a
version for each micro-batch in flight, p - r at most: *weight stashing*.

This is another algorithm than all others here: its weights are not those of one device.

Source: PipeDream, arXiv 1806.03377, sections 3.2 and 3.3.
"""

from labkit.schedules.actions import Action, Schedule
from labkit.schedules.one_f_one_b import one_f_one_b


def pipedream(stages: int, microbatches: int) -> Schedule:
    """The actions of each stage. Raises ValueError for less than 1 of either.

    >>> [str(one) for one in pipedream(stages=2, microbatches=2)[0]]
    ['F0', 'F1', 'B0', 'U0', 'B1', 'U1']
    """
    schedule: Schedule = []
    for actions in one_f_one_b(stages, microbatches):
        schedule.append([])
        for action in actions:
            schedule[-1].append(action)
            if action.phase == "backward":
                schedule[-1].append(Action("update", action.microbatch))
    return schedule
