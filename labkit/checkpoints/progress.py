"""A bar, for a save or load that takes long enough to ask whether it still goes on."""

import time
from collections.abc import Iterator

from labkit.world.progress import progress

PATIENCE_S = 2.0


class SlowBar:
    """Counts to `total`; shows itself when that has taken over two seconds."""

    def __init__(self, label: str, total: int):
        self._label, self._left = label, total
        self._began_s = time.monotonic()
        self._bar: Iterator[int] | None = None

    def tick(self) -> None:
        """One more is done."""
        if self._bar is None and time.monotonic() - self._began_s > PATIENCE_S and self._left:
            self._bar = progress(range(self._left), self._label)
        if self._bar is not None:
            next(self._bar, None)
        self._left -= 1

    def close(self) -> None:
        """No more comes."""
        for _ in self._bar or ():
            pass
