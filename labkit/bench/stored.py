"""Pictures of results from other machines, saved in labkit/bench/results with
`labkit bench precision --save` and `labkit bench transfers --save`.
"""

from pathlib import Path

from labkit import plot
from labkit.bench import harness
from labkit.bench.transfers import RESULTS, read_transfers
from labkit.plot.figure import Picture, styled
from labkit.plot.style import MEASURED


def show_stored(what: str, folder: Path = RESULTS) -> None:
    """Display one picture per file of `what`, "precision" or "transfers"; print a message if there
    is no file. Raises ValueError for any other `what`."""
    if what not in DRAWN:
        raise ValueError(f"no stored results of {what!r}; choose one of {', '.join(DRAWN)}")
    from IPython.display import display

    files = sorted(folder.glob(f"{what}-*.json"))
    for path in files:
        display(DRAWN[what](path))
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


DRAWN = {"precision": _precision, "transfers": _transfers}
