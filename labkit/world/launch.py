"""How the driver brings ranks to life: forked from a warm server, or spawned where the platform
has no fork. Both start, stop and tell of ends in the same way.
"""

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from labkit.world.channel import Channel
from labkit.world.rank import Spec


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit status (negative: the signal), and its peak memory if known."""

    status: int
    peak_bytes: int = 0


class ForkServer:
    """The driver's side of `labkit.world.server`, one for all worlds of a process."""

    _only: "ForkServer | None" = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from labkit.world.server import main; main({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._channel = Channel(ours)
        self._ends: dict[int, End] = {}
        self._owner = os.getpid()
        self._expect("warm")

    @staticmethod
    def get() -> "ForkServer":
        """The running server, or a new one."""
        only = ForkServer._only
        if only is None or only._owner != os.getpid() or only._process.poll() is not None:
            ForkServer._only = only = ForkServer()
        return only

    def start(self, specs: list[Spec]) -> list[int]:
        """Bring these ranks to life; returns their process ids."""
        self._channel.send(("fork", specs))
        return self._expect("forked")  # type: ignore[no-any-return]

    def fileno(self) -> int:
        return self._channel.fileno()

    def ends(self) -> dict[int, End]:
        """The ends known by now, by process id. Raises EOFError when the server itself is gone."""
        while select.select([self._channel], [], [], 0)[0]:
            self._note(*self._channel.recv())
        return self._ends

    def kill(self, pids: list[int], patience_s: float = 5.0) -> None:
        """Kill these ranks and wait until they are gone."""
        with suppress(EOFError):
            self.ends()
            for pid in pids:
                if pid not in self._ends:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.wait(pids, patience_s)

    def wait(self, pids: list[int], patience_s: float) -> bool:
        """Wait until these ranks have ended; False when they have not within `patience_s`."""
        until_s = time.monotonic() + patience_s
        with suppress(EOFError):
            while not all(pid in self._ends for pid in pids):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                if select.select([self._channel], [], [], left_s)[0]:
                    self._note(*self._channel.recv())
        return True

    def forget(self, pids: list[int]) -> None:
        for pid in pids:
            self._ends.pop(pid, None)

    def close(self) -> None:
        if self._owner == os.getpid():
            self._channel.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
            self._process.wait()

    def _expect(self, kind: str) -> object:
        while True:
            try:
                got, body = self._channel.recv()
            except EOFError:
                status = self._process.wait()
                raise RuntimeError(
                    f"the server that ranks are forked from ended with status {status} before it "
                    "was ready; its own error stands above. Check that `import labkit.world` works."
                ) from None
            if got == kind:
                return body
            self._note(got, body)

    def _note(self, kind: str, body: object) -> None:
        if kind == "ended":
            pid, status, peak_bytes = body  # type: ignore[misc]
            self._ends[pid] = End(os.waitstatus_to_exitcode(status), peak_bytes)


class Spawner:
    """Ranks as new interpreters: slower, but every platform has it."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, specs: list[Spec]) -> list[int]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from labkit.world.rank import spawned; "
            "spawned()"
        )
        started = []
        for spec in specs:
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(spec))
            process.stdin.flush()  # stays open: its end tells the rank that the driver is gone
            self._processes[process.pid] = process
            started.append(process.pid)
        return started

    def fileno(self) -> int:
        return -1

    def ends(self) -> dict[int, End]:
        statuses = {pid: process.poll() for pid, process in self._processes.items()}
        return {pid: End(status) for pid, status in statuses.items() if status is not None}

    def kill(self, pids: list[int], patience_s: float = 5.0) -> None:
        for pid in pids:
            self._processes[pid].kill()
        self.wait(pids, patience_s)

    def wait(self, pids: list[int], patience_s: float) -> bool:
        until_s = time.monotonic() + patience_s
        for pid in pids:
            try:
                self._processes[pid].wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def forget(self, pids: list[int]) -> None:
        for pid in pids:
            process = self._processes.pop(pid)
            if process.stdin:
                with suppress(OSError):
                    process.stdin.close()


Starter = ForkServer | Spawner


def starter(start: str | None = None) -> Starter:
    """What this platform starts ranks with; `start` is "fork" or "spawn" to choose."""
    if start not in (None, "fork", "spawn"):
        raise ValueError(f'start={start!r}: choose "fork", "spawn" or None (what is there)')
    if start == "spawn" or not hasattr(os, "fork"):
        return Spawner()
    return ForkServer.get()


@atexit.register
def _close() -> None:
    if ForkServer._only is not None:
        ForkServer._only.close()
