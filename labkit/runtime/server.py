"""The warm server: a process that has imported torch and labkit, and forks ranks on request.

A forked rank imports nothing and shares the server's memory: it starts within tens of milliseconds
and needs a fifth of a spawned rank's memory. Imports that are slow and not always needed wait until
the server is idle; in a notebook, which starts the server early, they run before the first ranks.
The server never uses CUDA, which does not survive a fork. When the driver's end of the socket
closes, for whatever reason, the server kills its ranks, removes their folders and exits.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from labkit.runtime import rank
from labkit.runtime.channel import Channel, ready
from labkit.runtime.folders import remove
from labkit.runtime.launch import kill_group
from labkit.runtime.rank import Spec

PR_SET_PDEATHSIG = 1
QUIET_S = 0.5


def main(fd: int, early: bool = False) -> None:
    """Serve the driver on the socket `fd`. `early`: run the slow imports at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = Channel(socket.socket(fileno=fd))
    wake_up, bell = socket.socketpair()
    for end in (wake_up, bell):
        end.setblocking(False)
    signal.set_wakeup_fd(bell.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # process id -> request number
    folders: set[str] = set()
    importer = threading.Thread(target=_import_slow_modules)
    _import_modules()
    gc.freeze()
    if early:
        importer.start()
    try:
        while True:
            readable = ready([driver, wake_up], QUIET_S if importer.ident is None else None)
            if not readable:
                importer.start()
            if wake_up in readable:
                with suppress(BlockingIOError):
                    wake_up.recv(4096)
                _report_ends(driver, children)
            if driver in readable:
                kind, body = driver.recv()
                if kind == "delete at end":
                    folders.add(body)
                elif kind == "cancel":
                    for pid in [pid for pid, number in children.items() if number == body]:
                        os.kill(pid, signal.SIGKILL)
                elif kind == "fork":
                    if importer.ident is not None:
                        importer.join()  # a fork would inherit locks that the importer holds
                    number, specs = body
                    pids: list[int] = []
                    problem = ""
                    try:
                        for spec in specs:
                            pids.append(_fork(spec, [driver.sock, wake_up, bell]))
                    except OSError as error:
                        problem = str(error)
                    children.update(dict.fromkeys(pids, number))
                    with suppress(EOFError):  # the driver is gone: handle its last requests first
                        driver.send(("forked", (number, pids, problem)))
    except EOFError:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
            kill_group(pid)
        remove(folders)
        os._exit(0)


def _import_modules() -> None:
    """Import the modules that every rank needs, and none that starts a thread."""
    import cloudpickle  # noqa: F401
    import torch.optim  # noqa: F401

    import labkit.runtime.cells  # noqa: F401


def _import_slow_modules() -> None:
    """Import the module that the first optimizer needs; this takes longer than all others."""
    import torch._dynamo  # noqa: F401

    gc.freeze()


def _fork(spec: Spec, inherited: list[socket.socket]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in inherited:
            end.close()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else the server died before prctl took effect
            rank.run_rank(spec)
    finally:
        os._exit(1)


def _report_ends(driver: Channel, children: dict[int, int]) -> None:
    """Report each ended child to the driver: pid, wait status, peak memory in bytes."""
    for pid in list(children):
        with suppress(ChildProcessError, EOFError):
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                del children[pid]
                kill_group(pid)
                unit = 1 if sys.platform == "darwin" else 1024
                driver.send(("ended", (pid, status, usage.ru_maxrss * unit)))
