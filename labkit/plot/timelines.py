"""The timeline of a step: a compute lane for each rank, with communication lanes below."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from labkit.plot.bars import (
    RankBars,
    bars_of,
    group_name,
    lane_place,
    legend_entries,
    title_of,
    unfinished,
)
from labkit.plot.choice import choose_ranks, choose_step
from labkit.plot.figure import Picture, lane_axes, legend_strip, styled
from labkit.plot.lettering import NAME_PT, Lettering, Name, fit_title
from labkit.plot.style import FAINT, INK, MUTED, PAPER, SMALL_PT, UNFINISHED, WAITING, text_on
from labkit.trace import Trace
from labkit.trace.measures import end_of

LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.15, 0.2, 0.4, 0.85  # margins of the axes
MOST_NAMES = 300  # at most; only the widest bars are named
LINE_PX, NAME_PX = 15, 12  # minimum height for a row label, and for a name in a bar
EDGE_PX = (4, 7)  # width, height: smaller bars get no white edge, which would cover them
EDGE_PT = 0.7
ARROW_PX = 12  # the tip of an unfinished bar


def timeline(
    trace: Trace,
    step: int | None = None,
    ranks: Iterable[int] | None = None,
    figure: Figure | None = None,
    zoom: tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """Compute, communication and waits of each rank in one step of a recorded run.

    Args:
        step: None draws an unfinished step, else the first timed step after the warm-up.
        ranks: global ranks, from top to bottom; None: all. The axis begins at their first bar.
        zoom: begin and end of the part of the step to show, as fractions from 0 to 1.

    Raises ValueError for an empty trace, a missing step or rank, or an invalid `zoom`.
    """
    return TimelineView(trace, step, ranks, figure, zoom).figure


class TimelineView:
    """A timeline that can be redrawn with different data on the same axes.

    All bars form one collection of polygons, so that `redraw` and `show` are fast enough for
    sliders. `figure`, `axes` and `polygons` stay the same objects; `bars` lists the visible bars.
    """

    @styled
    def __init__(
        self,
        trace: Trace,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        figure: Figure | None = None,
        zoom: tuple[float, float] = (0.0, 1.0),
    ):
        self.trace = trace
        self._steps: dict[int | None, tuple[Trace, float, dict[int, RankBars]]] = {}
        bars, chosen = self._of(choose_step(trace, step))[2], choose_ranks(trace, ranks)
        axes_in = min(max(1.3, sum(bars[rank].height for rank in chosen) * 0.46), 8.0)
        self.figure = figure or Picture(axes_in + TOP_IN + BOTTOM_IN)
        self.axes = lane_axes(self.figure, LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN)
        self.axes.grid(axis="x", color=FAINT, linewidth=0.8)
        self.axes.set_axisbelow(True)
        self._legend = legend_strip(self.figure, {})
        self.polygons = PolyCollection([], joinstyle="miter", zorder=2)
        self.axes.add_collection(self.polygons, autolim=False)
        self.names = Lettering(self.axes, NAME_PT, self.axes.transData, align=0.5, clip=True)
        beside = self.axes.get_yaxis_transform()  # x: 0 is the left end of the axes, 1 the right
        self.labels = Lettering(self.axes, SMALL_PT, beside, align=1.0, clip=False)
        self.redraw(step, chosen, zoom)

    @styled
    def redraw(
        self,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        zoom: tuple[float, float] = (0.0, 1.0),
        until_s: float = 0.0,
    ) -> Figure:
        """Show a different step, ranks or zoom; the time axis extends at least to `until_s`."""
        step = choose_step(self.trace, step)
        chosen = choose_ranks(self.trace, ranks)
        if not 0 <= zoom[0] < zoom[1] <= 1:
            raise ValueError(f"zoom={zoom}: pass two fractions of the step, such as (0.5, 0.8)")
        part, end_s, of_rank = self._of(step)
        entries = legend_entries(Trace({rank: part.ranks[rank] for rank in chosen}))
        if list(entries) != [text.get_text() for text in self._legend.get_texts()]:
            self._legend.remove()
            self._legend = legend_strip(self.figure, entries)
        tops = np.cumsum([0.0, *(of_rank[rank].height for rank in chosen)])
        whole_ms = (max(end_s, until_s) * 1e3 or 1.0) * 1.02
        begins_ms = [bar.begin_ms for rank in chosen for bar in of_rank[rank].bars]
        first_ms = min(begins_ms, default=0.0) if len(chosen) < len(part.ranks) else 0.0
        self._from_ms, self._to_ms = (first_ms + x * (whole_ms - first_ms) for x in zoom)
        self.axes.set(xlim=(self._from_ms, self._to_ms), ylim=(tops[-1], -0.1))
        box = self.axes.get_window_extent()
        self._px_per_ms = box.width / (self._to_ms - self._from_ms)
        self._px_per_row = box.height / (tops[-1] + 0.1)
        self.bars = [
            bar._replace(top=bar.top + top, bottom=bar.bottom + top, names_to=bar.names_to + top)
            for rank, top in zip(chosen, tops)
            for bar in of_rank[rank].bars
            if bar.end_ms >= self._from_ms and bar.begin_ms <= self._to_ms
        ]
        self._draw_bars()
        self._write_names()
        self._label_rows({rank: part.ranks[rank].complete for rank in chosen}, tops, of_rank)
        fit_title(self.axes, title_of(part, step, chosen, len(self.trace.steps())))
        detail = any(x.detail for rank in part.ranks.values() for x in rank.steps)
        label = "ms; recording in detail slows this step" if detail else "ms"
        self.axes.set_xlabel(label, labelpad=2)
        return self.figure

    def show(self, trace: Trace, *args: Any, **options: Any) -> Figure:
        """Show a different trace, with the arguments of `redraw`."""
        self.trace, self._steps = trace, {}
        return self.redraw(*args, **options)

    def _of(self, step: int | None) -> tuple[Trace, float, dict[int, RankBars]]:
        """The step's trace, its end in seconds, and the bars of each rank; cached."""
        if step not in self._steps:
            part = self.trace.from_zero() if step is None else self.trace.step(step)
            end_s = end_of(part) * (1.08 if unfinished(part) else 1.0)  # room for unfinished bars
            bars = {rank: bars_of(trace, end_s) for rank, trace in part.ranks.items()}
            self._steps[step] = (part, end_s, bars)
        return self._steps[step]

    def _draw_bars(self) -> None:
        """Draw bars as five-cornered polygons, so that an unfinished bar ends in an arrow."""
        bars = self.bars
        top, bottom, begin, end = (np.array([x[i] for x in bars]) for i in range(4))
        is_open = np.array([x.open for x in bars], dtype=bool)
        tip = end + is_open * ARROW_PX / self._px_per_ms
        roomy = (end - begin) * self._px_per_ms > EDGE_PX[0]
        roomy &= (bottom - top) * self._px_per_row > EDGE_PX[1]
        rim = roomy * EDGE_PT / 2 * self.figure.dpi / 72 / self._px_per_row  # half an edge
        top, bottom = top - rim, bottom + rim  # otherwise, bars with edges would look flatter
        x = np.stack([begin, end, tip, end, begin], axis=1)
        y = np.stack([top, top, (top + bottom) / 2, bottom, bottom], axis=1)
        edges = [
            UNFINISHED if bar.open or bar.color == WAITING else PAPER if room else bar.color
            for bar, room in zip(bars, roomy)
        ]
        self.polygons.set_verts(np.stack([x, y], axis=2))  # type: ignore[arg-type]
        self.polygons.set_facecolor([bar.color for bar in bars])
        self.polygons.set_edgecolor(edges)
        self.polygons.set_linewidth(np.where(is_open, 1.6, np.where(roomy, EDGE_PT, 0.2)).tolist())

    def _write_names(self) -> None:
        """Write the names of the widest bars where they fit."""
        names: list[Name] = []
        px_per_pt = self.figure.dpi / 72
        for bar in sorted(self.bars, key=lambda x: x.begin_ms - x.end_ms):
            if len(names) == MOST_NAMES:
                break
            free_ms = bar.free_ms or (bar.begin_ms, bar.end_ms)
            begin_ms, end_ms = max(free_ms[0], self._from_ms), min(free_ms[1], self._to_ms)
            room_pt = ((end_ms - begin_ms) * self._px_per_ms - 8) / px_per_pt
            if room_pt < NAME_PT / 2:
                continue
            fitting = [x for x in bar.names if self.names.width_pt(x) <= room_pt]
            if fitting and (bar.names_to - bar.top) * self._px_per_row > NAME_PX:
                middle = (begin_ms + end_ms) / 2, (bar.top + bar.names_to) / 2
                names.append(Name(fitting[0], *middle, text_on(bar.color)))
        self.names.write(names)

    def _label_rows(
        self, complete: dict[int, bool], tops: np.ndarray, of_rank: dict[int, RankBars]
    ) -> None:
        """Label the ranks and their lanes' groups where there is room."""
        labels = []
        every = 1  # label every rank, or every second, fourth, ...
        while every < len(tops) - 1 and np.diff(tops[::every]).min() * self._px_per_row < LINE_PX:
            every *= 2
        for (rank, whole), top in list(zip(complete.items(), tops))[::every]:
            labels.append(Name(f"rank {rank}" + " (cut off)" * (not whole), -0.007, top + 0.5, INK))
            for lane, group in enumerate(groups := of_rank[rank].groups):
                lane_top, lane_bottom = lane_place(lane, len(groups))
                high = (lane_bottom - lane_top) * self._px_per_row > NAME_PX
                if high and group not in groups[:lane]:
                    y = top + (lane_top + lane_bottom) / 2
                    labels.append(Name(group_name(group), -0.007, y, MUTED))
        self.labels.write(labels)
