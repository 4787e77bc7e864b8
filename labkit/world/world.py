"""`World`: real ranks that live beside the notebook and run what you give them.

    driver (the notebook)                     ranks (processes)
    World(4)  ── fork ──> warm server ──────> 0  1  2  3     one process group
    world.run(fn) ── cloudpickle ───────────> fn() on each   what they print comes back at once
              <── one value per rank ────────
    a failure ──────────────────────────────> all are killed; the next run starts new ones

Nothing is ever repaired: a rank that failed may have left its peers in the middle of a
collective, so the world is stopped and started anew, which takes a tenth of a second.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from labkit.comm import Board, Link
from labkit.world import cells, pickling
from labkit.world import rank as ranks_of_this_process
from labkit.world.channel import Channel, listener, ready
from labkit.world.errors import RankError, RankInterrupt
from labkit.world.failures import Failures
from labkit.world.interrupts import Interrupts, ignored
from labkit.world.launch import Starter, starter
from labkit.world.output import RankOutput
from labkit.world.pick import check_size, pick
from labkit.world.rank import CONTROL, HELLO, Spec

TICK_S = 0.05  # how often a running world is looked after
BIRTH_S = 60.0
MOST_BUFFERED_BYTES = 1 << 22  # more than the system keeps of what a rank has printed


class World:
    """`size` ranks, alive until `close` or the end of the `with` block.

    Args:
        size: number of ranks.
        backend, device: "gloo" or "nccl", "cpu" or "cuda". Not given: NCCL when there is a GPU
            for each rank, gloo ranks that share the GPUs when there are fewer, else gloo on the
            CPU. `world.picked` says what and why.
        threads: torch's threads on each rank.
        timeout_s: how long a rank waits for another before the run fails.
        link: a modelled wire, to see a slow network on one machine.
        seed: `torch.manual_seed`, numpy's and Python's, the same on every rank.
        check: compare what ranks call, at a few microseconds a call. Off for benchmarks.
        start: "fork" or "spawn"; not given: what the platform has.

    >>> with World(4) as world:
    ...     world.run(lambda: Comm().rank ** 2)
    [0, 1, 4, 9]
    """

    def __init__(
        self,
        size: int,
        backend: str | None = None,
        device: str | None = None,
        threads: int = 1,
        timeout_s: float = 30,
        link: Link | None = None,
        seed: int = 0,
        check: bool = True,
        start: str | None = None,
    ):
        me = ranks_of_this_process.current()
        if me is not None and (me.control is not None or me.size > 1):
            raise RuntimeError(
                f"World({size}) inside a rank: this process is itself a rank of a world. Start "
                "worlds from the notebook or script, or use Comm().subgroup(...) for fewer ranks."
            )
        check_size(size)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: the time that a rank waits is above 0 s")
        if threads < 1:
            raise ValueError(f"threads={threads}: a rank computes with at least 1 thread")
        self.size, self.threads, self.timeout_s = size, threads, timeout_s
        self.link, self.seed, self.check = link, seed, check
        self._pick = pick(size, backend, device)
        self.backend, self.device = self._pick.backend, self._pick.device
        self._start_with = start
        self._alive: _Ranks | None = None
        self._closed = False
        self._busy = threading.RLock()
        self._asked_to_stop = ""  # "closed" or "restarted", by another thread
        self._ranks()

    @property
    def picked(self) -> str:
        """What the ranks run on, and why."""
        where = "on the CPU" if self.device == "cpu" else "on the GPU"
        return f"{self.size} ranks, {self.backend} {where}: {self._pick.why}"

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"World({self.picked}{state})"

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; returns one value per rank.

        Functions, lambdas and closures of a notebook cell travel. GPU tensors come back as CPU
        tensors. Raises RankError when a rank fails, RankInterrupt when the user interrupts; the
        ranks are then stopped, and the next run starts new ones.
        """
        return self.run_on(range(self.size), fn, *args, **kwargs)

    def run_on(
        self, ranks: Sequence[int], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """As `run`, on some ranks only; returns one value for each of them."""
        if not callable(fn):
            raise TypeError(f"World.run needs a function; {fn!r} is a {type(fn).__name__}")
        try:
            body = pickling.dumps((fn, args, kwargs), "the call")
        except pickling.Unpicklable as error:
            text = str(error).replace("the call[0]", getattr(fn, "__name__", "the function"))
            text = text.replace("the call[1]", "arguments ").replace("the call[2]", "argument ")
            raise RankError(text, "unpicklable") from None
        return self._converse(("call", body), ranks)

    def run_cell(self, source: str, filename: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Run the statements of `source` on `ranks`, in the names that live there; returns the
        value of its last expression for each. (What `%%ranks` does.)"""
        cells.remember(source, filename)
        return self._converse(
            ("cell", (source, filename)), range(self.size) if ranks is None else ranks
        )

    def restart(self) -> None:
        """Stop the ranks, with all they keep and do, and start new ones."""
        self._asked_to_stop = "restarted"
        with self._busy:
            self._stop(kill=True)
            self._ranks()

    def close(self) -> None:
        """Stop the ranks, and what they do, for good. The `with` block does it."""
        self._closed, self._asked_to_stop = True, "closed"
        with self._busy:
            self._stop(kill=False)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------

    def _ranks(self) -> "_Ranks":
        if self._closed:
            raise RuntimeError(f"{self!r}: make a new World to run on")
        if self._alive is None:
            self._alive = _Ranks(self)
        if self._alive.owner != os.getpid():
            raise RuntimeError(
                f"this world belongs to process {self._alive.owner}, of which this one is a fork; "
                "make a World here"
            )
        return self._alive

    def _stop(self, kill: bool) -> None:
        if self._alive is not None:
            ranks, self._alive = self._alive, None
            ranks.stop(kill)

    def _converse(self, message: tuple[str, Any], targets: Sequence[int]) -> list[Any]:
        """Send `message` to the ranks `targets`; returns their values, once all have answered."""
        targets = list(targets)
        for rank in targets:
            if rank not in range(self.size):
                raise ValueError(f"rank {rank!r} is not in this world; choose 0 to {self.size - 1}")
        if len(targets) > len(set(targets)):
            raise ValueError(f"ranks {targets}: name each rank once")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this world is running something in another thread; make a second")
        try:
            with Interrupts() as interrupts:
                values = self._listen(message, targets, interrupts)
        finally:
            self._busy.release()
        return [pickling.loads(values[rank], f"the result of rank {rank}") for rank in targets]

    def _listen(
        self, message: tuple[str, Any], targets: list[int], interrupts: Interrupts
    ) -> dict[int, pickling.Parcel]:
        """Talk with the ranks until all have answered. Whatever ends it sooner ends them."""
        self._asked_to_stop = ""
        ranks = self._ranks()
        output = RankOutput(self.size)
        failures = Failures(self, ranks, targets)
        values: dict[int, pickling.Parcel] = {}
        unharmed = False
        try:
            for rank in targets:
                with suppress(EOFError):  # it has died: `failures` will see
                    ranks.controls[rank].send(message)
            while len(values) < len(targets) and not failures.settled():
                for rank, kind, body in ranks.listen(TICK_S, output):
                    if kind == "value":
                        values[rank] = body
                        failures.returned(rank)
                    else:
                        failures.add(rank, kind, body)
                failures.look()
                if interrupts.came:
                    raise KeyboardInterrupt
                if self._asked_to_stop:
                    raise RankError(f"the world was {self._asked_to_stop} meanwhile", "interrupted")
            ranks.drain(output)
            if error := failures.error():
                raise error
            unharmed = True
        except KeyboardInterrupt:
            raise RankInterrupt(
                f"interrupted; the {self.size} ranks were stopped, and the next run starts new ones"
            ) from None
        finally:
            if not unharmed:
                self._stop(kill=True)
            output.close()
        return values


class _Ranks:
    """The living processes of a world, and the sockets to them."""

    def __init__(self, world: World):
        self.size, self.owner = world.size, os.getpid()
        self.folder = tempfile.mkdtemp(prefix="labkit-")
        self.board = Board.create(Path(self.folder) / "board", world.size) if world.check else None
        self.ends: list[socket.socket] = []  # all that are open, for `_abandon`
        self.controls: list[Channel] = []
        self.outputs: list[socket.socket] = []
        self.pids: list[int] = []
        self._cleanup = weakref.finalize(self, _abandon, self.folder, self.owner, self.ends)
        try:
            with Interrupts() as interrupts:
                self.starter: Starter = starter(world._start_with)
                self._bear(world, interrupts)
        except BaseException:
            self.stop(kill=True)
            raise

    def _bear(self, world: World, interrupts: Interrupts) -> None:
        sock, address = listener(self.folder)
        token = secrets.token_bytes(16)
        specs = [
            Spec(
                rank=rank, size=world.size, address=address, token=token, folder=self.folder,
                backend=world.backend, device=world.device, threads=world.threads,
                timeout_s=world.timeout_s, link=world.link, seed=world.seed, check=world.check,
                cwd=os.getcwd(), path=sys.path, env=dict(os.environ),
            )
            for rank in range(world.size)
        ]  # fmt: skip
        controls: dict[int, Channel] = {}
        outputs: dict[int, socket.socket] = {}
        unborn: dict[Channel, int] = {}  # ranks that have called and are not ready
        with sock:
            self.pids = self.starter.start(specs)
            until_s = time.monotonic() + BIRTH_S + world.timeout_s  # they wait for each other, too
            while len(controls) + len(outputs) < 2 * world.size or unborn:
                talking = ready([sock, *unborn], TICK_S)
                if not talking:  # only now: a rank that has ended may have said why
                    self._look_after(until_s, interrupts)
                for end in talking:
                    if isinstance(end, Channel):
                        self._hear(unborn.pop(end), end)
                        continue
                    caller, _ = sock.accept()
                    hello = caller.recv(HELLO.size, socket.MSG_WAITALL)
                    if hello[: len(token)] != token or len(hello) < HELLO.size:
                        caller.close()
                        continue
                    self.ends.append(caller)
                    _, rank, stream = HELLO.unpack(hello)
                    if stream == CONTROL:
                        controls[rank] = Channel(caller)
                        unborn[controls[rank]] = rank
                    else:
                        outputs[rank] = caller
        self.controls = [controls[rank] for rank in range(world.size)]
        self.outputs = [outputs[rank] for rank in range(world.size)]
        self._look_after(until_s, interrupts)

    def _hear(self, rank: int, channel: Channel) -> None:
        with suppress(EOFError):  # it has died, and is soon known to
            kind, error = channel.recv()
            if kind != "ready":
                text = f"rank {rank} could not start:\n{error.format()}"
                raise RankError(text, "raised", (rank,))

    def _look_after(self, until_s: float, interrupts: Interrupts) -> None:
        """Raises what stops the ranks from being born."""
        ends = self.starter.ends()
        dead = tuple(rank for rank, pid in enumerate(self.pids) if pid in ends)
        if dead:
            raise RankError(f"rank {dead[0]} {ends[self.pids[dead[0]]]} at its start", "died", dead)
        if time.monotonic() > until_s:
            raise RankError(f"the {self.size} ranks did not start in time", "stuck")
        if interrupts.came:
            raise KeyboardInterrupt

    def listen(self, patience_s: float, output: RankOutput) -> list[tuple[int, str, Any]]:
        """Answers of ranks that came within `patience_s`; what they print goes to `output`."""
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
                    answers.append((sources[end], *end.recv()))
                except EOFError:
                    end.close()
                    answers.append((sources[end], "cut off", None))
        output.refresh()
        return answers

    def drain(self, output: RankOutput) -> None:
        """All that the ranks have printed so far; not more, since a thread of theirs may go on."""
        for rank, sock in enumerate(self.outputs):
            left_bytes = MOST_BUFFERED_BYTES
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
        """End the processes, politely first unless `kill`; close and remove all that was theirs."""
        if os.getpid() != self.owner:
            return
        with ignored():
            if not kill:
                for channel in self.controls:
                    with suppress(EOFError):
                        channel.send(("stop", None))
            for output in self.outputs:
                output.close()
            for channel in self.controls if kill else ():
                channel.close()
            if self.pids and (kill or not self.starter.wait(self.pids, 1.0)):
                self.starter.kill(self.pids)
            for channel in self.controls:
                channel.close()
            if self.pids:
                self.starter.forget(self.pids)
            if self.board is not None:
                self.board.close()
            self._cleanup()


def _abandon(folder: str, owner: int, ends: list[socket.socket]) -> None:
    """Nobody will talk to these ranks again: they end by themselves when they notice."""
    for end in ends:
        end.close()
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
