"""Pictures show what the trace says, in corners, colours, words and boxes, and can be read."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from io import BytesIO
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from command import python
from labkit import CommEvent, plot, replaying
from labkit.holdings import Footprint
from labkit.plot import style
from labkit.plot.figure import Picture, png
from labkit.plot.lettering import Lettering
from labkit.plot.memories import peak_bytes
from labkit.plot.pipelines import LIGHTEST
from labkit.plot.strategies import draw_comparison, sent_bytes, step_times
from labkit.plot.timelines import LINE_PX, TimelineView
from labkit.trace import CATEGORIES, MemoryPoint, RankTrace, Span, Step, Trace
from labkit.trace.measures import overlap, waiting
from tables import cases, raises, refusals
from traces import sample_trace


def paths(view: TimelineView) -> list:
    return view.polygons.get_paths()


def extents(view: TimelineView) -> list[tuple[float, float]]:
    """From where to where each polygon goes, in ms."""
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths(view)]


def colours(view: TimelineView) -> list[str]:
    return [to_hex(colour).upper() for colour in view.polygons.get_facecolor()]


def found(view: TimelineView, begin_s: float, end_s: float, top: float, bottom: float) -> list[str]:
    """Colours of the polygons with just these times whose middle lies in these rows."""
    return [
        colour
        for path, (begin, end), colour in zip(paths(view), extents(view), colours(view))
        if abs(begin - begin_s * 1e3) < 1e-9
        and abs(end - end_s * 1e3) < 1e-9
        and top <= path.vertices[:, 1].mean() <= bottom
    ]


def names(view: TimelineView) -> list[str]:
    return [name.text for name in view.names.names]


def labels(view: TimelineView, word: str = "") -> list[str]:
    return [name.text for name in view.labels.names if word in name.text]


def rows(view: TimelineView) -> list[tuple[float, float]]:
    """Top and bottom of each rank drawn, by the places of their labels."""
    middles = [name.y for name in view.labels.names if name.text.startswith("rank")]
    tops = [y - 0.5 for y in middles]
    return list(zip(tops, [*tops[1:], np.inf]))


def title(figure: Figure, panel: int = 0) -> str:
    return figure.axes[panel].get_title(loc="left")


def letterings(figure: Figure) -> list[Lettering]:
    return [x for x in figure.findobj(Lettering) if isinstance(x, Lettering)]


def words(figure: Figure) -> list[str]:
    names = [name.text for one in letterings(figure) for name in one.names]
    return [text.get_text() for text in figure.findobj(Text)] + names


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its box in pixels."""
    figure.canvas.draw()
    not_drawn: list[Text] = []
    for axes in figure.axes:
        if not axes.get_visible():
            not_drawn += axes.findobj(Text)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                not_drawn += [] if low <= tick.get_loc() <= high else [tick.label1, tick.label2]
    drawn = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and text not in not_drawn
    ]
    for lettering in letterings(figure):
        drawn += zip([name.text for name in lettering.names], lettering.boxes(), strict=True)
    return drawn


def assert_readable(figure: Figure, slack_px: float = 0.5) -> None:
    """No two texts overlap by more than `slack_px`, and all lie on the figure."""
    every = boxes(figure)
    assert len(every) > 5
    whole = figure.bbox.padded(0.5)
    for text, box in every:
        assert whole.contains(*box.min) and whole.contains(*box.max), f"{text!r} leaves the figure"
    for (one, box), (other, other_box) in combinations(every, 2):
        across = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
        down = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
        assert not (across > slack_px and down > slack_px), f"{one!r} lies on {other!r}"


ALL_REDUCE = CommEvent("all_reduce", "default", (0, 1), 0, 4, "float32", (8,), 32, 32, True)


def hung_trace() -> Trace:
    """Rank 0 waits in a collective that rank 1, still in backward, has not come to."""
    traces = {}
    for rank in range(2):
        spans = [Span("forward", "", 0, 1.0, 1.01, 0, "GPT"), Span("backward", "", 0, 1.01, 0.0)]
        steps = [Step(0, 1.0, 0.0)]
        traces[rank] = RankTrace(rank, 2, steps=steps, spans=spans, complete=rank == 0)
    traces[0].comms.append(replace(ALL_REDUCE, issued_s=1.02))
    return Trace(traces)


def without_steps() -> Trace:
    trace = sample_trace(2, 1, None)
    for rank in trace.ranks.values():
        rank.steps = []
    return trace


