"""Collects the failures of a run, waits briefly for their cause, and reports that cause once,
without its consequences on other ranks.
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

GRACE_S = 0.3  # from the first sign of failure to the report
COMPUTING_S = 2.0  # the same, if the other ranks are computing and may still answer
UNREPORTED_S = 5.0  # for the server to report the end of a rank whose connection has closed
HARMLESS = {"raised", "unpicklable"}  # after these alone, the ranks may still be in step
BY_SEVERITY = ("server", "died", "cut off", "disagree", "unpicklable", "raised", "lost a peer")


class Failures:
    """The failures of one run; their cause is known once `settled()` returns True."""

    def __init__(self, ranks: Ranks, targets: Sequence[int]):
        self._ranks, self._targets = ranks, targets
        self.running = set(targets)  # ranks that have not answered
        self._failures: dict[str, dict[int, Any]] = {}  # kind -> rank -> RemoteError or End
        self._stuck: Verdict | None = None
        self._where: dict[int, str] = {}  # positions at the first sign of failure
        self._first_s: float | None = None
        self._oom_kills = _oom_kills()
        self._watch = Watch(ranks.board, ranks.timeout_s, targets) if ranks.board else None

    def add(self, rank: int, kind: str, what: Any) -> None:
        """Record that rank `rank` failed; `what`: its RemoteError or End, if any."""
        self.running.discard(rank)
        self._first_sign(self.running | {rank} if kind == "lost a peer" else self.running)
        self._failures.setdefault(kind, {}).setdefault(rank, what)

    def check(self) -> None:
        """Check for ranks that have ended or are stuck."""
        try:
            ends = self._ranks.starter.ends()
        except EOFError:
            self.running.clear()
            self._first_sign(set())
            self._failures["server"] = {}
            return
        dead = {rank: ends[pid] for rank, pid in enumerate(self._ranks.pids) if pid in ends}
        self.running -= dead.keys()
        for rank, end in dead.items():
            self.add(rank, "died", end)
        if self._watch and self._first_s is None:
            self._stuck = self._watch.check(self.running)
            if self._stuck:
                self._first_sign(self.running)

    def settled(self) -> bool:
        """Whether the run has failed and enough time has passed to know the cause."""
        return self._first_s is not None and time.monotonic() - self._first_s >= self._patience_s()

    def _patience_s(self) -> float:
        """Seconds from the first sign of failure until the cause is known."""
        failures, running = self._failures, self.running
        unreported = failures.get("cut off", {}).keys() - failures.get("died", {}).keys()
        if "server" in failures or not (running or unreported):
            return 0
        if unreported or ("died" in failures and any(map(self._has_ended, running))):
            return UNREPORTED_S
        if failures.keys() == {"lost a peer"} and not self._stuck:
            return 5 * GRACE_S
        board = self._ranks.board  # without a board, waits are unknown
        waits = board is None or any(board.notes(rank, (WAITED_FOR,)) for rank in running)
        harmless = failures.keys() <= HARMLESS and not self._stuck and not waits
        return COMPUTING_S if harmless else GRACE_S

    def _has_ended(self, rank: int) -> bool:
        """Whether the rank's process has exited. On a loaded machine, the server's report and the
        end of the connection can arrive much later."""
        try:
            return psutil.Process(self._ranks.pids[rank]).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def none(self) -> bool:
        return self._first_s is None

    def nothing_in_flight(self) -> bool:
        """Whether all ranks have answered and completed all of their operations, so that the
        ranks are in step for the next run."""
        board = self._ranks.board
        if self.running or board is None or not set(self._failures) <= HARMLESS:
            return False
        return all(
            note.state == ENDED and all(board.has_begun(peer, note) for peer in note.ranks)
            for rank in range(board.size)
            for note in board.notes(rank)
        )

    def error(self, kept: bool) -> RankError:
        """The RankError that reports the failures; `kept`: whether the ranks stay alive."""
        kind, text, culprits = self._diagnosis()
        others = [rank for rank in range(self._ranks.size) if rank not in culprits]
        stopped = ranks_text(others) if culprits and others else "all ranks"
        text += (
            "\n(All ranks keep their variables for the next run.)"
            if kept
            else f"\n({stopped} stopped; the next run starts new ranks. All variables on the ranks "
            "are lost: rerun the cells that define them.)"
        )
        return RankError(cells.with_titles(text), kind, culprits)

    def _diagnosis(self) -> tuple[str, str, tuple[int, ...]]:
        """The kind of the error, its text, and the ranks at fault."""
        cause = next((kind for kind in BY_SEVERITY if kind in self._failures), "stuck")
        failures = self._failures.get(cause, {})
        culprits = tuple(sorted(failures))
        if cause in ("died", "cut off") and (board := self._ranks.board):
            self._where.update({rank: last_operation(board, rank) for rank in culprits})
        lines = [f"  rank {rank}: {where}" for rank, where in sorted(self._where.items())]
        where = "\n".join(["\nWhere each rank was:", *lines]) if lines else ""
        match cause:
            case "server":
                text = "the server that forks the ranks has died, and so have all ranks"
                return "died", text, ()
            case "died":
                deaths = [f"rank {rank} {self._death(end)}" for rank, end in failures.items()]
                return "died", "\n".join(deaths) + where, culprits
            case "cut off":
                text = f"{ranks_text(culprits)} closed the connection to this process"
                return "died", text + where, culprits
            case "disagree":  # the last error lists all calls
                return "disagree", list(failures.values())[-1].message, ()
            case "unpicklable" | "raised":
                return cause, _report(failures), culprits
        if self._stuck:
            return "stuck", self._stuck.sentence + where, self._stuck.ranks
        return "stuck", _report(failures) + where, ()  # only ranks that lost a peer have errors

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
                "model or a smaller batch"
            )
        return (
            f"{end} ({available_bytes() / 1e9:.1f} GB are free now). If no user killed it, the "
            "system probably ran out of memory"
        )


def _report(errors: dict[int, RemoteError]) -> str:
    """Each distinct error once, with the ranks that raised it."""
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
    """The number of out-of-memory kills by the Linux kernel so far; 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
