"""What the times of a trace add up to: computing, communicating, waiting, and how much of the
communication was hidden behind computing.

All over sets of intervals: lists of (begin, end) in seconds, sorted, that do not touch.
"""

from collections import Counter
from collections.abc import Iterable

from labkit.events import CommEvent
from labkit.trace.graph import CATEGORIES, RankTrace, Trace

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time, each moment once."""
    joined: Intervals = []
    for begin, end in sorted(one for one in intervals if one[1] > one[0]):
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


def common(one: Intervals, other: Intervals) -> Intervals:
    """What is in both."""
    return without(one, without(one, other))


def length_s(intervals: Intervals) -> float:
    """Seconds in all of them together."""
    return sum(end - begin for begin, end in intervals)


def waiting(one: RankTrace) -> Intervals:
    """When the program stood still for communication."""
    return union((x.wait_began_s, x.wait_ended_s) for x in one.comms if x.wait_ended_s)


def computing(one: RankTrace) -> Intervals:
    """When it computed: its outermost spans, less the waits inside them. Those of the user count
    where nothing else is in them: one around the whole loop says nothing of computing."""
    spans = [x for x in one.spans if x.depth == 0 and x.ended_s]
    known = union((x.began_s, x.ended_s) for x in spans if x.phase != "user")
    own = [(x.began_s, x.ended_s) for x in spans if x.phase == "user"]
    return without(union([*known, *(x for x in own if not common([x], known))]), waiting(one))


def communicating(one: RankTrace) -> Intervals:
    """When something was under way."""
    return union((x.began_s, x.ended_s) for x in one.comms if x.ended_s)


def overlap(trace: Trace) -> float:
    """The part of the communication during which the same rank computed, 0 to 1, over all ranks;
    0 where nothing travelled."""
    pairs = [(communicating(one), computing(one)) for one in trace.ranks.values()]
    total_s = sum(length_s(comm) for comm, _ in pairs)
    hidden_s = sum(length_s(common(comm, compute)) for comm, compute in pairs)
    return hidden_s / total_s if total_s else 0.0


def end_of(trace: Trace) -> float:
    """The last moment known of it, in seconds; 0.0 of an empty trace."""
    times = [0.0]
    for one in trace.ranks.values():
        for thing in one.things():
            times += [thing.ended_s]
            if isinstance(thing, CommEvent):
                times += [thing.issued_s, thing.began_s, thing.wait_began_s, thing.wait_ended_s]
            else:
                times += [thing.began_s]
        times += [point.when_s for point in one.memory]
    return max(times)


def lanes(events: Iterable[CommEvent]) -> list[tuple[str, list[CommEvent]]]:
    """The events of one rank by group, and where some of one group were under way at the same
    time, in as many lanes as that takes: in a lane, one ends before the next begins."""
    found: dict[str, list[list[CommEvent]]] = {}
    for event in sorted((e for e in events if e.ended_s), key=lambda e: (e.began_s, e.ended_s)):
        of_group = found.setdefault(event.group, [])
        for lane in of_group:
            if lane[-1].ended_s <= event.began_s:
                lane.append(event)
                break
        else:
            of_group.append([event])
    return [(group, lane) for group, its in found.items() for lane in its]


def peak_memory(one: RankTrace) -> dict[str, int]:
    """Bytes by category at the moment when it held the most; all 0 where nothing is known."""
    most = max((point.held_bytes for point in one.memory), key=sum, default=(0,) * len(CATEGORIES))
    return dict(zip(CATEGORIES, most, strict=True))


def main_dtype(trace: Trace) -> str | None:
    """That in which the most operations were counted; None where none was."""
    flops: Counter[str] = Counter()
    for one in trace.ranks.values():
        for operation in one.operations:
            flops[operation.dtype] += operation.flops
    return max(flops, key=lambda dtype: flops[dtype], default=None) if flops.total() else None
