"""Steps of large models on large clusters: each shortcut beside the full computation."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from labkit import Layout, Sizes, cluster, plot, step_report, step_trace
from labkit.predict import bytes_by_axis
from labkit.replaying.costs import Costs
from labkit.replaying.pipeline import pipeline_trace, timed_actions
from labkit.replaying.planning.clock import pipeline_timing, schedule_of
from labkit.replaying.planning.layers import Layer, record_layers, recorded, shape_of
from labkit.replaying.planning.published import GPT3, MEGATRON
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.stages import rank_groups, virtual_stages
from labkit.replaying.planning.step_model import StepModel
from labkit.schedules import Message
from labkit.trace import Operation
from tables import refusals

SELENE = cluster("selene")
SMALL = Sizes(width=48, depth=4, heads=4, context=32, vocab=100)
PARTS = ("compute_s", "tensor_s", "optimizer_s", "data_s", "pipeline_s", "bubble_s")


def engine_times(microbatches: int, forward: Any, backward: Any, messages: Any) -> list[Any]:
    """Of each stage when it ended, how long it was idle, and when the last backward of each chunk
    began: by the engine that runs everything."""
    stages, chunks = forward.shape

    def seconds(stage: int, action: Any) -> float:
        return float((forward if action.phase == "forward" else backward)[stage, action.chunk])

    def message_s(message: Message) -> float:
        return float(messages[min(message.source, message.target) % stages])

    trace = pipeline_trace(schedule_of(stages, microbatches, chunks), seconds, message_s)
    times = []
    for done in timed_actions(trace):
        idle_s = done[-1].ended_s - sum(x.ended_s - x.began_s for x in done)
        began = {x.action.chunk: x.began_s for x in done if x.action.phase == "backward"}
        times.append((done[-1].ended_s, idle_s, [began[chunk] for chunk in range(chunks)]))
    return [np.array(each) for each in zip(*times, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_the_short_clock_agrees_with_the_engine(seed: int) -> None:
    """Alike stages, unlike ones, whole numbers (which tie), and messages that hold up everything;
    few micro-batches, and so many that periods are put in."""
    draw = np.random.default_rng(seed)
    stages = int(draw.integers(1, 6))
    chunks = int(draw.choice([1, 2, 3])) if stages > 1 else 1
    microbatches = int(draw.integers(1, 12)) * (stages if chunks > 1 else 3)
    shape = (stages, chunks)
    forward, messages = draw.uniform(0.5, 1.5, shape), draw.uniform(0, 0.3, stages)
    backward = 2 * forward
    if seed % 4 == 1:
        forward, backward, messages = np.ones(shape), 2 * np.ones(shape), np.full(stages, 0.1)
    if seed % 4 == 2:
        messages *= 20
    if seed % 4 == 3:
        forward, backward = (draw.integers(1, 4, shape).astype(float) for _ in "fb")
        messages = draw.integers(0, 3, stages).astype(float)
    timing = pipeline_timing(microbatches, forward, backward, messages)
    ended, idle, lasts = engine_times(microbatches, forward, backward, messages)
    assert timing.ended_s == pytest.approx(ended, rel=1e-9)
    assert timing.last_s == pytest.approx(lasts, rel=1e-9)
    assert timing.bubble_s + timing.pipeline_s == pytest.approx(idle, rel=1e-9, abs=1e-9)


def test_a_thousand_micro_batches_are_the_bubble_of_the_formula() -> None:
    """(p - 1)(F + B), or 1/v of it; nothing is on its way."""
    for chunks in (1, 2):
        ones = np.ones((4, chunks)) / chunks
        timing = pipeline_timing(1000, ones, 2 * ones, np.zeros(4))
        assert max(timing.ended_s) == pytest.approx(3000 + 9 / chunks, rel=1e-12)
        assert not timing.pipeline_s.any()


def operations(layer: Layer) -> Counter[Any]:
    both = [*layer.forward.all_of("compute"), *layer.backward.all_of("compute")]
    return Counter(one._replace(when_s=0.0) for one in both)


def sent(layer: Layer) -> Counter[Any]:
    both = [*layer.forward.all_of("issue"), *layer.backward.all_of("issue")]
    return Counter((one.op, one.payload_bytes, one.bus_bytes, one.blocking) for one in both)


@pytest.mark.parametrize(
    "layout",
    [Layout(microbatch=3), Layout(tp=2, microbatch=3, recompute="full"), Layout(4, sequence=True)],
    ids=lambda layout: f"tp {layout.tp} {layout.recompute}",
)
def test_a_whole_stage_is_the_sum_of_its_layers(layout: Layout) -> None:
    """Operations, collectives and what is kept for backward, exactly. At its peak the whole holds
    its loss and the gradient of that as well: 8 bytes, once."""
    (stage,) = virtual_stages(replace(SMALL, tied=False), layout)
    whole, parts = record_layers(list(stage)), [recorded(shape) for shape in stage]
    assert operations(whole) == sum(map(operations, parts), Counter())
    assert sent(whole) == sum(map(sent, parts), Counter())
    assert whole.kept == tuple(map(sum, zip(*(one.kept for one in parts), strict=True)))
    assert sorted(whole.gradients) == sorted(n for one in parts for n in one.gradients)
    most = max(sum(whole.forward.peak), sum(whole.backward.peak))
    report = step_report(replace(SMALL, tied=False), layout, layout.microbatch, SELENE)
    states = 16 * stage.parameters + 4 * len(whole.gradients)
    assert 0 <= most - (report.peak_bytes - states) <= 8


def test_groups_stand_where_the_mesh_has_them() -> None:
    """pp, dp and tp on nodes of 8: tensor parallelism inside, over two, or both; a replica of 2 x 2
    ranks has one neighbour on its node, and one on the next. Counted from their first node."""
    assert rank_groups(2, 2, 8, "tp", (1,), 8) == (tuple(range(8)),)
    assert rank_groups(2, 1, 16, "tp", (1,), 8) == (tuple(range(16)),)
    assert rank_groups(2, 1, 6, "tp", (1,), 8) == (tuple(range(6, 12)),)
    assert rank_groups(1, 4, 6, "tp", (0,), 8) == (tuple(range(6)), tuple(range(6, 12)))
    assert rank_groups(2, 2, 2, "dp", (1,), 8) == ((4, 6),)
    assert rank_groups(4, 1, 2, "pp", (0, 1), 8) == ((0, 2),)
    assert rank_groups(8, 1, 2, "pp", (3, 4), 8) == ((6, 8),)


def check_sums(report: StepReport) -> None:
    assert sum(getattr(report, name) for name in PARTS) == report.step_s
    assert min(getattr(report, name) for name in PARTS) >= 0
    assert 0 < report.mfu < 1


def test_gpt_3_on_1024_ranks() -> None:
    report, zero = (
        step_report(GPT3, Layout(8, 8, 16, zero=zero, recompute="full"), 1536, SELENE)
        for zero in (0, 1)
    )
    check_sums(report)
    check_sums(zero)
    bubble = 7 / (96 + 7)  # (p - 1) / (m + p - 1), of what the stages do
    assert report.bubble_s / report.step_s == pytest.approx(bubble, rel=0.5)
    elements = GPT3.parameters / 64
    assert report.memory_bytes["parameters"] == pytest.approx(2 * elements, rel=0.1)
    assert report.sent_bytes["data"] == 2 * 15 / 16 * report.memory_bytes["parameters"]
    boundary_bytes = 96 * 2048 * 12288 * 2 / 8
    assert report.sent_bytes["pipeline"] == 2 * boundary_bytes  # of a stage that has two
    ratio = report.memory_bytes["optimizer state"] / zero.memory_bytes["optimizer state"]
    assert ratio == pytest.approx(16, rel=0.001)
    assert zero.sent_bytes == report.sent_bytes


@pytest.mark.slow
def test_published_models_fit_and_take_about_what_they_took() -> None:
    """No row is fitted here: 80 GB hold each of them, and FLOP/s as that paper counts them, with
    what is computed again, are within a half of what it reached."""
    for row in MEGATRON:
        report = step_report(row.sizes, row.layout, row.batch, SELENE)
        check_sums(report)
        assert report.peak_bytes < 80e9
        tflops = 4 / 3 * report.model_flops / report.step_s / row.ranks / 1e12
        assert 0.5 < tflops / row.tflops < 1.5, row


ODD = Sizes(width=12, depth=5, heads=4, context=8, vocab=21)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, dp=5),
        Layout(tp=2, pp=2, dp=5, zero=1),
        Layout(tp=4, pp=2, dp=7, zero=1, chunks=2, sequence=True),
        Layout(pp=1, dp=7, zero=1),
        Layout(tp=2, pp=3, dp=2, zero=1, scatter_gather=False),
    ],
    ids=lambda one: f"{one.in_words} zero {one.zero}",
)
@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_and_data_bytes_are_those_of_the_formula(layout: Layout, tied: bool) -> None:
    """What does not divide into shares is padded; ends of a tied model sum a share each."""
    sizes = replace(ODD, tied=tied)
    sent = step_report(sizes, layout, 12 * layout.dp, SELENE).sent_bytes
    formula = bytes_by_axis(
        vocab=21, width=12, depth=5, context=8, rows=12, sequence=8, microbatches=12,
        pp=layout.pp, dp=layout.dp, tp=layout.tp, chunks=layout.chunks, zero=layout.zero,
        sequence_parallel=layout.sequence, scatter_gather=layout.scatter_gather, tied=tied,
    )  # fmt: skip
    assert sent["data"] == pytest.approx(max(one["data"] for one in formula), rel=1e-12)
    assert sent["pipeline"] == max(one["pipeline"] + one["embedding"] for one in formula)


def test_custom_costs_are_used() -> None:
    class TwiceAsSlow(Costs):
        def compute_s(self, operation: Operation) -> float:
            return 2 * super().compute_s(operation)

    args = SMALL, Layout(tp=2, pp=2), 8, SELENE
    plain, slow = (step_report(*args, costs=costs(SELENE)) for costs in (Costs, TwiceAsSlow))
    assert slow.compute_s == pytest.approx(2 * plain.compute_s)
    assert slow.optimizer_s == pytest.approx(2 * plain.optimizer_s)
    assert slow.sent_bytes == plain.sent_bytes and slow.memory_bytes == plain.memory_bytes


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2, dp=2), Layout(tp=2, pp=2, dp=4, chunks=2, zero=1)],
    ids=lambda one: one.in_words,
)
def test_the_trace_is_the_report(layout: Layout) -> None:
    report = step_report(SMALL, layout, 16, SELENE)
    trace = step_trace(SMALL, layout, 16, SELENE)
    ranks = trace.ranks.values()
    for rank in ranks:
        assert rank.steps[0].ended_s == pytest.approx(report.step_s, rel=1e-9)
    assert sorted(trace.record_of) == list(range(layout.ranks))
    updates = [x for rank in ranks for x in rank.spans if x.phase == "optimizer"]
    assert np.mean([x.ended_s - x.began_s for x in updates]) == pytest.approx(report.optimizer_s)
    for axis, groups in (("data", ["data"]), ("pipeline", ["pipeline", "tied"])):
        sent_bytes = [
            sum(x.bus_bytes for x in rank.comms if x.group.split()[0] in groups) for rank in ranks
        ]
        assert max(sent_bytes) == pytest.approx(report.sent_bytes[axis], rel=1e-3)
    ended_s = [done[-1].ended_s for done in timed_actions(trace)]
    timing = StepModel(SMALL, layout, 16, SELENE).timing()
    assert ended_s == pytest.approx(timing.ended_s, rel=1e-9) and len(ended_s) == layout.pp
    assert plot.timeline(trace) is not None


ODD_CONTEXT = replace(SMALL, context=SMALL.context + 1)

test_an_impossible_layout_is_reported = refusals(
    lambda layout, batch, sizes=SMALL, core="fused": step_report(
        sizes, layout, batch, SELENE, core=core
    ),
    (Layout(dp=3), 16, "choose a multiple of 3"),
    (Layout(pp=8), 16, "choose at most 4"),
    (Layout(dp=4096), 4096, "nodes="),
    (Layout(tp=3), 16, "not divisible by tp=3; choose a divisor"),
    (Layout(pp=2, chunks=2), 5, "divisible by pp"),
    (Layout(chunks=2), 4, "several stages"),
    (Layout(zero=2, dp=2), 4, "zero=2: choose 0 .DDP. or 1"),
    (Layout(zero=3), 4, "zero=3"),
    (Layout(tp=8), 16, "4 heads are not divisible by tp=8"),
    (Layout(tp=0), 16, "tp=0: choose a whole number"),
    (Layout(chunks=-1), 16, "chunks=-1: choose a whole number"),
    (Layout(), 0, "global_batch=0: choose a whole number"),
    (Layout(recompute="some"), 4, 'choose "none" or "full"'),
    (Layout(tp=2, sequence=True), 4, ODD_CONTEXT, "positions are not divisible by tp=2"),
    (Layout(), 4, SMALL, "flash", 'choose "fused" or "plain"'),
)


def test_a_recording_is_made_once_for_shapes_that_differ_in_what_does_not_matter() -> None:
    shape = shape_of("embedding", SMALL, Layout(tp=2, pp=2, dp=4, recompute="full"))
    assert shape == shape_of("embedding", SMALL, Layout(tp=2))
    recorded.cache_clear()
    pod = replace(cluster("dgx-h100"), nodes=128)
    for layout in (Layout(8, 8, 16), Layout(8, 8, 16, chunks=2), Layout(8, 12, 4, zero=1)):
        assert step_report(GPT3, layout, 1536, SELENE) != step_report(GPT3, layout, 1536, pod)
    assert recorded.cache_info().misses == 3
