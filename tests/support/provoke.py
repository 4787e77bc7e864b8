"""Processes looked at from outside, and drivers run as scripts that can be killed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from places import ROOT, SUPPORT


def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Wait for something to become true; returns what it was, true or not."""
    end_s = time.monotonic() + within_s
    while not (value := condition()) and time.monotonic() < end_s:
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs. (A zombie does not: whoever inherits it may be slow to reap.)"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    return bool(until(lambda: not any(map(alive, pids)), within_s))


def stop_tree(process: subprocess.Popen[Any], within_s: float = 60.0) -> list[str]:
    """End a process tree; the command lines of those that had to be killed."""
    if process.poll() is not None:
        return []
    parent = psutil.Process(process.pid)
    family = [(parent, "")] + [(one, _command(one)) for one in parent.children(recursive=True)]
    process.terminate()
    until(lambda: process.poll() is not None, within_s)
    until(lambda: not any(alive(one.pid) for one, _ in family), within_s)
    left = [(one, command) for one, command in family if one.is_running() and alive(one.pid)]
    for one, _ in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    return [f"{one.pid}: {command}" for one, command in left]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "gone"


def servers(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The warm servers of a driver, this process if none is given."""
    return (process or psutil.Process()).children()


def ranks_of_servers() -> set[int]:
    return {rank.pid for server in servers() for rank in server.children()}


def interrupted(action: Callable[[], object], *delays_s: float) -> BaseException | None:
    """Run `action` under interrupts after these times; returns the first KeyboardInterrupt."""
    raised = None
    kill = partial(os.kill, os.getpid(), signal.SIGINT)
    timers = [threading.Timer(delay_s, kill) for delay_s in delays_s]
    try:
        for timer in timers:
            timer.start()
        action()
    except KeyboardInterrupt as error:
        raised = error
    except BaseException:
        for timer in timers:
            timer.cancel()  # its interrupt would hit whatever comes after this failure
        raise
    until_s = time.monotonic() + max(delays_s)  # one that `start` was interrupted in comes, too
    while True:
        try:
            while time.monotonic() < until_s or any(timer.is_alive() for timer in timers):
                time.sleep(0.005)
            time.sleep(0.02)
            return raised
        except KeyboardInterrupt:
            pass


def shared_folders(pid: int) -> list[str]:
    """The folders of a driver's worlds in shared memory."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names if name.startswith(f"labkit-{pid}-")]


class Driver:
    """A script in a process of its own; `say` in it prints what `hear` returns here."""

    PRELUDE = """
import os, sys, time, signal, threading
from pathlib import Path
import labkit, psutil, torch
from labkit import Comm, RankError, RankInterrupt, World
from provoke import interrupted
from tables import raises
def say(*words):
    print("SAID", *words, flush=True)
def ones():
    x = torch.ones(1)
    Comm().all_reduce(x)
    return x.item()
"""

    def __init__(self, script: str, folder: Path, **options: Any):
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self.file = folder / "driver_script.py"
        self.file.write_text(self.PRELUDE + textwrap.dedent(script))
        own = {"TMPDIR": str(self.folder), "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")  # else torch makes it in TMPDIR
        self.env = os.environ | own
        self.process = subprocess.Popen(
            [sys.executable, str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
            start_new_session=True,
            **options,
        )
        self.log: list[str] = []

    def hear(self) -> str:
        """The next thing it says; everything else that it prints goes to the log."""
        for line in self.process.stdout:
            self.log.append(line)
            if line.startswith("SAID"):
                return line.removeprefix("SAID").strip()
        raise AssertionError("the driver ended without saying more:\n" + "".join(self.log))

    def hear_pids(self) -> list[int]:
        return [int(word) for word in self.hear().split()]

    def rest(self, within_s: float = 60) -> str:
        """All that it prints until it ends."""
        text, _ = self.process.communicate(timeout=within_s)
        self.log.append(text)
        return text

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal: its whole group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self, within_s: float = 20.0) -> None:
        """Kill it: all that it has started ends, and its worlds leave no folder."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert family
        self.process.kill()
        assert gone([process.pid for process in family], within_s)
        assert until(lambda: not self.leftovers() and not shared_folders(self.process.pid))

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@contextmanager
def driver(script: str, folder: Path, **options: Any) -> Iterator[Driver]:
    """Run `script`; whatever is left of it at the end is killed."""
    running = Driver(script, folder, **options)
    family = [psutil.Process(running.process.pid)]
    try:
        yield running
    finally:
        if running.process.poll() is None:
            family += family[0].children(recursive=True)
            running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
        for process in family[1:]:
            if process.is_running():
                process.kill()
