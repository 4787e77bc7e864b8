"""When does the program pass a point? On the CPU now; on a GPU when its stream gets there.

A clock writes the time, in seconds on the machine's monotonic clock, into a field of a span or an
event: at once, or once the GPU has passed the point.
"""

import threading
import time
from contextlib import suppress
from typing import Any

import torch


class Clock:
    """As the host has it: the CPU has finished one line before it begins the next."""

    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        """Write the time of this point of the program, or of the moment `at`, into these fields
        of `thing`."""
        time_s = at[0] if at and isinstance(at, list) else time.monotonic()
        for field in fields:
            setattr(thing, field, time_s)

    def begin(self, span: Any) -> None:
        self.mark(span, "began_s")

    def end(self, span: Any) -> None:
        self.mark(span, "ended_s")

    def end_of(self, work: Any) -> Any:
        """The moment at which torch's `work` is done, for `mark`: a list that will hold it."""
        moment: list[float] = []
        with suppress(RuntimeError):  # work without a future
            work.get_future().add_done_callback(lambda _: moment.append(time.monotonic()))
        return moment

    def settle(self, patience_s: float = 0.2) -> bool:
        """Write the times of the points so far, waiting `patience_s` for those not passed yet;
        whether all are known now."""
        return True


class HostClock(Clock):
    """The clock of programs without a GPU."""


HOST_CLOCK = HostClock()


class StreamClock(Clock):
    """Work for a GPU is only enqueued: a CUDA event between two kernels knows when it passed.
    Times count from a moment at which both host and GPU were idle. Until then a begin has the
    host's time, an end is 0.0, "not yet"."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str], tuple[Any, Any]] = {}  # (thing, field) -> event
        self._lock = threading.Lock()  # two threads may settle
        self._side_stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        self._zero = self._event_here()
        torch.cuda.synchronize()
        self._zero_s = time.monotonic()

    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        known = at if isinstance(at, list) else None  # of something that only the host has seen
        event = None if known is not None else at or self._event_here()
        for field in fields:
            if known is not None or "ended" not in field:
                setattr(thing, field, known[0] if known else time.monotonic())
            if event is None:
                self._pending.pop((id(thing), field), None)
            else:
                self._pending[id(thing), field] = thing, event

    def end_of(self, work: Any) -> Any:
        """As the host's, of work on a stream only: other work it would wait for."""
        with torch.cuda.stream(self._side_stream):
            work.wait()
            return self._event_here()

    def settle(self, patience_s: float = 0.2) -> bool:
        with self._lock, suppress(RuntimeError):  # after an error of CUDA no time is known
            return self._settle(time.monotonic() + patience_s)
        return False

    def _settle(self, until_s: float) -> bool:
        all_known = True
        for (key, field), (thing, event) in list(self._pending.items()):
            while not event.query() and time.monotonic() < until_s:
                time.sleep(0.001)
            if not event.query():
                all_known = False
            elif self._pending.get((key, field), (None, None))[1] is event:  # not marked anew
                del self._pending[key, field]
                setattr(thing, field, self._zero_s + self._zero.elapsed_time(event) / 1e3)
        return all_known

    @staticmethod
    def _event_here() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_here() -> Clock:
    """That of the device this process computes on."""
    return StreamClock() if torch.cuda.is_initialized() else HOST_CLOCK
