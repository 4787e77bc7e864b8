"""Run a student's function on ranks, and explain its failures in one sentence."""

import atexit
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import labkit
from labkit.comm import Comm, listen
from labkit.course.findings import CheckFailed, fail, honest
from labkit.events import CommEvent
from labkit.labs import FOLDERS
from labkit.memory.peak import PeakMemory
from labkit.runtime.errors import RankError, RankInterrupt
from labkit.runtime.world import World
from labkit.trace.movement import Movement
from labkit.trace.recording import watch_collective

WAIT_S = 5.0  # longest wait for a rank that computes; deadlocks are detected at once
LIMIT_S = 20.0  # for a whole call
LIBRARIES = (Path(labkit.__file__).parent, Path(torch.__file__).parent, *FOLDERS.values())

_worlds: dict[int, World] = {}


@dataclass(frozen=True)
class Ran:
    """The record of a call on ranks; each field has one entry per rank."""

    values: list[Any]  # the values returned
    events: list[list[CommEvent]]  # the operations called on the Comm, in order
    peak_bytes: list[int]  # peak memory of the tensors created in the call

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends (`bus_bytes`: the same on every transport)."""
        return [sum(event.bus_bytes for event in events) for events in self.events]

    @property
    def wire_bytes(self) -> list[int]:
        """Bytes that each rank puts on the wire; in a broadcast, not every rank sends."""
        return [sum(event.wire_bytes for event in events) for events in self.events]

    @property
    def ops(self) -> list[list[str]]:
        """Names of the operations, such as ["send", "recv", "all_reduce"]."""
        return [[event.op.split("(")[0] for event in events] for events in self.events]


def run(size: int, play: Callable[..., Any], *args: Any) -> Ran:
    """Call `play(comm, *args)` on each of `size` ranks, on the CPU so that every machine gives the
    same verdict; the world is kept for the next check. Raises CheckFailed for an error on a rank, a
    hang, or ranks that call different collectives."""
    with _limited(size) as world:
        results = world.run(_one_rank, play, args)
    values, events, peaks = zip(*results)
    for rank, of_rank in enumerate(events):
        for event in of_rank:
            if not event.ended_s:
                world.restart()  # a message in flight must not reach the next check
                message = event.op in ("send", "recv")
                call = f"i{event.op}" if message else f"{event.op}(..., async_op=True)"
                raise CheckFailed(
                    f"rank {rank} returns before its {event.op} has completed.",
                    hint=f"{call} only starts the operation and returns a handle: call "
                    "handle.wait().",
                )
    return Ran(list(values), list(events), list(peaks))


@contextmanager
def _limited(size: int) -> Iterator[World]:
    """A world of `size` ranks, restarted after LIMIT_S. Raises CheckFailed instead of RankError."""
    world = _world(size)
    too_late = threading.Timer(LIMIT_S, world.restart)
    too_late.start()
    try:
        yield world
    except RankInterrupt:
        raise
    except RankError as error:
        if "the server that forks the ranks" in str(error):  # shared by all worlds
            close_worlds()
        raise check_failure(error) from None
    finally:
        too_late.cancel()
        too_late.join()


def warm(size: int, play: Callable[[], Any]) -> list[Any]:
    """Call `play()` on each rank without a time limit, for slow first calls; return all values."""
    return _world(size).run(play)


def first_backward() -> None:
    """Run a backward with a given gradient, because torch's first such backward imports modules."""
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward(x * 2, torch.ones(2))


def _one_rank(play: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[CommEvent], int]:
    comm = Comm()
    with listen() as events, PeakMemory() as memory:
        value = honest(play(comm, *args))
    return value, events, memory.peak_bytes


def close_worlds() -> None:
    """Close the worlds that are kept for later checks."""
    for size in list(_worlds):
        _worlds.pop(size).close()


def _world(size: int) -> World:
    if size not in _worlds:
        with redirect_stdout(io.StringIO()):  # hide what the world prints about its backend
            _worlds[size] = World(size, device="cpu", backend="gloo", timeout_s=WAIT_S)
        atexit.register(_worlds[size].close)
    return _worlds[size]


def check_failure(error: RankError) -> CheckFailed:
    """The CheckFailed that explains the error of a run."""
    lines = [line for line in str(error).splitlines() if "the next run" not in line]
    first, rest = lines[0], "\n".join(f"  {line}" for line in lines[1:])
    match error.kind:
        case "raised" if "NotImplementedError: your turn:" in first:
            stub = re.search(r"your turn: write (\w+)", first)
            name = f" of {stub[1]}" if stub else ""
            return CheckFailed(
                f"you left the stub{name}: the body is not written yet.",
                hint="Replace the line `raise NotImplementedError(...)`, then run its cell again.",
            )
        case "raised" | "stuck" if error.kind == "raised" or " raised " in first:
            return CheckFailed(f"{first}.", details=_last_lines(rest))
        case "stuck":
            hint = "Each receive needs its send, and all ranks must call every collective."
            calls = set(re.findall(r"rank \d+: waits in (\w+)", rest))
            if "wait for each other" in first and calls in ({"send"}, {"recv"}):
                hint = f"All of them wait in a {calls.pop()}: one must start with the other call."
            return CheckFailed(f"the ranks hang: {first}", details=rest, hint=hint)
        case "interrupted":
            return CheckFailed(
                f"the call did not return within {LIMIT_S:g} s.",
                hint="No rank waits for another: look for an endless loop.",
            )
    return CheckFailed(first, details=rest)


def _last_lines(trace: str) -> str:
    """The innermost line of student code in the first traceback of `trace`."""
    place = re.compile(r'^\s*(?:File "[^"]*"|Cell In\[\d+\]), line \d+, in .*')
    lines = re.split(r"\n *ranks? [\d, and]+ raised ", trace)[0].splitlines()
    shown: list[str] = []
    for i, line in enumerate(lines):
        library = any(f"{folder}{os.sep}" in line for folder in LIBRARIES)
        if place.match(line) and (not library or "wrong_answers.py" in line):  # a wrong answer
            shown = lines[i : i + 2]
    return "\n".join(f"  {line.strip()}" for line in shown)


def only(ran: Ran, ops: Collection[str], expected: str, hint: str = "") -> None:
    """Fail if a rank calls any operation not in `ops`."""
    for rank, called in enumerate(ran.ops):
        if others := [op for op in called if op not in ops]:
            fail(f"rank {rank} calls {others[0]}.", expected=expected, hint=hint)


def only_messages(ran: Ran, which: str = "send, recv, isend and irecv") -> None:
    """Fail if a rank calls any operation except send, recv, isend and irecv."""
    only(ran, ("send", "recv"), f"only {which}", "The collective is yours to build.")


def watch(size: int, collective: str, student: Callable[..., Any], root: int = 0) -> Movement:
    """Record how the student's function moves data on `size` ranks, step by step, within LIMIT_S.
    Raises CheckFailed for an error on a rank."""
    with _limited(size) as world:
        return watch_collective(world, collective, student, root)


def alone_for_each(student: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The values of a function for several argument tuples, from a single call of `alone`."""
    values: list[Any] = alone(lambda cases: [student(*given) for given in cases], cases)
    return values


def alone(student: Callable[..., Any], *given: Any) -> Any:
    """The value of a function that takes no Comm, run on one rank; errors do not name the rank."""
    try:
        return run(1, lambda comm, *given: student(*given), *given).values[0]
    except CheckFailed as failed:
        failed.sentence = failed.sentence.replace("rank 0 raised", "your function raised", 1)
        raise
