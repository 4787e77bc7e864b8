"""The errors that a failed run raises in the driver, with the ranks' tracebacks."""

import textwrap
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

CAUSED = "The above error directly caused the following one"
DURING = "During handling of the above error, another one occurred"
MAX_DEPTH = 8  # longest chain of causes
MAX_FRAMES, MAX_PARTS, MAX_TEXT = 100, 10, 10_000

_OWN = tuple(str(Path(__file__).with_name(name)) for name in ("rank.py", "cells.py"))


class RankError(RuntimeError):
    """Raised when a run fails on one or more ranks; the message names the ranks and the cause.

    `kind`: "raised", "died", "stuck", "disagree", "unpicklable" or "interrupted";
    `ranks`: the ranks at fault, if known.
    """

    def __init__(self, message: str, kind: str = "raised", ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.kind, self.ranks = kind, ranks

    def _render_traceback_(self) -> list[str]:
        """The report for a notebook, without the driver's frames."""
        return [f"{type(self).__name__}: {self}"]


class RankInterrupt(RankError, KeyboardInterrupt):
    """Raised when the user interrupts a run; all ranks are then stopped. It is also a
    KeyboardInterrupt, so that a surrounding loop stops, too."""

    def __init__(self, message: str):
        RankError.__init__(self, message, "interrupted")


@dataclass(frozen=True)
class RemoteError:
    """A rank's exception as plain data, truncated to a readable length. The driver adds the
    source lines, since only the driver has the source of notebook cells."""

    type_name: str
    message: str
    frames: list[tuple[str, int, str]]  # file, line, function
    cause: "RemoteError | None" = None
    because: str = ""
    notes: list[str] = field(default_factory=list)
    parts: list["RemoteError"] = field(default_factory=list)  # the exceptions of a group

    @staticmethod
    def of(error: BaseException, above: tuple[int, ...] = ()) -> "RemoteError":
        """Capture `error`. Never raises, even if causes form a cycle or `str(error)` fails.
        `above`: ids of the errors already being captured."""
        above = (*above, id(error))
        get = object.__getattribute__  # bypasses the class's __getattribute__, which may raise
        cause, because = get(error, "__cause__"), CAUSED
        if cause is None and not get(error, "__suppress_context__"):
            cause, because = get(error, "__context__"), DURING
        is_group = issubclass(type(error), BaseExceptionGroup)
        parts = get(error, "exceptions")[:MAX_PARTS] if is_group else ()
        notes = get(error, "__dict__").get("__notes__")
        notes = notes if isinstance(notes, (list, tuple)) else ()
        return RemoteError(
            type_name=type(error).__name__,
            message=_text(error),
            frames=_frames(get(error, "__traceback__")),
            cause=RemoteError.of(cause, above) if _is_new(cause, above) else None,
            because=because,
            notes=[_truncated(note) for note in notes if isinstance(note, str)],
            parts=[RemoteError.of(part, above) for part in parts if _is_new(part, above)],
        )

    @property
    def headline(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def format(self) -> str:
        """The traceback as Python prints it, with the source lines of cells."""
        before = ""
        if self.cause is not None:
            before = f"{self.cause.format()}\n\n{self.because}:\n\n"
        entries = traceback.format_list([(*frame, None) for frame in self.frames])
        if len(entries) > MAX_FRAMES:
            half = MAX_FRAMES // 2
            left_out = f"  ... {len(entries) - 2 * half:,} calls left out ...\n"
            entries[half:-half] = [left_out]
        stack = "".join(entries).rstrip()
        lines = ["Traceback (most recent call last):", stack] if stack else []
        parts = [textwrap.indent(part.format(), "  | ") for part in self.parts]
        return before + "\n".join([*lines, self.headline, *self.notes, *parts])


def _is_new(error: BaseException | None, above: tuple[int, ...]) -> TypeGuard[BaseException]:
    return error is not None and id(error) not in above and len(above) < MAX_DEPTH


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """The frames outside rank.py and cells.py."""
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
    outside = [(code, line) for code, line in places if not code.co_filename.startswith(_OWN)]
    return [(code.co_filename, line, code.co_name) for code, line in outside]


def _text(error: BaseException) -> str:
    try:
        if issubclass(type(error), SyntaxError):
            return _truncated("".join(traceback.format_exception_only(error)).strip())
        return _truncated(str(error))
    except BaseException as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


def _truncated(text: str) -> str:
    text = "".join(text)  # a plain str: the driver may be unable to import a subclass
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """ "rank 2", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
