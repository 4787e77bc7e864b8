"""The clock of a pipeline of many micro-batches: when each stage is done, and why it stood still.

    stage 0   F0 F1 F2 │ .. B0 F3 │ .. B1 F4 │ ..  B2 ..      after the warm-up, rounds of one
    stage 1      F0 F1 │ B0 F2 .. │ B1 F3 .. │                forward and one backward

What a stage does in a round depends on the round before and on its neighbours: if all stages end a
round so many seconds later than c micro-batches ago, they do so for ever. So the clock runs until
it sees that, and whole periods are put in; where it sees none, it runs to the end. It tells what
`labkit.replaying.engine`, which can run anything, tells, in a hundredth of its time
(tests/replaying/test_at_scale.py).

    waits       ├─ bubble: the neighbour has not sent it yet ─┼─ pipeline: it is on its way ─┤
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from labkit.schedules import Schedule, received, schedule

Array = np.ndarray
ALIKE = 1e-12  # of the time so far: rounding


@dataclass(frozen=True)
class Timing:
    """By stage, in seconds from the beginning of the step."""

    ended_s: Array  # [p] when its last backward is over
    bubble_s: Array  # [p] stood still until then, for a stage that had not come to it
    pipeline_s: Array  # [p] or for a message
    last_s: Array  # [p, v] when the last backward of each chunk began


class _Compiled(NamedTuple):
    """A schedule, in an order in which it can run. Action 0 is the beginning of all."""

    before: list[int]  # the action before it on its stage
    needed: list[int]  # the action that sends what it needs; 0: none
    takes: list[int]  # which of the seconds, 2 x virtual stage + (backward)
    over: list[int]  # which of the messages; p: none
    of_stage: list[Array]  # the actions of each stage, as it does them
    warm_up: list[int]  # actions before the first round
    lasts: list[Array]  # of each stage, the last backward of each chunk


def schedule_of(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B, or interleaved where there are chunks."""
    name = "interleaved" if chunks > 1 else "1f1b"
    return schedule(name, stages, microbatches, chunks)


@lru_cache(maxsize=512)
def _compiled(stages: int, microbatches: int, chunks: int) -> _Compiled:
    lists = schedule_of(stages, microbatches, chunks)
    number: dict[tuple[str, int, int], int] = {}  # phase, micro-batch, virtual stage
    before, needed, takes, over = [0], [0], [0], [stages]
    of_stage: list[list[int]] = [[] for _ in lists]
    every = sum(map(len, lists))
    while len(before) <= every:
        for stage, actions in enumerate(lists):
            done = of_stage[stage]
            while len(done) < len(actions):  # until it waits for a stage that is not so far
                phase, microbatch, chunk = action = actions[len(done)]
                virtual, source, way = chunk * stages + stage, 0, stages
                message = received(action, stage, stages, chunks) if stages > 1 else None
                if message is not None:
                    source = number.get((phase, microbatch, message.source), 0)
                    way = min(message.source, message.target) % stages
                    if not source:
                        break
                before.append(done[-1] if done else 0)
                needed.append(source)
                takes.append(2 * virtual + (phase == "backward"))
                over.append(way)
                number[phase, microbatch, virtual] = len(before) - 1
                done.append(len(before) - 1)
    warm_up = [
        next(k for k, action in enumerate(one) if action.phase == "backward") - 1 for one in lists
    ]
    lasts = [
        [number["backward", microbatches - 1, chunk * stages + stage] for chunk in range(chunks)]
        for stage in range(stages)
    ]
    arrays = [[np.array(x) for x in one] for one in (of_stage, lasts)]
    return _Compiled(before, needed, takes, over, arrays[0], warm_up, arrays[1])


