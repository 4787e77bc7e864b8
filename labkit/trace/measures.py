"""Measures of a trace: computing, communication, waiting, and their overlap. `Intervals` are sorted
lists of disjoint (begin, end) pairs in seconds."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul

from labkit.events import CommEvent
from labkit.trace.graph import CATEGORIES, TIMES, RankTrace, Trace

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Merge intervals that overlap or touch."""
    joined: Intervals = []
    for begin, end in sorted(x for x in intervals if x[1] > x[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def without(intervals: Intervals, taken: Intervals) -> Intervals:
    """The parts of `intervals` outside `taken`."""
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
    """The intersection of `first` and `second`."""
    return without(first, without(first, second))


def length_s(intervals: Intervals) -> float:
    """The total length in seconds."""
    return sum(end - begin for begin, end in intervals)


def waiting(rank: RankTrace) -> Intervals:
    """Intervals in which the rank waited for communication."""
    return union((x.wait_began_s, x.wait_ended_s) for x in rank.comms if x.wait_ended_s)


def computing(rank: RankTrace) -> Intervals:
    """Intervals in which the rank computed: outermost spans, minus waits. A user span that overlaps
    a recorded phase does not count: a span around the whole training loop is not computing."""
    spans = [x for x in rank.spans if x.depth == 0 and x.ended_s]
    known = union((x.began_s, x.ended_s) for x in spans if x.phase != "user")
    own = [(x.began_s, x.ended_s) for x in spans if x.phase == "user"]
    return without(union([*known, *(x for x in own if not common([x], known))]), waiting(rank))


def communicating(rank: RankTrace) -> Intervals:
    """Intervals in which at least one transfer was in progress."""
    return union((x.began_s, x.ended_s) for x in rank.comms if x.ended_s)


def overlap(trace: Trace) -> float:
    """The fraction of all ranks' transfer time hidden behind computing; 0 without transfers."""
    pairs = [(communicating(rank), computing(rank)) for rank in trace.ranks.values()]
    total_s = sum(length_s(comm) for comm, _ in pairs)
    hidden_s = sum(length_s(common(comm, compute)) for comm, compute in pairs)
    return hidden_s / total_s if total_s else 0.0


def end_of(trace: Trace) -> float:
    """The latest time in the trace, in seconds; 0.0 for an empty trace."""
    times = (
        getattr(record, name)
        for rank in trace.ranks.values()
        for names, records in zip(TIMES.values(), rank.lists())
        for record in records
        for name in names
    )
    return max(times, default=0.0)


def lanes(events: Iterable[CommEvent]) -> list[tuple[str, list[CommEvent]]]:
    """One rank's finished events by group, split into lanes of non-overlapping events."""
    lanes_of: dict[str, list[list[CommEvent]]] = {}
    for event in sorted((e for e in events if e.ended_s), key=lambda e: (e.began_s, e.ended_s)):
        group_lanes = lanes_of.setdefault(event.group, [])
        free = (lane for lane in group_lanes if lane[-1].ended_s <= event.began_s)
        if (lane := next(free, None)) is None:
            group_lanes.append(lane := [])
        lane.append(event)
    return [(group, lane) for group, group_lanes in lanes_of.items() for lane in group_lanes]


def peak_memory(rank: RankTrace) -> dict[str, int]:
    """Bytes by category at the rank's memory peak; zeros if no memory was recorded."""
    most = max((point.held_bytes for point in rank.memory), key=sum, default=(0,) * len(CATEGORIES))
    return dict(zip(CATEGORIES, most, strict=True))


def main_dtype(trace: Trace) -> str | None:
    """The dtype with the most counted FLOPs; None if no FLOPs were counted."""
    flops: Counter[str] = Counter()
    for rank in trace.ranks.values():
        for operation in rank.operations:
            flops[operation.dtype] += operation.flops
    return max(flops, key=lambda dtype: flops[dtype], default=None) if flops.total() else None


@dataclass(frozen=True)
class Split:
    """The time of one step (mean over ranks), in three parts that add up to `step_s`.

    compute_s   the rank did not wait: it computed (or, on a real machine, did other work)
    exposed_s   the rank waited while the awaited transfer or one queued earlier was in progress
    bubble_s    the rank waited with neither in progress, or was outside its own step
    """

    step_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    flops: float | None = None  # per rank, if FLOPs were counted

    def mfu(self, peak_flops: float) -> float:
        """Model FLOPs utilization: counted FLOPs / (step time x `peak_flops` in FLOP/s). Recomputed
        FLOPs (including those of flash attention's backward) count too, so with recomputation this
        is hardware FLOPs utilization; `predict.step_flops` returns the FLOPs of the model alone.
        Source: PaLM, arXiv 2204.02311, appendix B. Raises ValueError if no FLOPs were counted."""
        if self.flops is None:
            raise ValueError("no FLOPs were counted in this step; use record(detail_step=...)")
        return self.flops / (self.step_s * peak_flops)

    def __str__(self) -> str:
        parts = {"computing": self.compute_s, "exposed communication": self.exposed_s}
        parts["bubble"] = self.bubble_s
        shares = ", ".join(f"{name} {x / (self.step_s or 1):.0%}" for name, x in parts.items())
        return f"{self.step_s * 1e3:,.2f} ms: {shares}"


def split_of(trace: Trace, step: int | None = None) -> Split:
    """The split of a step (by default the last): the mean over recorded and represented ranks.
    Raises ValueError if the step is missing or has not ended on every rank."""
    if not trace.steps():
        raise ValueError("this trace has no steps; a step ends with optimizer.step()")
    ranks = trace.step(trace.steps()[-1] if step is None else step).ranks.values()
    for rank in ranks:
        if not rank.steps or not rank.steps[0].ended_s:
            raise ValueError(f"rank {rank.rank} did not complete the step; choose another step")
    began_s = min(rank.steps[0].began_s for rank in ranks)  # on the earliest rank
    ended_s = max(rank.steps[0].ended_s for rank in ranks)  # on the latest rank
    splits = [_split_of_rank(rank, ended_s - began_s) for rank in ranks]
    weights = [1 + len(rank.alike) for rank in ranks]
    names = ["step_s", "compute_s", "exposed_s", "bubble_s"]
    names += ["flops"] * all(split.flops is not None for split in splits)
    columns = ([getattr(split, name) for split in splits] for name in names)
    return Split(*(sum(map(mul, weights, column)) / sum(weights) for column in columns))


def _split_of_rank(rank: RankTrace, whole_s: float) -> Split:
    step = rank.steps[0]
    waits = common(waiting(rank), [(step.began_s, step.ended_s)])
    absent_s = whole_s - (step.ended_s - step.began_s)  # outside this rank's own step
    waiting_s = length_s(waits) + absent_s
    exposed_s = length_s(common(waits, _exposing(rank)))
    flops = [span.flops for span in rank.spans if span.flops is not None]
    return Split(
        whole_s, whole_s - waiting_s, exposed_s, waiting_s - exposed_s,
        sum(flops) if flops else None,
    )  # fmt: skip


def _exposing(rank: RankTrace) -> Intervals:
    """Waiting during the awaited transfer or, unless this is a receive, an earlier transfer."""
    exposing, transfers = [], list[tuple[float, float]]()
    for event in sorted(rank.comms, key=lambda x: (x.issued_s, x.began_s)):
        own = [(event.began_s, event.ended_s)]
        if event.op != "recv":
            transfers += own
        if event.wait_ended_s:
            begin_s, end_s = event.wait_began_s, event.wait_ended_s
            busy = own if event.op == "recv" else [x for x in transfers if x[1] > begin_s]
            exposing += common([(begin_s, end_s)], union(busy))
    return union(exposing)
