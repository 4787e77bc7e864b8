"""`World`: rank processes that live alongside the notebook and run functions and cells.

    driver (the notebook)                     ranks (processes)
    World(4)  ── fork ──> warm server ──────> 0  1  2  3     one process group
    world.run(fn) ── cloudpickle ───────────> fn() on each   output is shown immediately
              <── one value per rank ────────
    an exception ───────────────────────────> ranks live on if all have answered and nothing is
                                              in flight; else all are killed, and the next run
                                              starts new ranks

Ranks are never repaired: a failed rank may have left its peers in the middle of a collective. New
ranks start within a tenth of a second.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from labkit.comm import Link, TwoLevel
from labkit.events import ranks_in_words
from labkit.runtime import cells, pickling
from labkit.runtime.attach import current
from labkit.runtime.errors import RankError, RankInterrupt
from labkit.runtime.failures import Failures
from labkit.runtime.interrupts import Interrupts, check_interrupt
from labkit.runtime.launch import warm_up_early
from labkit.runtime.output import RankOutput, in_notebook, interactive
from labkit.runtime.pick import check_size, pick, pick_transport
from labkit.runtime.ranks import TICK_S, Ranks
from labkit.runtime.transports.chooser import table_note
from labkit.trace.recording import Recording


class World:
    """`size` ranks, alive until `close` or the end of the `with` block.

    Args:
        size: number of ranks.
        backend, device: "gloo" or "nccl", "cpu" or "cuda". `backend="gloo"` alone selects the CPU.
            Default: LABKIT_BACKEND and LABKIT_DEVICE; else NCCL if each rank has a GPU and there is
            no link; else gloo, on GPUs if any. `world.picked` states the choice and the reason.
        threads: torch threads per rank.
        timeout_s: seconds that a rank may wait for other ranks before the run fails.
        link: the link to model, to simulate a slow network; `TwoLevel`: the links of a cluster.
        seed: for torch, numpy and Python, the same on every rank.
        check: compare the ranks' calls (15 microseconds per call); choose False for benchmarks.
        start: "fork" or "spawn"; default: fork if available.
        transport: "shm" (CPU tensors through memory that the ranks share) or "gloo" (messages).
            Default: gloo with a link; else LABKIT_TRANSPORT; else gloo if `backend` names it or
            the ranks use GPUs; else shm if available.

    Raises TypeError or ValueError for invalid arguments, RuntimeError inside a rank, and RankError
    if the ranks do not start.

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
        link: Link | TwoLevel | None = None,
        seed: int = 0,
        check: bool = True,
        start: str | None = None,
        transport: str | None = None,
    ):
        me = current()
        if me is not None and (me.control is not None or me.size > 1):
            raise RuntimeError(
                f"World({size}) inside a rank: this process is itself a rank of a world. Start "
                "worlds from the notebook or script, or use Comm().subgroup(...) for fewer ranks."
            )
        check_size(size)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: choose more than 0 s")
        if threads < 1:
            raise ValueError(f"threads={threads}: a rank needs at least 1 thread")
        self.size, self.threads, self.timeout_s = size, threads, timeout_s
        self.link, self.seed, self.check = link, seed, check
        self._pick = pick(size, backend, device, link is not None)
        self.backend, self.device = self._pick.backend, self._pick.device
        self.transport, self._no_shm = pick_transport(size, self._pick, transport, backend, link)
        self._start_with = start
        self._alive: Ranks | None = None
        self._closed = False
        self._busy = threading.RLock()
        self._stopped_by = ""  # "closed" or "restarted", by another thread
        with Interrupts():
            try:
                self._ranks()
                check_interrupt()
            except BaseException:  # an interrupt: the caller never gets this world
                self._stop(kill=True)
                raise
        if interactive():
            print(self.picked)

    @property
    def picked(self) -> str:
        """The backend, device and transport, with the reasons."""
        where = "on the CPU" if self.device == "cpu" else "on the GPU"
        through = ", tensors through shared memory (shm)" if self.transport == "shm" else ""
        why_not = self._no_shm and f"; no shared memory: {self._no_shm}"
        size = ranks_in_words(self.size)
        return f"{size}, {self.backend} {where}{through}: {self._pick.why}{why_not}"

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"World({self.picked}{state})"

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; returns one value per rank.

        `fn` may be a lambda, a closure or a function defined in a notebook cell. GPU tensors are
        returned on the CPU. Raises RankError if a rank fails, RankInterrupt if the user interrupts;
        the error says whether the ranks were stopped. If so, the next run starts new ranks.
        """
        return self.run_on(range(self.size), fn, *args, **kwargs)

    def run_on(
        self, ranks: Sequence[int], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Like `run`, but only on `ranks`. Raises ValueError for unknown or repeated ranks."""
        if not callable(fn):
            raise TypeError(f"World.run: {fn!r} has type {type(fn).__name__}; pass a function")
        try:
            body = pickling.dumps((fn, args, kwargs), "the call")
        except pickling.Unpicklable as error:
            text = str(error).replace("the call[0]", getattr(fn, "__name__", "the function"))
            text = text.replace("the call[1]", "arguments ").replace("the call[2]", "argument ")
            raise RankError(text, "unpicklable") from None
        return self._converse(("call", body), ranks)

    def run_cell(
        self,
        source: str,
        filename: str,
        ranks: Sequence[int] | None = None,
        as_text: bool = False,
    ) -> list[Any]:
        """Run the statements of `source` in the namespace of each rank in `ranks`; returns, per
        rank, the last expression's value or, with `as_text`, its display form, a `cells.Shown`.

        Raises SyntaxError before any rank runs the cell.
        """
        cells.check(source, filename)
        targets = range(self.size) if ranks is None else ranks
        return self._converse(("cell", (source, filename, as_text)), targets)

    def restart(self) -> None:
        """Stop the ranks, discard their variables and work, and start new ranks."""
        self._stopped_by = "restarted"
        with self._busy:
            self._stopped_by = ""
            self._stop(kill=True)
            self._ranks()

    def close(self) -> None:
        """Stop the ranks for good, even during a run. Called at the end of the `with` block."""
        self._closed, self._stopped_by = True, "closed"
        with self._busy:
            self._stop(kill=False)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- internals ----------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        if self._closed:
            raise RuntimeError(f"{self!r}: create a new World")
        if self._alive is None:
            self._table = table_note()  # the ranks keep the environment they started with
            with Interrupts():
                self._alive = Ranks(self)
        if self._alive.owner != os.getpid():
            raise RuntimeError(
                f"this process is a fork of process {self._alive.owner}, which owns this world; "
                "create a World here"
            )
        return self._alive

    def _stop(self, kill: bool) -> None:
        if self._alive is not None:
            ranks, self._alive = self._alive, None
            ranks.stop(kill)

    def _converse(self, message: tuple[str, Any], targets: Sequence[int]) -> list[Any]:
        """Send `message` to the ranks `targets`; returns one value per target."""
        targets = list(targets)
        for rank in targets:
            if rank not in range(self.size):
                raise ValueError(f"rank {rank!r} is not in this world; choose 0 to {self.size - 1}")
        if len(targets) > len(set(targets)):
            raise ValueError(f"ranks={targets}: name each rank once")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this world is busy in another thread; create a second World")
        try:
            with Interrupts():
                values = self._listen(message, targets)
        finally:
            self._busy.release()
        return [pickling.loads(values[rank], f"the result of rank {rank}") for rank in targets]

    def _about(self) -> dict[str, Any]:
        """The facts about this world that a recorded run stores."""
        names = ("backend", "device", "transport", "threads", "seed")
        about = {"world_size": self.size} | {name: getattr(self, name) for name in names}
        return about | {"table": self._table} | ({"link": asdict(self.link)} if self.link else {})

    def _listen(self, message: tuple[str, Any], targets: list[int]) -> dict[int, pickling.Parcel]:
        """Send `message` and collect all answers; kill the ranks if they may be out of step."""
        ranks = self._ranks()
        output = RankOutput(self.size)
        failures = Failures(ranks, targets)
        values: dict[int, pickling.Parcel] = {}
        keep = False
        recording = Recording.now
        spec = recording.spec_for(self, self._about()) if recording else None
        try:
            for rank in targets:
                with suppress(EOFError), Interrupts(1):  # `failures` reports a dead rank
                    ranks.controls[rank].send((*message, spec))
            while len(values) < len(targets) and not failures.settled():
                for rank, kind, body in ranks.listen(TICK_S, output):
                    if kind == "value":
                        values[rank] = body
                        failures.running.discard(rank)
                    else:
                        failures.add(rank, kind, body)
                failures.check()
                check_interrupt()
                if self._stopped_by:
                    raise RankError(f"the world was {self._stopped_by} during a run", "interrupted")
            ranks.drain(output)
            keep = failures.none or (failures.nothing_in_flight() and ranks.in_step(output))
            if not failures.none:
                raise failures.error(keep)
        except KeyboardInterrupt:
            were = "1 rank was" if self.size == 1 else f"{self.size} ranks were"
            raise RankInterrupt(
                f"interrupted; the {were} stopped, and the next run starts new ranks"
            ) from None
        finally:
            if not keep:
                self._stop(kill=True)
                if recording:
                    recording.failed = True
            output.close()
        return values


if in_notebook():  # the server then imports in parallel with this process
    warm_up_early()
