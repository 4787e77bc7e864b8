"""Clocks write the time at which the program passes a point to fields of spans and events, in
seconds of the machine's monotonic clock. GPU times are written once the stream passes the point.
"""

import threading
import time
from contextlib import suppress
from typing import Any

import torch


class Clock:
    """Host time, for work that ends before the CPU continues with the program."""

    def mark(self, record: Any, *fields: str, at: Any = None) -> None:
        """Write the time of this point, or `at` (from `end_of`), to `fields` of `record`."""
        time_s = at[0] if at and isinstance(at, list) else time.monotonic()
        for field in fields:
            setattr(record, field, time_s)

    def begin(self, span: Any) -> None:
        self.mark(span, "began_s")

    def end(self, span: Any) -> None:
        self.mark(span, "ended_s")

    def end_of(self, work: Any) -> Any:
        """A list that will contain the time at which torch's `work` ends, for `mark`'s `at`."""
        moment: list[float] = []
        with suppress(RuntimeError):  # work without a future
            work.get_future().add_done_callback(lambda _: moment.append(time.monotonic()))
        return moment

    def align(self) -> None:
        """Wait for the device, and let both clocks show the same time from here on."""

    def settle(self, patience_s: float = 0.2) -> bool:
        """Write pending times, waiting at most `patience_s`; return whether all times are known."""
        return True


class HostClock(Clock):
    """The clock of programs without a GPU."""


HOST_CLOCK = HostClock()


class StreamClock(Clock):
    """GPU time: a CUDA event records when the stream passes a point, relative to a moment at which
    the GPU was idle. Until the time is known, begin fields contain host time and end fields 0.0."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str], tuple[Any, ...]] = {}  # of (record, field)
        self._lock = threading.Lock()  # two threads may call `settle`
        self._side_stream = torch.cuda.Stream()
        self.align()

    def align(self) -> None:
        with suppress(RuntimeError):  # after a CUDA error, no time is known
            torch.cuda.synchronize()
            zero = self._event_here()
            torch.cuda.synchronize()
            self._zero = zero, time.monotonic()  # the clocks drift apart by microseconds a second

    def mark(self, record: Any, *fields: str, at: Any = None) -> None:
        known = at if isinstance(at, list) else None  # a time that only the host knows
        event = None if known is not None else at or self._event_here()
        for field in fields:
            if known is not None or "ended" not in field:
                setattr(record, field, known[0] if known else time.monotonic())
            if event is None:
                self._pending.pop((id(record), field), None)
            else:
                self._pending[id(record), field] = record, event, *self._zero

    def end_of(self, work: Any) -> Any:
        """A CUDA event recorded after `work`. Work outside a stream would block the host here."""
        with torch.cuda.stream(self._side_stream):
            work.wait()
            return self._event_here()

    def settle(self, patience_s: float = 0.2) -> bool:
        with self._lock, suppress(RuntimeError):  # after a CUDA error, no time is known
            return self._settle(time.monotonic() + patience_s)
        return False

    def _settle(self, deadline_s: float) -> bool:
        all_known = True
        for (key, field), (record, event, zero, zero_s) in list(self._pending.items()):
            while not event.query() and time.monotonic() < deadline_s:
                time.sleep(0.001)
            if not event.query():
                all_known = False
            elif self._pending.get((key, field), (None, None))[1] is event:  # not marked again
                del self._pending[key, field]
                setattr(record, field, zero_s + zero.elapsed_time(event) / 1e3)
                if getattr(record, "wait_ended_s", 0.0):  # the side stream may notice an end later
                    record.ended_s = min(record.ended_s, record.wait_ended_s)
        return all_known

    @staticmethod
    def _event_here() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_here() -> Clock:
    """The clock of the device on which this process computes."""
    return StreamClock() if torch.cuda.is_initialized() else HOST_CLOCK
