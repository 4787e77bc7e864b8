"""The recorded run as a graph.

    Trace ── one RankTrace per rank
              steps    where each training step began and ended
              spans    computing: forward, backward and optimizer, by module
              comms    what went through the door (`labkit.events.CommEvent`)
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
from typing import Any, NamedTuple

from labkit.events import CommEvent
from labkit.trace.groups import as_seen_by

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "communication buffers",
    "other",
)
PHASES = (
    "forward",
    "backward",
    "input",  # in a pipeline, where backward is in two halves
    "weight",
    "update",  # in a pipeline: an optimizer's step for one micro-batch
    "optimizer",
    "user",
)


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

    def things(self) -> Iterator[Span | CommEvent | Step]:
        yield from self.steps
        yield from self.spans
        yield from self.comms


class MessageKey(NamedTuple):
    """What a send and its receive have in common."""

    group: str
    source: int  # global ranks
    target: int
    tag: int
    seq: int


@dataclass
class Trace:
    """A recorded run. `about` is what `run.json` says of it: what, where, versions, seeds.
    `metrics`: one dict for each note of a rank, {"step": 3, "rank": 0, "loss": 2.1}."""

    ranks: dict[int, RankTrace] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Ranks in the world (of which a damaged trace may miss some)."""
        return max((one.size for one in self.ranks.values()), default=0)

    @property
    def complete(self) -> bool:
        """Whether all ranks are there and none was cut off."""
        return 0 < len(self.ranks) == self.size and all(r.complete for r in self.ranks.values())

    def steps(self, detail: bool | None = None) -> list[int]:
        """Numbers of the steps; only the detailed or only the timed ones where asked."""
        every = (step for one in self.ranks.values() for step in one.steps)
        return sorted({s.index for s in every if detail is None or s.detail == detail})

    def step(self, index: int) -> "Trace":
        """Step `index` alone, beginning at 0 s. Raises ValueError when it is not there."""
        if index not in self.steps():
            raise ValueError(f"no step {index} in this trace; it has {_ranges(self.steps())}")
        return self.only([index]).from_zero()

    def only(self, steps: Iterable[int]) -> "Trace":
        """These steps alone, at the times that they have here."""
        chosen = set(steps)
        ranks = {
            number: replace(
                one,
                steps=[x for x in one.steps if x.index in chosen],
                spans=[x for x in one.spans if x.step in chosen],
                comms=[x for x in one.comms if x.step in chosen],
                memory=[x for x in one.memory if x.step in chosen],
                operations=[x for x in one.operations if x.step in chosen],
            )
            for number, one in self.ranks.items()
        }
        return Trace(ranks, self.about, [x for x in self.metrics if x.get("step") in chosen])

    @property
    def record_of(self) -> dict[int, RankTrace]:
        """Global rank -> its record, or that of the rank that does the same; in order."""
        every = [(number, one) for one in self.ranks.values() for number in one.alike]
        every += self.ranks.items()
        return dict(sorted(every, key=lambda x: x[0]))

    def expanded(self, ranks: Iterable[int] | None = None) -> "Trace":
        """With a record for each of `ranks` (all by default), those that do as another does among
        them, in groups that lie alike (`groups_like`): what they share is not copied.

        Raises ValueError for a rank of which nothing is known.
        """
        record_of = self.record_of
        found: dict[int, RankTrace] = {}
        for number in record_of if ranks is None else ranks:
            if number not in record_of:
                raise ValueError(f"rank {number} has no record in this trace, nor does one like it")
            found[number] = _as_rank(record_of[number], number)
        return replace(self, ranks=found)

    def from_zero(self) -> "Trace":
        """The same with its earliest time at 0 s; itself is left as it is."""
        zero_s = min((t for one in self.ranks.values() for t in _begins(one)), default=0.0)
        ranks = {number: earlier(one, zero_s) for number, one in self.ranks.items()}
        return replace(self, ranks=ranks)

    def collectives(self) -> dict[tuple[str, int], dict[int, CommEvent]]:
        """(group, seq) -> global rank -> its event."""
        found: dict[tuple[str, int], dict[int, CommEvent]] = {}
        for one in self.ranks.values():
            for event in one.comms:
                if event.op not in ("send", "recv"):
                    found.setdefault((event.group, event.seq), {})[one.rank] = event
        return found

    def messages(self) -> dict[MessageKey, dict[str, CommEvent]]:
        """Each message -> {"send": event, "recv": event}, one of them missing where it is not
        recorded."""
        found: dict[MessageKey, dict[str, CommEvent]] = {}
        for one in self.ranks.values():
            for event in one.comms:
                if event.op in ("send", "recv"):
                    assert event.peer is not None
                    ends = (one.rank, event.ranks[event.peer])
                    source, target = ends if event.op == "send" else ends[::-1]
                    key = MessageKey(event.group, source, target, event.tag, event.seq)
                    found.setdefault(key, {})[event.op] = event
        return found


def _as_rank(one: RankTrace, number: int) -> RankTrace:
    """The record of rank `number`, which does as `one` does."""
    comms = [as_seen_by(event, number, one.size) for event in one.comms]
    return replace(one, rank=number, comms=comms, alike=())


def _begins(one: RankTrace) -> Iterable[float]:
    for thing in one.things():
        yield thing.issued_s if isinstance(thing, CommEvent) else thing.began_s
    for point in one.memory[:1]:
        yield point.when_s


def earlier(one: RankTrace, by_s: float) -> RankTrace:
    """All times earlier by `by_s`; an end that is 0.0, "not yet", stays so."""

    def moved(thing: Any, begin: str, *others: str) -> Any:
        times = {name: getattr(thing, name) for name in others}
        changes = {name: time_s - by_s for name, time_s in times.items() if time_s}
        return replace(thing, **{begin: getattr(thing, begin) - by_s}, **changes)

    later = ("began_s", "ended_s", "wait_began_s", "wait_ended_s")
    return replace(
        one,
        steps=[moved(x, "began_s", "ended_s") for x in one.steps],
        spans=[moved(x, "began_s", "ended_s") for x in one.spans],
        comms=[moved(x, "issued_s", *later) for x in one.comms],
        memory=[x._replace(when_s=x.when_s - by_s) for x in one.memory],
        operations=[x._replace(when_s=x.when_s - by_s) for x in one.operations],
    )


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
