"""Starts ranks: forks them from a warm server, or spawns them on platforms without fork.

Each rank leads a new process group: an interrupt of the driver's group does not reach the rank, and
processes that a rank has started (data loaders, shell commands) are killed when the rank ends.
"""

import atexit
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.runtime.channel import Channel, ready
from labkit.runtime.rank import Spec

POLL_S = 0.05  # polling interval, because another thread may receive the awaited message
KILL_PATIENCE_S = 5.0


@dataclass(frozen=True)
class End:
    """A rank's exit status (negative: minus the signal number) and peak memory (0: unknown)."""

    status: int
    peak_bytes: int = 0

    def __str__(self) -> str:
        """ "was killed by SIGSEGV", "ended by itself with status 3 ..."."""
        if self.status >= 0:
            return f"ended by itself with status {self.status} (os._exit, or a crash in C code)"
        name = f"signal {-self.status}"  # for a real-time signal
        with suppress(ValueError):
            name = signal.Signals(-self.status).name
        used = f"; it had used up to {self.peak_bytes / 1e9:.2f} GB" if self.peak_bytes else ""
        return f"was killed by {name}{used}"


class ForkServer:
    """The driver's side of `labkit.runtime.server`, shared by all worlds and threads of a process.
    If an interrupt cancels a request, the server kills the ranks that it forked for the request."""

    _only: "ForkServer | None" = None
    _choosing = threading.Lock()

    def __init__(self, early: bool = False) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from labkit.runtime.server import main; main({theirs.fileno()}, early={early})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # survives a kill of the driver's group, to clean up
        )
        theirs.close()
        self._channel = Channel(ours)
        self._talking = threading.Lock()
        self._numbers = itertools.count(1)
        self._replies: dict[int, tuple[list[int], str]] = {}  # request -> process ids, problem
        self._ends: dict[int, End] = {}
        self._owner = os.getpid()

    @staticmethod
    def get(early: bool = False) -> "ForkServer":
        """The running server, or a new one."""
        with ForkServer._choosing:
            only = ForkServer._only
            if only is None or only._owner != os.getpid() or only._process.poll() is not None:
                if only is not None:
                    only.close()
                ForkServer._only = only = ForkServer(early)
            return only

    def delete_at_end(self, folder: str) -> None:
        """Have the server delete this folder once the driver is gone."""
        with suppress(EOFError):  # `start` reports this in detail
            self._send("delete at end", folder)

    def start(self, specs: list[Spec], tick: Callable[[], None]) -> list[int]:
        """Start these ranks, calling `tick` while waiting, and return their process ids."""
        number = next(self._numbers)
        try:
            self._send("fork", (number, specs))
            while number not in self._replies:
                ready([self._channel], POLL_S)
                tick()
                self.ends()
        except EOFError:
            self.close()
            raise RuntimeError(
                "the server that forks the ranks ended with status "
                f"{self._process.returncode}. Its error, if any, is printed above; check that "
                "`import labkit.runtime.world` works."
            ) from None
        except BaseException:
            with suppress(EOFError):
                self._send("cancel", number)
            raise
        pids, problem = self._replies.pop(number)
        if problem:
            self.kill(pids)
            self.forget(pids)
            raise RuntimeError(f"the system could not start {len(specs)} processes: {problem}")
        return pids

    def ends(self) -> dict[int, End]:
        """The `End` of each ended rank, by process id. Raises EOFError if the server is gone."""
        with self._talking:
            while ready([self._channel], 0):
                kind, body = self._channel.recv()
                if kind == "forked":
                    number, pids, problem = body
                    self.forget(pids)  # remove entries of earlier processes with these ids
                    self._replies[number] = pids, problem
                else:
                    pid, status, peak_bytes = body
                    self._ends[pid] = End(os.waitstatus_to_exitcode(status), peak_bytes)
        return self._ends

    def kill(self, pids: list[int]) -> None:
        """Kill these ranks and wait until they are gone."""
        try:
            ended = self.ends()
        except EOFError:
            if sys.platform == "linux":
                return  # they died with the server; other processes may have their ids by now
            ended = self._ends
        for pid in pids:
            if pid not in ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait(pids, KILL_PATIENCE_S)

    def wait(self, pids: list[int], patience_s: float) -> bool:
        """Wait for these ranks to end; return False if any is alive after `patience_s` seconds."""
        deadline_s = time.monotonic() + patience_s
        with suppress(EOFError):
            while not self.ends().keys() >= set(pids):
                if time.monotonic() > deadline_s:
                    return False
                ready([self._channel], POLL_S)
        return True

    def forget(self, pids: list[int]) -> None:
        for pid in pids:
            self._ends.pop(pid, None)

    def close(self) -> None:
        self._channel.close()
        if self._owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
            self._process.wait()

    def _send(self, kind: str, body: Any) -> None:
        with self._talking:
            self._channel.send((kind, body))


class Spawner:
    """Starts each rank as a new interpreter, which is slower but works on every platform."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def delete_at_end(self, folder: str) -> None:
        """Nothing to do: the ranks delete the folder when the driver is gone."""

    def start(self, specs: list[Spec], tick: Callable[[], None]) -> list[int]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from labkit.runtime.rank import run_spawned; "
            "run_spawned()"
        )
        try:
            for spec in specs:
                process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
                )
                self._processes[process.pid] = process
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # the rank has died; `ends` will report it
                    process.stdin.write(pickle.dumps(spec))
                    process.stdin.flush()  # stdin stays open until the driver ends
        except BaseException:
            self.kill(list(self._processes))
            self.forget(list(self._processes))
            raise
        return list(self._processes)

    def ends(self) -> dict[int, End]:
        statuses = {pid: process.poll() for pid, process in self._processes.items()}
        return {pid: End(status) for pid, status in statuses.items() if status is not None}

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            self._processes[pid].kill()
        self.wait(pids, KILL_PATIENCE_S)

    def wait(self, pids: list[int], patience_s: float) -> bool:
        deadline_s = time.monotonic() + patience_s
        with suppress(subprocess.TimeoutExpired):
            for pid in pids:
                self._processes[pid].wait(max(0.0, deadline_s - time.monotonic()))
            return True
        return False

    def forget(self, pids: list[int]) -> None:
        for pid in pids:
            process = self._processes.pop(pid)
            kill_group(pid)
            if process.stdin:
                with suppress(OSError):
                    process.stdin.close()


Starter = ForkServer | Spawner


def starter(start: str | None = None) -> Starter:
    """The starter for `start`: "fork" (if available), "spawn", or None (the platform's default)."""
    if start not in (None, "fork", "spawn"):
        raise ValueError(f'start={start!r}: choose "fork", "spawn" or None')
    if start == "spawn" or not hasattr(os, "fork"):
        return Spawner()
    return ForkServer.get()


def warm_up_early() -> None:
    """Start the server now, without waiting for it."""
    if hasattr(os, "fork"):
        ForkServer.get(early=True)


def kill_group(pid: int) -> None:
    """Kill the processes left behind by rank process `pid`, which has just ended."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@atexit.register
def _close() -> None:
    if ForkServer._only is not None:
        ForkServer._only.close()
