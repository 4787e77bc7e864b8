"""Sliders over a replay. The pure part (`changed`, `Redrawing`) is tested without ipywidgets."""

from base64 import b64decode
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import Cluster, CommEvent, cluster, known_clusters, replaying
from labkit.plot.figure import png
from labkit.plot.timelines import TimelineView
from labkit.replaying import changed, replay
from labkit.replaying.redrawing import ROOM, Redrawing, in_words, next_axis_s
from labkit.trace import MemoryPoint, Operation, RankTrace, Span, Step, Trace, split_of
from labkit.trace.measures import main_dtype
from tables import refusals

POD = cluster("dgx-h100")
NODE = cluster("h200-node")
CLOUD = cluster("v100-cloud")


def recorded(buckets: int = 2, ranks: int = 8, op: str = "all_reduce") -> Trace:
    """One rank that stands for all: two products a bucket, which leaves beside the next."""
    group, nbytes = tuple(range(ranks)), 10**8 // buckets
    operations, comms = [], []
    for number in range(buckets):
        when_s = 2.0 + number * 10
        for at_s in (when_s, when_s + 1):
            operations.append(Operation(at_s, 1, "mm", "float32", 10**10, 10**6, (1024,) * 3))
        comms.append(CommEvent(
            op, "default", group, 0, number, "float32", (nbytes // 4,), nbytes, nbytes, False,
            step=1, issued_s=when_s + 2, began_s=when_s + 2, ended_s=98.0,
            wait_began_s=91.0, wait_ended_s=98.0,
        ))  # fmt: skip
    rank = RankTrace(
        0, ranks, alike=group[1:], steps=[Step(1, 0.0, 100.0, True)],
        spans=[Span("backward", "", 1, 1.0, 90.0, flops=2 * buckets * 10**10)], comms=comms,
        operations=operations, memory=[MemoryPoint(1.0, 1, (1, 0, 0, 0, 0, 0))],
    )  # fmt: skip
    return Trace({0: rank})


def step_s(at: Cluster, trace: Trace | None = None) -> float:
    return split_of(replay(trace or recorded(), at)).step_s


def test_only_the_given_fields_change() -> None:
    new = changed(POD, 8, 1e9, 2e9, 3e-6, 4e-6, 4)
    assert (new.nodes, new.devices_per_node) == (2, 4)
    assert (new.inside.bytes_per_s, new.inside.latency_s) == (1e9, 3e-6)
    assert (new.between.bytes_per_s, new.between.latency_s) == (2e9, 4e-6)
    assert new.inside.sources["bytes_per_s"] == new.inside.sources["latency_s"] == "what if"
    assert new.inside.sources["reached"] == POD.inside.sources["reached"]
    back = replace(
        new, nodes=POD.nodes, devices_per_node=8, inside=POD.inside, between=POD.between,
        title=POD.title,
    )  # fmt: skip
    assert back == POD
    assert new.title == "DGX H100 pod, changed"


@pytest.mark.parametrize("name", known_clusters())
@pytest.mark.parametrize("ranks", [1, 7, 8, 9, 2048])
def test_there_are_just_enough_nodes(name: str, ranks: int) -> None:
    known = cluster(name)
    for per_node in (None, 1, 2, 16):
        new = changed(known, ranks, devices_per_node=per_node)
        assert new.size - new.devices_per_node < ranks <= new.size
    if known.between is not None:
        assert changed(known, ranks) == replace(known, nodes=-(-ranks // known.devices_per_node))


def test_ports_follow_the_devices_where_each_had_its_own() -> None:
    for per_node in (1, 2, 16):
        pod, cloud = (changed(x, 32, devices_per_node=per_node) for x in (POD, CLOUD))
        assert pod.inside.ports == pod.between.ports == cloud.inside.ports == per_node
        assert cloud.between.ports == 1
        assert pod.share_bytes_per_s(pod.between) == pod.between.bytes_per_s


def test_a_single_node_that_is_cut_gets_wires_like_those_inside() -> None:
    new = changed(NODE, 8, devices_per_node=2)
    assert new.between.name != new.inside.name  # they are other ports
    assert replace(new.between, name=new.inside.name) == new.inside
    slower = changed(NODE, 16, between_bytes_per_s=1e9)
    assert (slower.nodes, slower.between.bytes_per_s) == (2, 1e9)
    assert slower.between.latency_s == NODE.inside.latency_s
    assert slower.title.endswith(", changed")
    assert changed(NODE, 8) == NODE


test_an_impossible_change_is_reported = refusals(
    lambda wrong: changed(POD, **{"ranks": 8, **wrong}),
    ({"inside_bytes_per_s": 0.0}, "inside_bytes_per_s=0.0: choose more than 0"),
    ({"between_bytes_per_s": float("nan")}, "between_bytes_per_s=nan"),
    ({"between_latency_s": -1.0}, "between_latency_s=-1.0: choose 0 or more"),
    ({"devices_per_node": 0}, "devices_per_node=0"),
    ({"ranks": 0}, "ranks=0"),
)


SPEEDS = st.floats(1e7, 1e12)
OPS = ["all_reduce", "all_gather", "all_to_all", "broadcast"]
FACTORS, PER_NODE = st.floats(1.0, 100.0), st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(SPEEDS, SPEEDS, FACTORS, PER_NODE, st.sampled_from(OPS))
def test_more_bandwidth_or_less_latency_never_makes_a_step_longer(
    inside: float, between: float, factor: float, per_node: int, op: str
) -> None:
    trace = recorded(op=op)

    def seconds(inside: float, between: float, latency_s: float = 1e-5) -> float:
        at = changed(POD, 8, inside, between, latency_s, latency_s, per_node)
        return step_s(at, trace) / (1 + 1e-12)  # sums in another order differ in the last digit

    before = seconds(inside, between) * (1 + 1e-9)
    assert seconds(inside * factor, between) <= before
    assert seconds(inside, between * factor) <= before
    assert seconds(inside, between, 1e-5 / factor) <= before


def test_a_slower_cluster_takes_longer() -> None:
    as_it_is = step_s(changed(POD, 8))
    for wire, devices in (("inside", 8), ("between", 4)):
        for slower in ({f"{wire}_bytes_per_s": 1e9}, {f"{wire}_latency_s": 1e-2}):
            assert step_s(changed(POD, 8, devices_per_node=devices, **slower)) > 2 * as_it_is
    assert step_s(changed(POD, 8, between_bytes_per_s=1e9)) == as_it_is  # one node


def test_the_axis_stays_while_the_step_fills_a_quarter_to_all_of_it() -> None:
    assert next_axis_s(0.0, 2.0) == 2.0 * ROOM
    assert [next_axis_s(4.0, x) for x in (1.0, 3.0, 4.0)] == [4.0] * 3
    assert next_axis_s(4.0, 4.1) == 4.1 * ROOM
    assert next_axis_s(4.0, 0.9) == 0.9 * ROOM


def test_a_redrawing_keeps_its_objects_and_shows_what_is_replayed() -> None:
    trace, redrawing = recorded(), Redrawing()
    first, split = redrawing.draw(trace, changed(POD, 8))
    view = redrawing.view
    kept = (view.figure, view.axes, view.polygons, view.names, view.labels)
    artists, (_, until_ms) = len(view.figure.findobj()), view.axes.get_xlim()
    slower, later = redrawing.draw(trace, changed(POD, 8, inside_bytes_per_s=300e9))
    assert first != slower and later.step_s > split.step_s
    assert view.axes.get_xlim() == (0, until_ms)
    assert until_ms == pytest.approx(split.step_s * 1e3 * ROOM * 1.02)
    longest = max(x.vertices[:, 0].max() for x in view.polygons.get_paths())
    assert longest == pytest.approx(later.step_s * 1e3)
    assert redrawing.draw(trace, changed(POD, 8))[0] == first  # nothing is left of the other
    assert redrawing.view is view
    assert (view.figure, view.axes, view.polygons, view.names, view.labels) == kept
    assert len(view.figure.findobj()) == artists


def test_the_line_says_where_the_time_went() -> None:
    trace, at = recorded(), changed(POD, 8)
    split = split_of(replay(trace, at))
    assert split.flops == 4 * 10**10
    mfu = 4e10 / (split.step_s * at.device.peak_flops["float32"])
    assert 0.1 < mfu < 0.85
    line = in_words(split, trace, at)
    assert line.startswith(str(split)) and f"MFU {mfu:.1%} of the float32 peak" in line
    trace.ranks[0].operations.append(Operation(1.0, 1, "mm", "bfloat16", 10**11, 0))
    assert main_dtype(trace) == "bfloat16"
    assert in_words(replace(split, flops=None), trace, at) == str(split)


def test_another_trace_is_shown_as_a_fresh_view_would() -> None:
    first, other = (replay(recorded(op=op), changed(POD, 8)) for op in ("all_reduce", "all_gather"))
    view = TimelineView(first)
    drawn, kept = png(view.figure), (view.figure, view.axes, view.polygons)
    view.show(other)
    assert png(view.figure) == png(TimelineView(other).figure) != drawn
    assert [x.get_text() for x in view._legend.get_texts()][-1] == "all_gather"
    assert len(view.figure.legends) == 1
    view.show(first, until_s=1e-9)  # the axis is never too short for the step
    assert png(view.figure) == drawn
    assert (view.figure, view.axes, view.polygons) == kept


@pytest.mark.parametrize("name", known_clusters())
def test_a_title_leaves_the_figure_on_no_cluster(name: str) -> None:
    redrawing = Redrawing(3)
    redrawing.draw(recorded(ranks=64), changed(cluster(name), 64, inside_bytes_per_s=1e8))
    figure, axes = redrawing.view.figure, redrawing.view.axes
    figure.canvas.draw()
    title = axes.get_title(loc="left")
    assert title.endswith(", changed") and "3 of 64 ranks" in title
    assert axes._left_title.get_window_extent().x1 < figure.bbox.x1
    assert list(redrawing.view.trace.ranks) == [0, 1, 2], "the first of all that are known"


widgets = pytest.mark.skipif(find_spec("ipywidgets") is None, reason="needs ipywidgets")


@widgets
def test_sliders_begin_with_the_cluster_and_change_what_is_replayed() -> None:
    shown = replaying.what_if(recorded(), POD)
    assert shown.cluster == replace(POD, nodes=1)
    assert "at first" not in shown.line.value
    starts = [slider.value for slider in shown.links.values()]
    assert starts == pytest.approx([450, 3.4, 50, 14])
    assert [x for _, x in shown.devices_per_node.options] == [1, 2, 4, 8]
    assert shown.devices_per_node.value == 8
    between = shown.links["between_bytes_per_s"]
    assert between.disabled  # one node
    shown.devices_per_node.value = 2
    assert not between.disabled and not shown.links["between_latency_s"].disabled
    for name, value in zip(shown.links, (100.0, 5.0, 10.0, 20.0), strict=True):
        shown.links[name].value = value
    now = shown.cluster
    assert now == changed(POD, 8, 100e9, 10e9, 5 * 1e-6, 20 * 1e-6, 2)
    step = split_of(replay(recorded(), now))
    assert f"{step}; MFU" in shown.line.value
    times = step.step_s / step_s(changed(POD, 8))
    assert times > 2 and shown.line.value.endswith(f"; {times:.3g} times as long as at first")
    drawn = Redrawing()
    drawn.axis_s = shown._redrawing.axis_s
    assert bytes(shown.picture.value) == drawn.draw(recorded(), now)[0]


@widgets
def test_each_slider_draws_another_picture_and_the_page_shows_it() -> None:
    shown = replaying.what_if(lambda buckets: recorded(buckets), NODE, buckets=(2, 4))
    assert shown.links["between_bytes_per_s"].value == shown.links["inside_bytes_per_s"].value
    sliders = (*shown.choices.values(), *shown.links.values())
    shown.devices_per_node.value = 4
    seen = set()
    for slider, value in zip(sliders, (4, 1.0, 100.0, 0.1, 5000.0), strict=True):
        before = shown.line.value
        slider.value = value
        bundle = shown._repr_mimebundle_()
        assert "application/vnd.jupyter.widget-view+json" in bundle
        picture = b64decode(bundle["image/png"])
        assert picture == bytes(shown.picture.value) and picture.startswith(b"\x89PNG")
        seen.add(picture)
        assert shown.line.value != before
    assert len(seen) == 5


@widgets
def test_every_combination_is_recorded_once() -> None:
    calls: Counter[tuple[int, str]] = Counter()

    def record(buckets: int, op: str) -> Trace:
        calls[buckets, op] += 1
        return recorded(buckets, op=op)

    ops = ["all_reduce", "all_gather"]
    shown = replaying.what_if(record, POD, buckets=(1, 2, 2, 3), op=ops)
    assert calls == Counter(product((1, 2, 3), ops))
    for buckets, op in product((3, 1), ops):
        shown.choices["buckets"].value, shown.choices["op"].value = buckets, op
        (comms,) = (rank.comms for rank in shown.recorded.ranks.values())
        assert (len(comms), comms[0].op) == (buckets, op)
        assert len(shown._redrawing.view.trace.ranks[0].comms) == buckets
    assert calls.total() == 6


test_impossible_widgets_are_reported = widgets(
    refusals(
        lambda given, choices: replaying.what_if(given, POD, **choices),
        (recorded(), {"bucket_mb": (1, 5)}, "bucket_mb: a recorded trace has no choices"),
        (recorded, {"buckets": ()}, "buckets has no values to choose from"),
        (recorded, {"buckets": 5}, "buckets=5: pass values to choose from"),
        (recorded, {"op": "all_reduce"}, "op='all_reduce': pass values"),
        (3, {}, "what_if of 3: pass a trace"),
        (lambda x: x, {"x": (1,)}, "the recording with x=1 has type int, not Trace"),
        (replay(recorded(), POD), {}, "this trace has no counted operations"),
        (lambda x: Trace(), {"x": (1,)}, "the recording with x=1 has no counted operations"),
        (recorded(), {"ranks": 0}, "ranks=0"),
    )
)


def test_a_picture_says_of_which_wires_it_is() -> None:
    """Also where they make no difference: inside a node nothing holds up this ring."""
    redrawing, trace = Redrawing(), recorded(ranks=16)
    rates = (149e9, 148e9)
    clusters = [CLOUD, *(changed(CLOUD, 16, inside_bytes_per_s=rate) for rate in rates)]
    assert len({redrawing.draw(trace, at)[0] for at in clusters}) == 3
    label = redrawing.view.axes.get_xlabel()
    assert label == "ms  ·  NVLink 2 148 GB/s, 3.4 µs  ·  Ethernet 3.12 GB/s, 30 µs"
