"""When does the program pass a point? On the CPU now; on a GPU when its stream comes there.

A clock writes the time, in seconds on the machine's monotonic clock, into a field of a span or an
event: at once, or once the GPU has come to it.
"""

import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import torch


class Clock(ABC):
    """Tells when the program passes its points; see above."""

    @abstractmethod
    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        """Write the time of this point of the program, or of the moment `at`, into these fields
        of `thing`."""

    def begin(self, span: Any) -> None:
        """Write the time of now as the beginning of `span`."""
        self.mark(span, "began_s")

    def end(self, span: Any) -> None:
        """Write the time of now as the end of `span`."""
        self.mark(span, "ended_s")

    @abstractmethod
    def end_of(self, work: Any) -> Any:
        """The moment at which torch's `work` is done, for `mark`. (A clock of streams is asked
        about work on a stream only: other work it would wait for.)"""

    @abstractmethod
    def settle(self, patience_s: float = 0.2) -> bool:
        """Write the times of the points so far, waiting `patience_s` for those not passed yet;
        whether all are known now."""


class HostClock(Clock):
    """The CPU does what it is told before it goes on."""

    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        time_s = at[0] if at and isinstance(at, list) else time.monotonic()
        for field in fields:
            setattr(thing, field, time_s)

    def begin(self, span: Any) -> None:
        span.began_s = time.monotonic()

    def end(self, span: Any) -> None:
        span.ended_s = time.monotonic()

    def end_of(self, work: Any) -> list[float]:
        """A list that will hold the time, once there is one."""
        moment: list[float] = []
        with suppress(RuntimeError):  # work without a future
            work.get_future().add_done_callback(lambda _: moment.append(time.monotonic()))
        return moment

    def settle(self, patience_s: float = 0.2) -> bool:
        return True


HOST_CLOCK = HostClock()


class StreamClock(Clock):
    """Work for a GPU is only enqueued: a CUDA event between two kernels knows when it passed.
    Times count from a moment at which host and GPU stood still together. A begin has the host's
    time until then, an end is 0.0, "not yet"."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, str], tuple[Any, Any]] = {}  # (thing, field) -> event
        self._lock = threading.Lock()  # two threads may settle
        self._beside = torch.cuda.Stream()
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
                self._under_way.pop((id(thing), field), None)
            else:
                self._under_way[id(thing), field] = thing, event

    def end_of(self, work: Any) -> Any:
        with torch.cuda.stream(self._beside):
            work.wait()
            return self._event_here()

    def settle(self, patience_s: float = 0.2) -> bool:
        with self._lock, suppress(RuntimeError):  # after an error of CUDA no time is known
            return self._settle(time.monotonic() + patience_s)
        return False

    def _settle(self, until_s: float) -> bool:
        all_known = True
        for (key, field), (thing, event) in list(self._under_way.items()):
            while not event.query() and time.monotonic() < until_s:
                time.sleep(0.001)
            if not event.query():
                all_known = False
            elif self._under_way.get((key, field), (None, None))[1] is event:  # not marked anew
                del self._under_way[key, field]
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
