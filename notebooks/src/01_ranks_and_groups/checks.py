"""Checks of lab 01, "Ranks and groups"."""

import copy
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from labkit.comm import Mesh
from labkit.comm.mesh import coordinates, lines
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import CheckFailed, brief, equal, fail, kind, several
from labkit.course.ranks import WAIT_S, Ran, run
from labkit.runtime.plain import file_store

from . import scenarios

ON_RANKS = ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 3}, {"dp": 3, "tp": 2})
LARGE = {"pp": 16, "dp": 8, "tp": 8}
CALLS = 4  # to the store, allowed per rank and barrier: two are enough
LATE_S = 0.1
LOOP_S = 2 * WAIT_S  # a barrier that still polls the store after this never ends


def _answers(student: Student, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Values of a function without a Comm, called on a rank, where its errors are reported."""
    return run(1, lambda comm: [student(*copy.deepcopy(args)) for args in calls]).values[0]


@exercise(points=2)
def where(student: Student) -> Iterator[str]:
    """where(rank, sizes): the rank's index on each axis, as {"dp": 1, "tp": 0}."""
    for sizes in ON_RANKS:
        ran = run(prod(sizes.values()), _where_on_a_mesh, student, sizes)
        for rank, (found, right) in enumerate(ran.values):
            _same_place(found, right, rank, sizes)
    yield "the same coordinates as a Mesh, on 4 and 6 ranks"
    every = range(prod(LARGE.values()))
    for rank, found in enumerate(_answers(student, [(rank, LARGE) for rank in every])):
        _same_place(found, coordinates(LARGE, rank), rank, LARGE)
    yield "all 1,024 ranks of pp=16, dp=8, tp=8"


def _where_on_a_mesh(comm: Any, student: Student, sizes: dict[str, int]) -> tuple[Any, Any]:
    return student(comm.rank, dict(sizes)), Mesh(comm, **sizes).coordinates()


def _same_place(found: Any, right: dict[str, int], rank: int, sizes: dict[str, int]) -> None:
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if not isinstance(found, dict):
        fail(f"where({rank}, ...) returned {kind(found)}.", expected=right)
    if found != right:
        fail(
            f"rank {rank} of a mesh {axes} is not at {found}.",
            expected=right,
            hint="The last axis varies fastest: start with it, and continue with the quotient.",
        )


@exercise(points=2)
def groups_along(student: Student) -> Iterator[str]:
    """groups_along(axis, sizes): the ranks of each group along an axis, as a list of lists."""
    for sizes in ON_RANKS:
        size = prod(sizes.values())
        for axis in sizes:
            (found,), right = _answers(student, [(axis, sizes)]), list(lines(sizes, axis))
            _same_groups(found, right, axis, sizes)
            ran = run(size, _sums_in_groups, found)
            sums = [sum(line) for rank in range(size) for line in right if rank in line]
            equal(ran.values, sums, what=f"sums up in its {axis} group")
    yield "groups created on 4 and 6 ranks, for each axis, with an all-reduce in each"
    for axis, found in zip(LARGE, _answers(student, [(axis, LARGE) for axis in LARGE])):
        _same_groups(found, list(lines(LARGE, axis)), axis, LARGE)
    yield "the groups of 1,024 ranks"


def _same_groups(found: Any, right: list[list[int]], axis: str, sizes: dict[str, int]) -> None:
    call = f"groups_along({axis!r}, {sizes})"
    if not isinstance(found, (list, tuple)) or not all(isinstance(x, (list, tuple)) for x in found):
        fail(f"{call} returned {brief(found)}.", expected="a list of lists of ranks")
    groups = [list(group) for group in found]
    ranks = [rank for group in groups for rank in group]
    if sorted(ranks) != list(range(prod(sizes.values()))):
        fail(
            f"{call}: the groups do not hold each rank once.",
            expected=f"ranks 0 to {prod(sizes.values()) - 1}, each in one group",
            found=brief(groups),
        )
    if len(groups) != len(right):
        fail(f"{call} has {len(groups)} groups.", expected=f"{len(right)} of {sizes[axis]} ranks")
    for group in groups:
        if group not in right:
            fail(
                f"{call} has a group {brief(group)}.",
                expected=f"{next(line for line in right if group[0] in line)} for rank {group[0]}",
                hint="The ranks of a group differ only on this axis; list them in ascending order.",
            )


def _sums_in_groups(comm: Any, groups: list[list[int]]) -> float:
    """Make all groups, in the same order on every rank; sum the ranks of this rank's group."""
    own = [comm.subgroup(group) for group in groups]
    x = torch.tensor([float(comm.rank)])
    next(one for one in own if one is not None).all_reduce(x)
    return x.item()


@exercise(points=2)
def my_barrier(student: Student) -> Iterator[str]:
    """my_barrier(store, rank, size, name): returns when all ranks have called it."""
    for size in (2, 4):
        for late in range(size):
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "store")
                ran = _run(STORE_HINTS, size, _meet_twice, student, path, late)
            for rank, (arrived, calls) in enumerate(ran.values):
                _all_had_come(arrived, rank, size, late)
                if max(calls) > CALLS:
                    fail(
                        f"rank {rank} calls the store {max(calls)} times in one barrier.",
                        expected=f"at most {CALLS}",
                        hint="A polling loop keeps the store busy; store.wait sleeps.",
                    )
    yield "no rank leaves before the last one has arrived, whichever it is, on 2 and 4 ranks"
    yield "a second barrier works, too"


def _all_had_come(arrived: list[int], rank: int, size: int, late: int) -> None:
    for number, (count, name) in enumerate(zip(arrived, ("first", "second")), 1):
        if count < number * size:
            fail(
                f"rank {rank} leaves the {name} barrier when {count - (number - 1) * size} of "
                f"{size} ranks have come.",
                expected=f"that it waits for rank {late}, which is late here",
                hint="The store never forgets: do both barriers use the same keys?"
                if number == 2
                else "Which rank can know that all have arrived, and how do the others find out?",
            )


