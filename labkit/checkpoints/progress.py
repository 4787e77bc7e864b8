"""A bar, for a save or load that takes long enough to ask whether it still goes on."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from labkit.runtime.progress import progress

T = TypeVar("T")
PATIENCE_S = 2.0


def slow_progress(things: Sequence[T], label: str) -> Iterator[T]:
    """Go through `things`; a bar is shown for what is left after two seconds."""
    began_s = time.monotonic()
    for done, thing in enumerate(things):
        if time.monotonic() - began_s > PATIENCE_S:
            yield from progress(things[done:], label)
            return
        yield thing
