"""A recorded rank as a program for the virtual clock: what it computes, sends and waits for, in the
recorded order, with the moments in between at which spans and steps begin and end.

    recorded   forward [ mm add mm ]  issue all-reduce  backward [ mm mm ]  wait  step
    program    Compute                Issue             Compute             Wait  Compute
                       ^ moments: forward began, ended, ...

Only the order of the record is used, unless its times are asked for ("measured"): then the time
between two moments is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Timed, Wait
from labkit.trace import Operation, RankTrace, Span, Step


class Moment(NamedTuple):
    """The time of `field` of `record`: `after_s` after the begin of an instruction."""

    record: Any
    field: str
    place: int
    after_s: float


@dataclass
class RankProgram:
    """The program of a rank, and the moments in it."""

    parts: list[Compute | Issue | Wait] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)  # id(event) -> place of its Wait
    _pending_s: float = 0.0  # computed since the last Issue or Wait

    def compute(self, seconds: float) -> None:
        self._pending_s += seconds

    def moment(self, record: Any, name: str) -> None:
        self.moments.append(Moment(record, name, len(self.parts), self._pending_s))

    def issue(self, part: Issue) -> None:
        self._close()
        self.parts.append(part)

    def wait(self, event: CommEvent, part: Wait) -> None:
        self._close()
        self.waits[id(event)] = len(self.parts)
        self.parts.append(part)

    def finish(self) -> "RankProgram":
        self._close()
        return self

    def _close(self) -> None:
        self.parts.append(Compute(self._pending_s))
        self._pending_s = 0.0

    def times(self, timed: list[Timed]) -> dict[int, dict[str, float]]:
        """id(record) -> field -> seconds, of all moments, once the clock has run."""
        times: dict[int, dict[str, float]] = {}
        for moment in self.moments:
            at_s = timed[moment.place].began_s + moment.after_s
            times.setdefault(id(moment.record), {})[moment.field] = at_s
        return times


def program_of(
    one: RankTrace,
    compute_s: Callable[[Operation], float] | None,
    issue_of: Callable[[RankTrace, CommEvent], Issue | None],
    wait_for: Callable[[RankTrace, CommEvent], Wait],
) -> RankProgram:
    """The program of one rank.

    Args:
        compute_s: seconds of an operation; None: computing takes the recorded time.
        issue_of: the part of this rank in an operation; None for a receive, which only waits.
        wait_for: the wait of this rank for an operation.
    """
    program = RankProgram()
    measured = compute_s is None
    last_s, waiting = None, 0
    for when_s, _, kind, record in sorted(events_of(one), key=lambda x: x[:2]):
        if measured and last_s is not None and not waiting:
            program.compute(when_s - last_s)
        last_s = when_s
        match kind:
            case "compute":
                if compute_s is not None:
                    program.compute(compute_s(record))
            case "issue":
                program.moment(record, "issued_s")
                if (part := issue_of(one, record)) is not None:
                    program.issue(part)
            case "wait":
                program.wait(record, wait_for(one, record))
                waiting += 1
            case "waited":
                waiting -= 1
            case field_name:
                program.moment(record, field_name)
    return program.finish()


# At the same moment, ends come before begins, and an issue before the wait for it.
ORDER = {"compute": 0, "waited": 1, "ended_s": 2, "began_s": 3, "issue": 4, "wait": 5, "when_s": 6}


def events_of(one: RankTrace) -> Iterable[tuple[float, int, str, Any]]:
    """(when, order at that moment, kind, record)."""
    events: list[tuple[float, str, Any]] = []
    intervals: list[Step | Span] = [*one.steps, *one.spans]
    for interval in intervals:
        events.append((interval.began_s, "began_s", interval))
        if interval.ended_s:
            events.append((interval.ended_s, "ended_s", interval))
    for event in one.comms:
        events.append((event.issued_s, "issue", event))
        if event.wait_ended_s:
            events.append((event.wait_began_s, "wait", event))
            events.append((event.wait_ended_s, "waited", event))
    events += [(operation.when_s, "compute", operation) for operation in one.operations]
    events += [(point.when_s, "when_s", point) for point in one.memory]
    return [(when_s, ORDER[kind], kind, record) for when_s, kind, record in events]