def test_every_span_event_and_wait_is_drawn_from_its_begin_to_its_end() -> None:
    """A wait on the lane of computing."""
    trace = sample_trace(3, 4)
    view = TimelineView(trace, 2)
    part = trace.step(2)
    waits = 0
    for rank, (top, bottom) in zip(part.ranks.values(), rows(view), strict=True):
        for span in rank.spans:
            drawn = found(view, span.began_s, span.ended_s, top, top + 1)
            assert style.PHASES[span.phase] in drawn, span
        for event in rank.comms:
            assert found(view, event.began_s, event.ended_s, top + 1, bottom), event
        for begin_s, end_s in waiting(rank):
            assert style.WAITING in found(view, begin_s, end_s, top, top + 1)
            waits += 1
    assert waits >= 3
    assert colours(view).count(style.WAITING) == waits
    records = sum(len(x.spans) + len(x.comms) for x in part.ranks.values())
    assert len(paths(view)) == records + waits


def test_an_operation_has_one_colour_on_all_ranks_and_its_neighbours_another() -> None:
    """A collective on all of them, a message on both ends."""
    trace = sample_trace(4, 3)
    view = TimelineView(trace, 2)
    row = rows(view)

    def colours_of(rank: int, event: CommEvent) -> list[str]:
        top, bottom = row[rank]
        return found(view, event.began_s, event.ended_s, top + 1, bottom)

    of_seq: dict[int, str] = {}
    for (_, seq), events in trace.step(2).collectives().items():
        assert len(events) == 4
        (of_seq[seq],) = {colour for x in events.items() for colour in colours_of(*x)}
    in_order = [of_seq[seq] for seq in sorted(of_seq)]
    assert all(before != after for before, after in pairwise(in_order))
    seen = set()
    for key, ends in trace.step(2).messages().items():
        sent = colours_of(key.source, ends["send"])
        assert sent == colours_of(key.target, ends["recv"]), key
        seen.add(sent[0])
    assert len(seen) == 2  # and neighbours differ


def test_events_at_the_same_time_lie_in_lanes_of_their_own():
    view = TimelineView(sample_trace(8, 2), 0, ranks=[0])
    comms = [bar for bar in view.bars if bar.top >= 1]
    assert len({bar.top for bar in comms}) == 7
    for one, other in combinations(comms, 2):
        at_once = one.begin_ms < other.end_ms and other.begin_ms < one.end_ms
        assert not at_once or one.bottom <= other.top or other.bottom <= one.top


def test_the_title_says_what_is_shown_and_how_much_was_hidden():
    trace = sample_trace(4, 3)
    part = trace.step(2)
    text = title(plot.timeline(trace))
    assert text.startswith("Step 2  ·  4 ranks  ·  ")
    assert f"{overlap(part):.0%} of communication hidden" in text
    assert "paced" not in text
    trace.about["link"] = {"gbps": 1.0}
    view = TimelineView(trace, ranks=[3, 1])
    assert labels(view, "rank ") == ["rank 3", "rank 1"]
    few = title(view.figure)
    assert "2 of 4 ranks" in few
    assert few.endswith("paced to 1 Gbit/s")
    shown = Trace({rank: part.ranks[rank] for rank in (1, 3)})
    assert f"{overlap(shown):.0%} of communication" in few
    assert overlap(shown) != pytest.approx(overlap(part), abs=0.01)
    # A single step has no number; with no computing there is nothing to hide behind.
    single = sample_trace(2, 1)
    text = title(plot.timeline(single))
    assert text.startswith("2 ranks  ·  ") and "hidden" in text
    for rank in single.ranks.values():
        rank.spans = []
    assert "hidden" not in title(plot.timeline(single))


def test_a_message_is_named_by_its_other_end_and_its_row_messages():
    """Rank 0 sends to rank 2, each for a second time between these two, of a group of two."""
    traces, times = {}, {"issued_s": 1.0, "began_s": 1.0, "ended_s": 1.5, "wait_ended_s": 1.5}
    for rank, op, peer in ((0, "send", 1), (2, "recv", 0)):
        event = CommEvent(op, "default", (0, 2), rank, 2, "int8", (1,), 1, 1, True, peer=peer)
        comms = [replace(event, **times)]
        traces[rank] = RankTrace(rank, 3, steps=[Step(0, 1.0, 2.0)], comms=comms)
    view = TimelineView(Trace(traces))
    assert {"send → 2", "recv ← 0"} <= set(names(view))
    assert labels(view) == ["rank 0", "messages", "rank 2", "messages"]
    traces[2].comms[0].ended_s = traces[2].comms[0].wait_ended_s = 0.0
    still_open = {bar.names[0] for bar in TimelineView(Trace(traces)).bars if bar.open}
    assert still_open == {"recv ← 0", "waiting for recv ← 0"}
    traces[2].comms[0].ended_s = traces[2].comms[0].wait_ended_s = 1.5
    later = {name: value + 0.5 for name, value in times.items()}
    for rank in traces.values():
        rank.comms.append(replace(rank.comms[0], op="barrier", peer=None, **later))
    view = TimelineView(Trace(traces))
    assert {"send → 2", "barrier 2"} <= set(names(view))
    assert "all ranks" in labels(view)
    assert_readable(view.figure)


