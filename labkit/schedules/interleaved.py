"""Interleaved 1F1B: the model goes round the stages several times, in smaller pieces.

  2 stages, 4 micro-batches, 2 chunks

  stage 0  F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 .... B2.1 .... B3.1 B2.0 B3.0
  stage 1  .... F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0

F1.0 is the forward of micro-batch 1 on chunk 0 of a stage, F1.1 on chunk 1: chunk c of stage r is
virtual stage c p + r of the model. A piece is 1/v of a stage, so filling and draining take 1/v of
the time: a bubble of (p - 1)(F + B)/v, where F and B are of a whole stage. The price is v times the
messages, and activations: stage 0 holds v p + p - 1 pieces, p (1 + (p - 1)/(p v)) micro-batches.

Micro-batches go in groups of p: a group goes through chunk 0, then through chunk 1, ..., then the
next group comes. Backwards go likewise, from the last chunk on. The warm-up is longer than that of
1F1B by the forwards of p (v - 1) pieces, and by one for each stage that follows.

Source: Megatron-LM, arXiv 2104.04473, section 2.2.2.
"""

from labkit.schedules.actions import Action, Schedule, check_sizes


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The actions of each stage. Raises ValueError for less than 2 chunks, and where micro-batches
    make no whole groups.

    >>> [str(one) for one in interleaved(stages=2, microbatches=2, chunks=2)[1]]
    ['F0', 'F1', 'F0.1', 'B0.1', 'F1.1', 'B1.1', 'B0', 'B1']
    """
    check_sizes(stages, microbatches)
    if chunks < 2:
        raise ValueError(
            f"chunks={chunks}: interleaved needs at least 2 pieces of the model on each stage; "
            "with 1 it is 1f1b"
        )
    if microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} with {stages} stages: interleaved sends micro-batches "
            f"round in groups of {stages}; take a multiple of {stages}"
        )
    groups = range(0, microbatches, stages)
    forwards = [(k, c) for g in groups for c in range(chunks) for k in range(g, g + stages)]
    backwards = [(k, chunks - 1 - c) for k, c in forwards]
    schedule = []
    for stage in range(stages):
        warm_up = min(2 * (stages - 1 - stage) + (chunks - 1) * stages, len(forwards))
        actions = [Action("forward", *one) for one in forwards[:warm_up]]
        for ahead, back in zip(forwards[warm_up:], backwards, strict=False):
            actions += [Action("forward", *ahead), Action("backward", *back)]
        actions += [Action("backward", *one) for one in backwards[len(forwards) - warm_up :]]
        schedule.append(actions)
    return schedule
