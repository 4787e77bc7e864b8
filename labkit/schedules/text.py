"""Schedules as text: `parse_schedule` reads the format that `show` prints.

    stage 0  F0 F1 .. B0 .. B1
    stage 1  .. F0 B0 F1 B1

Each column is one unit of time, the duration of every action; ".." is idle. F is forward, B
backward, I and W the halves of backward (input, weight), U update; F0.1 is F0 on chunk 1.
"""

import re

from labkit.schedules.actions import LETTERS, Action, Message, Schedule, chunks_of, received, sent
from labkit.schedules.rules import run_order

PHASES = {letter: phase for phase, letter in LETTERS.items()}


def parse(text: str) -> list[Action]:
    """The actions of one stage. Raises ValueError for a word that is not an action.

    >>> parse("F0 .. I0.1")
    [Action(phase='forward', microbatch=0, chunk=0), Action(phase='input', microbatch=0, chunk=1)]
    """
    actions = []
    for place, word in enumerate(text.split()):
        if set(word) == {"."}:
            continue
        match = re.fullmatch(r"([A-Za-z])(\d+)(?:\.(\d+))?", word)
        if match is None or match[1].upper() not in PHASES:
            raise ValueError(
                f"{word!r}, word {place} of {text!r}, is not an action; write one letter of "
                f"{' '.join(PHASES)} and a micro-batch, such as F0, or F0.1 with a chunk"
            )
        actions.append(Action(PHASES[match[1].upper()], int(match[2]), int(match[3] or 0)))
    return actions


def parse_schedule(text: str) -> Schedule:
    """Parses one line per stage, with or without the label "stage 0"; `check` validates the result.

    >>> parse_schedule("F0 B0") == parse_schedule(" stage 0   F0 .. B0 ")
    True
    """
    lines = [re.sub(r"^\s*stage \d+", "", line) for line in text.splitlines()]
    return [parse(line) for line in lines if line.strip()]


def show(schedule: Schedule) -> str:
    """A table with one line per stage, as above: actions run as early as possible, all take equally
    long, and messages take no time. Raises ScheduleError like `check`."""
    stages, chunks = len(schedule), chunks_of(schedule)
    columns: list[list[int]] = [[] for _ in schedule]
    sent_in: dict[Message | None, int] = {None: -1}  # message -> column of its sender
    for stage, position in run_order(schedule):
        action = schedule[stage][position]
        before = columns[stage][-1] if position else -1
        column = 1 + max(before, sent_in[received(action, stage, stages, chunks)])
        columns[stage].append(column)
        sent_in.setdefault(sent(action, stage, stages, chunks), column)
    chunk = ".{0.chunk}" if chunks > 1 else ""
    words = [
        [f"{LETTERS[a.phase]}{a.microbatch}{chunk.format(a)}" for a in actions]
        for actions in schedule
    ]
    width = max(len(word) for line in words for word in line)
    lines = []
    for stage, line in enumerate(words):
        cells = ["." * width] * (1 + columns[stage][-1])
        for column, word in zip(columns[stage], line, strict=True):
            cells[column] = word.ljust(width)
        lines.append(f"stage {stage:<{len(str(stages - 1))}}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)
