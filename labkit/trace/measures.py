"""What the times of a trace add up to: computing, communicating, waiting, and how much
communication was hidden behind computing. All over sets of intervals: lists of (begin, end) in
seconds, sorted, that do not touch.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul

from labkit.events import CommEvent
from labkit.trace.graph import CATEGORIES, RankTrace, Trace

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time, each moment once."""
    joined: Intervals = []
    for begin, end in sorted(x for x in intervals if x[1] > x[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def without(intervals: Intervals, taken: Intervals) -> Intervals:
    """What of `intervals` is not in `taken`."""
    left: Intervals = []
    for begin, end in intervals:
        for out_begin, out_end in taken:
            if out_begin >= end:
                break
            if out_end > begin:
                if out_begin > begin:
                    left.append((begin, out_begin))
                begin = max(begin, out_end)
        if end > begin:
            left.append((begin, end))
    return left


def common(first: Intervals, second: Intervals) -> Intervals:
    """What is in both."""
    return without(first, without(first, second))


def length_s(intervals: Intervals) -> float:
    """Seconds in all of them together."""
    return sum(end - begin for begin, end in intervals)


def waiting(rank: RankTrace) -> Intervals:
    """When the program waited for communication."""
    return union((x.wait_began_s, x.wait_ended_s) for x in rank.comms if x.wait_ended_s)


def computing(rank: RankTrace) -> Intervals:
    """When it computed: its outermost spans, less the waits inside them. A user's span counts only
    where it holds no other: one around the whole loop is no computing."""
    spans = [x for x in rank.spans if x.depth == 0 and x.ended_s]
    known = union((x.began_s, x.ended_s) for x in spans if x.phase != "user")
    own = [(x.began_s, x.ended_s) for x in spans if x.phase == "user"]
    return without(union([*known, *(x for x in own if not common([x], known))]), waiting(rank))


def communicating(rank: RankTrace) -> Intervals:
    """When something was under way."""
    return union((x.began_s, x.ended_s) for x in rank.comms if x.ended_s)


def overlap(trace: Trace) -> float:
    """The part of the communication during which the same rank computed, 0 to 1, over all ranks;
    0 where nothing travelled."""
    pairs = [(communicating(rank), computing(rank)) for rank in trace.ranks.values()]
    total_s = sum(length_s(comm) for comm, _ in pairs)
    hidden_s = sum(length_s(common(comm, compute)) for comm, compute in pairs)
    return hidden_s / total_s if total_s else 0.0


def end_of(trace: Trace) -> float:
    """The last moment of a trace, in seconds; 0.0 of an empty one."""
    times = [0.0]
    for rank in trace.ranks.values():
        for record in rank.timed_records():
            times += [record.began_s, record.ended_s]
            if isinstance(record, CommEvent):
                times += [record.issued_s, record.wait_began_s, record.wait_ended_s]
        times += [point.when_s for point in rank.memory]
    return max(times)


def lanes(events: Iterable[CommEvent]) -> list[tuple[str, list[CommEvent]]]:
    """The events of one rank by group, and where some of one group were under way at the same
    time, in as many lanes as that takes: in a lane, one ends before the next begins."""
    lanes_of: dict[str, list[list[CommEvent]]] = {}
    for event in sorted((e for e in events if e.ended_s), key=lambda e: (e.began_s, e.ended_s)):
        group_lanes = lanes_of.setdefault(event.group, [])
        free = (lane for lane in group_lanes if lane[-1].ended_s <= event.began_s)
        if (lane := next(free, None)) is None:
            group_lanes.append(lane := [])
        lane.append(event)
    return [(group, lane) for group, group_lanes in lanes_of.items() for lane in group_lanes]


def peak_memory(rank: RankTrace) -> dict[str, int]:
    """Bytes by category at the moment when it held the most; all 0 where nothing is known."""
    most = max((point.held_bytes for point in rank.memory), key=sum, default=(0,) * len(CATEGORIES))
    return dict(zip(CATEGORIES, most, strict=True))


def main_dtype(trace: Trace) -> str | None:
    """That in which the most operations were counted; None where none was."""
    flops: Counter[str] = Counter()
    for rank in trace.ranks.values():
        for operation in rank.operations:
            flops[operation.dtype] += operation.flops
    return max(flops, key=lambda dtype: flops[dtype], default=None) if flops.total() else None


@dataclass(frozen=True)
class Split:
    """The time of one step; of several ranks, their mean. The three parts add up to it.

    compute_s   the program went on: it computed (or, on a real machine, did whatever else it does)
    exposed_s   it waited while what it waited for, or what had to leave before, was on the wire
    bubble_s    it waited for other ranks, with nothing of its own on the wire, or its step was over
    """

    step_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    flops: float | None = None  # on one rank, where they were counted

    def mfu(self, peak_flops: float) -> float:
        """Model FLOPs utilization: the counted operations over those that a device of `peak_flops`
        a second could have done in this time. What the step computes twice is counted twice:
        with recomputation, and a little by the backward of flash attention, it is the hardware's
        utilization (`predict.step_flops` has the model's). Source: PaLM, arXiv 2204.02311,
        appendix B.

        Raises ValueError where no operations were counted.
        """
        if self.flops is None:
            raise ValueError("no operations were counted in this step; see record(detail_step=1)")
        return self.flops / (self.step_s * peak_flops)

    def __str__(self) -> str:
        parts = {"computing": self.compute_s, "exposed communication": self.exposed_s}
        parts["bubble"] = self.bubble_s
        shares = ", ".join(f"{name} {x / (self.step_s or 1):.0%}" for name, x in parts.items())
        return f"{self.step_s * 1e3:,.2f} ms: {shares}"


def split_of(trace: Trace, step: int | None = None) -> Split:
    """The split of a step, by default the last one: the mean over the ranks, of which each counts
    as often as others do the same.

    Raises ValueError for a step that is not there or has not ended on all ranks.
    """
    if not trace.steps():
        raise ValueError("this trace has no steps; they end with the step of an optimizer")
    ranks = trace.step(trace.steps()[-1] if step is None else step).ranks.values()
    for rank in ranks:
        if not rank.steps or not rank.steps[0].ended_s:
            raise ValueError(f"rank {rank.rank}: the step never ended")
    began_s = min(rank.steps[0].began_s for rank in ranks)  # the first rank
    ended_s = max(rank.steps[0].ended_s for rank in ranks)  # the last one
    splits = [_split_of_rank(rank, ended_s - began_s) for rank in ranks]
    weights = [1 + len(rank.alike) for rank in ranks]
    names = ["step_s", "compute_s", "exposed_s", "bubble_s"]
    names += ["flops"] * all(split.flops is not None for split in splits)
    columns = ([getattr(split, name) for split in splits] for name in names)
    return Split(*(sum(map(mul, weights, column)) / sum(weights) for column in columns))


def _split_of_rank(rank: RankTrace, whole_s: float) -> Split:
    step = rank.steps[0]
    waits = common(waiting(rank), [(step.began_s, step.ended_s)])
    others_s = whole_s - (step.ended_s - step.began_s)  # it began later, or was done earlier
    waiting_s = length_s(waits) + others_s
    exposed_s = length_s(common(waits, _exposing(rank)))
    flops = [span.flops for span in rank.spans if span.flops is not None]
    return Split(
        whole_s, whole_s - waiting_s, exposed_s, waiting_s - exposed_s,
        sum(flops) if flops else None,
    )  # fmt: skip


def _exposing(rank: RankTrace) -> Intervals:
    """When this rank waited for something that was on the wire: for a received message, that
    message; for its own communication, also what it had handed to the wire before."""
    exposing, wire = [], list[tuple[float, float]]()
    for event in sorted(rank.comms, key=lambda x: (x.issued_s, x.began_s)):
        own = [(event.began_s, event.ended_s)]
        if event.op != "recv":
            wire += own
        if event.wait_ended_s:
            begin_s, end_s = event.wait_began_s, event.wait_ended_s
            busy = own if event.op == "recv" else [x for x in wire if x[1] > begin_s]
            exposing += common([(begin_s, end_s)], union(busy))
    return union(exposing)
