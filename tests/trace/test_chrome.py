"""A trace as the viewers get it: held to the rules of the Trace Event Format."""

import copy
import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from labkit.trace import Span, Trace
from labkit.trace.chrome import to_chrome, write_chrome
from traces import sample_trace

# "Trace Event Format", Google, 2016: what each phase must have, and of which type.
NUMBER = (int, float)
COMMON = {"name": str, "ph": str, "pid": int}
FIELDS: dict[str, dict[str, Any]] = {
    "M": {"args": dict},
    "X": {"tid": int, "ts": NUMBER, "dur": NUMBER, "cat": str, "args": dict},
    "C": {"ts": NUMBER, "args": dict},
    "s": {"tid": int, "ts": NUMBER, "id": int, "cat": str},
    "f": {"tid": int, "ts": NUMBER, "id": int, "cat": str, "bp": str},
}
METADATA = {
    "process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int
}  # fmt: skip


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def faults(page: dict[str, Any]) -> list[str]:
    """A word for each broken rule."""
    found: list[str] = []
    events = page["traceEvents"]
    json.dumps(page, allow_nan=False)
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in events:
        phase, args = event["ph"], event.get("args", {}).values()
        for name, kind in (COMMON | FIELDS[phase]).items():
            if not isinstance(event.get(name), kind) or isinstance(event[name], bool):
                found.append(f"field {name} of {event}")
        for name in ("ts", "dur"):
            if not (math.isfinite(event.get(name, 0)) and event.get(name, 0) >= 0):
                found.append(f"number {name} of {event}")
        if phase == "M" and [type(x) for x in args] != [METADATA[event["name"]]]:
            found.append(f"metadata {event}")
        if phase == "C" and not all(type(x) is int for x in args):
            found.append(f"counter {event}")
        nameless = phase == "X" and (event["pid"], event["tid"]) not in threads
        if nameless or event["pid"] not in processes:
            found.append(f"nameless {event}")
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if times != sorted(times):
        found.append("order of times")
    return found + _crossings(events) + _arrows(events)


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    return threads


def _crossings(events: list[dict[str, Any]]) -> list[str]:
    """As Perfetto reads it: in the file's order, with a stack for each thread."""
    found = []
    for thread, slices in _slices(events).items():
        stack: list[int] = []
        for begin, end in slices:
            while stack and stack[-1] <= begin:
                stack.pop()
            if stack and end > stack[-1]:
                found.append(f"crossing on {thread} at {begin}")
            stack.append(end)
    return found


def _arrows(events: list[dict[str, Any]]) -> list[str]:
    found, threads = [], _slices(events)
    ends = defaultdict(list)
    for place, e in enumerate(events):
        if e["ph"] in "sf":
            ends[e["id"]].append((e["ph"], e["name"], e["cat"], e["ts"], place))
            at = ns(e["ts"])
            if not any(begin <= at < end for begin, end in threads[e["pid"], e["tid"]]):
                found.append(f"unbound {e}")
            if e["ph"] == "f" and e["bp"] != "e":
                found.append(f"bp {e}")
    for number, both in ends.items():
        if [x[0] for x in both] != ["s", "f"] or both[0][1:3] != both[1][1:3]:
            found.append(f"arrow {number}: {both}")
        elif both[0][3] > both[1][3]:
            found.append(f"backward arrow {number}")
    return found


MISSING_RANK = sample_trace(3)
del MISSING_RANK.ranks[0]


@pytest.mark.parametrize("trace", [*map(sample_trace, (1, 2, 4)), Trace(), MISSING_RANK])
def test_it_keeps_the_rules(trace: Trace) -> None:
    assert faults(to_chrome(trace)) == []


def test_every_span_step_event_and_wait_is_a_slice() -> None:
    trace = sample_trace(3)
    events = to_chrome(trace)["traceEvents"]
    for rank, one in trace.ranks.items():
        of_rank = [e for e in events if e["ph"] == "X" and e["pid"] == rank + 1]
        drawn = Counter(e["cat"] for e in of_rank)
        assert drawn["step"] == 3
        assert drawn["communication"] == drawn["wait"] == len(one.comms)
        assert sum(drawn[p] for p in ("forward", "backward", "optimizer", "user")) == len(one.spans)
        head = next(x for x in one.spans if x.module == "head" and x.step == 1)
        first, shown, *_ = (e for e in of_rank if e["name"] == "forward head")  # of steps 0, 1
        assert shown["ts"] == pytest.approx(head.began_s * 1e6, abs=1e-3)
        assert shown["ts"] + shown["dur"] == pytest.approx(head.ended_s * 1e6, abs=2e-3)
        assert shown["args"]["flops"] == head.flops and "flops" not in first["args"]
        # Memory is a counter by category.
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == rank + 1]
        assert [tuple(x.values()) for x in counters] == [p.held_bytes for p in one.memory]
        assert list(counters[0])[:2] == ["parameters", "gradients"]


