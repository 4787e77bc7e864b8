"""Run an action on the ranks: it succeeds on every rank, or every rank raises the same error."""

from collections.abc import Callable
from errno import EIO
from typing import Any, TypeVar, cast

from labkit.comm import Comm

T = TypeVar("T")


def together(comm: Comm, action: Callable[[], T], failed: str) -> list[T]:
    """Run `action` on every rank and return all ranks' results. If any rank fails, all raise
    the first failing rank's error (OSError or ValueError), with `failed` before its message."""
    own_error: Exception | None = None
    result: Any = None
    failure = None
    try:
        result = action()
    except Exception as error:  # sent as text: its attributes may not be picklable
        number = getattr(error, "errno", None) or EIO
        own_error, failure = error, (isinstance(error, OSError), number, str(error))
    results, failures = zip(*comm.all_gather_object((result, failure)))
    if any(failures):
        rank, first = next((rank, x) for rank, x in enumerate(failures) if x)
        is_file, number, text = first
        text = f"{failed}: {text}" if {*failures} == {first} else f"{failed}: rank {rank}: {text}"
        raise (OSError(number, text) if is_file else ValueError(text)) from own_error
    return list(results)


def on_rank_0(comm: Comm, action: Callable[[], T], failed: str) -> T:
    """Run `action` on rank 0; every rank returns the result or raises the error."""
    result = together(comm, lambda: action() if comm.rank == 0 else None, failed)[0]
    return cast("T", result)


def on_every_rank(comm: Comm, action: Callable[[], T], failed: str) -> T:
    """Run `action` on every rank, and return this rank's result, which is not sent."""
    results: list[T] = []
    together(comm, lambda: results.append(action()), failed)
    return results[0]
