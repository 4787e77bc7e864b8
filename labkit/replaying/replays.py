"""`replay(trace, cluster)`: a recorded run with the times of a different machine.

    recorded   forward [ mm add mm ]  issue all-reduce  backward [ mm mm ]  wait  step
    program    Compute                Issue             Compute             Wait  Compute
                       ^ moments: forward began, ended, ...

Order and dependencies are as recorded. A rank that represents other ranks (`RankTrace.alike`) is
replayed once for the whole set, assuming the slowest placement of their groups on nodes. A send
does not wait for its receiver.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import float_info
from typing import Any, Literal, NamedTuple

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.engine import Compute, Issue, Timed, Wait, run
from labkit.trace import MemoryPoint, RankTrace, Span, Step, Trace
from labkit.trace.graph import as_seen_by

Computing = Literal["counted", "measured"]
NOT_AT_0_S = float_info.min  # in a trace, `ended_s == 0.0` means "not ended yet"
# Among simultaneous events, ends precede begins, and an issue precedes its wait.
ORDER = {"compute": 0, "waited": 1, "ended_s": 2, "began_s": 3, "issue": 4, "wait": 5, "when_s": 6}


def replay(
    trace: Trace,
    cluster: Cluster | Costs,
    computing: Computing = "counted",
    steps: Iterable[int] | None = None,
) -> Trace:
    """Replay a trace with the times of `cluster`.

    Args:
        trace: recorded with operations (`dry_run`, or `record(detail_step=...)`); with
            computing="measured", any trace.
        cluster: a cluster, or `Costs` for a cluster.
        computing: "counted" derives compute times from FLOPs and bytes at the device's rates;
            "measured" keeps the recorded compute times and replaces only communication times.
        steps: the steps to replay; by default every step that `computing` allows.

    Returns a trace of these steps; repeated replays are bit-identical. Raises ValueError if the
    cluster has too few devices or no rate for a dtype, or if ranks or steps are missing or cut
    off; Deadlock if ranks wait for each other.

    >>> plot.timeline(replay(trace, cluster("dgx-h100")))
    """
    if computing not in ("counted", "measured"):
        raise ValueError(f'computing={computing!r}: choose "counted" or "measured"')
    costs = cluster if isinstance(cluster, Costs) else Costs(cluster)
    where = costs.cluster
    if trace.size > where.size:
        raise ValueError(
            f"{trace.size} ranks do not fit on {where.title}, which has {where.nodes} x "
            f"{where.devices_per_node} devices; use a larger cluster: dataclasses.replace("
            "cluster, nodes=...), or measure yours with `labkit doctor --cluster FILE --ranks "
            f"{trace.size}`"
        )
    chosen = trace.only(_steps(trace, computing, steps))
    for rank_trace in chosen.ranks.values():
        cut = not rank_trace.complete and computing == "counted"
        if cut or not all(step.ended_s for step in rank_trace.steps):
            raise ValueError(
                f"the record of rank {rank_trace.rank} is cut off, so its last steps are unknown; "
                "replay steps that all ranks have completed, with computing='measured'"
            )
    return _Replay(chosen, costs, computing).trace()


def events_of(rank_trace: RankTrace) -> list[tuple[float, int, str, Any]]:
    """Everything a rank recorded, as (time, order among simultaneous events, kind, record)."""
    events: list[tuple[float, str, Any]] = []
    intervals: list[Step | Span] = [*rank_trace.steps, *rank_trace.spans]
    for interval in intervals:
        events.append((interval.began_s, "began_s", interval))
        if interval.ended_s:
            events.append((interval.ended_s, "ended_s", interval))
    for event in rank_trace.comms:
        events.append((event.issued_s, "issue", event))
        if event.wait_ended_s:
            events.append((event.wait_began_s, "wait", event))
            events.append((event.wait_ended_s, "waited", event))
    events += [(operation.when_s, "compute", operation) for operation in rank_trace.operations]
    events += [(point.when_s, "when_s", point) for point in rank_trace.memory]
    return [(when_s, ORDER[kind], kind, record) for when_s, kind, record in events]


@dataclass
class _RankProgram:
    """A program. `moments`: (record, time field, instruction index, seconds after it starts)."""

    parts: list[Compute | Issue | Wait] = field(default_factory=list)
    moments: list[tuple[Any, str, int, float]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)  # id(event) -> index of its Wait
    computed_s: float = 0.0  # compute time since the last Issue or Wait

    def add_moment(self, record: Any, name: str) -> None:
        self.moments.append((record, name, len(self.parts), self.computed_s))

    def add(self, *parts: Issue | Wait) -> None:
        """Append the accumulated compute time, then `parts`."""
        self.parts += [Compute(self.computed_s), *parts]
        self.computed_s = 0.0


class _Key(NamedTuple):
    """An operation's key; its repr is the text shown in deadlock messages."""

    text: str
    group: str

    def __repr__(self) -> str:
        return self.text


