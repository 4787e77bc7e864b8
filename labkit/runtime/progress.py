"""A progress bar in the driver or on ranks (rank 0 draws it), also under torchrun."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

from labkit.runtime.attach import current
from labkit.runtime.interrupts import check_interrupt
from labkit.runtime.output import in_notebook, interactive

T = TypeVar("T")
EVERY_S = 0.1
WIDTH = 30
NOTICE_S = 1.0
PATIENCE_S = 2.0  # before `slow_progress` shows a bar


def progress(items: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate over `items` with a progress bar.

    >>> for step in progress(range(100), "train"): ...
    """
    me = current()
    on_rank = me is not None and me.control is not None
    total = len(items) if total is None and isinstance(items, Sized) else total
    if me is not None and me.rank != 0:
        yield from items
    elif on_rank or in_notebook():  # rich's notebook widget can break nbclient
        yield from _printed(items, label, total, transient=not on_rank)
    else:
        from rich.progress import track

        yield from track(items, label, total=total, transient=True)


@contextmanager
def notice(text: str) -> Iterator[Callable[[], None]]:
    """Yields a function to call repeatedly within the block: it checks for interrupts and, after
    NOTICE_S, shows `text` until the end of the block."""
    due_s, shown = time.monotonic() + NOTICE_S, False

    def tick() -> None:
        nonlocal shown
        check_interrupt()
        if not shown and time.monotonic() > due_s and (interactive() or sys.stdout.isatty()):
            shown = True
            print(f"\r{text}", end="", flush=True)

    try:
        yield tick
    finally:
        if shown:
            print(f"\r{' ' * len(text)}\r", end="", flush=True)


def _printed(
    items: Iterable[T], label: str, total: int | None, transient: bool = False
) -> Iterator[T]:
    """A bar redrawn after a carriage return and, if `transient`, removed at the end."""
    began_s, drawn_s, count = time.monotonic(), 0.0, 0
    try:
        for count, item in enumerate(items, 1):
            yield item
            now_s = time.monotonic()
            if now_s - drawn_s > EVERY_S and now_s - began_s > 0.5:
                drawn_s = now_s
                sys.stdout.write(f"\r{_bar(label, count, total, now_s - began_s)}")
    finally:  # the loop may have ended early
        if drawn_s:
            last = _bar(label, count, total, time.monotonic() - began_s)
            sys.stdout.write(f"\r{' ' * (len(last) + 9)}\r" if transient else f"\r{last}\n")


def _bar(label: str, count: int, total: int | None, spent_s: float) -> str:
    if not total:
        return f"{label} {count} in {spent_s:.0f} s"
    full = WIDTH * count // total
    left_s = spent_s / count * (total - count)
    return f"{label} {'█' * full}{'░' * (WIDTH - full)} {count}/{total}, {left_s:.0f} s left"


def slow_progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Iterate over `items`; after PATIENCE_S, show a bar for the rest."""
    began_s = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - began_s > PATIENCE_S:
            yield from progress(items[done:], label)
            return
        yield item
