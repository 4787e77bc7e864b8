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

SMALL_MESHES = ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 3}, {"dp": 3, "tp": 2})
LARGE_MESH = {"pp": 16, "dp": 8, "tp": 8}
MOST_CALLS = 4  # the limit for calls to the store, per rank and barrier; two are enough
LATE_S = 0.1
LOOP_S = 2 * WAIT_S  # a barrier that still polls the store after this time counts as endless


def _results(student: Student, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Results of a function without a Comm argument, run on a rank so that errors are reported."""
    return run(1, lambda comm: [student(*copy.deepcopy(args)) for args in calls]).values[0]


@exercise(points=2)
def where(student: Student) -> Iterator[str]:
    """where(rank, sizes): the rank's index on each axis, as {"dp": 1, "tp": 0}."""
    for sizes in SMALL_MESHES:
        ran = run(prod(sizes.values()), _where_on_a_rank, student, sizes)
        for rank, (returned, expected) in enumerate(ran.values):
            _same_place(returned, expected, rank, sizes)
    yield "the same coordinates as a Mesh, on 4 and 6 ranks"
    ranks = range(prod(LARGE_MESH.values()))
    for rank, returned in enumerate(_results(student, [(rank, LARGE_MESH) for rank in ranks])):
        _same_place(returned, coordinates(LARGE_MESH, rank), rank, LARGE_MESH)
    yield "the coordinates of all 1,024 ranks of pp=16, dp=8, tp=8"


def _where_on_a_rank(comm: Any, student: Student, sizes: dict[str, int]) -> tuple[Any, Any]:
    return student(comm.rank, dict(sizes)), Mesh(comm, **sizes).coordinates()


def _same_place(returned: Any, expected: dict[str, int], rank: int, sizes: dict[str, int]) -> None:
    if not isinstance(returned, dict):
        fail(f"where({rank}, {sizes}) returned {kind(returned)}.", expected=expected)
    if returned != expected:
        fail(
            f"where({rank}, {sizes}) returned {returned}.",
            expected=expected,
            hint="The last axis varies fastest: start there, and continue with the quotient.",
        )


@exercise(points=2)
def groups_along(student: Student) -> Iterator[str]:
    """groups_along(axis, sizes): the ranks of each group along an axis, as a list of lists."""
    for sizes in SMALL_MESHES:
        size = prod(sizes.values())
        for axis in sizes:
            (returned,), expected = _results(student, [(axis, sizes)]), list(lines(sizes, axis))
            _same_groups(returned, expected, axis, sizes)
            ran = run(size, _sums_in_groups, returned)
            sums = [sum(line) for rank in range(size) for line in expected if rank in line]
            equal(ran.values, sums, what=f"gets, in its {axis} group, a sum of")
    yield "the right sum from an all-reduce in each group along each axis, on 4 and 6 ranks"
    for axis, returned in zip(
        LARGE_MESH, _results(student, [(axis, LARGE_MESH) for axis in LARGE_MESH])
    ):
        _same_groups(returned, list(lines(LARGE_MESH, axis)), axis, LARGE_MESH)
    yield "the groups of 1,024 ranks along each axis"


def _same_groups(
    returned: Any, expected: list[list[int]], axis: str, sizes: dict[str, int]
) -> None:
    call = f"groups_along({axis!r}, {sizes})"
    if not isinstance(returned, (list, tuple)) or not all(
        isinstance(x, (list, tuple)) for x in returned
    ):
        fail(f"{call} returned {brief(returned)}.", expected="a list of lists of ranks")
    groups = [list(group) for group in returned]
    ranks = [rank for group in groups for rank in group]
    if sorted(ranks) != list(range(prod(sizes.values()))):
        fail(
            f"{call}: not every rank is in exactly one group.",
            expected=f"ranks 0 to {prod(sizes.values()) - 1}, each in one group",
            found=brief(groups),
        )
    if len(groups) != len(expected):
        fail(
            f"{call} returned {len(groups)} groups.",
            expected=f"{len(expected)} groups of {sizes[axis]} ranks",
        )
    for group in groups:
        if group not in expected:
            fail(
                f"{call} returned the group {brief(group)}.",
                expected=f"{next(line for line in expected if group[0] in line)} for rank "
                f"{group[0]}",
                hint="The ranks of a group differ only on this axis; list them in ascending order.",
            )


def _sums_in_groups(comm: Any, groups: list[list[int]]) -> float:
    """Create all groups, in the same order on every rank; sum the ranks of this rank's group."""
    own_groups = [comm.subgroup(group) for group in groups]
    x = torch.tensor([float(comm.rank)])
    next(group for group in own_groups if group is not None).all_reduce(x)
    return x.item()


@exercise(points=2)
def my_barrier(student: Student) -> Iterator[str]:
    """my_barrier(store, rank, size, name): returns when all ranks have called it."""
    for size in (2, 4):
        for late in range(size):
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "store")
                ran = _run_with_hints(STORE_HINTS, size, _two_barriers, student, path, late)
            for rank, (arrived, calls) in enumerate(ran.values):
                _waited_for_all(arrived, rank, size, late)
                if max(calls) > MOST_CALLS:
                    fail(
                        f"rank {rank} calls the store {max(calls)} times in one barrier.",
                        expected=f"at most {MOST_CALLS}",
                        hint="A polling loop keeps the store busy; store.wait sleeps until the "
                        "keys are set.",
                    )
    yield "no rank leaves before the last rank arrives, on 2 and 4 ranks, whichever rank is last"
    yield "a second barrier works, too"