@cases((2, None, 1), (3, None, 1), (3, 1, 2), (3, 0, 1), (2, 0, 1))
def test_a_usual_step_is_shown_where_none_is_asked(steps: int, detail: int | None, expected: int):
    trace = sample_trace(2, steps, detail)
    assert f"Step {expected} " in title(plot.timeline(trace))
    for step in range(steps):
        axes = plot.timeline(trace, step).axes[0]
        assert f"Step {step} " in axes.get_title(loc="left")
        assert ("slows this step" in axes.get_xlabel()) == (step == detail)
        assert step == detail or axes.get_xlabel() == "ms"


def test_modules_inside_a_wrapper_are_drawn_as_without_it():
    trace = sample_trace(1, 1, None)
    bare, spans = names(TimelineView(trace)), trace.ranks[0].spans
    for span in spans:
        span.depth += span.phase == "forward"
    root = next(x for x in spans if x.phase == "forward" and not x.module)
    spans.insert(0, replace(root, depth=0, kind="DDP"))
    assert names(TimelineView(trace)) == bare
    assert "blocks.0" in bare


def test_what_never_ended_is_open_to_the_right_and_the_run_says_so() -> None:
    view = TimelineView(hung_trace())
    drawn = list(zip(view.bars, paths(view), view.polygons.get_edgecolor(), strict=True))
    unfinished = [(path.vertices[2, 0], to_hex(edge).upper()) for x, path, edge in drawn if x.open]
    assert len(unfinished) == 4  # two backwards, an event, the wait for it
    ((tip, edge),) = set(unfinished)
    assert edge == style.UNFINISHED
    assert tip > max(bar.end_ms for bar in view.bars) > 20.0 * 1.05  # room to see it
    closed = [(path.vertices[2, 0], bar.end_ms) for bar, path, _ in drawn if not bar.open]
    assert closed
    assert all(end == pytest.approx(end_ms) for end, end_ms in closed)
    # An event only issued begins there, and is waited for.
    event = next(bar for bar in view.bars if bar.top >= 1)
    wait = next(bar for bar in view.bars if bar.color == style.WAITING)
    assert [event.begin_ms, wait.begin_ms] == pytest.approx([20.0, 20.0])
    assert wait.open and event.open
    assert "all_reduce 4" in wait.names[0]
    # In words.
    assert "unfinished after 20 ms" in title(view.figure)
    assert "never ended" in words(view.figure)
    assert [x for x in labels(view, "rank") if "all" not in x] == ["rank 0", "rank 1 (cut off)"]
    assert "never ended" not in words(plot.timeline(sample_trace(2)))
    assert_readable(view.figure)


def test_a_wait_from_the_first_moment_is_shown():
    trace = hung_trace()
    for one in trace.ranks.values():
        one.spans, one.steps = [], [Step(0, 1.02, 0.0)]
    trace.ranks[1].spans = [Span("forward", "", 0, 1.02, 1.05)]
    view = TimelineView(trace)
    assert [bar.begin_ms for bar in view.bars if bar.color == style.WAITING] == [0.0]


def test_no_words_lie_on_each_other_with_every_operation_in_the_legend():
    trace = hung_trace()
    ops = ["all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier", "gather", "send"]
    for seq, op in enumerate(ops):
        event = CommEvent(op, f"{seq} (ranks 0, 1)", (0, 1), 0, seq, "int8", (1,), 1, 1, False)
        event.peer, event.issued_s, event.began_s, event.ended_s = 1, 1.0, 1.0, 1.01
        trace.ranks[0].comms.append(event)
    view = TimelineView(trace)
    assert set(ops[:-1]) <= set(words(view.figure))
    assert_readable(view.figure)


def test_the_legend_has_what_is_drawn_and_nothing_else():
    """As where ranks agree on a model before the first step: an all-gather in no step."""
    trace = sample_trace(2, 2)
    first = trace.ranks[0].comms[0]
    trace.ranks[0].comms.append(replace(first, op="all_gather", step=-1))
    trace.ranks[1].comms.append(replace(first, op="broadcast", step=1))
    view = TimelineView(trace, step=0)

    def legend() -> set[str]:
        (one,) = view.figure.legends
        return {text.get_text() for text in one.get_texts()}

    usual = {"forward", "backward", "optimizer", "waiting", "all_reduce"}
    assert usual <= legend() and not legend() & {"all_gather", "broadcast"}
    view.redraw(step=1, zoom=(0.4, 0.5))
    assert legend() >= usual | {"broadcast"} and "all_gather" not in legend()
    view.redraw(step=1, ranks=[0])
    assert "broadcast" not in legend(), "of a rank that is not drawn"
    for event in trace.ranks[0].comms:
        event.wait_began_s = event.wait_ended_s = 0.0
    view.show(trace, step=1, ranks=[0])
    assert "waiting" not in legend()