def test_arrows_join_what_belongs_together() -> None:
    trace = sample_trace(4, steps=1, detail_step=None)
    events = to_chrome(trace)["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    arrows = Counter(e["name"] for e in events if e["ph"] == "f")
    # 3 messages; 3 all-reduces to 3 other ranks; 3 isends and 4 x 3 all-reduces are waited for
    assert arrows == {"message": 3, "collective": 9, "issued": 15}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    for end in (e for e in events if e["ph"] == "f"):
        begin = begins[end["id"]]
        here, there = (slices.get((x["pid"], x["tid"], x["ts"]), "") for x in (begin, end))
        if end["name"] == "collective":
            assert here == there and here.startswith("all_reduce")
            assert begin["pid"] != end["pid"]
        elif end["name"] == "message":
            assert here == "send 1"
            assert (begin["pid"], end["pid"]) in {(1, 2), (1, 3), (1, 4)}
        else:
            assert there.startswith("wait for ")
            assert begin["pid"] == end["pid"]
            op, seq = there.split()[-2:]
            comms = trace.ranks[end["pid"] - 1].comms
            waited = [x for x in comms if (x.op, x.seq) == (op, int(seq))]
            assert ns(begin["ts"]) in {round(x.issued_s * 1e9) for x in waited}


def test_what_never_ended_is_drawn_to_the_end() -> None:
    trace = sample_trace(2, steps=2)
    rank = trace.ranks[1]
    event = rank.comms[-1]
    event.began_s = event.ended_s = event.wait_ended_s = 0.0
    rank.steps[-1].ended_s = rank.spans[-1].ended_s = 0.0
    before = copy.deepcopy(trace)
    page = to_chrome(trace)
    assert faults(page) == []
    assert trace.ranks == before.ranks
    never = [e for e in page["traceEvents"] if "never ended" in e["name"]]
    assert {e["cat"] for e in never} == {"step", "optimizer", "communication"}
    last_s = max(rank.memory[-1].when_s, *(x.ended_s for x in trace.ranks[0].steps))
    assert {ns(e["ts"] + e["dur"]) for e in never} == {round(last_s * 1e9)}


def test_overlapping_spans_have_separate_threads() -> None:
    trace = sample_trace(1, steps=1)
    (step,) = trace.ranks[0].steps
    middle_s = (step.began_s + step.ended_s) / 2
    trace.ranks[0].spans.append(Span("user", "longer than the step", 0, middle_s, step.ended_s + 1))
    page = to_chrome(trace)
    assert faults(page) == []
    threads = [e["args"]["name"] for e in page["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["computing", "computing", "waiting", "group default"]


def test_spans_may_come_as_they_ended_and_not_as_they_began() -> None:
    trace = sample_trace(2)
    expected = to_chrome(trace)
    trace.ranks[1].spans.sort(key=lambda x: x.ended_s)
    page = to_chrome(trace)
    assert faults(page) == []
    assert len(page["traceEvents"]) == len(expected["traceEvents"])


def test_the_run_is_described_in_words() -> None:
    page = to_chrome(Trace(about={"a": Path("b"), "seeds": [1]}))
    assert page["otherData"] == {"a": "b", "seeds": "[1]"}


def test_clocks_that_disagree_make_no_arrow_back_in_time() -> None:
    trace = sample_trace(2, steps=1)
    for event in trace.ranks[1].comms:  # received long before it was sent
        for name in ("issued_s", "began_s", "ended_s", "wait_began_s", "wait_ended_s"):
            setattr(event, name, getattr(event, name) / 1e3)
    assert faults(to_chrome(trace)) == []


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_holds_the_page(name: str, tmp_path: Path) -> None:
    trace = sample_trace(2)
    data = write_chrome(trace, tmp_path / name).read_bytes()
    assert json.loads(gzip.decompress(data) if name.endswith("gz") else data) == to_chrome(trace)


def test_the_checker_sees_what_is_wrong() -> None:
    page = to_chrome(sample_trace(2, steps=1))

    def spoilt(phase: str, **changes: Any) -> list[str]:
        worse = copy.deepcopy(page)
        event = next(e for e in worse["traceEvents"] if e["ph"] == phase and e["pid"] == 2)
        event.update(changes)
        return faults(worse)

    for word, phase, changes in (
        ("crossing", "X", {"dur": 2000.0}), ("number", "X", {"dur": -1.0}),
        ("order", "X", {"ts": 1e9}), ("nameless", "X", {"tid": 99}),
        ("unbound", "f", {"tid": 99}), ("arrow", "f", {"id": 10**6}),
    ):  # fmt: skip
        assert any(word in x for x in spoilt(phase, **changes)), word
    with pytest.raises(ValueError):
        spoilt("X", ts=math.nan)
