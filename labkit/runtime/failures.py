"""What went wrong in a run: collect the first signs, wait a moment for their cause, and report it
once, with the ranks that caused it before those that only suffered.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from labkit.runtime import cells
from labkit.runtime.board import ENDED, WAITED_FOR
from labkit.runtime.diagnose import Verdict, Watch, last_operation, positions
from labkit.runtime.errors import RankError, RemoteError, ranks_text
from labkit.runtime.launch import End
from labkit.runtime.pick import available_bytes
from labkit.runtime.ranks import Ranks

GRACE_S = 0.3  # between the first sign and the verdict
COMPUTING_S = 2.0  # the same, while the other ranks wait for nothing and may yet answer
UNREPORTED_S = 5.0  # until the server reports the end of a rank whose connection has closed
HARMLESS = {"raised", "unpicklable"}  # by themselves they leave no rank in the middle of anything
MOST_TO_LEAST = ("server", "died", "cut off", "disagree", "unpicklable", "raised", "lost a peer")


class Failures:
    """The failures of one run. `settled` once there are some and their grace is over."""

    def __init__(self, ranks: Ranks, targets: Sequence[int]):
        self._ranks, self._targets = ranks, targets
        self.running = set(targets)  # ranks that have not answered
        self._found: dict[str, dict[int, Any]] = {}  # kind -> rank -> RemoteError or End
        self._stuck: Verdict | None = None
        self._where: dict[int, str] = {}  # at the first sign
        self._first_s: float | None = None
        self._oom_kills = _oom_kills()
        self._watch = Watch(ranks.board, ranks.timeout_s, targets) if ranks.board else None

    def add(self, rank: int, kind: str, what: Any) -> None:
        """Rank `rank` failed; `what` is its RemoteError, or its End."""
        self.running.discard(rank)
        self._first_sign(self.running | {rank} if kind == "lost a peer" else self.running)
        self._found.setdefault(kind, {}).setdefault(rank, what)

    def look(self) -> None:
        """Has a rank ended? Do ranks wait for each other in vain?"""
        try:
            ends = self._ranks.starter.ends()
        except EOFError:
            self.running.clear()
            self._first_sign(set())
            self._found["server"] = {}
            return
        dead = {rank: ends[pid] for rank, pid in enumerate(self._ranks.pids) if pid in ends}
        self.running -= dead.keys()
        for rank, end in dead.items():
            self.add(rank, "died", end)
        if self._watch and self._first_s is None:
            self._stuck = self._watch.look(self.running)
            if self._stuck:
                self._first_sign(self.running)

    def settled(self) -> bool:
        """Whether there is a failure, and time enough has passed to know its cause."""
        return self._first_s is not None and time.monotonic() - self._first_s >= self._patience_s()

    def _patience_s(self) -> float:
        """How long after the first sign its cause is known."""
        found, running = self._found, self.running
        unreported = found.get("cut off", {}).keys() - found.get("died", {}).keys()
        if "server" in found or not (running or unreported):
            return 0
        if unreported or ("died" in found and any(map(self._has_ended, running))):
            return UNREPORTED_S
        if found.keys() == {"lost a peer"} and not self._stuck:
            return 5 * GRACE_S
        board = self._ranks.board  # without it, it is not known whether a rank waits
        waits = board is None or any(board.notes(rank, (WAITED_FOR,)) for rank in running)
        harmless = found.keys() <= HARMLESS and not self._stuck and not waits
        return COMPUTING_S if harmless else GRACE_S

    def _has_ended(self, rank: int) -> bool:
        """Whether its process has, though the server has yet to report it, and the kernel perhaps
        to close its connection: on a loaded machine that follows much later."""
        try:
            return psutil.Process(self._ranks.pids[rank]).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def none(self) -> bool:
        return self._first_s is None

    def nothing_in_flight(self) -> bool:
        """Whether all ranks have answered, and every operation that one of them began was
        finished by all: then the next run finds them in step."""
        board = self._ranks.board
        if self.running or board is None or not set(self._found) <= HARMLESS:
            return False
        return all(
            note.state == ENDED and all(board.has_begun(peer, note) for peer in note.ranks)
            for rank in range(board.size)
            for note in board.notes(rank)
        )

    def error(self, kept: bool) -> RankError:
        """The one error that reports the failures; `kept`: the ranks live on."""
        kind, text, guilty = self._story()
        others = [rank for rank in range(self._ranks.size) if rank not in guilty]
        stopped = ranks_text(others) if guilty and others else "all ranks"
        text += (
            "\n(All ranks keep their variables for the next run.)"
            if kept
            else f"\n({stopped} stopped; the next run starts new ranks. What these kept is gone: "
            "run the cells that made your variables again.)"
        )
        return RankError(cells.with_titles(text), kind, guilty)

    def _story(self) -> tuple[str, str, tuple[int, ...]]:
        """The kind of the error, what happened, and the ranks whose fault it is."""
        cause = next((kind for kind in MOST_TO_LEAST if kind in self._found), "stuck")
        found = self._found.get(cause, {})
        guilty = tuple(sorted(found))
        if cause in ("died", "cut off") and (board := self._ranks.board):
            self._where.update({rank: last_operation(board, rank) for rank in guilty})
        lines = [f"  rank {rank}: {where}" for rank, where in sorted(self._where.items())]
        where = "\n".join(["\nWhere each rank was:", *lines]) if lines else ""
        match cause:
            case "server":
                text = "the server that ranks are forked from has died, and all ranks with it"
                return "died", text, ()
            case "died":
                deaths = [f"rank {rank} {self._death(end)}" for rank, end in found.items()]
                return "died", "\n".join(deaths) + where, guilty
            case "cut off":
                text = f"{ranks_text(guilty)} closed the connection to this process"
                return "died", text + where, guilty
            case "disagree":  # the last to come saw all of them
                return "disagree", list(found.values())[-1].message, ()
            case "unpicklable" | "raised":
                return cause, _report(found), guilty
        if self._stuck:
            return "stuck", self._stuck.sentence + where, self._stuck.ranks
        return "stuck", _report(found) + where, ()  # only ranks that lost a peer have errors

    def _first_sign(self, running: set[int]) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()
            if board := self._ranks.board:
                folder = Path(self._ranks.folder)
                self._where = positions(board, self._ranks.pids, running, self._targets, folder)

    def _death(self, end: End) -> str:
        if end.status != -signal.SIGKILL:
            return str(end)
        if _oom_kills() > self._oom_kills:
            return (
                f"{end}. The system ran out of memory and killed it: use fewer ranks, a smaller "
                "model or batch"
            )
        return (
            f"{end} ({available_bytes() / 1e9:.1f} GB are free now). If nobody killed it, the "
            "system did, which it does when memory runs out"
        )


def _report(errors: dict[int, RemoteError]) -> str:
    """Each different error once, with the ranks that raised it."""
    groups: dict[str, list[int]] = {}
    for rank, error in sorted(errors.items()):
        groups.setdefault(error.format(), []).append(rank)
    parts = []
    for text, ranks in groups.items():
        error = errors[ranks[0]]
        if error.type_name == "Unpicklable":
            parts.append(f"{ranks_text(ranks)}: {error.message}")
        else:
            parts.append(f"{ranks_text(ranks)} raised {error.headline}\n\n{text}\n")
    return "\n".join(parts)


def _oom_kills() -> int:
    """How often the kernel has killed for want of memory, on Linux; 0 where that is not known."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