class _Replay:
    def __init__(self, trace: Trace, costs: Costs, computing: Computing):
        self.recorded, self.costs, self.computing = trace, costs, computing
        self.record_of = trace.record_of
        self._known_placements: dict[Any, list[int]] = {}
        self.issues = self._issues()

    def trace(self) -> Trace:
        ranks = {rank: _copied(rank_trace) for rank, rank_trace in self.recorded.ranks.items()}
        programs = {rank: self._program(rank_trace) for rank, rank_trace in ranks.items()}
        timed = run({rank: program.parts for rank, program in programs.items()})
        transfers = {
            part.key: when
            for rank, program in programs.items()
            for part, when in zip(program.parts, timed[rank], strict=True)
            if isinstance(part, Issue)
        }
        for rank, rank_trace in ranks.items():
            self._set_times(rank_trace, programs[rank], timed[rank], transfers)
        about = {**self.recorded.about, "replayed": self.costs.cluster.title}
        return Trace(ranks, about, self.recorded.metrics)

    def _program(self, rank_trace: RankTrace) -> _RankProgram:
        """Instructions in recorded order; "measured" keeps the recorded time outside waits."""
        program, measured = _RankProgram(), self.computing == "measured"
        last_s, waiting = None, 0
        for when_s, _, kind, record in sorted(events_of(rank_trace), key=lambda x: x[:2]):
            if measured and last_s is not None and not waiting:
                program.computed_s += when_s - last_s
            last_s = when_s
            match kind:
                case "compute":
                    program.computed_s += 0.0 if measured else self.costs.compute_s(record)
                case "issue":
                    program.add_moment(record, "issued_s")
                    if record.op != "recv":  # a receive issues nothing
                        program.add(self.issues[self._key(rank_trace, record)])
                case "wait":
                    program.add(Wait(self._key(rank_trace, record)))
                    program.waits[id(record)] = len(program.parts) - 1
                    waiting += 1
                case "waited":
                    waiting -= 1
                case field:
                    program.add_moment(record, field)
        program.add()
        return program

    def _key(self, rank_trace: RankTrace, event: CommEvent) -> _Key:
        """A key shared by all ranks of a collective, or by both ends of a message."""
        if event.op not in ("send", "recv"):
            return _Key(f"collective {event.seq} of group {event.group}", event.group)
        assert event.peer is not None
        ends = rank_trace.rank, self._representative(event, event.ranks[event.peer])
        source, target = ends if event.op == "send" else ends[::-1]
        tag = f" with tag {event.tag}" if event.tag else ""
        return _Key(f"message {event.seq} from rank {source} to {target}{tag}", event.group)

    def _issues(self) -> dict[Hashable, Issue]:
        """One Issue per communication operation, with the time of the slowest rank."""
        issues: dict[Hashable, Issue] = {}
        for rank_trace in self.recorded.ranks.values():
            for event in rank_trace.comms:
                if event.op == "recv":
                    continue
                if rank_trace.rank not in event.ranks:
                    raise ValueError(
                        f"rank {rank_trace.rank} has {event.op} {event.seq} of group {event.group}"
                        ", but is not in that group; record a rank of that group"
                    )
                members = (rank_trace.rank,) if event.op == "send" else event.ranks
                ranks = tuple(sorted({self._representative(event, rank) for rank in members}))
                key, cost = self._key(rank_trace, event), self._slowest(rank_trace, event)
                issue = Issue(key, ranks, cost.seconds, cost.latency_s, cost.port)
                if key not in issues or issues[key].seconds < issue.seconds:
                    issues[key] = issue
        return issues

    def _slowest(self, rank_trace: RankTrace, event: CommEvent) -> Sending:
        """The cost in the slowest group of this rank or of the ranks that it represents."""
        alike, size = [event], rank_trace.size
        if len(event.ranks) < size or event.op == "send":  # otherwise this is the only group
            alike += [as_seen_by(event, rank, size) for rank in self._placements(rank_trace, event)]
        return max(map(self.costs.sending, alike), key=lambda cost: cost.total_s)

    def _placements(self, rank_trace: RankTrace, event: CommEvent) -> list[int]:
        """One represented rank per distinct placement of the group, or of a message's two ends."""
        key = rank_trace.rank, event.ranks, event.peer if event.op == "send" else None
        if key not in self._known_placements:
            kinds: dict[Any, int] = {}
            for rank in rank_trace.alike:
                there = as_seen_by(event, rank, rank_trace.size)
                ends = there.ranks
                if there.op == "send" and there.peer is not None:
                    ends = there.ranks[there.rank], there.ranks[there.peer]
                nodes = Counter(self.costs.cluster.node_of(end) for end in ends)
                kinds.setdefault(tuple(sorted(nodes.values())), rank)
            self._known_placements[key] = list(kinds.values())
        return self._known_placements[key]

    def _representative(self, event: CommEvent, rank: int) -> int:
        """The recorded rank that represents `rank`."""
        if rank not in self.record_of:
            raise ValueError(
                f"rank {rank} takes part in {event.op} {event.seq} of group {event.group}, but its "
                "record is missing; record all ranks, or one that does the same (RankTrace.alike)"
            )
        return self.record_of[rank].rank

    def _set_times(
        self,
        rank_trace: RankTrace,
        program: _RankProgram,
        timed: list[Timed],
        transfers: Mapping[Hashable, Timed],
    ) -> None:
        rank_trace.operations, rank_trace.memory = [], []  # memory is refilled below
        for record, name, place, after_s in program.moments:
            when_s = timed[place].began_s + after_s
            if isinstance(record, MemoryPoint):
                rank_trace.memory.append(record._replace(when_s=when_s))
            else:
                setattr(record, name, _nonzero(when_s) if name == "ended_s" else when_s)
        waits = {event_id: timed[place] for event_id, place in program.waits.items()}
        for event in rank_trace.comms:
            event.algorithm = self.costs.sending(event).algorithm
            transfer = transfers[self._key(rank_trace, event)]
            set_times(event, event.issued_s, transfer, waits.get(id(event)))


