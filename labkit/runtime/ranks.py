"""Starts, listens to and stops the processes of a world."""

import math
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.comm import Board
from labkit.events import ranks_in_words
from labkit.runtime.channel import MAX_FOLDER_BYTES, Channel, listener, ready
from labkit.runtime.errors import RankError
from labkit.runtime.folders import memory_folder, new_folder, remove
from labkit.runtime.in_step import Begun, in_step
from labkit.runtime.interrupts import Interrupts
from labkit.runtime.launch import Starter, starter
from labkit.runtime.output import RankOutput
from labkit.runtime.progress import notice
from labkit.runtime.rank import CONTROL, HELLO, OUTPUT, STARTUP_TIMEOUT_S, Spec

if TYPE_CHECKING:
    from labkit.runtime.world import World

TICK_S = 0.05  # between checks of a running world
ANSWER_S = 1.0  # for an idle rank to answer
MAX_BUFFERED_BYTES = 1 << 22  # exceeds the system's buffer for a rank's output


class Ranks:
    """The running processes of a world, and the sockets to them."""

    def __init__(self, world: "World"):
        self.size, self.timeout_s, self.owner = world.size, world.timeout_s, os.getpid()
        self.board: Board | None = None
        self.ends: list[socket.socket] = []  # all open sockets, for `_disconnect`
        self.controls: list[Channel] = []
        self.outputs: list[socket.socket] = []
        self.pids: list[int] = []
        folders: set[str] = set()
        self._cleanup = weakref.finalize(self, _disconnect, folders, self.owner, self.ends)
        try:
            self.starter: Starter = starter(world._start_with)

            def register(folder: str) -> None:
                folders.add(folder)
                self.starter.delete_at_end(folder)

            self.folder, self.shared = new_folder(register), ""
            if world.transport == "shm":
                self.shared = memory_folder(register, self.folder)
            if world.check:
                self.board = Board.create(Path(self.folder) / "board", world.size)
            with notice("starting ranks; the first time, importing torch takes a while") as tick:
                fits = len(os.fsencode(self.folder)) <= MAX_FOLDER_BYTES
                self._spawn(world, self.folder if fits else new_folder(register, "/tmp"), tick)
        except BaseException:
            self.stop(kill=True)
            raise

    def _spawn(self, world: "World", folder: str, tick: Callable[[], None]) -> None:
        sock, address = listener(folder)
        token, env = secrets.token_bytes(16), dict(os.environ)
        specs = [
            Spec(
                rank=rank, size=world.size, address=address, token=token, folder=self.folder,
                shared=self.shared, backend=world.backend, device=world.device,
                threads=world.threads, timeout_s=world.timeout_s, link=world.link, seed=world.seed,
                check=world.check, cwd=os.getcwd(), path=sys.path, env=env,
            )
            for rank in range(world.size)
        ]  # fmt: skip
        streams: dict[tuple[int, int], socket.socket] = {}
        pending: dict[Channel, int] = {}  # ranks that are connected but not ready
        with sock:
            self.pids = self.starter.start(specs, tick)
            # The ranks also wait for each other.
            deadline_s = time.monotonic() + STARTUP_TIMEOUT_S + world.timeout_s
            while len(streams) < 2 * world.size or pending:
                readable = ready([sock, *pending], TICK_S)
                tick()
                if not readable:  # checked last: a rank that has died may have sent the reason
                    self._check_startup(deadline_s)
                for end in readable:
                    if isinstance(end, Channel):
                        _check_ready(pending.pop(end), end)
                        continue
                    caller, _ = sock.accept()
                    hello = caller.recv(HELLO.size, socket.MSG_WAITALL)
                    if hello[: len(token)] != token or len(hello) < HELLO.size:
                        caller.close()
                        continue
                    self.ends.append(caller)
                    _, rank, stream = HELLO.unpack(hello)
                    streams[rank, stream] = caller
                    if stream == CONTROL:
                        pending[Channel(caller)] = rank
        self.controls = [Channel(streams[rank, CONTROL]) for rank in range(world.size)]
        self.outputs = [streams[rank, OUTPUT] for rank in range(world.size)]
        self._check_startup(deadline_s)

    def _check_startup(self, deadline_s: float) -> None:
        """Raises RankError if a rank has died during startup or `deadline_s` has passed."""
        ends = self.starter.ends()
        dead = tuple(rank for rank, pid in enumerate(self.pids) if pid in ends)
        if dead:
            raise RankError(f"rank {dead[0]} {ends[self.pids[dead[0]]]} at startup", "died", dead)
        if time.monotonic() > deadline_s:
            text = f"{ranks_in_words(self.size)} did not start in time; use fewer, or try again"
            raise RankError(text, "stuck")

    def listen(self, patience_s: float, output: RankOutput) -> list[tuple[int, str, Any]]:
        """The ranks' answers within `patience_s` seconds; printed text is passed to `output`."""
        sources: dict[Any, int] = {}
        for rank in range(self.size):
            for end in (self.controls[rank], self.outputs[rank]):
                if end.fileno() >= 0:
                    sources[end] = rank
        answers = []
        for end in ready(list(sources), patience_s):
            if isinstance(end, socket.socket):
                self._read(sources[end], output)
            else:
                try:
                    with Interrupts(1):  # interrupt at once: this message can be long
                        answers.append((sources[end], *end.recv()))
                except EOFError:
                    end.close()
                    answers.append((sources[end], "cut off", None))
        output.refresh()
        return answers

    def in_step(self, output: RankOutput) -> bool:
        """Whether all ranks answer and have begun the same operations of torch.distributed."""
        begun: dict[int, Begun] = {}
        for channel in self.controls:
            with suppress(EOFError):
                channel.send(("begun", None, None))
        deadline_s = time.monotonic() + ANSWER_S
        while len(begun) < self.size and time.monotonic() < deadline_s:
            answers = self.listen(TICK_S, output)
            begun.update({rank: body for rank, kind, body in answers if kind == "begun"})
        return len(begun) == self.size and in_step(begun.values())

    def drain(self, output: RankOutput) -> None:
        """Read the output so far, without waiting for threads on the ranks that keep printing."""
        for rank, sock in enumerate(self.outputs):
            left_bytes = MAX_BUFFERED_BYTES
            while left_bytes > 0 and sock.fileno() >= 0 and ready([sock], 0):
                left_bytes -= self._read(rank, output)

    def _read(self, rank: int, output: RankOutput) -> int:
        data = self.outputs[rank].recv(1 << 16)
        if data:
            output.feed(rank, data)
        else:
            self.outputs[rank].close()
        return len(data)

    def stop(self, kill: bool) -> None:
        """End the processes, gracefully unless `kill`; close the sockets and remove the folders."""
        if os.getpid() != self.owner:
            return
        with Interrupts(math.inf):  # must not be left half done; takes a few seconds at most
            if not kill:
                for channel in self.controls:
                    with suppress(EOFError):
                        channel.send(("stop", None, None))
            for end in self.ends if kill else self.outputs:
                end.close()
            if self.pids:
                if kill or not self.starter.wait(self.pids, 1.0):
                    self.starter.kill(self.pids)
                self.starter.forget(self.pids)
            if self.board is not None:
                self.board.close()
            self._cleanup()


def _check_ready(rank: int, channel: Channel) -> None:
    with suppress(EOFError):  # the rank has died; its starter will report it
        kind, error = channel.recv()
        if kind != "ready":
            text = f"rank {rank} could not start:\n{error.format()}"
            raise RankError(text, "raised", (rank,))


def _disconnect(folders: set[str], owner: int, ends: list[socket.socket]) -> None:
    """Close the connections, which ends the ranks, and remove the folders."""
    for end in ends:
        end.close()
    if os.getpid() == owner:  # not in a fork of the driver
        remove(folders)