def test_a_name_stands_where_no_wait_lies_over_its_bar():
    """As in tensor parallelism, where a module waits in the middle of its forward."""
    span = Span("forward", "mlp", 0, 0.0, 0.010, 1)
    rank = RankTrace(0, 2, steps=[Step(0, 0.0, 0.010)], spans=[span])
    for begin_s, end_s in ((0.001, 0.004), (0.007, 0.009)):
        times = dict.fromkeys(("issued_s", "began_s", "wait_began_s"), begin_s)
        rank.comms.append(replace(ALL_REDUCE, ended_s=end_s, wait_ended_s=end_s, **times))
    view = TimelineView(Trace({0: rank}))
    (name,) = [x for x in view.names.names if x.text == "mlp"]
    assert name.x == pytest.approx(5.5)
    assert_readable(view.figure)
    view.redraw(zoom=(0, 0.35))  # up to 3.6 ms
    assert "mlp" not in names(view)


def test_lanes_are_named_by_the_ranks_of_their_group_in_a_narrow_margin():
    trace = hung_trace()
    (first,) = comms = trace.ranks[0].comms
    groups = ["3 (ranks 0, 1)", "9 (ranks 0, 1, 2, 3, 4, 5, 6, 7 ...) of world 2"]
    comms += [replace(first, group=group) for group in groups]
    view = TimelineView(trace, ranks=[0])
    assert labels(view) == ["rank 0", "all ranks", "ranks 0, 1", "ranks 0, 1, 2 …"]
    assert_readable(view.figure)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 64])
def test_no_words_lie_on_each_other_and_each_name_fits_in_its_bar(ranks: int) -> None:
    """A narrow bar keeps its colour: a white edge would be all one sees of it."""
    view = TimelineView(sample_trace(ranks, 2))
    assert_readable(view.figure)
    for name, box in zip(view.names.names, view.names.boxes(), strict=True):
        bar = [
            bar for bar in view.bars
            if name.text in bar.names
            and bar.begin_ms <= name.x <= bar.end_ms
            and bar.top <= name.y <= bar.bottom
        ][-1]  # fmt: skip
        corners = [(bar.begin_ms, bar.top), (bar.end_ms, bar.bottom)]
        (left, top), (right, bottom) = view.axes.transData.transform(corners)
        assert left < box.x0 and box.x1 < right, name
        assert bottom < box.y0 and box.y1 < top, name
        assert name.color == style.text_on(bar.color)
    assert ranks > 16 or len(view.names.names) > 4
    px_per_ms = view.axes.get_window_extent().width / np.diff(view.axes.get_xlim())[0]
    narrow = [
        (bar.color, to_hex(edge).upper())
        for bar, edge in zip(view.bars, view.polygons.get_edgecolor(), strict=True)
        if (bar.end_ms - bar.begin_ms) * px_per_ms < 3
        and not (bar.open or bar.color == style.WAITING)
    ]
    assert narrow or ranks not in (4, 64)
    assert all(edge == colour for colour, edge in narrow)


def test_rows_of_64_ranks_are_labelled_as_far_as_there_is_room():
    view = TimelineView(sample_trace(64, 2))
    assert [x for x in view.axes.collections if len(x.get_paths()) > 300] == [view.polygons]
    assert not view.axes.patches
    of_ranks = [name for name in labels(view) if name.startswith("rank")]
    assert of_ranks[0] == "rank 0"
    assert 10 < len(of_ranks) < 64
    gaps = np.diff(sorted(box.y0 for box in view.labels.boxes()))
    assert gaps.min() >= LINE_PX - 3  # boxes of words differ by their descent
    lanes = [(bar.bottom - bar.top) for bar in view.bars if bar.bottom % 1 != bar.top]
    high_px = view.axes.get_window_extent().height / view.axes.get_ylim()[0]
    assert max(lanes) * high_px > 4


def test_redraw_shows_another_step_on_the_same_axes_and_polygons():
    trace = sample_trace(4, 5, None)
    view = TimelineView(trace, 1)
    kept = (view.figure, view.axes, view.polygons)
    artists = len(view.figure.findobj())
    before = png(view.figure)
    for step, ranks in ((3, [0, 2]), (0, None), (1, None)):
        view.redraw(step, ranks)
        fresh = TimelineView(trace, step, ranks)
        assert extents(view) == extents(fresh)
        assert colours(view) == colours(fresh)
        assert view.axes.get_xlim() == fresh.axes.get_xlim()
    assert (view.figure, view.axes, view.polygons) == kept
    assert len(view.figure.findobj()) == artists
    assert png(view.figure) == before


