"""Zero bubble: backward is split into two halves, so that the second half can fill the bubble.

Backward is I, the input gradient, and W, the weight gradients. The previous stage waits for I; no
stage waits for W. So I runs first, and W runs later, in otherwise idle time. Both schedules are
1F1B with delayed Ws; ZB-H2 also has a longer warm-up:

              forwards before the first I     W delayed by     held at most     bubble
    ZB-H1     p - r                           r                p                (p-1)(F+I-W)
    ZB-H2     2 (p - r) - 1                   2 r              2p - 1           (p-1)(F+I-2W)

The first three columns count micro-batches on stage r of p, each held until its W. ZB-H1:

    3 stages, 5 micro-batches

        stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

1F1B's bubble is (p-1)(F+I+W). Here the previous stage waits only for I, which leaves (p-1)(F+I).
In ZB-H1, delayed Ws shorten the bubble by one W for each of p-1 stages, with the memory of 1F1B's
first stage; in ZB-H2, by two Ws, with almost twice that memory:

    3 stages, 5 micro-batches

        stage 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        stage 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        stage 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

Here no stage is idle between its first and last action, and the next step can start at once unless
stages synchronize (e.g. for the global gradient norm). So the table counts the bubble on the stage
with the longest time from its first to its last action.

The table's bubble holds for W <= F in ZB-H1, and for W <= F or I <= F in ZB-H2 (at least 0).
Otherwise, the bubbles are (p-1) I and (p-1)(I-F): the first stage has run as many forwards as its
memory allows and waits for the first I. No order of actions does better with that memory.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2 (I is B there).
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1. Raises ValueError for fewer micro-batches than stages.

    >>> [str(action) for action in zero_bubble_h1(stages=2, microbatches=3)[1]]
    ['F0', 'I0', 'F1', 'I1', 'W0', 'F2', 'I2', 'W1', 'W2']
    """
    _check_enough("zb-h1", stages, microbatches, stages)
    return [_stage(microbatches, stages - stage, delay=stage) for stage in range(stages)]


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2. Raises ValueError for fewer than `2 * stages - 1` micro-batches."""
    _check_enough("zb-h2", stages, microbatches, 2 * stages - 1)
    return [
        _stage(microbatches, 2 * (stages - stage) - 1, delay=2 * stage) for stage in range(stages)
    ]


def _stage(microbatches: int, warm_up: int, delay: int) -> list[Action]:
    """`warm_up` forwards, then repeated I, W (of the micro-batch `delay` earlier) and F."""
    actions = [Action("forward", k) for k in range(warm_up)]
    for k in range(microbatches + delay):
        if k < microbatches:
            actions.append(Action("input", k))
        if k >= delay:
            actions.append(Action("weight", k - delay))
        if warm_up + k < microbatches:
            actions.append(Action("forward", warm_up + k))
    return actions


def _check_enough(name: str, stages: int, microbatches: int, needed: int) -> None:
    check_sizes(stages, microbatches)
    if microbatches < needed:
        raise ValueError(
            f"microbatches={microbatches} with {stages} stages: {name} needs {needed} or more to "
            "fill the pipeline; use more micro-batches, or 1f1b"
        )
