"""Replayed schedules cost what closed forms and papers say; and the layers that stages get."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.parallel.splitting import balance
from labkit.replaying import bubble, pipeline_programs, pipeline_step_s, pipeline_trace
from labkit.schedules import (
    SCHEDULES,
    one_f_one_b,
    parse_schedule,
    peak_in_flight,
    schedule,
    zero_bubble_h1,
    zero_bubble_h2,
)
from labkit.trace import Trace
from laws import broken_laws
from schedule_cases import PROMISES, Case, cases, made
from tables import raises, refusals

UNIT = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0, "update": 0.0}
times = st.integers(1, 40).map(lambda k: k / 8)  # exact in binary


def holds(case: Case, seconds: dict[str, float]) -> None:
    stages, form = made(case), PROMISES[case[0]].step(*case[1:], seconds)
    each = {phase: phase_s / case[3] for phase, phase_s in seconds.items()}  # of a chunk
    step_s = pipeline_step_s(pipeline_trace(stages, each))
    assert step_s == pytest.approx(form.step_s)
    assert bubble(stages, step_s, each) == pytest.approx(form.of_total, abs=1e-12)
    assert max(peak_in_flight(stages)) / case[3] == pytest.approx(form.peak_microbatches)


SIZES = [(1, 1), (1, 3), (2, 4), (3, 6), (4, 8), (8, 16)]
ANY_SIZES = [(1, 1), (2, 3), (4, 4), (4, 9), (8, 2)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_at_these_sizes_the_bubble_is_the_closed_form(name: str) -> None:
    for p, m in SIZES:
        holds((name, p, m, 3 if name == "interleaved" else 1), UNIT)
    for p, m in ANY_SIZES if name in ("1f1b", "gpipe") else ():
        holds((name, p, m, 1), {"forward": 1.0, "backward": 2.5})


@given(cases(), times, times, times)
@settings(max_examples=80, deadline=None)
def test_with_any_costs_the_bubble_is_the_closed_form(
    case: Case, forward: float, inputs: float, weight: float
) -> None:
    seconds = {"forward": forward, "backward": inputs + weight, "input": inputs, "weight": weight}
    holds(case, {**seconds, "update": weight / 2})


@given(st.integers(1, 8), st.integers(0, 17), times, times, times)
@settings(max_examples=60, deadline=None)
def test_the_bubble_of_zero_bubble_is_the_published_one_where_the_file_says(
    p: int, more: int, forward: float, inputs: float, weight: float
) -> None:
    """(p-1)(F+B-W) and (p-1)(F+B-2W), with B our I (pipeline_bubbles.csv); and elsewhere larger."""
    seconds = {"forward": forward, "input": inputs, "weight": weight}
    m = 2 * p - 1 + more
    h1, h2 = (max(0, forward + inputs - k * weight) for k in (1, 2))
    for make, published, exact in (
        (zero_bubble_h1, (p - 1) * h1, weight <= forward),
        (zero_bubble_h2, (p - 1) * h2, weight <= forward or inputs <= forward),
    ):
        step_s = pipeline_step_s(pipeline_trace(make(p, m), seconds))
        idle_s = step_s - m * (forward + inputs + weight)
        if exact or p == 1:
            assert idle_s == pytest.approx(published, abs=1e-9)
        else:
            assert idle_s > published


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_h2_has_no_hole(p: int) -> None:
    """With F = I = W each stage goes on from its first action to its last, and a step that follows
    at once begins as this one ends."""
    trace = pipeline_trace(zero_bubble_h2(p, 2 * p + 3), dict.fromkeys(UNIT, 1.0))
    for stage, rank in trace.ranks.items():
        assert rank.spans[0].began_s == stage
        assert all(one.ended_s == next_.began_s for one, next_ in pairwise(rank.spans))
        assert rank.spans[-1].ended_s == stage + 3 * (2 * p + 3)


@pytest.mark.parametrize(
    ("name", "step_s", "peak"),
    [("naive", 96, 1), ("gpipe", 33, 8), ("1f1b", 33, 4), ("interleaved", 28.5, 5.5),
     ("zb-h1", 27, 4), ("zb-h2", 24, 7), ("pipedream", 33, 4)],
)  # fmt: skip
def test_each_improves_on_the_one_before(name: str, step_s: float, peak: float) -> None:
    """At 4 stages and 8 micro-batches, F = I = W: what a step takes, and what it holds."""
    v = 2 if name == "interleaved" else 1
    stages = schedule(name, 4, 8, v)
    each = {phase: phase_s / v for phase, phase_s in UNIT.items()}
    assert pipeline_step_s(pipeline_trace(stages, each)) == step_s
    assert max(peak_in_flight(stages)) / v == peak


@given(cases(largest=9))
@settings(max_examples=40, deadline=None)
def test_a_replayed_pipeline_is_a_trace(case: Case) -> None:
    """Messages take their time, those of a way are numbered as they are sent, and the laws hold."""
    _, p, m, v = case
    trace = pipeline_trace(made(case), UNIT, message_s=0.25, message_bytes=100)
    assert broken_laws(trace) == []
    events = [(r, one) for r, rank in trace.ranks.items() for one in rank.comms]
    sends = {(r, one.peer, one.seq): one for r, one in events if one.op == "send"}
    recvs = {(one.peer, r, one.seq): one for r, one in events if one.op == "recv"}
    assert sends.keys() == recvs.keys()
    assert len(sends) == (2 * m * (p * v - 1) if p > 1 else 0), "within one stage nothing travels"
    for way in {key[:2] for key in sends}:
        issued = [one.issued_s for key, one in sorted(sends.items()) if key[:2] == way]
        assert issued == sorted(issued)
        numbers = sorted(key[2] for key in sends if key[:2] == way)
        assert numbers == list(range(1, len(numbers) + 1))


def test_messages_go_round_between_chunks() -> None:
    trace = pipeline_trace(schedule("interleaved", 3, 3, 2), UNIT, message_s=0.5)
    to_first = [x for x in trace.ranks[2].comms if x.op == "send" and x.peer == 0]
    assert len(to_first) == 3, "the activations of 3 micro-batches, for chunk 1 of stage 0"
    assert [x.module for x in trace.ranks[0].spans[:4]] == ["0.0", "1.0", "2.0", "0.1"]
    arrives_s = 3 * 1 + 3 * 0.5  # three forwards and three messages
    assert trace.ranks[0].spans[3].began_s == arrives_s
    spans = pipeline_trace(one_f_one_b(1, 2), UNIT).ranks[0].spans
    assert [x.module for x in spans[:2]] == ["0", "0"]


def test_a_schedule_is_checked_before_it_is_costed() -> None:
    stuck = parse_schedule("F0 B0 F1 B1\nF0 F1 B0 B1")
    raises("deadlock: stage 0, position 1: B0 waits", pipeline_programs, stuck, UNIT)
    words = "stage 0 runs I0, but `seconds` has no 'input', only forward"
    raises(words, pipeline_trace, zero_bubble_h1(1, 1), {"forward": 1.0})
    raises("no micro-batches in this trace", pipeline_step_s, Trace({}))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
@settings(max_examples=120, deadline=None)
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def worth(counts: list[int]) -> tuple[int, int]:
        ends = [0, *accumulate(counts)]
        each = [sum(costs[i:j]) for i, j in pairwise(ends)]
        return max(each), sum(one * one for one in each)

    counts = balance(costs, stages)
    assert len(counts) == stages and sum(counts) == len(costs) and min(counts) >= 1
    cuts = combinations(range(1, len(costs)), stages - 1)
    all_ways = [[j - i for i, j in pairwise([0, *cut, len(costs)])] for cut in cuts]
    assert worth(counts) == min(map(worth, all_ways))


def test_equal_layers_are_cut_evenly_and_dear_ones_stand_alone() -> None:
    assert balance([1.0] * 12, 4) == [3, 3, 3, 3]
    assert sorted(balance([1.0] * 7, 3)) == [2, 2, 3]
    assert balance([0.1] * 6, 3) == [2, 2, 2], "though sums of 0.1 are not exact"
    assert balance([9, 1, 1, 1, 1, 9], 3) == [1, 4, 1]
    assert balance([2.5], 1) == [1]


test_layers_that_cannot_be_cut_are_reported = refusals(
    balance,
    ([1, 1], 3, "stages=3: each stage needs.* 2 layers; choose 1 to 2"),
    ([1, 1], 0, "stages=0"),
    ([1, -1], 2, r"costs\[1\]=-1"),
    ([float("nan"), 1], 2, r"costs\[0\]=nan"),
    ([1, float("inf")], 2, r"costs\[1\]=inf"),
)
