"""Figures of other machines that labkit brings along, drawn for a notebook: the files of
`labkit bench precision --save` and `labkit bench transfers --save` in labkit/bench/results."""

import json
from pathlib import Path

from labkit import plot
from labkit.bench.transfers import RESULTS, read_transfers
from labkit.plot.figure import Picture, styled
from labkit.plot.style import MEASURED


def show_stored(what: str, folder: Path = RESULTS) -> None:
    """Display a picture for each file of `what`, "precision" or "transfers"; print a sentence where
    there is none. Raises ValueError for another `what`."""
    if what not in DRAWN:
        raise ValueError(f"no pictures of {what!r} are stored; choose one of {', '.join(DRAWN)}")
    from IPython.display import display

    files = sorted(folder.glob(f"{what}-*.json"))
    for path in files:
        display(DRAWN[what](path))
    if not files:
        print(f"no figures of other machines are here; `labkit bench {what}` measures this one")


@styled
def precision_steps(path: Path) -> Picture:
    """Milliseconds of a step, and bytes at its peak, in each number format."""
    found = json.loads(path.read_text(encoding="utf-8"))
    cases = dict(reversed(found["cases"].items()))
    picture = Picture(0.9 + 0.22 * len(cases), layout="constrained")
    times, peaks = picture.subplots(1, 2, sharey=True)
    times.barh(list(cases), [its["median_step_ms"] for its in cases.values()], color=MEASURED)
    times.set_xlabel("ms a step")
    peaks.barh(list(cases), [its["peak_bytes"] / 1e6 for its in cases.values()], color=MEASURED)
    peaks.set_xlabel("MB at the peak")
    picture.suptitle(", ".join(map(str, found["about"].values())), x=0.01, ha="left")
    return picture


def _transfers(path: Path) -> Picture:
    found = read_transfers(path)
    about = ", ".join(map(str, found.about.values()))
    return plot.transfers(found.measured, found.rates, about)


DRAWN = {"precision": precision_steps, "transfers": _transfers}
