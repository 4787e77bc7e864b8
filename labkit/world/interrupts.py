"""Ctrl-C and Jupyter's interrupt button, at a moment that suits us.

An interrupt that strikes anywhere could lose the process ids of ranks that have just started. So
while the driver starts ranks or talks to them, an interrupt is only noted, and `look` is called
many times a second, where it is safe to stop.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import ClassVar

ENOUGH = 3  # so many mean that nobody gets round to looking


class Interrupts:
    """While the block runs, interrupts are counted, and raise one KeyboardInterrupt: in `look`, or
    at the end of the block. What cleans up after it is not interrupted again. Blocks may be nested:
    the outermost counts. A user's own handler is left in its place."""

    outermost: "ClassVar[Interrupts | None]" = None  # only the main thread has one

    def __init__(self) -> None:
        self._count = 0
        self._holds = self._raised = False

    def __enter__(self) -> None:
        if _in_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._holds, Interrupts.outermost = True, self
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            Interrupts.outermost = None
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._count and error is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.raise_after(ENOUGH)

    def raise_after(self, count: int) -> None:
        if self._count >= count and not self._raised:
            self._raised = True
            raise KeyboardInterrupt


def look() -> None:
    """Raises KeyboardInterrupt if there was an interrupt since the `Interrupts` block began."""
    if Interrupts.outermost is not None and _in_main():
        Interrupts.outermost.raise_after(1)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def ignored() -> Iterator[None]:
    """For what must not stop half way, and takes no more than seconds."""
    before = signal.getsignal(signal.SIGINT) if _in_main() else None
    if before is None:  # another thread, or a handler that Python cannot put back
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
