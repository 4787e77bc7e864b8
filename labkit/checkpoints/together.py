"""All ranks do one thing, and all succeed or all raise the same error."""

from collections.abc import Callable
from errno import EIO
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
    told = None if mine[1] is None else (*_kind(mine[1]), str(mine[1]))
    everyone = comm.all_gather_object((mine[0], told))
    failures = [(rank, failure) for rank, (_, failure) in enumerate(everyone) if failure]
    if failures:
        rank, (is_file, number, text) = failures[0]
        same = len(failures) == comm.size and len({failure for _, failure in failures}) == 1
        text = f"{failed}: {text}" if same else f"{failed}: rank {rank}: {text}"
        raise (OSError(number, text) if is_file else ValueError(text)) from mine[1]
    return [result for result, _ in everyone]


def _kind(error: Exception) -> tuple[bool, int | None]:
    """Whether it is about a file, and its number."""
    return (True, error.errno or EIO) if isinstance(error, OSError) else (False, None)
