"""What the ranks print, in the cell or terminal of the driver, marked by rank, while they run.

A terminal gets the lines as they come. A notebook gets one output that is redrawn as they come,
and that, once the run is over and the notebook is kept, is grouped by rank.
"""

import sys
import time
from typing import Any

REDRAW_S = 0.1


class RankOutput:
    """Collects the bytes that ranks print during one run."""

    def __init__(self, size: int):
        self._kept: list[list[str]] = [[] for _ in range(size)]  # finished lines of each rank
        self._open = [""] * size  # the line that each rank is at
        self._pending = [b""] * size  # bytes of a character cut in two
        self._live: list[tuple[int, str]] = []  # all finished lines in the order they came
        self._display: Any = None
        self._drawn_s = 0.0
        self._in_notebook = _in_notebook()

    def feed(self, rank: int, data: bytes) -> None:
        """Take what rank `rank` wrote. A carriage return starts its line anew, so progress bars
        move in place."""
        text, self._pending[rank] = _decode(self._pending[rank] + data)
        *finished, unfinished = (self._open[rank] + text).replace("\r\n", "\n").split("\n")
        for line in finished:
            line = line.rsplit("\r", 1)[-1]
            self._kept[rank].append(line)
            self._live.append((rank, line))
            if not self._in_notebook:
                sys.stdout.write(
                    f"\r\x1b[K[rank {rank}] {line}\n" if _tty() else f"[rank {rank}] {line}\n"
                )
        self._open[rank] = unfinished
        bar = unfinished.rstrip("\r").rsplit("\r", 1)[-1]
        if bar and not self._in_notebook and _tty():
            sys.stdout.write(f"\r\x1b[K[rank {rank}] {bar}")
        if self._in_notebook and time.monotonic() - self._drawn_s > REDRAW_S:
            self._draw(grouped=False)
        else:
            sys.stdout.flush()

    def close(self) -> None:
        """The run is over: finish open lines and group by rank what is kept."""
        for rank, line in enumerate(self._open):
            if line.strip("\r"):
                self.feed(rank, b"\n")
        if self._in_notebook and self._live:
            self._draw(grouped=True)

    def _draw(self, grouped: bool) -> None:
        from IPython.display import display

        self._drawn_s = time.monotonic()
        if grouped:
            lines = [
                f"[rank {rank}] {line}" for rank, kept in enumerate(self._kept) for line in kept
            ]
        else:
            lines = [f"[rank {rank}] {line}" for rank, line in self._live[-200:]]
            bars = [
                (rank, line.rstrip("\r").rsplit("\r", 1)[-1])
                for rank, line in enumerate(self._open)
            ]
            lines += [f"[rank {rank}] {bar}" for rank, bar in bars if bar]
        bundle = {"text/plain": "\n".join(lines)}
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def _decode(data: bytes) -> tuple[str, bytes]:
    """As much of `data` as is whole UTF-8, and the cut rest."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if len(data) - error.start < 4 and error.reason == "unexpected end of data":
            return data[: error.start].decode(errors="replace"), data[error.start :]
        return data.decode(errors="replace"), b""


def _tty() -> bool:
    return sys.stdout.isatty()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs us (IPython in a terminal has a stream that scrolls)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
