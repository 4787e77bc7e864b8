"""Timing of a pipeline with many micro-batches: when each stage ends and how long it waits.

    stage 0   F0 F1 F2 │ .. B0 F3 │ .. B1 F4 │ ..  B2 ..      after warm-up, each round is
    stage 1      F0 F1 │ B0 F2 .. │ B1 F3 .. │                one forward and one backward

Once all stages repeat the rounds of c micro-batches earlier, shifted by a constant time, they keep
repeating until cool-down. The simulation runs some micro-batches and inserts the period for all
others. The times equal those of `labkit.replaying.engine`, but are computed a hundred times faster.

    waits       ├─ bubble: neighbor has not sent yet ─┼─ pipeline: message in flight ─┤
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from labkit.schedules import Schedule, received, run_order, schedule

Array = np.ndarray
ROUNDING = 1e-12  # tolerance, relative to the simulated time


@dataclass(frozen=True)
class Timing:
    """Seconds per stage. Times count from the beginning of the step."""

    ended_s: Array  # [p] end of the last backward
    bubble_s: Array  # [p] total wait until ended_s for messages not yet sent
    pipeline_s: Array  # [p] total wait until ended_s for messages in flight
    last_s: Array  # [p, v] start of each chunk's last backward


class _Compiled(NamedTuple):
    """A schedule in execution order. Action 0 is the start of the step."""

    before: list[int]  # the previous action on the same stage
    needed: list[int]  # the action that sends the input; 0: none
    takes: list[int]  # index of the action's seconds: 2 x virtual stage, + 1 for a backward
    over: list[int]  # index of the input message's seconds; p: none
    of_stage: Array  # [p, 2mv] actions per stage, in order
    warm_up: Array  # [p] number of actions before the first round
    lasts: Array  # [p, v] the last backward per stage and chunk

    def rounds(self, begin: int, end: int) -> Array:
        """[p, 2 (end - begin)] actions per stage in rounds `begin` to `end` - 1."""
        columns = self.warm_up[:, None] + np.arange(2 * begin, 2 * end)
        return np.take_along_axis(self.of_stage, columns, axis=1)


def schedule_of(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B, or interleaved 1F1B if `chunks` > 1."""
    return schedule("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)


@lru_cache(maxsize=512)
def _compiled(stages: int, microbatches: int, chunks: int) -> _Compiled:
    lists = schedule_of(stages, microbatches, chunks)
    number: dict[tuple[str, int, int], int] = {}  # phase, micro-batch, virtual stage
    before, needed, takes, over = [0], [0], [0], [stages]
    of_stage: list[list[int]] = [[] for _ in lists]
    for stage, position in run_order(lists):
        phase, microbatch, chunk = action = lists[stage][position]
        virtual, source, way = chunk * stages + stage, 0, stages
        message = received(action, stage, stages, chunks) if stages > 1 else None
        if message is not None:
            source = number[phase, microbatch, message.source]
            way = min(message.source, message.target) % stages
        before.append(of_stage[stage][-1] if of_stage[stage] else 0)
        needed.append(source)
        takes.append(2 * virtual + (phase == "backward"))
        over.append(way)
        number[phase, microbatch, virtual] = len(before) - 1
        of_stage[stage].append(len(before) - 1)
    warm_up = [[action.phase for action in actions].index("backward") - 1 for actions in lists]
    lasts = [
        [number["backward", microbatches - 1, chunk * stages + stage] for chunk in range(chunks)]
        for stage in range(stages)
    ]
    return _Compiled(before, needed, takes, over, *map(np.array, (of_stage, warm_up, lasts)))


class _Simulated:
    def __init__(self, compiled: _Compiled, seconds: list[float], messages: list[float]):
        takes = [seconds[k] for k in compiled.takes]
        over = [*messages, 0.0]
        message = [over[k] for k in compiled.over]
        ended: list[float] = [0.0]
        actions = zip(compiled.before, compiled.needed, takes, message, strict=True)
        next(actions)
        for before, needed, takes_s, message_s in actions:
            free_s, arrived_s = ended[before], ended[needed] + message_s
            ended.append((free_s if free_s > arrived_s else arrived_s) + takes_s)
        self.compiled, self.ended = compiled, np.array(ended)
        free = self.ended[compiled.before]
        sent = self.ended[compiled.needed]
        self.began = np.maximum(free, sent + np.array(message))
        self.bubble = np.maximum(sent - free, 0.0)
        self.pipeline = self.began - free - self.bubble

    def period(self, last: int, chunks: int) -> int | None:
        """The number of micro-batches after which all stages repeat, shifted by a constant time;
        None if no period is found. `last`: the last round that every stage completes."""
        stages = len(self.compiled.of_stage)
        window, step = (stages + 1, stages) if chunks > 1 else (1, 1)
        by_round = self.ended[self.compiled.rounds(0, last + 1)]
        for count in range(step, stages + 1, step):
            back = 2 * count * chunks
            if by_round.shape[1] < 2 * window + back:
                break
            later = by_round[:, back:][:, -2 * window :] - by_round[:, :-back][:, -2 * window :]
            if np.ptp(later) <= ROUNDING * by_round.max():
                return count
        return None


def pipeline_timing(
    microbatches: int, forward_s: Array, backward_s: Array, messages_s: Array
) -> Timing:
    """The timing of 1F1B, interleaved if v > 1. Raises ValueError for an invalid schedule.

    Args:
        forward_s, backward_s: [p, v] seconds of one micro-batch per stage and chunk.
        messages_s: [p] seconds of a message between stages k and k + 1, in either direction; the
            last entry is for messages between the last stage and the first.
    """
    stages, chunks = forward_s.shape
    seconds = np.stack([forward_s.T, backward_s.T], axis=-1).ravel().tolist()

    def simulated(count: int) -> _Simulated:
        return _Simulated(_compiled(stages, count, chunks), seconds, messages_s.tolist())

    count = 3 * stages
    while count < microbatches:
        run = simulated(count)
        last = count * chunks - int(run.compiled.warm_up.max()) - 1
        period = run.period(last, chunks)
        if period is not None:
            if rest := (microbatches - count) % period:
                count += rest
                run = simulated(count)
            return _timing(run, chunks, last, period, (microbatches - count) // period)
        count *= 2
    return _timing(simulated(microbatches), chunks)


def _timing(run: _Simulated, chunks: int, last: int = 0, period: int = 0, times: int = 0) -> Timing:
    """The timing of a run with its period inserted `times` times."""
    compiled, first = run.compiled, last + 1 - period * chunks
    actions, again = compiled.of_stage, compiled.rounds(first, last + 1)
    later_s = np.zeros(len(actions))
    if times:
        later_s += times * np.ptp(run.ended[compiled.rounds(first - 1, last + 1)[:, 1:]], axis=1)
    return Timing(
        run.ended[actions[:, -1]] + later_s,
        run.bubble[actions].sum(axis=1) + times * run.bubble[again].sum(axis=1),
        run.pipeline[actions].sum(axis=1) + times * run.pipeline[again].sum(axis=1),
        run.began[compiled.lasts] + later_s[:, None],
    )
