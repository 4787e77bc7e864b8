"""The recorded run as a graph.

    Trace ── one RankTrace per rank
              steps    begin and end of each training step
              spans    computing: forward, backward and optimizer, by module
              comms    communication operations (`labkit.events.CommEvent`)
              memory   bytes by category over time, in the detailed step
              operations  the operations computed in the detailed step

The edges are implicit. On a rank, records are ordered by time, and an event includes its wait. A
collective has the same `group` and `seq` on every rank; a receive has the same source, target, tag
and `seq` as the send (`Trace.collectives`, `Trace.messages`). This is sufficient for a replay.

All times are seconds since the beginning of the trace, on one clock shared by all ranks.
This module does not import torch, so traces can be read, replayed and drawn without torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from labkit.events import CommEvent

CATEGORIES = (
    "parameters", "gradients", "optimizer state", "activations", "communication buffers", "other",
)  # fmt: skip
PHASES = (  # "input" and "weight": the two halves of a pipeline's backward; "update": the
    # optimizer step after one micro-batch of a pipeline
    "forward", "backward", "input", "weight", "update", "optimizer", "user",
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """A period of computing on one rank. Forward spans nest like modules. In backward, a span with
    depth 0 and module "" covers the entire pass; module spans follow one another at depth 1 and
    exclude the time of child modules."""

    phase: str  # one of PHASES
    module: str  # path from the root, such as "blocks.0.mlp"; "": the root, or all of backward
    step: int
    began_s: float
    ended_s: float  # 0.0: still open when the run ended
    depth: int = 0  # 0 is outermost
    kind: str = ""  # class of the module or optimizer, such as "Linear"
    flops: int | None = None  # in the detailed step; excluding nested spans
    moved_bytes: int | None = None  # read and written, excluding nested spans


@dataclass(slots=True)
class Step:
    """One training step: from the end of the previous step to the end of the optimizer step."""

    index: int
    began_s: float
    ended_s: float  # 0.0: still open
    detail: bool = False  # memory and operations were recorded; times are meaningless


class MemoryPoint(NamedTuple):
    """Bytes held per category (in the order of CATEGORIES) from `when_s` on."""

    when_s: float
    step: int
    held_bytes: tuple[int, ...]


class Operation(NamedTuple):
    """One operation that a rank computed in the detailed step and finished at `when_s`."""

    when_s: float
    step: int
    name: str  # torch's name, such as "mm"
    dtype: str  # of the first floating-point tensor, such as "bfloat16"
    flops: int
    moved_bytes: int  # read and written
    sides: tuple[int, ...] = ()  # m, n, k of a matmul [m, k] x [k, n], batched or not


# Time fields per kind of record; all fields except the first may be 0.0, which means "not yet".
TIMES = {
    "steps": ("began_s", "ended_s"),
    "spans": ("began_s", "ended_s"),
    "comms": ("issued_s", "began_s", "ended_s", "wait_began_s", "wait_ended_s"),
    "memory": ("when_s",),
    "operations": ("when_s",),
}


@dataclass(slots=True)
class RankTrace:
    """The records of one rank."""

    rank: int  # global rank
    size: int  # world size
    device: str = "cpu"
    host: str = ""
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    comms: list[CommEvent] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    complete: bool = True  # False: the rank died, or the file was cut off
    alike: tuple[int, ...] = ()  # other global ranks that this record represents

    def timed_records(self) -> Iterator[Span | CommEvent | Step]:
        return chain(self.steps, self.spans, self.comms)

    def lists(self) -> tuple[list[Any], ...]:
        """The lists of records, in the order of TIMES."""
        return tuple(getattr(self, kind) for kind in TIMES)


class MessageKey(NamedTuple):
    """Identifies a message; a send and its receive have equal keys."""

    group: str
    source: int  # global ranks
    target: int
    tag: int
    seq: int


@dataclass
class Trace:
    """A recorded run. `about` has the contents of `run.json`; `metrics` has one dict per `metric`
    call on a rank, such as {"step": 3, "rank": 0, "loss": 2.1}."""

    ranks: dict[int, RankTrace] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The world size; a damaged trace may lack ranks."""
        return max((rank.size for rank in self.ranks.values()), default=0)

    @property
    def complete(self) -> bool:
        """Whether every rank is present and every record is complete."""
        return 0 < len(self.ranks) == self.size and all(r.complete for r in self.ranks.values())

    def steps(self, detail: bool | None = None) -> list[int]:
        """The step numbers: every step, only detailed steps (True), or only timed steps (False)."""
        every = (step for rank in self.ranks.values() for step in rank.steps)
        return sorted({s.index for s in every if detail is None or s.detail == detail})

    def step(self, index: int) -> "Trace":
        """Step `index` alone, beginning at 0 s. Raises ValueError if the step is missing."""
        if index not in self.steps():
            steps = self.steps()
            known = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
            raise ValueError(f"no step {index} in this trace; it has {known}")
        return self.only([index]).from_zero()

    def only(self, steps: Iterable[int]) -> "Trace":
        """A trace of the given steps only, with unchanged times."""
        chosen, ranks = set(steps), {}
        for number, rank in self.ranks.items():
            kept: dict[str, Any] = {
                kind: [x for x in getattr(rank, kind) if x.step in chosen]
                for kind in TIMES.keys() - {"steps"}
            }
            own = [x for x in rank.steps if x.index in chosen]
            ranks[number] = replace(rank, steps=own, **kept)
        return Trace(ranks, self.about, [x for x in self.metrics if x.get("step") in chosen])

    @property
    def record_of(self) -> dict[int, RankTrace]:
        """Global rank -> record of the rank or of its representative, in order of rank."""
        every = [(number, rank) for rank in self.ranks.values() for number in rank.alike]
        every += self.ranks.items()
        return dict(sorted(every, key=lambda x: x[0]))

    def expanded(self, ranks: Iterable[int] | None = None) -> "Trace":
        """The trace with a record for each of `ranks` (every rank by default). A represented rank
        gets its representative's record, with groups from `groups_like`; only `comms` is copied.
        Raises ValueError for a rank that is neither recorded nor represented."""
        record_of = self.record_of
        expanded: dict[int, RankTrace] = {}
        for number in record_of if ranks is None else ranks:
            if number not in record_of:
                raise ValueError(f"rank {number} is neither recorded nor represented in this trace")
            rank = record_of[number]
            comms = [as_seen_by(event, number, rank.size) for event in rank.comms]
            expanded[number] = replace(rank, rank=number, comms=comms, alike=())
        return replace(self, ranks=expanded)

    def from_zero(self) -> "Trace":
        """A copy whose earliest time is 0 s."""
        begins = (
            getattr(record, first)
            for rank in self.ranks.values()
            for (first, *_), records in zip(TIMES.values(), rank.lists())
            for record in records
        )
        zero_s = min(begins, default=0.0)
        ranks = {number: earlier(rank, zero_s) for number, rank in self.ranks.items()}
        return replace(self, ranks=ranks)

    def collectives(self) -> dict[tuple[str, int], dict[int, CommEvent]]:
        """(group, seq) -> global rank -> event."""
        collectives: dict[tuple[str, int], dict[int, CommEvent]] = {}
        for rank in self.ranks.values():
            for event in rank.comms:
                if event.op not in ("send", "recv"):
                    collectives.setdefault((event.group, event.seq), {})[rank.rank] = event
        return collectives

    def messages(self) -> dict[MessageKey, dict[str, CommEvent]]:
        """Message -> {"send": event, "recv": event}; an unrecorded end is absent."""
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


def earlier(rank: RankTrace, by_s: float) -> RankTrace:
    """Make all times earlier by `by_s`, except 0.0 ("not yet") in fields other than the first."""

    def moved(record: Any, names: tuple[str, ...]) -> Any:
        times = {name: getattr(record, name) for name in names}
        changes = {x: times[x] - by_s for x in names if times[x] or x == names[0]}
        return getattr(record, "_replace", partial(replace, record))(**changes)

    lists: dict[str, Any] = {
        kind: [moved(record, names) for record in getattr(rank, kind)]
        for kind, names in TIMES.items()
    }
    return replace(rank, **lists)


@cache
def groups_like(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Shifted copies of `ranks` that partition `size` ranks, as in a mesh; else `ranks` alone.

    (0, 1, 2, 3) of 8 ranks    also (4, 5, 6, 7)               neighbors
    (0, 4) of 8 ranks          also (1, 5)  (2, 6)  (3, 7)     one rank per node
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
    """The event as a represented `rank` would record it: in the corresponding group, with the peer
    at the same distance. The event is unchanged if `rank` is in no corresponding group."""
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
