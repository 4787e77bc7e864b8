"""The process of a rank: it joins the process group and runs the driver's requests until it is
stopped. It exits with `os._exit`, so that no gloo thread can abort it at shutdown.
"""

import ctypes
import dis
import faulthandler
import io
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from labkit.comm import Board, CollectiveMismatch, CommError, Link, TwoLevel, here
from labkit.runtime.attach import BACKENDS, Rank, become, current, leave, use_loopback
from labkit.runtime.channel import Channel, connect
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.errors import RemoteError
from labkit.runtime.folders import remove
from labkit.runtime.in_step import begun, count_messages
from labkit.runtime.pickling import Unpicklable, dumps, unpack
from labkit.trace.recording import OnRank

HELLO = struct.Struct("<16sHB")  # the world's token, rank, stream
CONTROL, OUTPUT = range(2)
STARTUP_TIMEOUT_S = 60.0  # for all ranks to join the group, even on a loaded machine
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BYTES, MAX_FROM_HEAP_BYTES = 512 * 2**20, 32 * 2**20  # the second is glibc's maximum


@dataclass(frozen=True)
class Spec:
    """The start-up parameters of a rank."""

    rank: int
    size: int
    address: Any
    token: bytes
    folder: str
    shared: str  # the folder for shared memory, or "" if unused
    backend: str
    device: str
    threads: int
    timeout_s: float
    link: Link | TwoLevel | None
    seed: int
    check: bool
    cwd: str
    path: list[str]
    env: dict[str, str]

    @property
    def folders(self) -> set[str]:
        return {self.folder, self.shared, os.path.dirname(str(self.address))}


def run_rank(spec: Spec) -> NoReturn:
    """Run a rank from start to exit."""
    status = 0
    try:
        control = _start_up(spec)
        _serve(control)
        leave()
    except EOFError:  # the driver is gone
        remove(spec.folders)
        status = 1
    except BaseException as error:
        sys.__stderr__ and print(RemoteError.of(error).format(), file=sys.__stderr__)
        status = 1
    finally:
        os._exit(status)


def _start_up(spec: Spec) -> Channel:
    """Set up rank `spec.rank`: streams, environment, seeds, board and process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts
    with suppress(OSError):  # Linux: if memory runs out, kill a rank before the notebook
        Path("/proc/self/oom_score_adj").write_text("500")
    control = Channel(connect(spec.address, HELLO.pack(spec.token, spec.rank, CONTROL)))
    _redirect_output(connect(spec.address, HELLO.pack(spec.token, spec.rank, OUTPUT)))
    try:
        for name in os.environ.keys() - spec.env.keys():
            del os.environ[name]
        os.environ.update(spec.env)
        os.chdir(spec.cwd)
        sys.path[:] = spec.path
        _keep_freed_memory()
        use_loopback(override=True)
        faulthandler.enable()  # a crash in C code prints the Python stack
        if hasattr(faulthandler, "register"):
            stacks = open(Path(spec.folder) / f"stack{spec.rank}", "w")  # noqa: SIM115, stays open
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        torch.set_num_threads(spec.threads)
        random.seed(spec.seed)
        np.random.seed(spec.seed % 2**32)
        torch.manual_seed(spec.seed)
        device = torch.device(spec.device)
        if device.type == "cuda":
            device = torch.device("cuda", spec.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
            # torch warns once per thread, then sets the missing CUDA context itself.
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no")
        here.link = spec.link
        here.shared = Path(spec.shared) if spec.shared else None
        if spec.check:
            here.board = Board(Path(spec.folder) / "board", spec.size, spec.rank)
        count_messages()
        store = dist.FileStore(str(Path(spec.folder) / "store"), spec.size)
        # The board must time out first, since it reports more; a timedelta must be finite.
        timeout_s = min(spec.timeout_s, 3e9) + 1
        # gloo keeps this timeout for messages: a long one is safe only if the board reports hangs.
        joining_s = max(timeout_s, STARTUP_TIMEOUT_S) if spec.check else timeout_s
        dist.init_process_group(
            BACKENDS[spec.backend],
            store=store,
            rank=spec.rank,
            world_size=spec.size,
            timeout=timedelta(seconds=joining_s),
        )
        _set_pg_timeout(timedelta(seconds=timeout_s))
    except BaseException as error:
        control.send(("failed", RemoteError.of(error)))
        raise
    me = become(Rank(spec.rank, spec.size, device, spec.backend, control=control))
    names = {"torch": torch, "dist": dist, "comm": me.comm, "rank": me.rank, "size": me.size}
    vars(me.state).update(names, device=device, __name__="__main__")
    control.send(("ready", None))
    return control


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory, unless MALLOC_* variables are set: see mallopt(3). By default,
    glibc returns memory to the system when 128 KiB to a few MiB are free at the top of the heap,
    and gets it back page by page. A training step on a CPU, which frees everything it allocates,
    then spends about 5 % of its time on page faults, more in some steps than in others."""
    if not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
        if mallopt is not None:  # the allocator is glibc's
            mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(M_MMAP_THRESHOLD, MAX_FROM_HEAP_BYTES)


