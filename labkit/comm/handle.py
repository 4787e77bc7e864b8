"""Handles of operations in progress."""

from collections.abc import Callable

from labkit.events import CommEvent
from labkit.runtime.board import Board, Note
from labkit.runtime.clock import HOST_CLOCK, Clock
from labkit.runtime.transports.wire import LaneWork, Work


class CommError(RuntimeError):
    """An operation failed while in progress: a peer died or timed out."""

    @classmethod
    def of(cls, operation: str, error: BaseException) -> "CommError":
        why = str(error).partition("\n")[0] or type(error).__name__
        return cls(f"{operation} failed: {why}")


class Handle:
    """Returned by an asynchronous operation; do not touch the operands until `wait` returns."""

    def __init__(
        self,
        work: Work,
        operation: str,
        finish: list[Callable[[], object]],
        event: CommEvent | None = None,
        board: Board | None = None,
        note: Note | None = None,
        clock: Clock = HOST_CLOCK,
    ):
        self._work: Work | None = work
        self._operation, self._finish = operation, finish
        self._event, self._board, self._note = event, board, note
        self._clock, self._end = clock, None
        if event is not None and hasattr(work, "get_future"):  # torch's work records no end time
            self._end = clock.end_of(work)

    def wait(self) -> None:
        """Block until completion (CUDA: the current stream waits). Raises CommError on failure."""
        if self._work is None:
            return
        if self._event and not self._event.blocking:
            self._clock.mark(self._event, "wait_began_s")
        if self._board and self._note:
            self._board.wait(self._note)
        try:
            sent_bytes = self._work.wait()
        except RuntimeError as error:
            if self._board and self._note:
                self._board.leave(self._note, failed=True)
            raise CommError.of(self._operation, error) from error
        for step in self._finish:
            step()
        if self._board and self._note:
            self._board.leave(self._note)
        if self._event:
            self._complete(self._event, sent_bytes)
        self._work, self._finish = None, []

    def is_completed(self) -> bool:
        """Whether `wait` would return immediately."""
        return self._work is None or self._work.is_completed()

    def _complete(self, event: CommEvent, sent_bytes: object) -> None:
        """Fill in the remaining fields; `ended_s`, set last, marks the event as complete."""
        counted = isinstance(sent_bytes, int) and not isinstance(sent_bytes, bool)
        event.wire_bytes = int(sent_bytes) if counted else event.bus_bytes  # type: ignore[call-overload]
        self._clock.mark(event, "wait_ended_s")
        if isinstance(self._work, LaneWork):
            event.lane = "caller" if event.blocking else "lane"
            self._clock.mark(event, "began_s", at=[self._work.began_s])
            self._clock.mark(event, "ended_s", at=[self._work.ended_s])
        else:
            event.lane = "backend"
            self._clock.mark(event, "ended_s", at=self._end)
            if event.wait_ended_s:  # host clock: the callback may run later
                event.ended_s = min(event.ended_s, event.wait_ended_s)