def test_zoom_shows_that_part_and_draws_nothing_outside():
    view = TimelineView(sample_trace(2, 3))
    _, whole = view.axes.get_xlim()
    every = len(view.bars)
    view.redraw(zoom=(0.25, 0.5))
    begin, end = view.axes.get_xlim()
    assert (begin, end) == pytest.approx((whole / 4, whole / 2))
    assert 0 < len(view.bars) < every / 2
    assert all(bar.end_ms >= begin and bar.begin_ms <= end for bar in view.bars)
    assert_readable(view.figure)


test_a_missing_step_or_rank_is_reported = refusals(
    lambda options: plot.timeline(sample_trace(4, 3), **options),
    ({"step": 7}, "no step 7 in this trace; it has 0 to 2"),
    ({"ranks": [0, 9]}, "no rank 9 in this trace; it has 0 to 3"),
    ({"ranks": []}, "no ranks to draw"),
    ({"zoom": (0.5, 0.5)}, "zoom"),
    ({"zoom": (0.5, 2)}, "zoom"),
)


@pytest.mark.parametrize("trace", [Trace(), Trace({0: RankTrace(0, 1)})])
def test_an_empty_trace_says_what_to_do(trace: Trace):
    for draw in (plot.timeline, plot.view, lambda x: plot.compare([x])):
        raises(r"nothing was recorded; .* record\(\)", draw, trace)


def test_a_run_without_steps_or_without_some_rank_is_drawn():
    trace = without_steps()
    assert title(plot.timeline(trace)).startswith("The whole run")
    damaged = sample_trace(4, 2)
    del damaged.ranks[2]
    assert "3 of 4 ranks" in title(plot.timeline(damaged))


def small_memory() -> Trace:
    """One rank, one step of 10 s in detail, three moments."""
    held = [(100, 0, 0, 0, 0, 0), (100, 50, 0, 300, 0, 7), (100, 50, 200, 0, 10, 0)]
    points = [MemoryPoint(5.0 + t, 3, x) for t, x in zip((0.0, 2.5, 8.0), held)]
    spans = [Span("forward", "", 3, 5.0, 8.0), Span("backward", "", 3, 8.0, 13.0)]
    one = RankTrace(0, 1, steps=[Step(3, 5.0, 15.0, True)], spans=spans, memory=points)
    return Trace({0: one})


@cases((4.0, 100), (5.0, 100), (5.5, 100), (7.5, 457))
def test_step_memory_is_drawn_from_the_beginning_of_forward_to_the_end(begin_s: float, first: int):
    """Wherever the moments of memory lie: forward may begin before the first, or after the last
    that counts."""
    runs = {"early": small_memory(), "other": small_memory()}
    runs["other"].ranks[0].spans[0].began_s = begin_s
    (axes,) = plot.step_memory(runs).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(curves) == 2
    for line in curves:
        assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0.0, 2.0)
        assert line.get_ydata()[-1] == line.get_ydata()[-2] == 360
        assert (np.diff(line.get_xdata()) >= 0).all()
    assert curves[1].get_ydata()[0] == first


def test_areas_are_the_bytes_of_each_category_from_that_moment_on():
    trace = small_memory()
    (axes, *_) = plot.memory(trace).axes
    areas = [x.get_paths()[0] for x in axes.collections]
    assert len(areas) == len(CATEGORIES)
    for percent, point in ((0.1, 0), (24.9, 0), (25.1, 1), (79.9, 1), (80.1, 2), (99.9, 2)):
        base = 0
        for area, held in zip(areas, trace.ranks[0].memory[point].held_bytes, strict=True):
            assert area.contains_point((percent, base + held / 2)) == (held > 0)
            assert area.contains_point((percent, base + held - 0.01)) == (held > 0)
            assert not area.contains_point((percent, base + held + 0.01))
            assert not area.contains_point((percent, base - 0.01))
            base += held
    drawn = [to_hex(x.get_facecolor()[0]).upper() for x in axes.collections]
    assert drawn == [style.CATEGORIES[name] for name in CATEGORIES]


def ribbon(axes: object) -> dict[str, tuple[float, float]]:
    """Colour of each phase, and from where to where it goes."""
    return {
        to_hex(x.get_facecolor()).upper(): (x.get_x(), x.get_x() + x.get_width())
        for x in axes.patches
    }


def test_the_peak_stands_where_it_is_with_its_value_under_a_ribbon_of_phases() -> None:
    (axes, *_) = plot.memory(small_memory()).axes
    (note,) = [x for x in axes.texts if "peak" in x.get_text()]
    assert note.get_text() == "peak 457 bytes"
    assert note.xy == pytest.approx((25, 457))
    assert ribbon(axes)[style.PHASES["forward"]] == pytest.approx((0, 30))
    assert ribbon(axes)[style.PHASES["backward"]] == pytest.approx((30, 80))
    assert {"forward", "backward"} <= {x.get_text() for x in axes.texts}
    assert "step 3 in detail" in axes.get_xlabel()
    real = plot.memory(sample_trace(2), ranks=[1]).axes[0]
    part = sample_trace(2).step(1)
    assert f"peak {peak_bytes(part.ranks[1]) / 1e6:.3g} MB" in [x.get_text() for x in real.texts]