def _redirect_output(sock: socket.socket) -> None:
    """Send everything that this process prints, even from C code, to the driver."""
    if os.name == "posix":
        os.dup2(sock.fileno(), 1)
        os.dup2(sock.fileno(), 2)
        sock.close()
        sys.stdout, sys.stderr = _stream(1), _stream(2)
    else:
        sys.stdout = sys.stderr = sock.makefile("w", buffering=1, encoding="utf-8")


def _stream(fd: int) -> io.TextIOWrapper:
    """An unbuffered text stream to `fd`, which stays open if the user closes the stream."""
    raw = open(fd, "wb", 0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw, "utf-8", errors="backslashreplace", line_buffering=True, write_through=True
    )


def _clean_up() -> None:
    """Flush all output, destroy dropped groups, and replace streams that the run has closed."""
    if dist.is_initialized():
        Dispatcher.of(dist.group.WORLD).destroy_dropped()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        try:
            getattr(sys, name).flush()
        except Exception:
            if os.name == "posix":
                setattr(sys, name, _stream(fd))


def _serve(control: Channel) -> None:
    """Run the driver's requests in order."""
    from labkit.runtime import cells

    me = current()
    assert me is not None
    process = os.getpid()
    recorder = OnRank(me.rank, me.size)
    while True:
        kind, body, spec = control.recv()
        if kind == "stop":
            return
        if kind == "begun":
            control.send(("begun", begun()))
            continue
        _clean_up()
        reply: tuple[str, Any]
        try:
            with recorder.following(spec):
                if kind == "cell":
                    source, filename, as_text = body
                    value = cells.run(source, filename, vars(me.state))
                    value = cells.shown(value) if as_text else value
                else:
                    function, args, kwargs = unpack(body)
                    value = function(*args, **kwargs)
                    del function, args, kwargs
            reply = ("value", dumps(value, "the result"))
            del value
        except BaseException as error:
            reply = (_failure_kind(error), RemoteError.of(error))
        _clean_up()
        if os.getpid() != process:
            os._exit(0)  # this is a child process that the function has forked
        control.send(reply)


def _failure_kind(error: BaseException) -> str:
    kind = type(error)  # isinstance reads error.__class__, which may raise
    if issubclass(kind, Unpicklable):
        return "unpicklable"
    if issubclass(kind, CollectiveMismatch):
        return "disagree"
    gloo_errors = ("closed by peer", "Connection reset", "Timed out waiting")
    from_torch = (kind is RuntimeError or issubclass(kind, dist.DistError)) and _raised_in_c(error)
    torch_lost = from_torch and any(text in str(error) for text in gloo_errors)
    return "lost a peer" if torch_lost or issubclass(kind, CommError) else "raised"


def _raised_in_c(error: BaseException) -> bool:
    """Whether C code raised the error, rather than a `raise` statement in Python."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"


def run_spawned() -> NoReturn:
    """Entry point of a spawned rank; its Spec is on stdin, which closes when the driver ends."""
    spec = pickle.load(sys.stdin.buffer)

    def die_with_driver() -> None:
        sys.stdin.buffer.read()
        remove(spec.folders)
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)  # with all processes that this rank has started
        os._exit(1)

    threading.Thread(target=die_with_driver, daemon=True).start()
    run_rank(spec)
