"""The recorder of one rank: puts spans, the door's events, memory and metrics together, step by
step, and hands what is finished to the run's folder every half second, so that a rank that dies
or hangs leaves its story behind.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from labkit.comm import here, listen_with
from labkit.comm.clock import HostClock, clock_here
from labkit.events import CommEvent
from labkit.recording.detail import Detail
from labkit.recording.spans import Spans
from labkit.trace import RankTrace, Step
from labkit.trace.folder import add_metrics
from labkit.trace.rankfile import RankFile

FLUSH_S = 0.5
MOST_PUT_OFF = 6


class Recorder:
    """Records this process while it is on (`with recorder:`), each time that it is turned on.

    Args:
        rank, size: of this process, in the world.
        folder: of the run, which is then written while it runs; None keeps all in `trace`.
        detail_step: the step to be recorded in detail.
    """

    now: "Recorder | None" = None  # the one that is on, in this process

    def __init__(self, rank: int, size: int, folder: Path | None, detail_step: int | None):
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
        self.trace = RankTrace(rank, size, device, platform.node())
        self.metrics: list[dict[str, Any]] = []
        self._clock = clock_here()
        self._spans = Spans(self._clock, self.trace.spans.append, self._step_ended, self._met)
        self._detail_step = detail_step
        self._detail: Detail | None = None
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._step = Step(0, 0.0, 0.0)
        self._in_step = 0  # spans and events when it began
        self._writer = _Writer(folder, self) if folder else None
        self._on = ExitStack()

    def __enter__(self) -> "Recorder":
        if Recorder.now is not None:
            raise RuntimeError("this process is being recorded already; end that block first")
        Recorder.now, here.clock = self, self._clock
        self._on.callback(setattr, Recorder, "now", None)
        self._on.callback(setattr, here, "clock", HostClock())
        self._on.enter_context(self._spans)
        self._on.enter_context(listen_with(self._heard))
        if self._writer:
            self._on.enter_context(self._writer)
        self._begin_step()
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        """Ends the step, if there was anything in it; so a run that is turned on again begins
        with a new one."""
        self._end_detail()
        self.trace.complete = kind is None
        if self._count() > self._in_step:
            if kind is None:
                self._end_step()
            else:  # all that is open stays so: here it was cut off
                self.trace.steps.append(self._step)
                self.trace.spans += self._spans.still_open()
                self._spans.step += 1
        self._clock.settle(patience_s=5.0)
        self._on.__exit__(kind, *rest)

    def leave_to_ranks(self) -> None:
        """This process only drives a world, whose ranks record themselves.

        Raises RuntimeError when something was recorded here.
        """
        if self.begun:
            raise RuntimeError(
                "record(): this block has recorded computing of this process itself; give the "
                "world's run a block of its own"
            )
        if self._writer:
            self._writer.off = True

    def _heard(self, event: CommEvent) -> None:
        event.step = self._spans.step
        self.trace.comms.append(event)

    # --- steps ---

    def _begin_step(self) -> None:
        self._step = Step(self._spans.step, 0.0, 0.0, self._spans.step == self._detail_step)
        self._in_step = self._count()
        if self._step.detail:
            self._detail = Detail(self._spans, self.trace.memory.append)
            here.carrying = self._detail.inside_the_door
            self._detail.begin(self._roots, self._optimizers)  # takes long: no part of the step
        self._clock.mark(self._step, "began_s")

    def _step_ended(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        if self._detail:
            self._detail.enter_state(optimizer)
        self._end_detail()
        self._end_step()
        self._begin_step()

    def _end_step(self) -> None:
        self._clock.mark(self._step, "ended_s")
        self.trace.steps.append(self._step)
        self._spans.step += 1

    def _end_detail(self) -> None:
        if self._detail:
            here.carrying = nullcontext
            self._detail.end()
            self._detail = None

    def _count(self) -> int:
        return len(self.trace.spans) + len(self.trace.comms) + len(self._spans.still_open())

    def _met(self, root: nn.Module) -> None:
        if root not in self._roots:
            self._roots.add(root)
            if self._detail:
                self._detail.met(root)

    @property
    def begun(self) -> bool:
        return self._count() > 0

    def settle(self) -> bool:
        return self._clock.settle()

    # --- what users say ---

    def metric(self, values: dict[str, Any]) -> None:
        step, rank = self._spans.step, self.trace.rank
        self.metrics.append({"step": step, "rank": rank, **values})

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        span = self._spans.begin("user", name)
        try:
            yield
        finally:
            self._spans.end(span)


class _Writer:
    """Appends what is new to the rank's file, from a thread of its own."""

    def __init__(self, folder: Path, recorder: Recorder):
        self._folder, self._recorder = folder, recorder
        self._file: RankFile | None = None
        self._written = [0, 0, 0, 0, 0]
        self._stop = threading.Event()
        self.off = False

    def __enter__(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="labkit record", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._write(self._counts())
        if self._file and kind is None:
            self._file.mark_end()

    def _work(self) -> None:
        put_off = 0
        while not self._stop.wait(FLUSH_S):
            until = self._counts()
            if not self._recorder.settle() and put_off < MOST_PUT_OFF:
                put_off += 1  # the GPU is behind: times written now would be the host's
            elif any(until):
                self._write(until)
                put_off = 0

    def _lists(self) -> list[list[Any]]:
        trace = self._recorder.trace
        return [trace.steps, trace.spans, trace.comms, trace.memory, self._recorder.metrics]

    def _counts(self) -> list[int]:
        return [len(one) for one in self._lists()]

    def _write(self, until: list[int]) -> None:
        if self.off:
            return
        trace = self._recorder.trace
        if self._file is None:
            self._file = RankFile(self._folder, trace.rank, trace.size, trace.device, trace.host)
        new = zip(self._lists(), self._written, until, strict=True)
        *things, metrics = (one[begin:end] for one, begin, end in new)
        self._written = until
        self._file.append(thing for some in things for thing in some)
        if metrics:
            add_metrics(self._folder, metrics)
