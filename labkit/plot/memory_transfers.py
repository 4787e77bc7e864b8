"""Transfers between memories, measured and predicted; weight loading during compute."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.memory.loading import Run
from labkit.memory.timing import Measured, rates_of
from labkit.memory.transfers import Rates, Transfer, short
from labkit.plot import style
from labkit.plot.figure import constrained, label, legend_row, open_rows, styled
from labkit.plot.style import INK, MEASURED, MUTED, PAPER, SMALL_PT
from labkit.trace.measures import common, computing, length_s, union

PARTS = {  # parts of a transfer: color, name in the legend
    "cast": (style.ORANGE, "cast (predicted)"),
    "stage": (style.GREEN, "staging of pageable memory"),
    "copy": (style.BLUE, "copy within a memory"),
    "bus": (style.BROWN, "bus"),
}
DIAMOND: Any = {"marker": "D", "ms": 7, "ls": "", "mfc": PAPER, "mec": style.UNFINISHED}
ROW_IN, GAP = 0.36, 0.9


@styled
def transfers(measured: Sequence[Measured], rates: Rates | None = None, title: str = "") -> Figure:
    """Two bars per transfer: predicted from its parts (above) and measured (below). A black line
    marks the bus limit (bytes / bandwidth); a diamond marks when a call returned early. Very long
    bars are cut off, and their times written on them.

    Args:
        measured: results of `labkit.memory.timing.measure`, one per row.
        rates: the rates for the prediction; None derives them from `measured`.

    Raises ValueError if `measured` is empty, or a part of a transfer has no rate.
    """
    if not measured:
        raise ValueError("nothing to draw: measure at least one transfer")
    rates = rates or rates_of(measured)
    groups = [(ends, list(ways)) for ends, ways in groupby(measured, lambda x: x.way.ends)]
    figure = constrained(None, 1.1 + ROW_IN * (len(measured) + GAP * len(groups)))
    axes = figure.subplots()
    y, names, used = 0.0, {}, set[str]()
    usual_s = 4 * median(x.done_s for x in measured)
    ends_s = [x.done_s for x in measured if x.done_s <= usual_s]
    most_ms = 1.05e3 * max(ends_s + [rates.predict_s(x.way, x.numel) for x in measured])
    early = [x for x in measured if x.returned_s < 0.9 * x.done_s]  # well before the data arrived
    for ends, ways in groups:
        axes.text(0, y + 0.62, " → ".join(ends), fontweight="bold", va="center")
        y += GAP
        for way in ways:
            left_ms = 0.0
            for part in way.way.parts(way.numel):
                ms, color = rates.seconds(part) * 1e3, PARTS[part.what][0]
                axes.barh(y + 0.24, ms, 0.34, left_ms, color=color, alpha=0.55, edgecolor=PAPER)
                left_ms += ms
                if part.what == "bus":
                    axes.plot([ms] * 2, [y + 0.02, y + 0.84], color=INK, lw=2, zorder=3)
                used.add(part.what)
            axes.barh(y + 0.62, way.done_s * 1e3, 0.34, color=MEASURED)
            if way.done_s * 1e3 > most_ms:
                label(axes, (0.97 * most_ms, y + 0.62), f"{way.done_s * 1e3:.0f} ms", color=PAPER)
            if way in early:
                axes.plot([way.returned_s * 1e3], [y + 0.62], zorder=4, clip_on=False, **DIAMOND)
            names[y + 0.42] = _name(way.way)
            y += 1
    axes.set_yticks(list(names), list(names.values()))
    open_rows(axes)
    axes.set(
        ylim=(y, 0), xlim=(0, most_ms), xlabel="ms until the data has arrived",
        title=f"{measured[0].numel * 4 / 1e6:g} MB of fp32" + f", {title}" * bool(title),
    )  # fmt: skip
    entries: list[Artist] = [
        Patch(facecolor=color, alpha=0.55, label=words)
        for what, (color, words) in PARTS.items()
        if what in used
    ]
    entries += [
        Patch(facecolor=MEASURED, label="measured"),
        Line2D([], [], color=INK, lw=2, label="bus limit"),
    ]
    if early:
        entries.append(Line2D([], [], mew=1.5, label="call returned", **DIAMOND))
    legend_row(figure, entries, fontsize=SMALL_PT)
    return figure


def _name(way: Transfer) -> str:
    words = [short(way.to)]
    if way.dtype != way.to:
        words.append(f"cast {way.cast}" if way.cast else "cast left to torch")
    if way.over_host_bus:
        words.append("pinned" if way.pinned else "pageable")
    return ", ".join(words + ["non-blocking"] * way.non_blocking)


@styled
def loading(runs: Mapping[str, Run]) -> Figure:
    """A bus lane and a compute lane per run, on one time axis, with the size of the weight buffers
    on the device. Light bars are waits. Raises ValueError if `runs` is empty."""
    if not runs:
        raise ValueError('nothing to draw: pass runs by name, e.g. loading({"pipelined": run})')
    figure = constrained(None, 0.9 + 1.05 * len(runs))
    axes = figure.subplots()
    for y, (name, run) in zip(range(0, 3 * len(runs), 3), runs.items()):
        (rank,) = run.trace.ranks.values()
        for event in rank.comms:
            _bar(axes, y + 1, event.began_s, event.ended_s, style.shade(event.op, event.seq))
        for span in rank.spans:
            _bar(axes, y + 1.8, span.began_s, span.ended_s, style.PHASES["forward"])
        for event in rank.comms:
            if event.op != "read" and event.wait_ended_s:
                _bar(axes, y + 1.8, event.wait_began_s, event.wait_ended_s, style.WAITING)
        busy = union((x.began_s, x.ended_s) for x in rank.comms)
        hidden = length_s(common(busy, computing(rank))) / (length_s(busy) or 1.0)
        words = f"holds {run.held_bytes / 1e6:.3g} MB"
        if all(event.op != "read" for event in rank.comms):  # a read is part of the compute span
            words += f", {hidden:.0%} of bus time hidden"
        axes.text(0, y + 0.55, name, fontweight="bold", va="center")
        axes.text(1, y + 0.55, words, transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=SMALL_PT, color=MUTED)  # fmt: skip
    places = [3 * i + dy for i in range(len(runs)) for dy in (1.35, 2.15)]
    axes.set_yticks(places, ["bus", "compute"] * len(runs))
    open_rows(axes)
    links = [run.about["link"]["gbps"] for run in runs.values() if "link" in run.about]  # type: ignore[index]
    paced = f"  ·  bus paced to {links[0]:g} Gbit/s" if links else ""
    axes.set(
        ylim=(3 * len(runs), 0.1), xlim=(0, None), xlabel="ms",
        title=f"Loading weights from CPU memory{paced}",
    )  # fmt: skip
    return figure


def _bar(axes: Axes, y: float, began_s: float, ended_s: float, color: str) -> None:
    width_ms = (ended_s - began_s) * 1e3
    axes.barh(y + 0.35, width_ms, 0.66, began_s * 1e3, color=color, edgecolor=PAPER, linewidth=0.7)
