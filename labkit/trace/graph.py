"""The recorded run as a graph.

    Trace ── one RankTrace per rank
              steps    where each training step began and ended
              spans    computing: forward, backward and optimizer, by module
              comms    what the communicator did (`labkit.events.CommEvent`)
              memory   bytes by category over time, in the one step recorded in detail
              operations  and what was computed in it, one by one

The edges are in the data. On a rank, things happen in the order of their times. A wait belongs to
the event it waits for. The same collective has the same `group` and `seq` on all its ranks, a
receive the same ends, tag and `seq` as its send: `Trace.collectives` and `Trace.messages` follow
them, and a replay needs nothing else.

All times are seconds since the trace's beginning, on one clock for all ranks.

No torch here: a trace is read, replayed and drawn on machines that have none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from labkit.events import CommEvent

CATEGORIES = (
    "parameters", "gradients", "optimizer state", "activations", "communication buffers", "other",
)  # fmt: skip
PHASES = (  # "input" and "weight": in a pipeline, where backward is in two halves; "update":
    # an optimizer's step for one micro-batch of a pipeline
    "forward", "backward", "input", "weight", "update", "optimizer", "user",
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """A stretch of computing on one rank.

    In forward, spans nest as modules do. In backward, the whole is one span of depth 0 and
    module "", and the modules follow each other at depth 1, each with what is its own only.
    """

    phase: str  # one of PHASES
    module: str  # path from the root, "blocks.0.mlp"; "" is the root, or all of backward
    step: int
    began_s: float
    ended_s: float  # 0.0 while it is open: the run ended inside
    depth: int = 0  # 0 is outermost
    kind: str = ""  # class of the module or optimizer, "Linear"
    flops: int | None = None  # counted in a detailed step: this span's own, without its children
    moved_bytes: int | None = None  # read and written by its operations, likewise


@dataclass(slots=True)
class Step:
    """One training step: from the end of the last one to the end of its optimizer step."""

    index: int
    began_s: float
    ended_s: float  # 0.0 while it is open
    detail: bool = False  # recorded in detail: has memory and operations, its times mean nothing


class MemoryPoint(NamedTuple):
    """Bytes held by each of CATEGORIES from `when_s` on."""

    when_s: float
    step: int
    held_bytes: tuple[int, ...]


class Operation(NamedTuple):
    """One operation that a rank computed in the step in detail, over at `when_s`."""

    when_s: float
    step: int
    name: str  # torch's, "mm"
    dtype: str  # of its first tensor, "bfloat16"
    flops: int
    moved_bytes: int  # read and written
    sides: tuple[int, ...] = ()  # m, n, k of a matrix product [m, k] x [k, n]; of many, each


@dataclass(slots=True)
class RankTrace:
    """What one rank recorded."""

    rank: int  # global
    size: int  # ranks in the world
    device: str = "cpu"
    host: str = ""
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    comms: list[CommEvent] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    complete: bool = True  # False: the rank died, or the file was cut off
    alike: tuple[int, ...] = ()  # global ranks that do the same, and have no record of their own

    def timed_records(self) -> Iterator[Span | CommEvent | Step]:
        return chain(self.steps, self.spans, self.comms)

    def lists(self) -> tuple[list[Any], ...]:
        """Its records, a list for each kind."""
        return self.steps, self.spans, self.comms, self.memory, self.operations


class MessageKey(NamedTuple):
    """What a send and its receive have in common."""

    group: str
    source: int  # global ranks
    target: int
    tag: int
    seq: int


@dataclass
class Trace:
    """A recorded run. `about` is the contents of `run.json`: what, where, versions, seeds.
    `metrics`: one dict for each note of a rank, {"step": 3, "rank": 0, "loss": 2.1}."""

    ranks: dict[int, RankTrace] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Ranks in the world (of which a damaged trace may miss some)."""
        return max((rank.size for rank in self.ranks.values()), default=0)

    @property
    def complete(self) -> bool:
        """Whether all ranks are there and none was cut off."""
        return 0 < len(self.ranks) == self.size and all(r.complete for r in self.ranks.values())

    def steps(self, detail: bool | None = None) -> list[int]:
        """Numbers of the steps; only the detailed or only the timed ones where asked."""
        every = (step for rank in self.ranks.values() for step in rank.steps)
        return sorted({s.index for s in every if detail is None or s.detail == detail})

    def step(self, index: int) -> "Trace":
        """Step `index` alone, beginning at 0 s. Raises ValueError when it is not there."""
        if index not in self.steps():
            steps = self.steps()
            there = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise ValueError(f"no step {index} in this trace; it has {there}")
        return self.only([index]).from_zero()

    def only(self, steps: Iterable[int]) -> "Trace":
        """These steps alone, at the times that they have here."""
        chosen, kinds = set(steps), ("spans", "comms", "memory", "operations")
        ranks = {}
        for number, rank in self.ranks.items():
            kept: dict[str, Any] = {
                kind: [x for x in getattr(rank, kind) if x.step in chosen] for kind in kinds
            }
            own = [x for x in rank.steps if x.index in chosen]
            ranks[number] = replace(rank, steps=own, **kept)
        return Trace(ranks, self.about, [x for x in self.metrics if x.get("step") in chosen])

    @property
    def record_of(self) -> dict[int, RankTrace]:
        """Global rank -> its record, or that of the rank that does the same; in order."""
        every = [(number, rank) for rank in self.ranks.values() for number in rank.alike]
        every += self.ranks.items()
        return dict(sorted(every, key=lambda x: x[0]))

    def expanded(self, ranks: Iterable[int] | None = None) -> "Trace":
        """With a record for each of `ranks` (all by default), those that do as another does among
        them, in groups that lie alike (`groups_like`): what they share is not copied.

        Raises ValueError for a rank of which nothing is known.
        """
        record_of = self.record_of
        expanded: dict[int, RankTrace] = {}
        for number in record_of if ranks is None else ranks:
            if number not in record_of:
                raise ValueError(f"rank {number} has no record in this trace, nor does one like it")
            rank = record_of[number]
            comms = [as_seen_by(event, number, rank.size) for event in rank.comms]
            expanded[number] = replace(rank, rank=number, comms=comms, alike=())
        return replace(self, ranks=expanded)

    def from_zero(self) -> "Trace":
        """The same with its earliest time at 0 s; itself is left as it is."""
        zero_s = min((t for rank in self.ranks.values() for t in _begins(rank)), default=0.0)
        ranks = {number: earlier(rank, zero_s) for number, rank in self.ranks.items()}
        return replace(self, ranks=ranks)

    def collectives(self) -> dict[tuple[str, int], dict[int, CommEvent]]:
        """(group, seq) -> global rank -> its event."""
        collectives: dict[tuple[str, int], dict[int, CommEvent]] = {}
        for rank in self.ranks.values():
            for event in rank.comms:
                if event.op not in ("send", "recv"):
                    collectives.setdefault((event.group, event.seq), {})[rank.rank] = event
        return collectives

    def messages(self) -> dict[MessageKey, dict[str, CommEvent]]:
        """Each message -> {"send": event, "recv": event}, one of them missing where it is not
        recorded."""
        messages: dict[MessageKey, dict[str, CommEvent]] = {}
        for rank in self.ranks.values():
            for event in rank.comms:
                if event.op in ("send", "recv"):
                    assert event.peer is not None
                    ends = (rank.rank, event.ranks[event.peer])
                    source, target = ends if event.op == "send" else ends[::-1]
                    key = MessageKey(event.group, source, target, event.tag, event.seq)
                    messages.setdefault(key, {})[event.op] = event
        return messages


