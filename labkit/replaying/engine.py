"""The virtual clock: one program per rank, and the time at which each instruction runs.

    Compute   computes for `seconds`
    Issue     queues an operation on one of this rank's ports and continues immediately
    Wait      blocks until the operation has ended

An operation begins once all its ranks have issued it and it heads the port's queue on each of them.
It occupies those ports for `seconds` and ends `latency_s` later. A port is one outgoing link of a
rank; it transfers one operation at a time, in the order of issue.

Only the sender issues a message, whether or not the receiver is ready; the receiver executes a
Wait. If both must be ready, as for an NCCL send, both issue it: `ranks=(sender, receiver)`.

Times are sums and maxima of the inputs, so they do not depend on the simulation order of the ranks.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Compute:
    """Computes for `seconds`. `what` is a label that the simulation ignores."""

    seconds: float
    what: Any = None


@dataclass(frozen=True)
class Issue:
    """Issues operation `key`, which occupies `port` for `seconds` and ends `latency_s` later. Every
    rank in `ranks` must issue an equal `Issue`."""

    key: Hashable
    ranks: tuple[int, ...]
    seconds: float
    latency_s: float = 0.0
    port: str = ""


@dataclass(frozen=True)
class Wait:
    """Blocks until operation `key` has ended."""

    key: Hashable


Program = Sequence[Compute | Issue | Wait]


class Timed(NamedTuple):
    """Begin and end times of an instruction; for an Issue, of its transfer, including latency."""

    began_s: float
    ended_s: float


class Deadlock(ValueError):
    """Raised if ranks are stuck. `cycle`: ranks in a circular wait; () if an Issue is missing."""

    def __init__(self, message: str, cycle: tuple[int, ...]):
        super().__init__(message)
        self.cycle = cycle


class _Operation:
    def __init__(self, issue: Issue, members: dict[int, "_Rank"]):
        self.issue, self.members = issue, members
        self.issued_s: dict[int, float] = {}
        self.first = 0  # number of ranks on which this operation heads the queue
        self.timed: Timed | None = None

    @property
    def can_begin(self) -> bool:
        return self.first == len(self.members)


class _Rank:
    def __init__(self, program: Program):
        self.program, self.place, self.now_s = program, 0, 0.0
        self.timed: list[Timed] = []
        self.queues: dict[str, deque[_Operation]] = {}  # per port: issued, but not yet begun
        self.free_s: dict[str, float] = {}  # per port: when it becomes free

    @property
    def at_end(self) -> bool:
        return self.place == len(self.program)


def run(programs: Mapping[int, Program]) -> dict[int, list[Timed]]:
    """Return when each rank runs each instruction, in seconds from the start. Raises ValueError for
    contradictory programs, and Deadlock if ranks wait for each other or for a missing Issue.

    >>> message = Issue("activations", ranks=(0,), seconds=2.0, latency_s=0.5)
    >>> run({0: [Compute(1.0), message], 1: [Wait("activations"), Compute(1.0)]})[1][-1]
    Timed(began_s=3.5, ended_s=4.5)
    """
    return _Run(programs).timed()


class _Run:
    def __init__(self, programs: Mapping[int, Program]):
        self.ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self.operations: dict[Hashable, _Operation] = {}
        self.waiting: dict[Hashable, list[int]] = {}  # key -> ranks blocked on the operation

    def timed(self) -> dict[int, list[Timed]]:
        ready = deque(self.ranks)
        while ready:
            for operation in self.advance(ready.popleft()):
                ready.extend(self.begin(operation))
        times = {key: x.timed for key, x in self.operations.items() if x.timed is not None}
        at_end = all(rank.at_end for rank in self.ranks.values())
        if not at_end or len(times) < len(self.operations):
            raise _DeadlockFinder(self.ranks, self.operations).deadlock()
        for rank in self.ranks.values():
            for place, part in enumerate(rank.program):
                if isinstance(part, Issue):
                    rank.timed[place] = times[part.key]
        return {number: rank.timed for number, rank in self.ranks.items()}

    def advance(self, number: int) -> list[_Operation]:
        """Run rank `number` until it blocks or ends; return the operations that can begin now."""
        rank, can_begin = self.ranks[number], []
        while not rank.at_end:
            part, began_s = rank.program[rank.place], rank.now_s
            match part:
                case Compute():
                    if not part.seconds >= 0:
                        raise ValueError(f"rank {number}: {part} has a negative time")
                    rank.now_s += part.seconds
                case Issue():
                    operation = self.operation_of(number, part)
                    operation.issued_s[number] = began_s
                    queue = rank.queues.setdefault(part.port, deque())
                    queue.append(operation)
                    operation.first += len(queue) == 1
                    if operation.can_begin:
                        can_begin.append(operation)
                case Wait():
                    awaited = self.operations.get(part.key)
                    if awaited is None or awaited.timed is None:
                        self.waiting.setdefault(part.key, []).append(number)
                        break
                    rank.now_s = max(began_s, awaited.timed.ended_s)
                case _:
                    raise ValueError(
                        f"rank {number}: the program contains {part!r}; use Compute, Issue or Wait"
                    )
            rank.timed.append(Timed(began_s, rank.now_s))
            rank.place += 1
        return can_begin

    def operation_of(self, number: int, issue: Issue) -> _Operation:
        """Return the issued operation. Raises ValueError if ranks issue it inconsistently."""
        if issue.key not in self.operations:
            unknown = [rank for rank in issue.ranks if rank not in self.ranks]
            if unknown:
                raise ValueError(f"rank {number}: {issue}, but rank {unknown[0]} has no program")
            if len(set(issue.ranks)) < len(issue.ranks):
                raise ValueError(f"rank {number}: {issue} names a rank twice")
            if not (issue.seconds >= 0 and issue.latency_s >= 0):
                raise ValueError(f"rank {number}: {issue} has a negative time")
            members = {rank: self.ranks[rank] for rank in issue.ranks}
            self.operations[issue.key] = _Operation(issue, members)
        operation = self.operations[issue.key]
        if operation.issue != issue:
            raise ValueError(f"rank {number} issues {issue}, but others issue {operation.issue}")
        if number not in operation.members:
            raise ValueError(f"rank {number} issues {issue}, but is not one of its ranks")
        if number in operation.issued_s:
            raise ValueError(f"rank {number} issues {issue.key!r} twice; use a new key each time")
        return operation

    def begin(self, operation: _Operation) -> list[int]:
        """Time this operation and queued operations that can then begin; return ranks to wake."""
        awake: list[int] = []
        beginning = deque([operation])
        while beginning:
            operation = beginning.popleft()
            issue, members = operation.issue, operation.members.values()
            free_s = max(rank.free_s.get(issue.port, 0.0) for rank in members)
            began_s = max(free_s, *operation.issued_s.values())
            out_s = began_s + issue.seconds
            operation.timed = Timed(began_s, out_s + issue.latency_s)
            for rank in members:
                rank.free_s[issue.port] = out_s
                queue = rank.queues[issue.port]
                queue.popleft()
                if queue:
                    queue[0].first += 1
                    if queue[0].can_begin:
                        beginning.append(queue[0])
            awake += self.waiting.pop(issue.key, [])
        return awake


class _DeadlockFinder:
    """Follows the chain of waits until it finds a cycle or a missing Issue."""

    def __init__(self, ranks: dict[int, _Rank], operations: dict[Hashable, _Operation]):
        self.ranks, self.operations = ranks, operations
        self.to_issue = {  # per rank: keys of the Issues in the rest of the program
            number: {part.key for part in rank.program[rank.place :] if isinstance(part, Issue)}
            for number, rank in ranks.items()
        }
        self.issuer = {key: number for number, keys in self.to_issue.items() for key in keys}

    def deadlock(self) -> Deadlock:
        waiting = [number for number, rank in self.ranks.items() if not rank.at_end]
        starts = [(number, "waits for", self.awaited(number)) for number in waiting]
        for key, operation in self.operations.items():
            if operation.timed is None:
                starts.append((next(iter(operation.issued_s)), "has issued", key))
        deadlocks, known = [], set[Hashable]()
        for number, does, key in starts:
            if key not in known:
                deadlocks.append(self.follow(number, f"rank {number} {does} {key!r}", key, known))
        return next((x for x in deadlocks if x.cycle), deadlocks[0])

    def awaited(self, number: int) -> Hashable:
        return self.ranks[number].program[self.ranks[number].place].key  # type: ignore[union-attr]

    def follow(self, number: int, subject: str, key: Hashable, known: set[Hashable]) -> Deadlock:
        """Follow the waits from operation `key`, which rank `number` awaits or has issued."""
        steps: dict[Hashable, tuple[int, str]] = {}  # operation -> the rank it blocks, the reason
        while key not in steps:
            known.add(key)
            operation, culprit = self.operations.get(key), self.issuer.get(key)
            if operation is not None:
                issued = operation.issued_s
                culprit = next((rank for rank in operation.members if rank not in issued), None)
            if operation is not None and culprit is None:  # issued on every rank, but still queued
                port, members = operation.issue.port, operation.members.items()
                first = {rank: member.queues[port][0] for rank, member in members}
                number = next(rank for rank in first if first[rank] is not operation)
                before = first[number].issue.key
                steps[key] = number, f"{subject}, which on rank {number} is queued after {before!r}"
                key, subject = before, f"rank {number} must first run {before!r}"
            elif culprit is None or key not in self.to_issue[culprit]:
                never = "no rank issues" if culprit is None else f"rank {culprit} never issues"
                steps[key] = number, f"{subject}, which {never}"
                return Deadlock(_explain(steps), ())
            else:
                steps[key] = number, f"{subject}, which rank {culprit} has yet to issue"
                number, key = culprit, self.awaited(culprit)
                subject = f"rank {number} waits for {key!r}"
        keys = list(steps)
        cycle = {blocked: steps[blocked] for blocked in keys[keys.index(key) :]}
        ranks = tuple(dict.fromkeys(number for number, _ in cycle.values()))
        return Deadlock(_explain(cycle), ranks)


def _explain(steps: Mapping[Hashable, tuple[int, str]]) -> str:
    """The steps as text; a long list is abbreviated to its first four and last two steps."""
    words = [why for _, why in steps.values()]
    if len(words) > 8:
        words = [*words[:4], f"... ({len(words) - 6} more)", *words[-2:]]
    return "; ".join(words)
