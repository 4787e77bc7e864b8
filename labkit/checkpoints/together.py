"""All ranks do one thing, and all succeed or all raise the same error."""

from collections.abc import Callable
from typing import TypeVar

from labkit.comm import Comm

T = TypeVar("T")


def together(comm: Comm, action: Callable[[], T], failed: str) -> list[T]:
    """Do `action` on every rank; all ranks' results. Where one or more fail, every rank raises
    the error of the first of them, an OSError or a ValueError, after the words `failed`."""
    try:
        mine: tuple[T | None, Exception | None] = (action(), None)
    except Exception as error:
        mine = (None, error)
    # An error travels as words: what it holds may not be picklable.
    told = None if mine[1] is None else (_kind(mine[1]), f"{failed}: rank {comm.rank}: {mine[1]}")
    everyone = comm.all_gather_object((mine[0], told))
    for _, failure in everyone:
        if failure is not None:
            (kind, number), text = failure
            raise (OSError(number, text) if kind == "file" else ValueError(text)) from mine[1]
    return [result for result, _ in everyone]


def _kind(error: Exception) -> tuple[str, int | None]:
    return ("file", error.errno or 5) if isinstance(error, OSError) else ("other", None)
