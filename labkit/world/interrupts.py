"""Ctrl-C and Jupyter's interrupt button, at a moment that suits us.

An interrupt that strikes in the middle of a message would leave half of it in the socket, and
everything after it out of step. So while the driver talks to its ranks, an interrupt is only
noted, and the talk looks for it many times a second.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

ENOUGH = 3  # so many mean that we do not get round to looking


class Interrupts:
    """While the block runs, `came` counts the interrupts. Whoever leaves it at its end without
    having looked gets its KeyboardInterrupt then. A user's own handler is left in its place."""

    def __init__(self) -> None:
        self.came = 0
        self._holds = False

    def __enter__(self) -> "Interrupts":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._holds = True
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.came and error is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came += 1
        if self.came >= ENOUGH:
            raise KeyboardInterrupt


@contextmanager
def ignored() -> Iterator[None]:
    """For what must not stop half way, and takes no more than seconds."""
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if before is None:  # another thread, or a handler that Python cannot put back
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
