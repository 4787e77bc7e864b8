"""A recorded rank as a program for the virtual clock: what it computes, sends and waits for, in the
recorded order, with the moments in between at which spans and steps begin and end.

    recorded   forward [ mm add mm ]  issue all-reduce  backward [ mm mm ]  wait  step
    program    Compute                Issue             Compute             Wait  Compute
                       ^ moments: forward began, ended, ...
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Wait
from labkit.trace import RankTrace, Span, Step


@dataclass
class RankProgram:
    """The program of a rank. `moments`: (id(record), name of its field) -> the place of an
    instruction, and the seconds after it began."""

    parts: list[Compute | Issue | Wait] = field(default_factory=list)
    moments: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)  # id(event) -> place of its Wait
    computed_s: float = 0.0  # since the last Issue or Wait

    def add_moment(self, record: Any, name: str) -> None:
        self.moments[id(record), name] = len(self.parts), self.computed_s

    def add(self, *parts: Issue | Wait) -> None:
        """What was computed so far, then this."""
        self.parts += [Compute(self.computed_s), *parts]
        self.computed_s = 0.0

    def add_wait(self, event: CommEvent, wait: Wait) -> None:
        self.add(wait)
        self.waits[id(event)] = len(self.parts) - 1


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
