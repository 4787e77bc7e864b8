"""Ctrl-C and Jupyter's interrupt button, delayed until it is safe to stop.

An immediate interrupt could lose the process ids of ranks that have just started. While the driver
starts ranks or communicates with them, interrupts are therefore only counted; `check_interrupt`,
which is called many times a second, then raises KeyboardInterrupt.
"""

import signal
import threading
from types import FrameType
from typing import ClassVar

ENOUGH = 3  # this many interrupts mean that `check_interrupt` is not being called


class Interrupts:
    """Within the block, interrupts are counted and raise one KeyboardInterrupt: in
    `check_interrupt`, after `enough` interrupts, or at the end of the block. A nested block may
    set a different `enough`. A SIGINT handler that the user has installed stays in place."""

    outermost: "ClassVar[Interrupts | None]" = None  # in the main thread only

    def __init__(self, enough: float = ENOUGH) -> None:
        self.count, self.enough, self.raised = 0, enough, False

    def __enter__(self) -> None:
        if _in_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            Interrupts.outermost = self
            signal.signal(signal.SIGINT, self._note)
        block = (_in_main() and Interrupts.outermost) or self
        block.enough, self.enough = self.enough, block.enough
        if block.count >= block.enough:
            check_interrupt()

    def __exit__(self, *error: object) -> None:
        if Interrupts.outermost is self:
            Interrupts.outermost = None
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.count and error[0] is None:
                raise KeyboardInterrupt
        elif _in_main() and Interrupts.outermost is not None:
            Interrupts.outermost.enough = self.enough

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= self.enough:
            check_interrupt()


def check_interrupt() -> None:
    """Raises KeyboardInterrupt, once, if interrupts have arrived in the outermost block."""
    block = Interrupts.outermost
    if block is not None and block.count and not block.raised and _in_main():
        block.raised = True
        raise KeyboardInterrupt


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
