"""What a process's door consults besides its process group: who listens, which wire is
modelled, and the board on which the ranks compare notes. A process has one of each, as it has
one network card; whoever starts the rank sets them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from labkit.comm.board import Board
from labkit.comm.link import Link
from labkit.events import CommEvent


@dataclass
class Surroundings:
    """`listeners`: lists that get every event at its issue; its later times are filled in."""

    listeners: list[list[CommEvent]] = field(default_factory=list)
    board: Board | None = None
    link: Link | None = None


here = Surroundings()


@contextmanager
def listen() -> Iterator[list[CommEvent]]:
    """Collect the events of all communication on this rank while the block runs.

    >>> with listen() as events:
    ...     comm.all_reduce(x)
    >>> sum(event.bus_bytes for event in events)
    """
    events: list[CommEvent] = []
    here.listeners.append(events)
    try:
        yield events
    finally:
        here.listeners[:] = [one for one in here.listeners if one is not events]


_COMM = str(Path(__file__).parent) + os.sep
_LABKIT = str(Path(__file__).parent.parent) + os.sep


def caller() -> str:
    """Where in the program we stand: the line that came through the door and, when that is
    a strategy's, the user's line above it.

    "lesson.py:12 in train" or "ddp.py:80 in _launch, from lesson.py:12 in train"
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_COMM):
        frame = frame.f_back
    line = _place(frame)
    if not frame.f_code.co_filename.startswith(_LABKIT):
        return line
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LABKIT) and "/torch/" not in name.replace("\\", "/"):
            return f"{line}, from {_place(frame)}"
        frame = frame.f_back  # type: ignore[assignment]
    return line


def _place(frame: object) -> str:
    code = frame.f_code  # type: ignore[attr-defined]
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # type: ignore[attr-defined]
