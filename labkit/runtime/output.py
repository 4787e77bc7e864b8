"""Shows what the ranks print, live and labeled by rank, in the cell or terminal of the driver.

A terminal shows lines in order of arrival. A notebook shows one output, redrawn during the run and
grouped by rank at the end; there, very long output is truncated because it would freeze the page.
"""

import codecs
import sys
import time
from collections import deque
from typing import Any

REDRAW_S = 0.1
MAX_LINES = 1000  # kept per rank in a notebook, half from the start and half from the end
MAX_LINE = 2000
MAX_OPEN_LINE = 100_000  # longer lines are split


class RankOutput:
    """Collects and shows the bytes that ranks print during one run."""

    def __init__(self, size: int):
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = [utf8("replace") for _ in range(size)]  # a character may span two reads
        self._open = [""] * size  # unfinished line per rank
        self._page = _Display(size) if in_notebook() else None

    def feed(self, rank: int, data: bytes) -> None:
        """Add output of rank `rank`. A carriage return restarts the line, so progress bars work."""
        text = self._open[rank] + self._decoders[rank].decode(data)
        *finished, unfinished = text.replace("\r\n", "\n").split("\n")
        if len(unfinished) > MAX_OPEN_LINE:
            finished, unfinished = [*finished, unfinished], ""
        for line in finished:
            if self._page:
                self._page.add(rank, _visible(line))
            else:
                _write(rank, f"{_visible(line)}\n")
        shown = _visible(unfinished)
        self._open[rank] = shown + "\r" * unfinished.endswith("\r")
        if self._page is None and shown and sys.stdout.isatty():
            _write(rank, shown)
        self.refresh()

    def refresh(self) -> None:
        """Show new output, if a redraw is due."""
        if self._page:
            self._page.draw_if_due([_visible(line) for line in self._open])
        else:
            sys.stdout.flush()

    def close(self) -> None:
        """Finish open lines and group the kept output by rank, at the end of a run."""
        for rank, line in enumerate(self._open):
            if _visible(line):
                self.feed(rank, b"\n")
        if self._page:
            self._page.close()


class _Display:
    """One output of a notebook, redrawn in place."""

    def __init__(self, size: int):
        self._first: list[list[str]] = [[] for _ in range(size)]  # first lines per rank
        self._last: list[deque[str]] = [deque(maxlen=MAX_LINES // 2) for _ in range(size)]
        self._counts = [0] * size
        self._recent: deque[str] = deque(maxlen=200)  # lines of all ranks, by arrival
        self._display: Any = None
        self._drawn: object = (0, [""] * size)  # number of lines, open lines
        self._drawn_s = 0.0

    def add(self, rank: int, line: str) -> None:
        if len(line) > MAX_LINE:
            line = f"{line[:MAX_LINE]} ... ({len(line) - MAX_LINE:,} more characters)"
        first = self._first[rank]
        (first if len(first) < MAX_LINES // 2 else self._last[rank]).append(line)
        self._counts[rank] += 1
        self._recent.append(f"[rank {rank}] {line}")

    def draw_if_due(self, open_lines: list[str]) -> None:
        content = sum(self._counts), open_lines
        if content != self._drawn and time.monotonic() - self._drawn_s > REDRAW_S:
            self._drawn = content
            shown = ((rank, line[:MAX_LINE]) for rank, line in enumerate(open_lines) if line)
            self._draw([*self._recent, *(f"[rank {rank}] {line}" for rank, line in shown)])

    def close(self) -> None:
        """Draw the kept lines, grouped by rank."""
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


def _visible(line: str) -> str:
    """The visible part of a line that contains carriage returns."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _write(rank: int, line: str) -> None:
    text = f"[rank {rank}] {line}"
    if sys.stdout.isatty():
        text = f"\r\x1b[K{text}"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # the terminal cannot encode the line
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; IPython in a terminal is not."""
    return getattr(running_ipython(), "kernel", None) is not None


def interactive() -> bool:
    """Whether this process runs IPython, in a terminal or a notebook."""
    return running_ipython() is not None


def running_ipython() -> Any:
    """The IPython shell or kernel of this process, if any."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
