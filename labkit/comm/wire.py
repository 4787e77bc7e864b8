"""Send and receive over a process group: all that the readable collectives are written on.

`Wire` posts messages at once. `PacedWire` lets each message leave only when a `Link` would have
delivered it; the receiver then really waits for it, and nothing else has to know.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from labkit.comm.link import Link


class Work(Protocol):
    """Anything under way that can be waited for."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Wire:
    """Messages between the ranks of one group. Tensors must be contiguous, of any dtype."""

    def __init__(self, group: Any):
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        """Post `x` to rank `peer` of the group; do not write to `x` before it is waited for."""
        return self.group.send([_as_bytes(x)], peer, tag)

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        """Post `x` to be filled with the next message that `peer` sends under `tag`."""
        return self.group.recv([_as_bytes(x)], peer, tag)


class PacedWire(Wire):
    """One outgoing wire of the speed of `link`: messages leave it one after the other."""

    def __init__(self, group: Any, link: Link):
        super().__init__(group)
        self.link = link
        self._lane = Lane("labkit wire")
        self._free_at_s = 0.0

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        self._free_at_s = max(time.monotonic(), self._free_at_s) + self.link.seconds(x.nbytes)
        arrives_s = self._free_at_s + self.link.latency_us * 1e-6

        def deliver() -> None:
            _sleep_until(arrives_s)
            super(PacedWire, self).isend(x, peer, tag).wait()

        return self._lane.submit(deliver)


class Lane:
    """A thread that runs what it is given, in order: this is what makes an operation
    asynchronous. (A daemon: a hung operation must not keep a process alive.)"""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[LaneWork] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> "LaneWork":
        work = LaneWork(function)
        self._tasks.put(work)
        return work

    def _run(self) -> None:
        while True:
            self._tasks.get().run()


class LaneWork:
    """A function on its way through a lane; `wait` returns its value or raises its error."""

    def __init__(self, function: Callable[[], Any]):
        self._function: Callable[[], Any] | None = function
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.began_s = self.ended_s = 0.0

    def run(self) -> "LaneWork":
        assert self._function is not None
        self.began_s = time.monotonic()
        try:
            self._value = self._function()
        except BaseException as error:  # belongs to whoever waits
            self._error = error
        self.ended_s = time.monotonic()
        self._function = None  # lets go of the tensors
        self._done.set()
        return self

    def wait(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def is_completed(self) -> bool:
        return self._done.is_set()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that every dtype can travel."""
    return x.detach().view(-1).view(torch.uint8)


def _sleep_until(when_s: float) -> None:
    while (left_s := when_s - time.monotonic()) > 0:
        time.sleep(left_s)