class _Ran:
    """The clock, run over so many micro-batches."""

    def __init__(self, compiled: _Compiled, seconds: list[float], messages: list[float]):
        takes = [seconds[k] for k in compiled.takes]
        over = [*messages, 0.0]
        arrives = [over[k] for k in compiled.over]
        ended: list[float] = [0.0]
        takes[0] = 0.0
        rest = zip(compiled.before, compiled.needed, takes, arrives, strict=True)
        next(rest)
        for before, needed, its_s, message_s in rest:
            free_s, there_s = ended[before], ended[needed] + message_s
            ended.append((free_s if free_s > there_s else there_s) + its_s)
        self.compiled, self.ended = compiled, np.array(ended)
        free = self.ended[compiled.before]
        sent = self.ended[compiled.needed]
        self.began = np.maximum(free, sent + np.array(arrives))
        self.bubble = np.maximum(sent - free, 0.0)
        self.pipeline = self.began - free - self.bubble

    def period(self, last: int, chunks: int) -> int | None:
        """The micro-batches after which all stages do the same again, so much later; None where
        they do not yet. `last`: the last round that all stages have."""
        stages = len(self.compiled.of_stage)
        window = stages + 1 if chunks > 1 else 1
        ends = [
            self.ended[one[warm : warm + 2 * (last + 1)]]
            for one, warm in zip(self.compiled.of_stage, self.compiled.warm_up, strict=True)
        ]
        by_round = np.stack(ends)  # [p, 2 (last + 1)]
        step = stages if chunks > 1 else 1
        for count in range(step, stages + 1, step):
            back = 2 * count * chunks
            if by_round.shape[1] < 2 * window + back:
                break
            later = by_round[:, back:][:, -2 * window :] - by_round[:, :-back][:, -2 * window :]
            if np.ptp(later) <= ALIKE * by_round.max():
                return count
        return None


def pipeline_timing(
    microbatches: int, forward_s: Array, backward_s: Array, messages_s: Array
) -> Timing:
    """The timing of 1F1B, or of interleaved 1F1B where there are chunks.

    Args:
        forward_s, backward_s: [p, v], of a micro-batch on each chunk of each stage.
        messages_s: [p], on its way between stage k and k + 1, either way; the last between the
            last stage and the first.

    Raises ValueError as the schedules do.
    """
    stages, chunks = forward_s.shape
    virtual = [x.T.ravel().tolist() for x in (forward_s, backward_s)]
    seconds = [x for pair in zip(*virtual, strict=True) for x in pair]

    def ran(count: int) -> _Ran:
        return _Ran(_compiled(stages, count, chunks), seconds, messages_s.tolist())

    count = 3 * stages
    while count < microbatches:
        found = ran(count)
        last = count * chunks - max(found.compiled.warm_up) - 1
        period = found.period(last, chunks)
        if period is not None:
            if rest := (microbatches - count) % period:
                count += rest
                found = ran(count)
            return _timing(found, chunks, last, period, (microbatches - count) // period)
        count *= 2
    return _timing(ran(microbatches), chunks)


def _timing(ran: _Ran, chunks: int, last: int = 0, period: int = 0, times: int = 0) -> Timing:
    """Of what ran, with a period put in so many times."""
    found = []
    compiled = ran.compiled
    for one, warm, of_chunk in zip(
        compiled.of_stage, compiled.warm_up, compiled.lasts, strict=True
    ):
        end = warm + 2 * (last + 1)
        again = one[end - 2 * period * chunks : end]
        before = one[end - 2 * period * chunks - 1 : end - 2 * period * chunks]
        later_s = times * (ran.ended[again[-1]] - ran.ended[before[0]]) if times else 0.0
        found.append(
            (
                ran.ended[one[-1]] + later_s,
                ran.bubble[one].sum() + times * ran.bubble[again].sum(),
                ran.pipeline[one].sum() + times * ran.pipeline[again].sum(),
                ran.began[of_chunk] + later_s,
            )
        )
    ended, bubble, pipeline, lasts = zip(*found, strict=True)
    return Timing(np.array(ended), np.array(bubble), np.array(pipeline), np.array(lasts))
