"""What the ranks print, in the cell or terminal of the driver, marked by rank, while they run.

A terminal gets the lines as they come. A notebook gets one output that is redrawn as they come,
and that, once the run is over and the notebook is kept, is grouped by rank. A flood is cut there:
a page cannot show it, and would stop answering.
"""

import codecs
import sys
import time
from collections import deque
from typing import Any

REDRAW_S = 0.1
MOST_LINES = 1000  # of a rank that a notebook keeps: half of them the first, half the last
LONGEST_LINE = 2000
LONGEST_OPEN = 100_000  # a line that grows and never ends is broken


class RankOutput:
    """Collects the bytes that ranks print during one run."""

    def __init__(self, size: int):
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = [utf8("replace") for _ in range(size)]  # a character may come in two parts
        self._open = [""] * size  # the line that each rank is at
        self._page = _Page(size) if in_notebook() else None

    def feed(self, rank: int, data: bytes) -> None:
        """Take what rank `rank` wrote. A carriage return starts its line anew, so progress bars
        move in place."""
        text = self._open[rank] + self._decoders[rank].decode(data)
        *finished, unfinished = text.replace("\r\n", "\n").split("\n")
        if len(unfinished) > LONGEST_OPEN:
            finished, unfinished = [*finished, unfinished], ""
        for line in finished:
            self._finish(rank, _shown(line))
        self._open[rank] = _shown(unfinished) + "\r" * unfinished.endswith("\r")
        if self._page:
            self._page.bar(rank, _shown(unfinished))
        elif _shown(unfinished) and _tty():
            _write(f"\r\x1b[K[rank {rank}] {_shown(unfinished)}")
        self.refresh()

    def refresh(self) -> None:
        """Show what has come, if it is time to."""
        if self._page:
            self._page.draw_if_due()
        else:
            sys.stdout.flush()

    def close(self) -> None:
        """The run is over: finish open lines and group by rank what is kept."""
        for rank, line in enumerate(self._open):
            if _shown(line):
                self.feed(rank, b"\n")
        if self._page:
            self._page.close()

    def _finish(self, rank: int, line: str) -> None:
        if self._page:
            self._page.add(rank, line)
        else:
            _write(f"\r\x1b[K[rank {rank}] {line}\n" if _tty() else f"[rank {rank}] {line}\n")


class _Page:
    """One output of a notebook."""

    def __init__(self, size: int):
        self._bars = [""] * size  # the line that each rank is at
        self._first: list[list[str]] = [[] for _ in range(size)]  # lines of each rank
        self._last: list[deque[str]] = [deque(maxlen=MOST_LINES // 2) for _ in range(size)]
        self._counts = [0] * size
        self._recent: deque[str] = deque(maxlen=200)  # of all ranks, in the order they came
        self._display: Any = None
        self._changed, self._drawn_s = False, 0.0

    def add(self, rank: int, line: str) -> None:
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} characters more)"
        first = self._first[rank]
        (first if len(first) < MOST_LINES // 2 else self._last[rank]).append(line)
        self._counts[rank] += 1
        self._recent.append(f"[rank {rank}] {line}")
        self._changed = True

    def bar(self, rank: int, line: str) -> None:
        self._changed |= line != self._bars[rank]
        self._bars[rank] = line

    def draw_if_due(self) -> None:
        if self._changed and time.monotonic() - self._drawn_s > REDRAW_S:
            bars = enumerate(self._bars)
            open_lines = [f"[rank {rank}] {bar[:LONGEST_LINE]}" for rank, bar in bars if bar]
            self._draw([*self._recent, *open_lines])

    def close(self) -> None:
        """Grouped by rank."""
        if any(self._counts):
            ranks = range(len(self._counts))
            self._draw([f"[rank {rank}] {line}" for rank in ranks for line in self._kept(rank)])

    def _kept(self, rank: int) -> list[str]:
        first, last = self._first[rank], self._last[rank]
        left_out = self._counts[rank] - len(first) - len(last)
        return [*first, *([f"... {left_out:,} lines left out ..."] if left_out else []), *last]

    def _draw(self, lines: list[str]) -> None:
        from IPython.display import display

        self._changed, self._drawn_s = False, time.monotonic()
        bundle = {"text/plain": "\n".join(lines)}
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def _shown(line: str) -> str:
    """What is seen of a line with carriage returns in it."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # a terminal of a smaller alphabet
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def _tty() -> bool:
    return sys.stdout.isatty()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs us (IPython in a terminal has a stream that scrolls)."""
    return getattr(_ipython(), "kernel", None) is not None


def interactive() -> bool:
    """Whether somebody sits at IPython or a notebook, and wants to be told what happens."""
    return _ipython() is not None


def _ipython() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