def _waited_for_all(arrived: list[int], rank: int, size: int, late: int) -> None:
    for number, (count, name) in enumerate(zip(arrived, ("first", "second")), 1):
        if count < number * size:
            fail(
                f"rank {rank} left the {name} barrier when {count - (number - 1) * size} of {size} "
                "ranks had arrived.",
                expected=f"rank {rank} waits for rank {late}, which arrives late",
                hint="Keys stay in the store: do both barriers use the same keys?"
                if number == 2
                else "Which rank knows that all have arrived? How do the others find out?",
            )


class CountingStore:
    """Counts the calls to a store, and raises errors that name the student's call."""

    def __init__(self, store: Any):
        self._store, self.calls, self._since_s = store, 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        if time.monotonic() - self._since_s > LOOP_S:
            raise RuntimeError(f"the loop still polls the store after {self.calls:,} calls")
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if not isinstance(value, (str, bytes)):
            raise TypeError(
                f"store.set({key!r}, {value!r}): the value must be a str, not {kind(value)}"
            )
        self.__getattr__("set")(key, value)

    def get(self, key: str) -> bytes:
        return self._blocking_call("get", key, [key])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._blocking_call("wait", keys, list(keys), *timeout)

    def _blocking_call(self, call: str, argument: Any, keys: list[str], *more: Any) -> Any:
        try:
            return self.__getattr__(call)(argument, *more)
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            missing = ", ".join(repr(key) for key in keys if not self._store.check([key]))
            text = f"store.{call} timed out after {WAIT_S:g} s: no rank has set {missing}"
            raise RuntimeError(text) from None


STORE_HINTS = {
    "still polls the store": "store.get returns bytes: b'4' never equals the number 4. Instead of "
    "polling, call store.wait.",
    "must be a str": "Pass a str, as in store.set(key, 'yes'); store.add is for numbers.",
    "no rank has set": "Which rank sets this key, and does it reach that line?",
}
ALL_REDUCE_HINTS = {
    "'NoneType'": "comm.all_reduce works in place and returns None: the result is in the tensor.",
    "the ranks disagree": "In each round, all ranks must all-reduce the same shape and dtype: a "
    "batch is float32, of shape [1].",
}


