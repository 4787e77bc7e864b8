"""Pictures of results from other machines, which `make gpu` saves in notebooks/results."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit import plot
from labkit.bench import harness
from labkit.bench.transfers import read_transfers
from labkit.labs import NOTEBOOKS
from labkit.plot.figure import Picture, styled
from labkit.plot.style import BLACK, BLUE, MEASURED, VERMILION

RESULTS = NOTEBOOKS / "results"


def show_stored(what: str, folder: Path = RESULTS) -> None:
    """Display one picture per file of `what`, "attention", "precision" or "transfers"; print a
    message if there is no file. Raises ValueError for any other `what`."""
    if what not in DRAWN:
        raise ValueError(f"no stored results of {what!r}; choose one of {', '.join(DRAWN)}")
    show: Callable[[Any], None] = print
    with suppress(ImportError):  # not in a script
        from IPython.display import display as show

    files = sorted(folder.glob(f"{what}-*.json"))
    for path in files:
        show(DRAWN[what](path))
    if not files:
        print(f"no results of other machines are stored; `labkit bench {what}` measures this one")


@styled
def _precision(path: Path) -> Picture:
    """Milliseconds per step and peak memory, by number format."""
    (times,) = harness.read(path)
    names = list(reversed(times.seconds))
    picture = Picture(0.9 + 0.22 * len(names), layout="constrained")
    steps, peaks = picture.subplots(1, 2, sharey=True)
    steps.barh(names, [times.ms(name) for name in names], color=MEASURED)
    steps.set_xlabel("ms per step")
    peak_bytes = times.figures["peak_bytes"]
    peaks.barh(names, [peak_bytes[name] / 1e6 for name in names], color=MEASURED)
    peaks.set_xlabel("peak memory, MB")
    picture.suptitle(", ".join(map(str, times.about.values())), x=0.01, ha="left")
    return picture


def _transfers(path: Path) -> Picture:
    stored = read_transfers(path)
    about = ", ".join(map(str, stored.about.values()))
    return plot.transfers(stored.measured, stored.rates, about)


@styled
def _attention(path: Path) -> Picture:
    """Milliseconds and peak memory of an attention layer, by sequence length."""
    measured = harness.read(path)
    picture = Picture(2.6, layout="constrained")
    steps, peaks = picture.subplots(1, 2)
    lengths = [times.about["length"] for times in measured]
    for name, color in zip(measured[0].seconds, (VERMILION, BLUE, BLACK), strict=True):
        peak_mb = [times.figures["peak_bytes"][name] / 1e6 for times in measured]
        steps.plot(lengths, [times.ms(name) for times in measured], "o-", color=color, label=name)
        peaks.plot(lengths, peak_mb, "o-", color=color)
    for axes, label in ((steps, "ms, forward and backward"), (peaks, "peak memory, MB")):
        axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=label)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
    steps.legend()
    about = {k: v for k, v in measured[0].about.items() if k != "length"}
    picture.suptitle(", ".join(map(str, about.values())), x=0.01, ha="left")
    return picture


DRAWN = {"attention": _attention, "precision": _precision, "transfers": _transfers}
