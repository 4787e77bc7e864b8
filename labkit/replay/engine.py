"""The virtual clock: when does everything happen that these ranks do?

Each rank has a program, a list of three kinds of things, which it does in order:

    Compute   takes its seconds
    Issue     hands an operation to a port of this rank and goes on at once
    Wait      stands still until the operation is over

An operation begins when all its ranks have issued it and it is the first in the queue of its port
on each of them; it then holds those ports for its seconds, and is over some latency later. A port
is one wire out of a rank: what is handed to it leaves in that order, one after the other. A message
is an operation that only its sender issues; its receiver waits for it.

No time is drawn by lot and none is measured: each is a sum of given numbers and the latest of
others, so a replay is the same to the last digit, whichever rank is looked at first.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Compute:
    """Takes `seconds`. `what` is for whoever reads the result."""

    seconds: float
    what: Any = None


@dataclass(frozen=True)
class Issue:
    """One rank's part in operation `key`, of `ranks`: `seconds` on the wire of `port`, and
    `latency_s` more until it is over. All its ranks must say the same."""

    key: Hashable
    ranks: tuple[int, ...]
    seconds: float
    latency_s: float = 0.0
    port: str = ""


@dataclass(frozen=True)
class Wait:
    """Until operation `key` is over."""

    key: Hashable


Program = Sequence[Compute | Issue | Wait]


class Timed(NamedTuple):
    """When it was: of a Compute or a Wait from begin to end, of an Issue the operation itself,
    from the first byte on the wire to its end."""

    began_s: float
    ended_s: float


class Deadlock(ValueError):
    """No rank can go on. `cycle` are the ranks that wait for each other, in that order; empty
    where one waits for a rank that has come to its end."""

    def __init__(self, message: str, cycle: tuple[int, ...]):
        super().__init__(message)
        self.cycle = cycle


@dataclass
class _Operation:
    issue: Issue
    issued_s: dict[int, float]
    timed: Timed | None = None


class _Rank:
    def __init__(self, program: Program):
        self.program, self.place, self.now_s = program, 0, 0.0
        self.timed: list[Timed] = []
        self.queues: dict[str, deque[Hashable]] = {}  # of each port: issued and not yet over
        self.free_s: dict[str, float] = {}  # when what has left each port is out of it

    @property
    def awaited(self) -> Hashable:
        """The operation it stands before; None at its end."""
        thing = self.program[self.place] if self.place < len(self.program) else None
        return thing.key if isinstance(thing, Wait) else None


def run(programs: Mapping[int, Program]) -> dict[int, list[Timed]]:
    """When each thing of each rank's program happens, in seconds from the start.

    Raises ValueError for programs that do not fit together, and Deadlock, with the cycle, where
    ranks wait for each other.

    >>> message = Issue("activations", ranks=(0,), seconds=2.0, latency_s=0.5)
    >>> run({0: [Compute(1.0), message], 1: [Wait("activations"), Compute(1.0)]})[1][-1]
    Timed(began_s=3.5, ended_s=4.5)
    """
    return _Run(programs).timed()


class _Run:
    def __init__(self, programs: Mapping[int, Program]):
        self.ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self.operations: dict[Hashable, _Operation] = {}
        self.waiting: dict[Hashable, list[int]] = {}  # the ranks that stand before an operation

    def timed(self) -> dict[int, list[Timed]]:
        ready = deque(self.ranks)
        while ready:
            number = ready.popleft()
            for port in self.advance(number):
                ready.extend(self.begin_operations(number, port))
        stuck = [number for number, rank in self.ranks.items() if rank.place < len(rank.program)]
        if stuck:
            raise self.deadlock(stuck[0])
        for key, one in self.operations.items():
            if one.timed is None:
                _, because = self.who_is_missing(key)
                raise ValueError(f"operation {key!r} never begins: {because}")
        return {number: self.filled_in(rank) for number, rank in self.ranks.items()}

    def advance(self, number: int) -> dict[str, None]:
        """Go on until a wait that has no end yet; returns the ports that something went to."""
        rank, ports = self.ranks[number], dict[str, None]()
        while rank.place < len(rank.program):
            thing, began_s = rank.program[rank.place], rank.now_s
            match thing:
                case Compute():
                    if not thing.seconds >= 0:
                        raise ValueError(f"rank {number}: {thing} takes less than no time")
                    rank.now_s += thing.seconds
                case Issue():
                    one = self.operations.setdefault(thing.key, _Operation(thing, {}))
                    self.check(number, thing, one)
                    one.issued_s[number] = began_s
                    rank.queues.setdefault(thing.port, deque()).append(thing.key)
                    ports[thing.port] = None
                case Wait():
                    awaited = self.operations.get(thing.key)
                    if awaited is None or awaited.timed is None:
                        self.waiting.setdefault(thing.key, []).append(number)
                        break
                    rank.now_s = max(began_s, awaited.timed.ended_s)
            rank.timed.append(Timed(began_s, rank.now_s))
            rank.place += 1
        return ports

    def check(self, number: int, issue: Issue, operation: _Operation) -> None:
        """Raise ValueError where this rank's part does not fit to those of the others."""
        if operation.issue != issue:
            raise ValueError(f"rank {number} issues {issue}, and another rank {operation.issue}")
        if number not in issue.ranks:
            raise ValueError(f"rank {number} issues {issue}, and is not among its ranks")
        if strangers := [rank for rank in issue.ranks if rank not in self.ranks]:
            raise ValueError(f"rank {number} issues {issue}; rank {strangers[0]} is in no program")
        if number in operation.issued_s:
            raise ValueError(f"rank {number} issues {issue.key!r} twice; each needs its own key")
        if not (issue.seconds >= 0 and issue.latency_s >= 0):
            raise ValueError(f"rank {number}: {issue} takes less than no time")

    def begin_operations(self, number: int, port: str) -> list[int]:
        """Give a time to all that can begin now that something went to this port of this rank;
        returns the ranks that can go on."""
        awake: list[int] = []
        changed = deque([number])
        while changed:
            queue = self.ranks[changed.popleft()].queues.get(port)
            if not queue:
                continue
            one = self.operations[queue[0]]
            issue, members = one.issue, [self.ranks[rank] for rank in one.issue.ranks]
            if len(one.issued_s) < len(members):
                continue
            if any(rank.queues[port][0] != issue.key for rank in members):
                continue
            free_s = max(rank.free_s.get(port, 0.0) for rank in members)
            began_s = max(free_s, *one.issued_s.values())
            out_s = began_s + issue.seconds
            one.timed = Timed(began_s, out_s + issue.latency_s)
            for rank in members:
                rank.queues[port].popleft()
                rank.free_s[port] = out_s
            changed.extend(issue.ranks)
            awake += self.waiting.pop(issue.key, [])
        return awake

    def filled_in(self, rank: _Rank) -> list[Timed]:
        """Its times; an Issue has those of its operation."""
        found = []
        for thing, timed in zip(rank.program, rank.timed, strict=True):
            timed_there = self.operations[thing.key].timed if isinstance(thing, Issue) else timed
            assert timed_there is not None
            found.append(timed_there)
        return found

    # --- why nothing goes on ---

    def deadlock(self, stuck: int) -> Deadlock:
        """Follow from rank to rank what each waits for, until one comes a second time."""
        path: list[int] = []
        why: list[str] = []
        while True:
            path.append(stuck)
            key = self.ranks[stuck].awaited
            culprit, because = self.who_is_missing(key)
            why.append(f"rank {stuck} waits for {key!r}, {because}")
            if culprit is None or self.ranks[culprit].awaited is None:
                return Deadlock("; ".join(why), ())
            if culprit in path:
                first = path.index(culprit)
                return Deadlock("; ".join(why[first:]), tuple(path[first:]))
            stuck = culprit

    def who_is_missing(self, key: Hashable) -> tuple[int | None, str]:
        """The rank that keeps operation `key` from beginning, and in words how."""
        behind, said = {key}, ""
        while True:
            one = self.operations.get(key)
            if one is None:
                issuer = self.who_issues(key)
                if issuer is None:
                    return None, f"{said}which no rank issues"
                return issuer, f"{said}which rank {issuer} has yet to issue"
            for number in one.issue.ranks:
                if number not in one.issued_s:
                    return number, f"{said}which rank {number} has not issued"
            queues = [self.ranks[rank].queues[one.issue.port] for rank in one.issue.ranks]
            key = next(queue[0] for queue in queues if queue[0] != key)
            said += f"which stands behind {key!r} on a port, "
            if key in behind:
                return None, f"{said}and that behind it on another: ranks issue in different orders"
            behind.add(key)

    def who_issues(self, key: Hashable) -> int | None:
        """A rank in whose program it still stands."""
        for number, rank in self.ranks.items():
            for thing in rank.program[rank.place :]:
                if isinstance(thing, Issue) and thing.key == key:
                    return number
        return None