FOOTPRINT = Footprint(100, 50, 200, bus_bytes=99999)


@cases(
    (FOOTPRINT, None, [[350, 350]]),
    (350.0, None, [[350, 350]]),
    (None, vars(FOOTPRINT), [[350, 350]]),
    (None, FOOTPRINT, [[350, 350]]),
    (None, {"bus_bytes": 5}, []),
    ids=["footprint", "bytes", "recorded", "recorded footprint", "none predicted"],
)
def test_predicted_bytes_are_a_line(given: object, recorded: object, right: list[list[int]]):
    trace = small_memory()
    if recorded:
        trace.about["predicted"] = recorded
    figure = plot.memory(trace, predicted=given)
    dashed = [x for x in figure.axes[0].lines if x.get_linestyle() == "--"]
    assert [list(x.get_ydata()) for x in dashed] == right
    assert ("as predicted, 350 bytes" in figure.get_suptitle()) == bool(right)
    assert ("predicted" in figure.get_suptitle()) == bool(right)


def test_each_rank_has_its_own_beginning():
    first, later = (small_memory().ranks[0] for _ in range(2))
    later.rank = 1
    for timed in (*later.steps, *later.spans):
        timed.began_s += 4
        timed.ended_s += 4
    later.memory = [x._replace(when_s=x.when_s + 4) for x in later.memory]
    figure = plot.memory(Trace({0: first, 1: later}))
    left, right = (ribbon(axes) for axes in figure.axes[:2])
    assert left.keys() == right.keys() and len(left) == 2
    assert all(left[colour] == pytest.approx(right[colour]) for colour in left)
    peaks = [x.xy for axes in figure.axes[:2] for x in axes.texts if "peak" in x.get_text()]
    assert peaks == [pytest.approx((25, 457))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64])
def test_memory_of_many_ranks_can_be_read(ranks: int):
    figure = plot.memory(sample_trace(ranks), predicted=1.9e6)
    assert sum(axes.get_visible() for axes in figure.axes) == min(ranks, 8)
    assert_readable(figure)
    assert ("ranks 0 to 7 of 64" in figure.get_suptitle()) == (ranks == 64)


def test_memory_needs_a_step_in_detail_and_a_rank_that_is_there():
    raises(r"record\(detail_step=1\)", plot.memory, sample_trace(2, 3, None))
    raises("no rank 5", plot.memory, sample_trace(2), ranks=[5])
    trace = sample_trace(2)
    trace.ranks[1].memory = []
    assert "nothing recorded" in [x.get_text() for x in plot.memory(trace).axes[1].texts]


def test_the_parts_of_a_steps_time_add_up_to_it():
    trace = sample_trace(3, 4, None)
    times = step_times(trace)
    total_s = times.alone_s + times.hidden_s + times.waiting_s + times.other_s
    ranks = trace.ranks.values()
    steps_s = [np.mean([x.steps[i].ended_s - x.steps[i].began_s for x in ranks]) for i in (1, 2, 3)]
    assert total_s == pytest.approx(np.median(steps_s))
    assert min(times.alone_s, times.hidden_s, times.waiting_s) > 0
    wait_s = np.mean([sum(e - b for b, e in waiting(x)) for x in trace.step(2).ranks.values()])
    assert times.waiting_s == pytest.approx(wait_s)
    # The step in detail does not count.
    trace = sample_trace(2, 2, 1)
    times = step_times(trace)
    assert times == step_times(sample_trace(2, 1, None))
    assert times.alone_s < step_times(trace.step(1)).alone_s / 2


def test_compare_draws_what_the_traces_say():
    runs = {"one": sample_trace(1, 3), "ddp": sample_trace(4, 3)}
    fuller = runs["ddp"].ranks[2]
    fuller.memory = [x._replace(held_bytes=(*x.held_bytes[:5], 700_000)) for x in fuller.memory]
    figure = plot.compare(runs)
    drawn, sent, held = (
        {part.get_label(): [bar.get_width() for bar in part] for part in axes.containers}
        for axes in figure.axes
    )
    for i, trace in enumerate(runs.values()):
        times = step_times(trace)
        assert drawn["compute"][i] == pytest.approx(times.alone_s * 1e3)
        assert drawn["compute, hiding communication"][i] == pytest.approx(times.hidden_s * 1e3)
        assert drawn["waiting"][i] == pytest.approx(times.waiting_s * 1e3)
        assert sent["all_reduce"][i] * 1e3 == pytest.approx(sent_bytes(trace)["all_reduce"])
        most_bytes = max(map(peak_bytes, trace.step(1).ranks.values()))
        assert sum(x[i] for x in held.values()) * 1e6 == pytest.approx(most_bytes)
    ends = [0.0, 0.0]
    for container in figure.axes[2].containers:
        assert [bar.get_x() for bar in container] == pytest.approx(ends)
        ends = [bar.get_x() + bar.get_width() for bar in container]
        (colour,) = {to_hex(bar.get_facecolor()).upper() for bar in container}
        assert colour == style.CATEGORIES[container.get_label()]
    labels = [x.get_text() for x in figure.axes[0].get_yticklabels()]
    assert labels == ["one\n1 rank", "ddp\n4 ranks"]
    assert_readable(figure)