def set_times(event: CommEvent, issued_s: float, transfer: Timed, wait: Timed | None) -> None:
    """Set the times of an event's issue, transfer and, unless `wait` is None, wait."""
    event.issued_s = issued_s
    event.began_s = max(transfer.began_s, issued_s)
    event.ended_s = _nonzero(max(transfer.ended_s, issued_s))
    event.wait_began_s = issued_s if wait is None else wait.began_s
    event.wait_ended_s = 0.0 if wait is None else _nonzero(wait.ended_s)
    event.transport, event.lane, event.wire_bytes = "replay", "backend", event.bus_bytes


def _copied(rank_trace: RankTrace) -> RankTrace:
    """Copy the steps, spans and events, so that their times can be overwritten."""
    return replace(
        rank_trace,
        steps=[replace(step, detail=False) for step in rank_trace.steps],
        spans=[replace(span) for span in rank_trace.spans],
        comms=[replace(event) for event in rank_trace.comms],
    )


def _nonzero(when_s: float) -> float:
    return max(when_s, NOT_AT_0_S)


def _steps(trace: Trace, computing: Computing, asked: Iterable[int] | None) -> list[int]:
    """The steps to replay. Raises ValueError if there are none, or if one in `asked` lacks data."""
    available = trace.steps(detail=False)
    if computing == "counted":
        available = sorted({x.step for rank in trace.ranks.values() for x in rank.operations})
    wanted = available if asked is None else sorted(set(asked))
    if missing := [step for step in wanted if step not in available]:
        raise ValueError(f"step {missing[0]} has no {computing} compute; choose one of {available}")
    if asked is None and not available:
        raise ValueError(
            "no step of this trace was timed; pass computing='counted'"
            if computing == "measured"
            else "no step of this trace has counted operations (replayed traces have none); record "
            "it with dry_run or record(detail_step=1), or replay it with computing='measured'"
        )
    return wanted
