"""An operation under way."""

import time
from collections.abc import Callable
from contextlib import suppress

from labkit.comm.board import Board, Note
from labkit.comm.wire import Work
from labkit.events import CommEvent


class CommError(RuntimeError):
    """An operation failed under way: a peer died, or did not come in time."""


class Handle:
    """What an asynchronous operation returns. The tensors given to the operation belong to it
    until `wait` returns."""

    def __init__(
        self,
        work: Work,
        what: str,
        finish: list[Callable[[], object]],
        event: CommEvent | None = None,
        board: Board | None = None,
        note: Note | None = None,
    ):
        self._work: Work | None = work
        self._what, self._finish = what, finish
        self._event, self._board, self._note = event, board, note

    def wait(self) -> None:
        """Block until the operation is done (on CUDA: until the current stream waits for it).

        Raises CommError when it failed: a peer died or did not come within the timeout.
        """
        if self._work is None:
            return
        wait_began_s = time.monotonic() if self._event else 0.0
        if self._board and self._note:
            self._board.wait(self._note)
        try:
            sent_bytes = self._work.wait()
        except RuntimeError as error:
            if self._board and self._note:
                self._board.leave(self._note, failed=True)
            why = str(error).partition("\n")[0] or type(error).__name__
            raise CommError(f"{self._what} failed: {why}") from error
        for step in self._finish:
            step()
        if self._board and self._note:
            self._board.leave(self._note)
        if self._event:
            self._complete(self._event, wait_began_s, sent_bytes)
        self._work, self._finish = None, []

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def _complete(self, event: CommEvent, wait_began_s: float, sent_bytes: object) -> None:
        event.wait_began_s = event.issued_s if event.blocking else wait_began_s
        event.wait_ended_s = time.monotonic()
        event.began_s, event.ended_s = event.issued_s, event.wait_ended_s
        with suppress(AttributeError):  # torch's own work does not tell
            event.began_s, event.ended_s = self._work.began_s, self._work.ended_s  # type: ignore[union-attr]
        counted = isinstance(sent_bytes, int) and not isinstance(sent_bytes, bool)
        event.wire_bytes = int(sent_bytes) if counted else event.bus_bytes  # type: ignore[call-overload]
