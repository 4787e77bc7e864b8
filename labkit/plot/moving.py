"""Pictures of what moves between memories: ways to move a tensor, measured beside predicted, with
the limit that the bus sets; and the loads of a model beside its computing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.memory.loading import Run
from labkit.memory.timing import Measured, rates_of
from labkit.memory.transfers import Rates, short
from labkit.plot.picture import Picture, styled
from labkit.plot.style import (
    BLUE,
    BROWN,
    FAINT,
    GREEN,
    INK,
    MEASURED,
    MUTED,
    ORANGE,
    PAPER,
    PHASES,
    SMALL_PT,
    TITLE_PT,
    UNFINISHED,
    WAITING,
    shade,
)
from labkit.trace.measures import common, computing, length_s, union

PARTS = {"cast": ORANGE, "stage": GREEN, "copy": BLUE, "bus": BROWN}
WORDS = {
    "cast": "cast (predicted)", "stage": "staging of pageable memory", "copy": "copy in a memory",
    "bus": "bus",
}  # fmt: skip
ROW_IN, GAP = 0.36, 0.9


@styled
def transfers(measured: Sequence[Measured], rates: Rates | None = None, title: str = "") -> Picture:
    """Each way with two bars: above, what its parts predict; below, what was measured. A black line
    is the limit: its bytes, over what the bus reaches. A diamond says when the call returned, where
    that is before the numbers are there.

    Args:
        measured: of `labkit.memory.timing.measure`, in the order of the rows.
        rates: to predict by; those that `measured` shows if None.

    Raises ValueError for no ways, or for one whose parts have no rate.
    """
    if not measured:
        raise ValueError("there is nothing to draw: measure at least one way")
    rates = rates or rates_of(measured)
    tops, groups = [0.0], sum(_starts(measured, i) for i in range(len(measured)))
    figure = Picture(1.1 + ROW_IN * (len(measured) + GAP * groups), layout="constrained")
    axes = figure.subplots()
    y, names = 0.0, {}
    for i, one in enumerate(measured):
        if _starts(measured, i):
            axes.text(0, y + 0.62, " → ".join(one.way.ends), fontweight="bold", va="center")
            y += GAP
        _draw_way(axes, y, one, rates)
        names[y + 0.42] = _name(one)
        y += 1
        tops.append(y)
    axes.set_yticks(list(names), list(names.values()))
    axes.tick_params(axis="y", length=0, labelsize=SMALL_PT)
    axes.spines["left"].set_visible(False)
    axes.set(ylim=(y, 0), xlim=(0, None), xlabel="ms until the numbers are there")
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
    axes.set_title(title or f"{measured[0].numel * 4 / 1e6:g} MB of fp32", loc="left")
    used = {part.what for one in measured for part in one.way.parts(one.numel)}
    entries: list[Artist] = [
        Patch(facecolor=PARTS[what], alpha=0.55, label=WORDS[what])
        for what in PARTS
        if what in used
    ]
    entries.append(Patch(facecolor=MEASURED, label="measured"))
    entries.append(Line2D([], [], color=INK, lw=2, label="limit of the bus"))
    if any(_early(one) for one in measured):
        entries.append(_diamond("the call has returned"))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=len(entries), fontsize=SMALL_PT
    )
    return figure


def _starts(measured: Sequence[Measured], i: int) -> bool:
    return i == 0 or measured[i].way.ends != measured[i - 1].way.ends


def _draw_way(axes: Axes, y: float, one: Measured, rates: Rates) -> None:
    left_ms = 0.0
    for part in one.way.parts(one.numel):
        width_ms = rates.seconds(part) * 1e3
        axes.barh(
            y + 0.24, width_ms, 0.34, left_ms, color=PARTS[part.what], alpha=0.55, edgecolor=PAPER
        )
        left_ms += width_ms
        if part.what == "bus":
            axes.plot([width_ms] * 2, [y + 0.02, y + 0.84], color=INK, lw=2, zorder=3)
    axes.barh(y + 0.62, one.done_s * 1e3, 0.34, color=MEASURED)
    if _early(one):
        mark = _diamond()
        axes.plot([one.returned_s * 1e3], [y + 0.62], zorder=4, **_style_of(mark))


def _early(one: Measured) -> bool:
    """The call came back well before the numbers were there."""
    return one.returned_s < 0.9 * one.done_s


def _diamond(label: str = "") -> Line2D:
    return Line2D([], [], marker="D", ms=6, ls="", mfc=PAPER, mec=UNFINISHED, mew=1.5, label=label)


def _style_of(line: Line2D) -> dict[str, Any]:
    names = ("marker", "markersize", "linestyle", "markerfacecolor", "markeredgecolor")
    return {name: getattr(line, f"get_{name}")() for name in names}


def _name(one: Measured) -> str:
    way = one.way
    words = [short(way.to)]
    if way.dtype != way.to:
        words.append(f"cast {way.cast}" if way.cast else "cast left to torch")
    if way.over_host_bus:
        words.append("pinned" if way.pinned else "pageable")
    return ", ".join(words + ["non-blocking"] * way.non_blocking)


@styled
def loading(runs: Mapping[str, Run]) -> Picture:
    """Each run with two lanes, what the bus carried and what was computed, all on one axis of time;
    beside its name the bytes of weights it held on the device. A light bar is a wait.

    Raises ValueError for no runs."""
    if not runs:
        raise ValueError("there is nothing to draw: give a run with its name")
    figure = Picture(0.9 + 1.05 * len(runs), layout="constrained")
    axes = figure.subplots()
    for i, (name, run) in enumerate(runs.items()):
        (rank,) = run.trace.ranks.values()
        y = 3 * i
        for event in rank.comms:
            _bar(axes, y + 1, event.began_s, event.ended_s, shade(event.op, event.seq))
        for span in rank.spans:
            _bar(axes, y + 1.8, span.began_s, span.ended_s, PHASES["forward"])
        for event in rank.comms:
            if event.op != "read" and event.wait_ended_s:
                _bar(axes, y + 1.8, event.wait_began_s, event.wait_ended_s, WAITING)
        busy = union((x.began_s, x.ended_s) for x in rank.comms)
        hidden = length_s(common(busy, computing(rank))) / (length_s(busy) or 1.0)
        words = f"holds {run.held_bytes / 1e6:.3g} MB, {hidden:.0%} of the bus's time hidden"
        axes.text(0, y + 0.55, name, fontweight="bold", va="center")
        axes.annotate(
            words, (1, y + 0.55), xycoords=axes.get_yaxis_transform(), ha="right", va="center",
            fontsize=SMALL_PT, color=MUTED,
        )  # fmt: skip
    places = [3 * i + dy for i in range(len(runs)) for dy in (1.35, 2.15)]
    axes.set_yticks(places, ["bus", "compute"] * len(runs), fontsize=SMALL_PT)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(ylim=(3 * len(runs), 0.1), xlim=(0, None), xlabel="ms")
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
    links = [run.about["link"]["gbps"] for run in runs.values() if "link" in run.about]  # type: ignore[index]
    paced = f"  ·  bus paced to {links[0]:g} Gbit/s" if links else ""
    axes.set_title(f"Weights from CPU memory{paced}", loc="left", fontsize=TITLE_PT)
    return figure


def _bar(axes: Axes, y: float, began_s: float, ended_s: float, colour: str) -> None:
    width_ms = (ended_s - began_s) * 1e3
    axes.barh(y + 0.35, width_ms, 0.66, began_s * 1e3, color=colour, edgecolor=PAPER, linewidth=0.7)
