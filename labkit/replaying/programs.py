"""A recorded rank as a program for the virtual clock: what it computes, sends and waits for, in the
order in which it did, and the moments in between that the trace tells of.

    recorded   forward [ mm add mm ]  issue all-reduce  backward [ mm mm ]  wait  step
    program    Compute                Issue             Compute             Wait  Compute
                       ^ moments: forward began, ended, ...

Only the order of the record is used, and not its times; unless they are asked for ("measured"):
then what is between two moments took as long as it was long.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labkit.events import CommEvent
from labkit.replaying.engine import Compute, Issue, Timed, Wait
from labkit.trace import Operation, RankTrace, Span, Step


class Moment(NamedTuple):
    """The time of `field` of `thing`: so long after the beginning of a part of the program."""

    thing: Any
    field: str
    place: int
    after_s: float


@dataclass
class RankProgram:
    """The program of a rank, and the moments to be found in it."""

    parts: list[Compute | Issue | Wait] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)  # id(event) -> place of its Wait
    _pending_s: float = 0.0  # computed since the last Issue or Wait

    def compute(self, seconds: float) -> None:
        self._pending_s += seconds

    def moment(self, thing: Any, name: str) -> None:
        self.moments.append(Moment(thing, name, len(self.parts), self._pending_s))

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
        """id(thing) -> field -> seconds, of all moments, once the clock has run."""
        found: dict[int, dict[str, float]] = {}
        for moment in self.moments:
            at_s = timed[moment.place].began_s + moment.after_s
            found.setdefault(id(moment.thing), {})[moment.field] = at_s
        return found


def program_of(
    one: RankTrace,
    compute_s: Callable[[Operation], float] | None,
    issue_of: Callable[[RankTrace, CommEvent], Issue | None],
    wait_for: Callable[[RankTrace, CommEvent], Wait],
) -> RankProgram:
    """The program of one rank.

    Args:
        compute_s: what an operation takes; None: computing takes what it took when recorded.
        issue_of: the part of this rank in an operation; None for a receive, which only waits.
        wait_for: what this rank waits for when it waits for an operation.
    """
    program = RankProgram()
    measured = compute_s is None
    last_s, waiting = None, 0
    for when_s, _, what, thing in sorted(events_of(one), key=lambda x: x[:2]):
        if measured and last_s is not None and not waiting:
            program.compute(when_s - last_s)
        last_s = when_s
        match what:
            case "compute":
                if compute_s is not None:
                    program.compute(compute_s(thing))
            case "issue":
                program.moment(thing, "issued_s")
                if (part := issue_of(one, thing)) is not None:
                    program.issue(part)
            case "wait":
                program.wait(thing, wait_for(one, thing))
                waiting += 1
            case "waited":
                waiting -= 1
            case _:
                program.moment(thing, what)
    return program.finish()


# At the same moment, what ends comes before what begins, and an issue before the wait for it.
ORDER = {"compute": 0, "waited": 1, "ended_s": 2, "began_s": 3, "issue": 4, "wait": 5, "when_s": 6}


def events_of(one: RankTrace) -> Iterable[tuple[float, int, str, Any]]:
    """(when, order at that moment, what, of which)."""
    told: list[tuple[float, str, Any]] = []
    lasting: list[Step | Span] = [*one.steps, *one.spans]
    for thing in lasting:
        told.append((thing.began_s, "began_s", thing))
        if thing.ended_s:
            told.append((thing.ended_s, "ended_s", thing))
    for event in one.comms:
        told.append((event.issued_s, "issue", event))
        if event.wait_ended_s:
            told.append((event.wait_began_s, "wait", event))
            told.append((event.wait_ended_s, "waited", event))
    told += [(operation.when_s, "compute", operation) for operation in one.operations]
    told += [(point.when_s, "when_s", point) for point in one.memory]
    return [(when_s, ORDER[what], what, thing) for when_s, what, thing in told]