class Counted:
    """A store that counts its calls and explains errors in terms a student knows."""

    def __init__(self, store: Any):
        self._store, self.calls, self._since_s = store, 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        if time.monotonic() - self._since_s > LOOP_S:
            raise RuntimeError(f"a loop asked the store {self.calls:,} times and did not end")
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if not isinstance(value, (str, bytes)):
            raise TypeError(
                f"store.set({key!r}, {value!r}): the value is {kind(value)}, not a text"
            )
        self.__getattr__("set")(key, value)

    def get(self, key: str) -> bytes:
        return self._patient("get", key, [key])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._patient("wait", keys, list(keys), *timeout)

    def _patient(self, call: str, argument: Any, keys: list[str], *more: Any) -> Any:
        try:
            return self.__getattr__(call)(argument, *more)
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            missing = ", ".join(repr(key) for key in keys if not self._store.check([key]))
            text = f"store.{call} waited {WAIT_S:g} s for {missing}, which no rank has set"
            raise RuntimeError(text) from None


STORE_HINTS = {
    "a loop asked the store": "store.get returns bytes, b'4', which never equal the number 4; and "
    "store.wait sleeps where a loop would ask again.",
    "not a text": "The value is a text, as in store.set(key, 'yes'). Numbers are for store.add.",
    "which no rank has set": "Which rank sets this key, and does it reach that line?",
}
IN_PLACE_HINTS = {
    "'NoneType'": "comm.all_reduce works in place and returns None: look into the tensor after it.",
    "the ranks disagree": "In a round all ranks sum tensors alike. A batch has one dimension, "
    "shape [1], and is float32.",
}


def _run(hints: dict[str, str], *args: Any) -> Ran:
    """As `run`; an error that contains a key of `hints` gets that hint."""
    try:
        return run(*args)
    except CheckFailed as failed:
        found = [hint for words, hint in hints.items() if words in failed.sentence]
        failed.hint = failed.hint or "".join(found[:1])
        raise


def _meet_twice(comm: Any, student: Student, path: str, late: int) -> tuple[list[int], list[int]]:
    """How many ranks had arrived when this one left each barrier, and its calls to the store."""
    register = file_store(path + ".register", WAIT_S)
    arrived, calls = [], []
    for name in ("one", "two"):
        store = Counted(file_store(path, WAIT_S))
        if comm.rank == late:
            time.sleep(LATE_S)
        register.add("arrived", 1)
        student(store, comm.rank, comm.size, name)
        arrived.append(register.add("arrived", 0))
        calls.append(store.calls)
        comm.barrier()  # all ranks read the register before any goes on
    return arrived, calls


@exercise(points=3)
def totals(student: Student) -> Iterator[str]:
    """totals(comm, batches): the sum over all ranks of each round's batch, on every rank."""
    for counts in ([2, 2], [3, 1], [1, 3, 2, 0]):
        every = [[float(10**rank * (i + 1)) for i in range(n)] for rank, n in enumerate(counts)]
        rounds = [sum(its[i] for its in every if i < len(its)) for i in range(max(counts))]
        ran = _run(IN_PLACE_HINTS, len(counts), _play_batches, student, every)
        hint = "A rank that has run out of batches still takes part: what does it add?"
        equal(ran.values, [rounds] * len(counts), hint=hint)
        for rank, ops in enumerate(ran.ops):
            if len(ops) > max(counts) + 1:
                fail(
                    f"rank {rank} calls {len(ops)} operations for {max(counts)} rounds.",
                    expected="one to agree on the number of rounds, and one per round",
                )
    yield "the totals on every rank, also if one rank has more batches and one has none"
    yield "one operation per round, and one to agree on their number"


def _play_batches(comm: Any, student: Student, every: list[list[float]]) -> Any:
    found = student(comm, [torch.tensor([x]) for x in every[comm.rank]])
    return [float(x) for x in found] if isinstance(found, (list, tuple)) else found


@exercise(points=3)
def place(student: Student) -> Iterator[str | Score]:
    """place(rank): the (dp, pp, tp) of each of 12 ranks on 3 nodes; few bytes between nodes."""
    places = _answers(student, [(rank,) for rank in range(scenarios.RANKS)])
    for rank, found in enumerate(places):
        several(found, 3, f"place({rank}) returned", "(dp, pp, tp)")
        if not all(i in range(n) for i, n in zip(found, scenarios.SIZES.values())):
            fail(
                f"place({rank}) is {tuple(found)}, which is outside the mesh.",
                expected=", ".join(f"{axis} 0 to {n - 1}" for axis, n in scenarios.SIZES.items()),
            )
    taken = [tuple(found) for found in places]
    for rank, found in enumerate(taken):
        if (first := taken.index(found)) < rank:
            fail(f"ranks {first} and {rank} are both at {found}.", expected="each place once")
    ran = run(scenarios.RANKS, scenarios.one_step, taken)
    crossing = scenarios.between_nodes(ran.events)
    if crossing > scenarios.WORST_ALLOWED:
        fail(
            f"{crossing:,} bytes cross between nodes.",
            expected=f"at most {scenarios.WORST_ALLOWED:,}",
            hint="Which axis sends the most bytes? Its ranks belong on one node.",
        )
    yield "each of the 12 places taken once; a step's messages sent on 12 real ranks"
    if crossing == scenarios.BEST:
        yield "none of all 5,775 ways to share the ranks out sends fewer: nobody can do better"
    yield Score(crossing, scenarios.BEST, "bytes between nodes")