def _run_with_hints(hints: dict[str, str], *args: Any) -> Ran:
    """Call `run`; if an error contains a key of `hints`, attach that hint."""
    try:
        return run(*args)
    except CheckFailed as failed:
        matching = [hint for text, hint in hints.items() if text in failed.sentence]
        failed.hint = failed.hint or "".join(matching[:1])
        raise


def _two_barriers(comm: Any, student: Student, path: str, late: int) -> tuple[list[int], list[int]]:
    """Per barrier: how many ranks had arrived when this rank left, and this rank's store calls."""
    arrivals = file_store(path + ".register", WAIT_S)
    arrived, calls = [], []
    for name in ("one", "two"):
        store = CountingStore(file_store(path, WAIT_S))
        if comm.rank == late:
            time.sleep(LATE_S)
        arrivals.add("arrived", 1)
        student(store, comm.rank, comm.size, name)
        arrived.append(arrivals.add("arrived", 0))
        calls.append(store.calls)
        comm.barrier()  # all ranks read `arrivals` before any continues
    return arrived, calls


@exercise(points=3)
def totals(student: Student) -> Iterator[str]:
    """totals(comm, batches): the sum over all ranks of each round's batch, on every rank."""
    for counts in ([2, 2], [3, 1], [1, 3, 2, 0]):
        batches = [[float(10**rank * (i + 1)) for i in range(n)] for rank, n in enumerate(counts)]
        rounds = [sum(x[i] for x in batches if i < len(x)) for i in range(max(counts))]
        ran = _run_with_hints(ALL_REDUCE_HINTS, len(counts), _totals_on_a_rank, student, batches)
        hint = "A rank without batches must still call all_reduce: what does it add?"
        equal(ran.values, [rounds] * len(counts), hint=hint)
        for rank, ops in enumerate(ran.ops):
            if len(ops) > max(counts) + 1:
                fail(
                    f"rank {rank} calls {len(ops)} operations for {max(counts)} rounds.",
                    expected="one to agree on the number of rounds, and one per round",
                )
    yield "every rank returns the totals, even if one rank has more batches and another has none"
    yield "one operation per round, and one to agree on the number of rounds"


def _totals_on_a_rank(comm: Any, student: Student, batches: list[list[float]]) -> Any:
    returned = student(comm, [torch.tensor([x]) for x in batches[comm.rank]])
    return [float(x) for x in returned] if isinstance(returned, (list, tuple)) else returned


@exercise(points=3)
def place(student: Student) -> Iterator[str | Score]:
    """place(rank): (dp, pp, tp) for each of 12 ranks on 3 nodes, with few bytes between nodes."""
    places = _results(student, [(rank,) for rank in range(scenarios.RANKS)])
    for rank, returned in enumerate(places):
        several(returned, 3, f"place({rank}) returned", "(dp, pp, tp)")
        if not all(i in range(n) for i, n in zip(returned, scenarios.SIZES.values())):
            fail(
                f"place({rank}) returned {tuple(returned)}, which is outside the mesh.",
                expected=", ".join(f"{axis} 0 to {n - 1}" for axis, n in scenarios.SIZES.items()),
            )
    taken = [tuple(returned) for returned in places]
    for rank, returned in enumerate(taken):
        if (other := taken.index(returned)) < rank:
            fail(
                f"ranks {other} and {rank} are both at {returned}.",
                expected="one rank at each place",
            )
    ran = run(scenarios.RANKS, scenarios.one_step, taken)
    crossing = scenarios.between_nodes(ran.events)
    if crossing > scenarios.WORST_ALLOWED:
        fail(
            f"the ranks send {crossing:,} bytes between nodes.",
            expected=f"at most {scenarios.WORST_ALLOWED:,}",
            hint="Which axis sends the most bytes? Put its ranks on one node.",
        )
    yield "one rank at each of the 12 places; a step's messages sent on 12 real ranks"
    if crossing == scenarios.BEST:
        yield "optimal: none of the 5,775 ways to assign ranks to nodes sends fewer bytes"
    yield Score(crossing, scenarios.BEST, "bytes between nodes")
