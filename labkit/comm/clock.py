"""When does the program pass a point? On the CPU now; on a GPU when its stream comes there.

A clock writes the time, in seconds on the machine's monotonic clock, into a field of a span or an
event: at once, or once the GPU has come to it.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any

import torch


class Clock(ABC):
    @abstractmethod
    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        """Write the time of this point of the program, or of the moment `at`, into these fields
        of `thing`."""

    @abstractmethod
    def end_of(self, work: Any) -> Any:
        """The moment at which torch's `work` is done, for `mark`."""

    @abstractmethod
    def settle(self, patience_s: float = 0.2) -> bool:
        """Write the times of the points so far, waiting `patience_s` for those not passed yet;
        whether all are known now."""


class HostClock(Clock):
    """The CPU does what it is told before it goes on."""

    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        time_s = at[0] if at else time.monotonic()
        for field in fields:
            setattr(thing, field, time_s)

    def end_of(self, work: Any) -> list[float]:
        """A list that will hold the time, once there is one."""
        moment: list[float] = []
        with suppress(RuntimeError):  # work without a future
            work.get_future().add_done_callback(lambda _: moment.append(time.monotonic()))
        return moment

    def settle(self, patience_s: float = 0.2) -> bool:
        return True


class StreamClock(Clock):
    """Work for a GPU is only enqueued: a CUDA event between two kernels knows when it passed.
    Times count from one moment at which host and GPU stood still together."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Any, tuple[str, ...], torch.cuda.Event]] = deque()
        self._beside = torch.cuda.Stream()
        torch.cuda.synchronize()
        self._zero = self._event_here()
        torch.cuda.synchronize()
        self._zero_s = time.monotonic()

    def mark(self, thing: Any, *fields: str, at: Any = None) -> None:
        time_s = time.monotonic()  # until the GPU tells better: 0.0 would mean "not yet"
        for field in fields:
            setattr(thing, field, time_s)
        self._under_way.append((thing, fields, at or self._event_here()))

    def end_of(self, work: Any) -> Any:
        with torch.cuda.stream(self._beside):
            work.wait()
            return self._event_here()

    def settle(self, patience_s: float = 0.2) -> bool:
        until_s, all_known = time.monotonic() + patience_s, True
        for _ in range(len(self._under_way)):
            thing, fields, event = self._under_way.popleft()
            while not event.query() and time.monotonic() < until_s:
                time.sleep(0.001)
            if not event.query():
                self._under_way.append((thing, fields, event))
                all_known = False
                continue
            time_s = self._zero_s + self._zero.elapsed_time(event) / 1e3
            for field in fields:
                setattr(thing, field, time_s)
        return all_known

    @staticmethod
    def _event_here() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_here() -> Clock:
    """That of the device this process computes on."""
    return (
        StreamClock() if torch.cuda.is_available() and torch.cuda.is_initialized() else HostClock()
    )