def _begins(rank: RankTrace) -> Iterable[float]:
    for record in rank.timed_records():
        yield record.issued_s if isinstance(record, CommEvent) else record.began_s
    for point in rank.memory[:1]:
        yield point.when_s


def earlier(rank: RankTrace, by_s: float) -> RankTrace:
    """All times earlier by `by_s`; an end that is 0.0, "not yet", stays so."""

    def moved(record: Any, begin: str, *others: str) -> Any:
        times = {name: getattr(record, name) for name in others}
        changes = {name: time_s - by_s for name, time_s in times.items() if time_s}
        return replace(record, **{begin: getattr(record, begin) - by_s}, **changes)

    waits = ("wait_began_s", "wait_ended_s")
    return replace(
        rank,
        steps=[moved(x, "began_s", "ended_s") for x in rank.steps],
        spans=[moved(x, "began_s", "ended_s") for x in rank.spans],
        comms=[moved(x, "issued_s", "began_s", "ended_s", *waits) for x in rank.comms],
        memory=[x._replace(when_s=x.when_s - by_s) for x in rank.memory],
        operations=[x._replace(when_s=x.when_s - by_s) for x in rank.operations],
    )


@cache
def groups_like(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """All groups of the shape of `ranks` that together have each of `size` ranks once, as those of
    a mesh do; `ranks` alone where it cannot be laid out so.

    (0, 1, 2, 3) of 8 ranks    (4, 5, 6, 7)                    neighbours
    (0, 4) of 8 ranks          (1, 5)  (2, 6)  (3, 7)          one of each node
    """
    shape = [rank - min(ranks) for rank in ranks]
    groups, free = [], dict.fromkeys(range(size))
    while free:
        first = next(iter(free))
        group = tuple(first + rank for rank in shape)
        if any(rank not in free for rank in group):
            return (ranks,)
        for rank in group:
            del free[rank]
        groups.append(group)
    return tuple(groups) if ranks in groups else (ranks,)


def as_seen_by(event: CommEvent, rank: int, size: int) -> CommEvent:
    """The event of a rank that does the same as the one of `event`, in its own group and with a
    peer at the same distance. Unchanged where the group of `rank` cannot be known."""
    own = next((x for x in groups_like(event.ranks, size) if rank in x), None)
    if own is None:
        return event
    place, peer, group = own.index(rank), event.peer, event.group
    if event.op in ("send", "recv") and peer is not None:
        peer = (peer + place - event.rank) % len(own)
    if own != event.ranks:
        members = ", ".join(map(str, own[:8])) + (" ..." if len(own) > 8 else "")
        group = f"{group.partition(' (')[0]} (ranks {members})"
    return replace(event, rank=place, ranks=own, peer=peer, group=group)
