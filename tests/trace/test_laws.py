"""Each law of a trace holds for a good one, and its violation is reported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from labkit.events import CommEvent
from labkit.trace import MemoryPoint, RankTrace, Span, Step, Trace
from laws import TOLERANCE_S, broken_laws
from traces import sample_trace

MORE_S = 3 * TOLERANCE_S


def reduces(trace: Trace, rank: int) -> list[CommEvent]:
    return [x for x in trace.ranks[rank].comms if x.op == "all_reduce"]


def span(trace: Trace, rank: int, phase: str, module: str) -> Span:
    spans = trace.ranks[rank].spans
    return next(x for x in spans if (x.phase, x.module) == (phase, module))


def moved(record: Any, name: str, to: str, by_s: float) -> None:
    """Set the time `name` of a record to that of `to`, and a little more or less."""
    setattr(record, name, getattr(record, to) + by_s)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_good_trace_breaks_none(ranks: int) -> None:
    assert broken_laws(sample_trace(ranks)) == []
    assert broken_laws(sample_trace(ranks).step(1)) == []
    assert broken_laws(Trace()) == []


def step_ends_early(trace: Trace) -> None:
    moved(trace.ranks[1].steps[0], "ended_s", "began_s", -MORE_S)
    trace.ranks[1].spans.clear()


def step_comes_twice(trace: Trace) -> None:
    trace.ranks[1].steps[1].index = 0
    trace.ranks[1].spans[:] = [x for x in trace.ranks[1].spans if x.step != 1]


def span_is_outside(trace: Trace) -> None:
    step = trace.ranks[0].steps[2]
    trace.ranks[0].spans.append(Span("forward", "late", 2, step.ended_s, step.ended_s + MORE_S))


def lane_overlaps(trace: Trace) -> None:
    before, after, *_ = reduces(trace, 2)
    after.began_s, after.issued_s = before.ended_s - MORE_S, before.issued_s


def caller_overlaps(trace: Trace) -> None:
    for event in reduces(trace, 2)[:2]:
        event.lane = "caller"
    lane_overlaps(trace)


def collective_is_missing(trace: Trace) -> None:
    trace.ranks[2].comms.remove(reduces(trace, 2)[1])


def other(name: str, value: Any) -> Callable[[Trace], None]:
    return lambda trace: setattr(reduces(trace, 2)[1], name, value)


def number_is_left_out(trace: Trace) -> None:
    for event in (*trace.ranks[0].comms, *trace.ranks[1].comms):
        if event.op in ("send", "recv") and event.step == 2 and 1 in (event.rank, event.peer):
            event.seq += 1


def number_comes_twice(trace: Trace) -> None:
    for rank in trace.ranks:
        reduces(trace, rank)[1].seq = 1


def subgroup_lacks_a_reduce(trace: Trace) -> None:
    for rank in (0, 1):
        for event in reduces(trace, rank):
            event.group, event.ranks = "pair", (0, 1)
    for rank in (2, 3):
        trace.ranks[rank].comms[:] = [x for x in trace.ranks[rank].comms if x.op != "all_reduce"]
    trace.ranks[1].comms.remove(reduces(trace, 1)[3])


def never_ends(trace: Trace) -> None:
    reduces(trace, 3)[-1].ended_s = reduces(trace, 3)[-1].wait_ended_s = 0.0


def memory_goes_back(trace: Trace) -> None:
    memory = trace.ranks[3].memory
    memory[4], memory[5] = memory[5], memory[4]


def memory_holds(*held_bytes: int) -> Callable[[Trace], None]:
    def change(trace: Trace) -> None:
        trace.ranks[3].memory[4] = trace.ranks[3].memory[4]._replace(held_bytes=held_bytes)

    return change


def event_of_3(k: int, name: str, to: str, by_s: float) -> Callable[[Trace], None]:
    return lambda trace: moved(reduces(trace, 3)[k], name, to, by_s)


def mlp_of_2(module: str, to: str, by_s: float) -> Callable[[Trace], None]:
    return lambda trace: moved(span(trace, 2, "forward", module), "ended_s", to, by_s)


UP = "blocks.1.mlp.up"
ONE, THREE = (f"rank 3: all_reduce {k} of group default has " for k in (1, 3))
SECOND = "rank 2: collective 2 of group default has "
MESSAGE = "message 1 to rank 1, tag 0, group default, is "
WHOLE = "of the whole model in step"
FAULTS: list[tuple[Callable[[Trace], None], str]] = [
    (step_ends_early, "rank 1: step 0 ends at -0.000060 s, before it begins at 0.000000 s"),
    (lambda t: moved(t.ranks[1].steps[1], "began_s", "began_s", -MORE_S), "rank 1: step 1, from"),
    (step_comes_twice, "rank 1: step 0, from"),
    (mlp_of_2(UP, "began_s", -MORE_S), f"rank 2: forward of {UP} in step 0 ends at"),
    (mlp_of_2(UP[:-3], "ended_s", MORE_S), f"rank 2: forward of {UP[:-3]} in step 0, 0.0"),
    (span_is_outside, "rank 0: forward of late in step 2, "),
    (lambda t: setattr(span(t, 0, "forward", ""), "step", 1), f"rank 0: forward {WHOLE} 1, "),
    (lambda t: t.ranks[0].steps.pop(), "is of step 2, which is not there"),
    (event_of_3(0, "issued_s", "began_s", MORE_S), ONE + "began_s = "),
    (event_of_3(0, "ended_s", "began_s", -MORE_S), ONE + "ended_s = "),
    (event_of_3(2, "wait_ended_s", "ended_s", -MORE_S), THREE + "wait_ended_s = "),
    (event_of_3(0, "wait_began_s", "issued_s", -MORE_S), ONE + "wait_began_s = "),
    (event_of_3(0, "wait_began_s", "wait_ended_s", MORE_S), ONE + "wait_ended_s = "),
    (lane_overlaps, "rank 2: the lane of group default carries all_reduce 2 of group default"),
    (caller_overlaps, "rank 2: the caller carries all_reduce 2 of group default from"),
    (collective_is_missing, "rank 2: all_reduce 2 of group default is missing, which rank 0"),
    (other("op", "broadcast"), SECOND + "op broadcast, but all_reduce on"),
    (other("dtype", "float64"), SECOND + "dtype float64, but float32 on"),
    (other("payload_bytes", 199940), SECOND + "payload_bytes 199940, but 199936"),
    (lambda t: t.ranks[0].comms.pop(0), MESSAGE + "received, but was"),
    (lambda t: t.ranks[1].comms.pop(0), MESSAGE + "sent, but was never"),
    (lambda t: setattr(t.ranks[1].comms[0], "payload_bytes", 1032),
     "is sent with 1024 bytes and received with 1032"),
    (number_is_left_out, "rank 0: the messages to rank 1, tag 0, group default go from number"),
    (number_comes_twice, "rank 0: the collectives of group default go from number 1 to 1"),
    (subgroup_lacks_a_reduce, "rank 1: all_reduce 4 of group pair is missing, which rank 0"),
    (never_ends, "rank 3: all_reduce 9 of group default never ended"),
    (lambda t: setattr(t.ranks[3].steps[-1], "ended_s", 0.0), "rank 3: step 2 never ended"),
    (lambda t: setattr(t.ranks[3].spans[-1], "ended_s", 0.0),
     f"rank 3: optimizer {WHOLE} 2 never ended"),
    (memory_goes_back, "rank 3: memory at"),
    (memory_holds(1, -2, 3, 4, 5, 6), "rank 3: gradients hold -2 bytes at"),
    (memory_holds(1, 2, 3, 4, 5), "has 5 categories, not 6"),
]  # fmt: skip
ONCE = (
    "rank 0: forward of late in step 2, ", ONE + "ended_s = ", "rank 3: gradients hold -2 bytes at",
    "rank 3: all_reduce 9 of group default never ended", SECOND + "dtype float64, but float32 on",
)  # fmt: skip
assert {*ONCE} <= {words for _, words in FAULTS}


@pytest.mark.parametrize(("break_it", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_broken_law_is_reported(break_it: Callable[[Trace], None], words: str) -> None:
    trace = sample_trace(4)
    break_it(trace)
    reported = broken_laws(trace)
    assert any(words in sentence for sentence in reported), reported
    assert all(sentence.startswith("rank ") for sentence in reported)
    assert len(reported) == 1 or words not in ONCE


def test_clocks_have_a_tolerance() -> None:
    trace = sample_trace(2)
    moved(reduces(trace, 1)[2], "wait_ended_s", "ended_s", -TOLERANCE_S / 2)
    assert broken_laws(trace) == []


def test_losses_of_a_damaged_trace_are_not_reported() -> None:
    trace = sample_trace(4)
    trace.ranks[2].complete = False
    collective_is_missing(trace)
    trace.ranks[2].spans[-1].ended_s = trace.ranks[2].steps.pop().ended_s = 0.0
    received = [x for x in trace.ranks[2].comms if x.op == "recv"]
    trace.ranks[2].comms.remove(received[1])
    assert broken_laws(trace) == []
    del trace.ranks[0]
    assert broken_laws(trace) == []


def test_what_may_differ_between_ranks_may() -> None:
    """Uneven all-to-all; numbers that making a subgroup takes; a user's span over two steps."""
    begins, ends = ("issued_s", "began_s", "wait_began_s"), ("ended_s", "wait_ended_s")
    ranks = {}
    for rank in range(2):
        first = CommEvent(
            "all_to_all", "default", (0, 1), rank, 1, "float32", (2,), 16 + 8 * rank, 8, True,
            **dict.fromkeys(begins, 1.0), **dict.fromkeys(ends, 1.5),
        )  # fmt: skip
        later = dict.fromkeys(begins, 2.0) | dict.fromkeys(ends, 2.5)
        second = replace(first, op="barrier", payload_bytes=0, seq=4, **later)
        ranks[rank] = RankTrace(
            rank, 2, steps=[Step(0, 0.5, 1.75), Step(1, 1.75, 3.0)],
            spans=[Span("user", "an epoch", 0, 0.75, 2.75)], comms=[first, second],
            memory=[MemoryPoint(1.0, 0, (0,) * 6)],
        )  # fmt: skip
    assert broken_laws(Trace(ranks)) == []
