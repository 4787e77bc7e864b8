"""Schedules as text: what `show` prints, `parse` reads.

    stage 0  F0 F1 .. B0 .. B1
    stage 1  .. F0 B0 F1 B1

A column is a unit of time, an action takes one, and ".." is a stage that waits. F is forward, B
backward, I and W its two halves (input, weight), U update; a chunk follows after a point: F0.1.
"""

import re

from labkit.schedules.actions import LETTERS, Action, Schedule, chunks_of
from labkit.schedules.messages import Message, received, sent
from labkit.schedules.rules import run_order

PHASES = {letter: phase for phase, letter in LETTERS.items()}


def parse(text: str) -> list[Action]:
    """The actions of one stage: "F0 F1 B0 B1", or "F0.1" with a chunk. Idle columns ("..") are
    passed over. Raises ValueError for a word that is no action.

    >>> parse("F0 .. I0.1")
    [Action(phase='forward', microbatch=0, chunk=0), Action(phase='input', microbatch=0, chunk=1)]
    """
    actions = []
    for place, word in enumerate(text.split()):
        if set(word) == {"."}:
            continue
        found = re.fullmatch(r"([A-Za-z])(\d+)(?:\.(\d+))?", word)
        if found is None or found[1].upper() not in PHASES:
            raise ValueError(
                f"{word!r}, word {place} of {text!r}, is no action; write a letter of "
                f"{' '.join(PHASES)} and a micro-batch, as F0, or with a chunk F0.1"
            )
        actions.append(Action(PHASES[found[1].upper()], int(found[2]), int(found[3] or 0)))
    return actions


def parse_schedule(text: str) -> Schedule:
    """A line for each stage, with or without "stage 0" before it; `check` says whether it can be.

    >>> parse_schedule("F0 B0") == parse_schedule(" stage 0   F0 .. B0 ")
    True
    """
    lines = [re.sub(r"^\s*stage \d+", "", line) for line in text.splitlines()]
    return [parse(line) for line in lines if line.strip()]


def show(schedule: Schedule) -> str:
    """A table with a line for each stage, as above: each action as early as it can be where all
    take equally long and messages no time. Raises ScheduleError as `check`."""
    stages, chunks = len(schedule), chunks_of(schedule)
    columns: list[list[int]] = [[] for _ in schedule]
    there: dict[Message | None, int] = {None: -1}  # in which column it was made
    for stage, position in run_order(schedule):
        action = schedule[stage][position]
        before = columns[stage][-1] if position else -1
        column = 1 + max(before, there[received(action, stage, stages, chunks)])
        columns[stage].append(column)
        there.setdefault(sent(action, stage, stages, chunks), column)
    words = [[_word(action, chunks) for action in actions] for actions in schedule]
    width = max(len(word) for line in words for word in line)
    lines = []
    for stage, line in enumerate(words):
        cells = ["." * width] * (1 + columns[stage][-1])
        for column, word in zip(columns[stage], line, strict=True):
            cells[column] = word.ljust(width)
        lines.append(f"stage {stage:<{len(str(stages - 1))}}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def _word(action: Action, chunks: int) -> str:
    return f"{LETTERS[action.phase]}{action.microbatch}" + (
        f".{action.chunk}" if chunks > 1 else ""
    )
