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
        self._open = [""] * size  # the unfinished line of each rank
        self._page = _Page(size) if in_notebook() else None

    def feed(self, rank: int, data: bytes) -> None:
        """Take what rank `rank` wrote. A carriage return starts its line anew, so progress bars
        move in place."""
        text = self._open[rank] + self._decoders[rank].decode(data)
        *finished, unfinished = text.replace("\r\n", "\n").split("\n")
        if len(unfinished) > LONGEST_OPEN:
            finished, unfinished = [*finished, unfinished], ""
        for line in finished:
            if self._page:
                self._page.add(rank, _shown(line))
            else:
                _write(rank, f"{_shown(line)}\n")
        shown = _shown(unfinished)
        self._open[rank] = shown + "\r" * unfinished.endswith("\r")
        if self._page is None and shown and sys.stdout.isatty():
            _write(rank, shown)
        self.refresh()

    def refresh(self) -> None:
        """Show what has come, if it is time to."""
        if self._page:
            self._page.draw_if_due([_shown(line) for line in self._open])
        else:
            sys.stdout.flush()

    def close(self) -> None:
        """The run is over: finish open lines and group by rank what is kept."""
        for rank, line in enumerate(self._open):
            if _shown(line):
                self.feed(rank, b"\n")
        if self._page:
            self._page.close()


class _Page:
    """One output of a notebook."""

    def __init__(self, size: int):
        self._first: list[list[str]] = [[] for _ in range(size)]  # lines of each rank
        self._last: list[deque[str]] = [deque(maxlen=MOST_LINES // 2) for _ in range(size)]
        self._counts = [0] * size
        self._recent: deque[str] = deque(maxlen=200)  # of all ranks, in the order they came
        self._display: Any = None
        self._drawn: object = (0, [""] * size)  # the number of lines, and the open ones
        self._drawn_s = 0.0

    def add(self, rank: int, line: str) -> None:
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} characters more)"
        first = self._first[rank]
        (first if len(first) < MOST_LINES // 2 else self._last[rank]).append(line)
        self._counts[rank] += 1
        self._recent.append(f"[rank {rank}] {line}")

    def draw_if_due(self, open_lines: list[str]) -> None:
        content = sum(self._counts), open_lines
        if content != self._drawn and time.monotonic() - self._drawn_s > REDRAW_S:
            self._drawn = content
            shown = ((rank, line[:LONGEST_LINE]) for rank, line in enumerate(open_lines) if line)
            self._draw([*self._recent, *(f"[rank {rank}] {line}" for rank, line in shown)])

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

        self._drawn_s = time.monotonic()
        bundle = {"text/plain": "\n".join(lines)}
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def _shown(line: str) -> str:
    """What is seen of a line with carriage returns in it."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _write(rank: int, line: str) -> None:
    text = f"[rank {rank}] {line}"
    if sys.stdout.isatty():
        text = f"\r\x1b[K{text}"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # a terminal of a smaller alphabet
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs us (IPython in a terminal has a stream that scrolls)."""
    return getattr(running_ipython(), "kernel", None) is not None


def interactive() -> bool:
    """Whether a user sits at IPython or a notebook, and wants to see what happens."""
    return running_ipython() is not None


def running_ipython() -> Any:
    """The IPython or kernel that runs this process, if one does."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
