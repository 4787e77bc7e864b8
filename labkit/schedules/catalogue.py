"""All schedules by name, and definitions of all except zero-bubble schedules (zero_bubble.py).

Naive: a micro-batch runs forward through all stages, then backward, before the next one starts.

    3 stages, 2 micro-batches; F1 is the forward of micro-batch 1, B1 its backward

        stage 0  F0 .. .. .. .. B0 F1 .. .. .. .. B1
        stage 1  .. F0 .. .. B0 .. .. F1 .. .. B1
        stage 2  .. .. F0 B0 .. .. .. .. F1 B1

A stage holds one micro-batch and is busy 1/p of the time, as in a model whose layers are placed on
several devices (`.to("cuda:1")`). The bubble is m (p - 1)(F + B) for m micro-batches on p stages.

GPipe: all forwards, then all backwards.

    3 stages, 4 micro-batches

        stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3
        stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3

The bubble (filling and draining) is (p - 1)(F + B), or (p - 1)/(m + p - 1) of the step. Each stage
holds the activations of all m micro-batches. (The paper reverses the backwards, at equal cost.)

1F1B: after a warm-up, each stage alternates one forward and one backward.

    3 stages, 4 micro-batches

        stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3

The bubble is GPipe's, but stage r holds the activations of at most p - r micro-batches.

Interleaved: each micro-batch passes through all stages v times, through a smaller chunk each time.

  2 stages, 4 micro-batches, 2 chunks

  stage 0  F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 .... B2.1 .... B3.1 B2.0 B3.0
  stage 1  .... F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0

F1.0 is the forward of micro-batch 1 on a stage's chunk 0, 1/v of the stage's layers. Groups of p
micro-batches run through chunk 0, then chunk 1, ...; backwards start at the last chunk. The bubble
is (p - 1)(F + B)/v, with F and B for a whole stage. The price is v times as many messages and more
memory: stage 0 holds activations of v p + p - 1 chunks, or p (1 + (p - 1)/(p v)) micro-batches.

PipeDream: 1F1B without a flush. Each stage updates its weights after each backward.

    3 stages, 4 micro-batches

        stage 0  F0 F1 F2 .. .. B0 U0 F3 B1 U1 .. B2 U2 .. B3 U3
        stage 1  .. F0 F1 .. B0 U0 F2 B1 U1 F3 B2 U2 .. B3 U3
        stage 2  .. .. F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3

U0 is the optimizer step with micro-batch 0's gradient. No update waits for other stages, so the
bubble occurs once per training run. But weights are *stale*, by p - 1 - r updates on stage r: only
with this schedule does training differ from training on one device. Backward needs the weights of
forward, so a stage keeps one version per micro-batch in flight, at most p - r (*weight stashing*).

Sources: GPipe, arXiv 1811.06965, figure 2b (naive) and section 2.3, drawn as in arXiv 2104.04473,
    figure 3; 1F1B: PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, sections 2.2.1
    and 2.2.2 (interleaved); PipeDream, arXiv 1806.03377, sections 3.2 and 3.3.
"""

from collections.abc import Callable

from labkit.schedules.actions import Action, Schedule, check_sizes
from labkit.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2


def naive(stages: int, microbatches: int) -> Schedule:
    """One micro-batch at a time. Raises ValueError for sizes below 1."""
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for k in range(microbatches) for phase in ("forward", "backward")]
        for _ in range(stages)
    ]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Raises ValueError for sizes below 1."""
    check_sizes(stages, microbatches)
    return [
        [Action(phase, k) for phase in ("forward", "backward") for k in range(microbatches)]
        for _ in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B, with a flush. Raises ValueError for sizes below 1."""
    check_sizes(stages, microbatches)
    order = [(k, 0) for k in range(microbatches)]
    return [_alternate(order, order, stages - 1 - stage) for stage in range(stages)]


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> list[Action]:
    """`warm_up` forwards, then alternating forwards and backwards, then the other backwards."""
    actions = [Action("forward", *place) for place in forwards[:warm_up]]
    for ahead, back in zip(forwards[warm_up:], backwards, strict=False):
        actions += [Action("forward", *ahead), Action("backward", *back)]
    turns = max(len(forwards) - warm_up, 0)
    return actions + [Action("backward", *place) for place in backwards[turns:]]


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with p (v - 1) more warm-up forwards, plus one for each later stage. Raises ValueError
    for fewer than 2 chunks, or if `microbatches` is not divisible by `stages`."""
    check_sizes(stages, microbatches)
    if chunks < 2:
        raise ValueError(
            f"chunks={chunks}: interleaved needs at least 2 chunks of the model per stage; for 1 "
            "chunk, use 1f1b"
        )
    if microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} with {stages} stages: interleaved runs micro-batches in "
            f"groups of {stages}; choose a multiple of {stages}"
        )
    groups = range(0, microbatches, stages)
    forwards = [(k, c) for g in groups for c in range(chunks) for k in range(g, g + stages)]
    backwards = [(k, chunks - 1 - c) for k, c in forwards]
    extra = (chunks - 1) * stages
    return [
        _alternate(forwards, backwards, extra + 2 * (stages - 1 - stage)) for stage in range(stages)
    ]


def pipedream(stages: int, microbatches: int) -> Schedule:
    """1F1B with an update after each backward. Raises ValueError for sizes below 1."""
    schedule: Schedule = []
    for actions in one_f_one_b(stages, microbatches):
        schedule.append([])
        for action in actions:
            schedule[-1].append(action)
            if action.phase == "backward":
                schedule[-1].append(Action("update", action.microbatch))
    return schedule


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "pipedream": pipedream,
}


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`. Raises ValueError for unknown names and unsupported sizes.

    >>> [str(action) for action in schedule("1f1b", stages=2, microbatches=2)[0]]
    ['F0', 'F1', 'B0', 'B1']
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if chunks != 1:
        raise ValueError(
            f"chunks={chunks}: {name} has one chunk of the model per stage; for several, use "
            "interleaved"
        )
    return SCHEDULES[name](stages, microbatches)
