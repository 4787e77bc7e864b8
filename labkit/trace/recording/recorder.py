"""Records one rank: collects spans, communication events, memory and metrics per step, and writes
finished records to the run folder every half second, so that these records survive if the rank dies
or hangs."""

import platform
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from labkit.comm import here, listen_with
from labkit.events import CommEvent
from labkit.runtime.clock import HOST_CLOCK, Clock, StreamClock, clock_here
from labkit.trace import RankTrace, Span, Step
from labkit.trace.folder import add_metrics
from labkit.trace.rankfile import RankFile
from labkit.trace.recording.detail import Detail
from labkit.trace.recording.spans import Spans

FLUSH_S = 0.5


class Recorder:
    """Records this process during every `with recorder:` block, into `trace` and, if given, the run
    folder `folder`. `rank` and `size` refer to the world; `detail_step` is recorded in detail."""

    now: "Recorder | None" = None  # active recorder of this process

    def __init__(self, rank: int, size: int, folder: Path | None, detail_step: int | None):
        device = _device() if torch.cuda.is_initialized() else "cpu"
        self.trace = RankTrace(rank, size, device, platform.node())
        self.metrics: list[dict[str, Any]] = []
        self.clock: Clock = clock_here()
        self.spans = Spans(self.clock, self.trace.spans.append, self._step_ended, self._root_called)
        self.still_open = self.spans.still_open
        self._detail_step = detail_step
        self._detail: Detail | None = None
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._step = Step(0, 0.0, 0.0)
        self.count_at_begin = 0  # number of spans and events when the step began
        self._writer = _Writer(folder, self) if folder else None
        self._on = ExitStack()

    def __enter__(self) -> "Recorder":
        Recorder.now, here.clock = self, self.clock
        self._on.callback(setattr, Recorder, "now", None)
        self._on.callback(setattr, here, "clock", HOST_CLOCK)
        self._on.enter_context(self.spans)
        self._on.enter_context(listen_with(self._add_event))
        if self._writer:
            self._on.enter_context(self._writer)
        self._begin_step()
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        """End the current step, or drop an empty step; the next block begins a new step."""
        try:
            self._end_detail(align=kind is None)
            self.trace.complete = kind is None
            if self.step_is_empty:
                self.trace.steps.pop()
            elif kind is None:
                self._end_step()
            else:  # the step was cut off: open records stay open
                self.trace.spans += self.still_open()
                self.spans.step += 1
            self.clock.settle(patience_s=5.0)
        finally:
            self._on.__exit__(kind, *rest)

    def leave_to_ranks(self) -> None:
        """Delegate recording to the ranks of a world that this process drives. Raises RuntimeError
        if this process already has records."""
        if self.count():
            raise RuntimeError(
                "record(): this block has already recorded computing in this process; put "
                "world.run in a separate block"
            )
        if self._writer:
            self._writer.off = True

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _add_event(self, event: CommEvent) -> None:
        event.step = self.spans.step
        self.trace.comms.append(event)

    # --- steps ---

    def _begin_step(self) -> None:
        self._step = Step(self.spans.step, 0.0, 0.0, self.spans.step == self._detail_step)
        self.count_at_begin = self.count()
        if self._step.detail:
            self._detail = Detail(self.spans, self.trace)
            here.carrying = self._detail.inside_communicator
            self._detail.begin(self._roots, self._optimizers)  # slow, so not part of the step
        self.spans.clock.mark(self._step, "began_s")
        self.trace.steps.append(self._step)

    def _step_ended(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        if self._detail:
            self._detail.enter_state(optimizer)
        self._end_detail()
        self._end_step()
        self._begin_step()

    def _end_step(self) -> None:
        clock = HOST_CLOCK if self._step.detail else self.clock
        clock.mark(self._step, "ended_s")
        self.spans.step += 1

    def _end_detail(self, align: bool = True) -> None:
        if self._detail:
            here.carrying = nullcontext
            self._detail.end()
            self._detail = None
            if align:  # after an error, the GPU may wait for other ranks
                self.clock.align()
            self.spans.clock = here.clock = self.clock

    def count(self) -> int:
        """The number of spans and events so far, including open spans."""
        return len(self.trace.spans) + len(self.trace.comms) + len(self.still_open())

    @property
    def step_is_empty(self) -> bool:
        """Whether the current step is the last in the trace and has no records yet."""
        steps = self.trace.steps
        return bool(steps) and steps[-1] is self._step and self.count() <= self.count_at_begin

    def _root_called(self, root: nn.Module) -> None:
        if self.clock is HOST_CLOCK and torch.cuda.is_initialized():  # the recorded code uses CUDA
            self.clock = StreamClock()
            if not self._detail:
                self.spans.clock = here.clock = self.clock
            self.trace.device = _device()
        if root not in self._roots:
            self._roots.add(root)
            if self._detail:
                self._detail.add_module(root)


def metric(**values: float) -> None:
    """Record metrics of the current step: `metric(loss=2.1)`. No effect outside `record()`."""
    if (recorder := Recorder.now) is None:
        return
    step = recorder.spans.step
    if recorder.count() == recorder.count_at_begin and step > 0:
        step -= 1  # the optimizer has just ended the step that the metrics describe
    metrics = {name: x if name == "step" else float(x) for name, x in values.items()}
    recorder.metrics.append({"step": step, "rank": recorder.trace.rank, **metrics})


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the enclosed code as a user span: `with span("sampling"):`."""
    if (recorder := Recorder.now) is None:
        yield
        return
    user_span = recorder.spans.begin("user", name)
    try:
        yield
    finally:
        recorder.spans.end(user_span)


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


class _Writer:
    """A thread that appends new records to the rank's file; on an OSError, it warns and stops."""

    def __init__(self, folder: Path, recorder: Recorder):
        self._folder, self._recorder = folder, recorder
        self._file: RankFile | None = None
        self._written = [0] * len(self._lists())
        self._early: dict[int, Span] = {}  # id -> span written while open, rewritten at its end
        self._stop = threading.Event()
        self.off = False

    def __enter__(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="labkit record", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._write()
        if self._file and kind is None and not self.off:
            self._file.mark_end()

    def close(self) -> None:
        if self._file:
            self._file.close()  # `__exit__` wrote the end mark, unless an error occurred

    def _work(self) -> None:
        long_open: list[Span] = []
        while not self._stop.wait(FLUSH_S):
            open_now = self._recorder.still_open()
            self._write([span for span in open_now if any(span is x for x in long_open)])
            long_open = open_now

    def _write(self, long_open: Sequence[Span] = ()) -> None:
        """Write new records, and the spans that were already open at the previous write."""
        if self.off:
            return
        self._recorder.clock.settle()
        trace, ends = self._recorder.trace, [len(records) for records in self._lists()]
        ends[0] -= self._recorder.step_is_empty  # an empty step is not written
        if self._file is None and not self._recorder.count() and not self._stop.is_set():
            return  # the ranks of a world may record instead
        lists = zip(self._lists(), self._written, ends, strict=True)
        steps, spans, *others, metrics = (records[begin:end] for records, begin, end in lists)
        self._written = ends
        spans = [span for span in spans if self._early.pop(id(span), None) is None]
        early = [x for x in long_open if not x.ended_s and id(x) not in self._early]
        self._early |= {id(span): span for span in early}
        try:
            if self._file is None:
                self._file = RankFile(self._folder, trace)
            self._file.append([*steps, *spans, *early, *chain(*others)])
            if metrics:
                add_metrics(self._folder, metrics)
        except OSError as error:
            self.off = True
            warnings.warn(f"the rest of this run could not be written: {error}", stacklevel=2)

    def _lists(self) -> list[list[Any]]:
        return [*self._recorder.trace.lists(), self._recorder.metrics]
