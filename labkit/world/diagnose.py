"""Who stands where: what the board says of ranks that wait for each other.

A wait is hopeless, proven, when a rank it needs can never come: that rank has returned, or stands
itself in a wait that is hopeless without us (a cycle). Else a timeout decides.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from labkit.comm.board import WAITED_FOR, Board, Note
from labkit.world.errors import ranks_text


class Verdict(NamedTuple):
    """A sentence on what is wrong, and the ranks whose fault it is."""

    sentence: str
    ranks: tuple[int, ...]


class Watch:
    """Looks at the board of a run now and then; `running` says which ranks have not returned."""

    settle_s = 0.25  # a proof must hold this long: a rank may be between two lines

    def __init__(self, board: Board, timeout_s: float):
        self.board, self.timeout_s = board, timeout_s
        self._suspect_since_s: float | None = None

    def look(self, running: Callable[[int], bool]) -> Verdict | None:
        """None while there is hope, else what is wrong."""
        waits: dict[int, Note] = {}  # what each rank has waited for longest
        for rank in filter(running, range(self.board.size)):
            waits |= {rank: note for note in self.board.notes(rank, WAITED_FOR)[:1]}
        now_s = time.monotonic()
        for rank, note in waits.items():
            if now_s - note.since_s > self.timeout_s:
                missing = self._missing(note)
                sentence = f"{ranks_text([rank])} waited {self.timeout_s:g} s for {_who(missing)}."
                return Verdict(sentence, tuple(missing))
        verdict = self._hopeless(waits, running)
        if verdict is None:
            self._suspect_since_s = None
        elif self._suspect_since_s is None:
            self._suspect_since_s = now_s
        elif now_s - self._suspect_since_s > self.settle_s:
            return verdict
        return None

    def _missing(self, note: Note) -> list[int]:
        return [rank for rank in note.ranks if not self.board.has_begun(rank, note)]

    def _hopeless(self, waits: dict[int, Note], running: Callable[[int], bool]) -> Verdict | None:
        needs = {rank: self._missing(note) for rank, note in waits.items()}
        for rank, missing in needs.items():
            gone = [other for other in missing if not running(other)]
            if gone:
                why = f"returned without calling what {ranks_text([rank])} waits for."
                return Verdict(f"{ranks_text(gone)} {why}", tuple(gone))
        stuck = {rank for rank, missing in needs.items() if missing}
        while freed := {rank for rank in stuck if not set(needs[rank]) <= stuck}:
            stuck -= freed  # these wait for somebody who can still come
        if not stuck:
            return None
        circle = tuple(sorted(stuck))
        return Verdict(f"{ranks_text(circle)} wait for each other: none can go on.", circle)


def who_stands_where(
    board: Board, pids: list[int], running: Callable[[int], bool], folder: Path
) -> str:
    """A line for each rank: the operation it waits in, else the line of code it is at."""
    lines = []
    for rank in range(board.size):
        notes = board.notes(rank, WAITED_FOR)
        if not running(rank):
            where = "has returned"
        elif notes:
            where = f"waits in {notes[0].sentence()}"
        else:
            where = f"is in no operation; it is at {_stack(pids[rank], folder / f'stack{rank}')}"
        lines.append(f"  rank {rank}: {where}")
    return "\n".join(lines)


def _stack(pid: int, file: Path) -> str:
    """The line a living rank is at, written by its own fault handler on a signal."""
    if not hasattr(signal, "SIGUSR1"):
        return "an unknown line"
    try:
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            text = file.read_text()[before:]
            frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File")]
            if frames and ("cells.py" in text or "rank.py" in text):
                return _innermost(frames)
            time.sleep(0.01)
    except OSError:
        pass
    return "an unknown line"


def _innermost(frames: list[str]) -> str:
    """Of 'File "x.py", line 3 in f' lines, innermost first, the innermost outside libraries."""
    for frame in frames:
        if "/torch/" not in frame and "/labkit/" not in frame:
            path, line, name = frame.removeprefix('File "').replace('"', "").rsplit(" ", 4)[0::2]
            return f"{Path(path.rstrip(',').removesuffix(', line')).name}:{line} in {name}"
    return frames[0]


def _who(missing: list[int]) -> str:
    if not missing:
        return "an operation that all its ranks have begun (is the link too slow for the timeout?)"
    return f"{ranks_text(missing)}, who never came to it"
