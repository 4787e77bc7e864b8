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
from labkit.plot.style import MEASURED

RESULTS = NOTEBOOKS / "results"


def show_stored(what: str, folder: Path = RESULTS) -> None:
    """Display one picture per file of `what`, "precision" or "transfers"; print a message
    if there is no file. Raises ValueError for any other `what`."""
    if what not in DRAWN:
        raise ValueError(f"no stored results of {what!r}; choose one of {', '.join(DRAWN)}")
    show: Callable[[Any], None] = print
    with suppress(ImportError):  # not in a script
        from IPython.display import display as show

    files = sorted(folder.glob(f"{what}-*.json"))
    for path in files:
        show(DRAWN[what](path))
    if not files:
        print(f"no results from other machines are stored; `labkit bench {what}` measures this one")


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
    about = times.about
    picture.suptitle(f"{about['model']}, {_where(about)}", x=0.01, ha="left")
    return picture


def _transfers(path: Path) -> Picture:
    """Blocking copies between the CPU's memory and the GPU's."""
    stored = read_transfers(path)
    over_bus = [x for x in stored.measured if x.way.over_host_bus and "paced" not in x.way.ends]
    blocking = [x for x in over_bus if not x.way.non_blocking]
    return plot.transfers(blocking or stored.measured, stored.rates, _where(stored.about))


def _where(about: dict[str, Any]) -> str:
    return f"measured on {about['device']}, torch {about['torch']}, {about['date']}"


DRAWN = {"precision": _precision, "transfers": _transfers}