def test_bytes_are_those_that_one_rank_sends_in_one_step():
    trace = sample_trace(4, 5)
    every = [x for rank in trace.ranks.values() for x in rank.comms if x.op == "all_reduce"]
    in_3_steps = sum(x.bus_bytes for x in every if x.step in (2, 3, 4))
    assert sent_bytes(trace)["all_reduce"] == in_3_steps / 3 / 4
    assert "recv" not in sent_bytes(trace)


def test_compare_needs_runs_and_needs_no_memory_with_pacing_and_with_many_names() -> None:
    raises("nothing to compare", plot.compare, {})
    paced = sample_trace(2, 2, None)
    paced.about.update(link={"gbps": 1}, strategy="a strategy with a long name")
    figure = plot.compare([paced] * 6)
    assert len(figure.axes) == 2
    of_rows = [x.get_text() for x in figure.axes[0].get_yticklabels()]
    assert len(set(of_rows)) == 6
    assert all(name.endswith("2 ranks, paced") for name in of_rows)
    assert_readable(figure)


def test_the_picture_of_losses_has_the_same_colours_and_all_categories(tmp_path: Path):
    def draw(measured: Footprint, *strategies: str) -> Figure:
        same = {"ranks": 4, "losses": [3.0, 2.5], "measured": measured, "predicted": measured}
        results = [SimpleNamespace(strategy=name, **same) for name in strategies]
        return draw_comparison(results, tmp_path / "compare.png")

    categories = ["parameters", "gradients", "optimizer state"]
    figure = draw(Footprint(4e6, 4e6, 8e6, 6e6), "single", "naive-ddp", "ddp")
    held = figure.axes[2].containers
    shown = [to_hex(x[0].get_facecolor()).upper() for x in held]
    assert shown == [style.CATEGORIES[name] for name in categories]
    assert [bar.get_width() for x in held for bar in x] == [4.0] * 6 + [8.0] * 3
    assert_readable(figure)
    legend = draw(Footprint(4e6, 0, 0, 6e6), "single").axes[2].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == categories


def seen_without(cone: str, colour: str) -> np.ndarray:
    """`colour` as someone sees it who lacks these cones (Machado and others, 2009), linear RGB."""
    matrix = {
        "none": np.eye(3),
        "red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    }[cone]
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(matrix) @ linear, 0, 1)
    return np.where(seen <= 0.0031308, seen * 12.92, 1.055 * seen ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize(
    "together",
    [
        list(style.CATEGORIES.values()),
        [*dict.fromkeys(style.PHASES.values()), style.WAITING],  # an update is an optimizer's
        [style.PHASES["forward"], style.PHASES["backward"], style.FAINT]
        + [style.tint(style.PHASES[x], LIGHTEST) for x in ("forward", "backward")],  # two chunks
        [pair[0] for op, pair in style.OPERATIONS.items() if op != "recv"],
        *style.OPERATIONS.values(),
        style.OTHER_OPERATIONS,
        [style.COMPUTING, style.HIDDEN, style.WAITING, style.IDLE],
        [style.MEASURED, style.PREDICTED],
    ],
)
def test_colours_that_stand_together_can_be_told_apart(together: Iterable[str]):
    for cone in ("none", "red", "green"):
        for one, other in combinations(together, 2):
            distance = np.linalg.norm(seen_without(cone, one) - seen_without(cone, other))
            assert distance > 0.12, (cone, one, other)


def test_every_text_has_contrast():
    for ink in (style.INK, style.MUTED):
        assert style.contrast(ink, style.PAPER) >= 4.5
    fills = [*style.PHASES.values(), *sum(style.OPERATIONS.values(), ()), style.WAITING]
    for fill in [*fills, *style.OTHER_OPERATIONS]:
        assert style.contrast(style.text_on(fill), fill) >= 4.5, fill
    assert style.contrast("#000000", "#FFFFFF") == pytest.approx(21)


def test_the_style_of_a_notebook_changes_nothing():
    import matplotlib.style

    trace = sample_trace(2)
    draws = (plot.timeline, plot.memory, lambda x: plot.compare([x]))
    plain = [draw(trace)._repr_png_() for draw in draws]
    loud = {"savefig.facecolor": "red", "savefig.bbox": "tight", "font.size": 30}
    with matplotlib.style.context(["dark_background", loud]):
        assert [draw(trace)._repr_png_() for draw in draws] == plain


def test_a_figure_is_shown_once_as_a_png():
    pytest.importorskip("IPython", reason="needs IPython, which notebooks bring")
    from IPython.core.formatters import DisplayFormatter

    figure = plot.timeline(sample_trace(2))
    shown = DisplayFormatter().format(figure)[0]
    assert set(shown) == {"image/png", "text/plain"}
    picture = imread(BytesIO(shown["image/png"]))
    assert picture.shape[:2] == tuple(map(round, figure.bbox.size[::-1]))
    assert (picture[[0, -1, 0, -1], [0, 0, -1, -1]] == 1).all()  # opaque, for dark themes


def test_margins_stay_where_a_notebook_cuts_its_pictures():
    """IPython, once pyplot is there, saves with bbox_inches="tight"."""

    def cut(figure: Figure) -> np.ndarray:
        file = BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0)
        return imread(BytesIO(file.getvalue()))

    figure = plot.timeline(sample_trace(2))
    assert cut(figure).shape == imread(BytesIO(png(figure))).shape
    own = Figure((10, 3), dpi=100)
    plot.timeline(sample_trace(2), figure=own)
    left_px = min(box.x0 for box in letterings(own)[-1].boxes())
    assert cut(own).shape[1] >= 1000 - left_px - 40


