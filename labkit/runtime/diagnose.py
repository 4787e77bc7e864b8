"""Detects hung ranks from the board.

A wait cannot end if it depends on a rank that has returned, is not in the run, or is stuck in a
cycle of waits. The timeout limits all other waits.
"""

import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from labkit.runtime.board import ENDED, FAILED, WAITED_FOR, Board, Note
from labkit.runtime.errors import ranks_text

_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)\n')
STACK_S = 0.5  # time for a rank to write its stack
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in (
        Path(__file__).parent.parent,
        Path(torch.__file__).parent,
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)


_LOOP = str(Path(__file__).with_name("rank.py"))  # near the end of every complete stack


class Verdict(NamedTuple):
    """A diagnosis in one sentence, and the ranks at fault."""

    sentence: str
    ranks: tuple[int, ...]


class Watch:
    """Checks the board of a run for waits that cannot end or that exceed the timeout."""

    settle_s = 0.25  # a verdict must persist this long: a rank may be between two operations
    every_s = 0.04

    def __init__(self, board: Board, timeout_s: float, targets: Iterable[int]):
        self.board, self.timeout_s, self.targets = board, timeout_s, set(targets)
        self._suspect: tuple[Verdict, dict[int, Note]] | None = None
        self._suspect_since_s = self._checked_s = 0.0

    def check(self, running: set[int]) -> Verdict | None:
        """The verdict once it has persisted for `settle_s`. `running`: the unfinished ranks."""
        now_s = time.monotonic()
        if now_s - self._checked_s < self.every_s:
            return None
        self._checked_s = now_s
        waits: dict[int, Note] = {}  # each rank's longest wait
        for rank in sorted(running):
            if notes := self.board.notes(rank, (WAITED_FOR,)):
                waits[rank] = notes[0]
        verdict = self._overdue(waits, now_s) or self._hopeless(waits, running)
        suspect = (verdict, waits) if verdict else None
        if suspect != self._suspect:
            self._suspect, self._suspect_since_s = suspect, now_s
        return verdict if now_s - self._suspect_since_s > self.settle_s else None

    def _overdue(self, waits: dict[int, Note], now_s: float) -> Verdict | None:
        """A wait that exceeds the timeout."""
        for rank, note in waits.items():
            if now_s - note.since_s > self.timeout_s:
                missing = self._missing(note)
                peers = (
                    f"{ranks_text(missing)}, which never called the operation"
                    if missing
                    else "an operation that all its ranks have begun (is the link too slow?)"
                )
                sentence = f"{ranks_text([rank])} waited {self.timeout_s:g} s for {peers}."
                return Verdict(sentence, tuple(missing))
        return None

    def _missing(self, note: Note) -> list[int]:
        return [rank for rank in note.ranks if not self.board.has_begun(rank, note)]

    def _hopeless(self, waits: dict[int, Note], running: set[int]) -> Verdict | None:
        """A wait for a rank that has returned or is not in the run, or a cycle of waits."""
        needs = {rank: self._missing(note) for rank, note in waits.items()}
        for rank, missing in needs.items():
            gone = [other for other in missing if other not in running]
            absent = [other for other in gone if other not in self.targets]
            if absent:
                are = "is" if len(absent) == 1 else "are"
                why = f"waits for {ranks_text(absent)}, which {are} not in this run."
                return Verdict(f"{ranks_text([rank])} {why}", tuple(absent))
            if gone:
                why = f"waits for {ranks_text(gone)}, which returned without calling the operation."
                return Verdict(f"{ranks_text([rank])} {why}", tuple(gone))
        stuck = {rank for rank, missing in needs.items() if missing}
        while free := {rank for rank in stuck if not set(needs[rank]) <= stuck}:
            stuck -= free  # these ranks wait for a rank that can still arrive
        if not stuck:
            return None
        cycle = tuple(sorted(stuck))
        return Verdict(f"{ranks_text(cycle)} wait for each other forever.", cycle)


def positions(
    board: Board, pids: list[int], running: set[int], targets: Iterable[int], folder: Path
) -> dict[int, str]:
    """Where each rank is: the operation it waits in, else the line of code it executes."""
    notes = {rank: board.notes(rank, (WAITED_FOR, FAILED)) for rank in range(board.size)}
    free = [rank for rank in notes if rank in running and not notes[rank]]
    stacks = _stacks({rank: (pids[rank], folder / f"stack{rank}") for rank in free})
    where = {}
    for rank in notes:
        if rank not in targets:
            place = "is not in this run"
        elif rank not in running:
            place = "has returned"
        elif notes[rank]:
            place = f"waits in {notes[rank][0].sentence()}"
        else:
            place = f"is in no Comm operation; it {stacks.get(rank, 'is at an unknown line')}"
        where[rank] = place
    return where


def last_operation(board: Board, rank: int) -> str:
    """The last operation of a rank that has died."""
    notes = board.notes(rank)
    if not notes:
        return "died before its first operation"
    return f"died {'after' if notes[-1].state == ENDED else 'in'} {notes[-1].sentence()}"


def _stacks(living: dict[int, tuple[int, Path]]) -> dict[int, str]:
    """The line of code that each rank executes, from the stack that the rank writes on SIGUSR1."""
    if not hasattr(signal, "SIGUSR1"):
        return {}
    before: dict[int, int] = {}
    lines: dict[int, str] = {}
    for rank, (pid, file) in living.items():
        try:
            before[rank] = file.stat().st_size
            os.kill(pid, signal.SIGUSR1)
        except OSError:  # the rank has ended
            before.pop(rank, None)
    deadline_s = time.monotonic() + STACK_S
    while before and time.monotonic() < deadline_s:
        for rank in list(before):
            try:
                text = living[rank][1].read_text(errors="replace")[before[rank] :]
            except OSError:  # the world's folder is being removed
                return lines
            if _LOOP in text or text.endswith("...\n"):  # complete, or truncated by faulthandler
                program = (  # innermost first
                    f"is at {Path(file).name}:{line} in {name}"
                    for file, line, name in _FRAME.findall(text)
                    if not file.startswith((*_LIBRARIES, "<string>", "<frozen"))
                )
                lines[rank] = next(program, "is inside a library")
                del before[rank]
        time.sleep(0.005)
    return lines
