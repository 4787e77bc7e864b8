"""State that the communicators of a process share, besides process groups: listeners, a modeled
link and the board. Each of them exists once per process.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from labkit.events import CommEvent
from labkit.runtime.board import Board
from labkit.runtime.clock import HOST_CLOCK, Clock
from labkit.runtime.transports.link import Link, TwoLevel


@dataclass
class ProcessContext:
    """`listeners` receive each event when it is issued; later times are filled in afterward.
    `carrying` creates a context that any thread enters to allocate memory for an operation. `clock`
    timestamps events. `shared` is the folder for the ranks' shared memory, if any."""

    listeners: list[Callable[[CommEvent], object]] = field(default_factory=list)
    board: Board | None = None
    shared: Path | None = None
    link: Link | TwoLevel | None = None
    carrying: Callable[[], AbstractContextManager[None]] = nullcontext
    clock: Clock = HOST_CLOCK


here = ProcessContext()


@contextmanager
def listen() -> Iterator[list[CommEvent]]:
    """Collect the events of all communication on this rank within the block.

    >>> with listen() as events:
    ...     comm.all_reduce(x)
    >>> sum(event.bus_bytes for event in events)
    """
    events: list[CommEvent] = []
    with listen_with(events.append):
        yield events


@contextmanager
def listen_with(listener: Callable[[CommEvent], object]) -> Iterator[None]:
    """Within the block, call `listener` with each event when it is issued."""
    here.listeners.append(listener)
    try:
        yield
    finally:
        here.listeners.remove(listener)


_COMM = tuple(str(Path(__file__).parents[1] / room) + os.sep for room in ("comm", "runtime"))
_DYNAMO = str(Path(torch.__file__).parent / "_")  # torch.compile's frames are in these files
_LABKIT = str(Path(__file__).parent.parent) + os.sep


def caller() -> str:
    """The source line that calls a communicator; for a line inside labkit, also the user's line
    that led to it.

    "lesson.py:12 in train" or "ddp.py:80 in _launch, from lesson.py:12 in train"
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_COMM, _DYNAMO)):
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