def test_a_picture_is_drawn_into_the_figure_that_is_given():
    for draw in (plot.timeline, plot.memory, lambda x, figure: plot.compare([x], figure=figure)):
        own = Figure((9, 4))
        assert draw(sample_trace(2), figure=own) is own
        assert own.axes
    assert isinstance(plot.timeline(sample_trace(2)), Picture)


def test_importing_plot_loads_nothing_and_drawing_needs_neither_torch_nor_pyplot():
    code = """
import sys
from labkit import plot, replaying
print(*{name.split('.')[0] for name in sys.modules})
plot.timeline, plot.memory, plot.compare, plot.movement
print(*{name.split('.')[0] for name in sys.modules})"""
    imported, drawing = (set(x.split()) for x in python("-c", code).stdout.splitlines())
    assert imported & {"matplotlib", "numpy", "torch", "ipywidgets", "IPython"} == set()
    assert drawing & {"torch", "ipywidgets", "IPython"} == set()


def test_plot_names_what_it_has():
    has = (
        "bandwidth, bill, bits, calibration, compare, flip_bits, front, loading, magnitudes, "
        "memory, mesh, movement, nccl, number_line, plan, plan_view, schedule, schedules, "
        "step_memory, steps, timeline, transfers, view"
    )
    assert ", ".join(plot.__all__) == has and set(plot.__all__) <= set(dir(plot))
    raises(f"it has {has}", lambda: plot.histogram, error=AttributeError)


widgets = pytest.mark.skipif(find_spec("ipywidgets") is None, reason="needs ipywidgets")


@widgets
def test_each_control_of_a_view_draws_another_picture():
    from base64 import b64decode

    view = plot.view(sample_trace(3, 4, 1))
    seen = [bytes(view.picture.value)]
    bundle = view._repr_mimebundle_()  # without a kernel it is its picture
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert b64decode(bundle["image/png"]) == view.picture.value

    def change(control: Any, value: object) -> None:
        control.value = value
        picture = bytes(view.picture.value)
        assert picture.startswith(b"\x89PNG")
        assert picture not in seen
        seen.append(picture)

    assert view.step.value == 2
    change(view.step, 3)
    change(view.ranks[1], False)
    assert "2 of 3 ranks" in title(view._timeline.figure)
    change(view.zoom, (50, 60))
    change(view.what, "memory")
    assert view.step.disabled
    change(view.ranks[0], False)
    change(view.what, "timeline")
    assert not view.step.disabled
    for button in view.ranks:
        button.value = False  # none chosen: all are shown
    assert "3 ranks" in title(view._timeline.figure)
    change(view.zoom, (100, 100))


@widgets
def test_a_view_of_a_run_without_detail_or_without_steps():
    assert plot.view(sample_trace(2, 2, None)).what.options == ("timeline",)
    trace = without_steps()
    view = plot.view(trace)
    assert view.step.options == ("all",)
    assert view.picture.value == png(plot.timeline(trace))


@cases((plot, "view"), (replaying, "what_if"), ids=["view", "what_if"])
def test_a_view_needs_ipywidgets(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for loaded in ("labkit.replaying.what_ifs", "labkit.plot.widgets"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.delitem(vars(module), name, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'labkit\[lab\]'"):
        getattr(module, name)(sample_trace(2))
