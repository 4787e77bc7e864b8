"""Symmetric memory: what the ranks of a world reduce where all can reach it."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from comm_contract import PLAIN
from harness import Mutation, noticed, on_ranks, replaces
from labkit import DDP, Comm, RankError, World, listen
from labkit.runtime.transports.shm import symmetric
from labkit.runtime.transports.shm.slots import REDUCED, Slots
from tables import raises
from test_shm import MEMORY, in_shared_memory, with_tiny_pieces
from worlds import world_fixture

world2 = world_fixture(2, transport="shm")
world4 = world_fixture(4, transport="shm")
NUMEL = 70_001  # above what is reduced at once; no slice is as long as another


def symmetric_files() -> list[str]:
    """Those that still have a name."""
    names = [name for folder in in_shared_memory() for name in os.listdir(MEMORY / folder)]
    return [name for name in names if "symmetric" in name]


def filled(numel: int, value: float) -> torch.Tensor:
    return Comm().symmetric_empty(numel, like=torch.empty(0)).fill_(value)


def both(op: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A reduction in memory that all reach, and the same through the slots."""
    comm = Comm()
    torch.manual_seed(comm.rank)
    plain = torch.randn(NUMEL).to(dtype)
    shared = comm.symmetric_empty(NUMEL, like=plain).copy_(plain)
    assert shared.is_contiguous() and shared.dtype == dtype
    for part in (slice(None), slice(77, -5), slice(1, 60_000)):
        comm.all_reduce(plain[part], op)  # type: ignore[arg-type]
        handle = comm.all_reduce(shared[part], op, async_op=True)  # type: ignore[arg-type]
        assert handle is not None
        handle.wait()
        assert torch.equal(plain, shared), f"{op} of {part} in {dtype}"
    return plain, shared


@pytest.mark.parametrize("op", PLAIN)
def test_the_bits_are_those_of_the_slots(world4: World, op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = world4.run(both, op, dtype)
        assert all(torch.equal(shared, results[0][0]) for _, shared in results)


@pytest.mark.slow
def test_it_works_on_three_ranks_in_tiny_pieces() -> None:
    with World(3, transport="shm") as world:
        world.run(with_tiny_pieces)
        world.run(both, "mean")


def test_a_rank_copies_its_slice_to_the_others_and_nothing_else(world4: World) -> None:
    def copied() -> tuple[int, int]:
        comm, x = Comm(), filled(64_000, 0)
        with listen() as events:
            comm.all_reduce(x)
            comm.all_reduce(torch.zeros(64_000))
        return events[0].wire_bytes, events[1].wire_bytes

    n, nbytes = 4, 4 * 64_000
    assert world4.run(copied) == [((n - 1) * nbytes // n, (2 * n - 1) * nbytes // n)] * n


def different_parts() -> None:
    """Those of rank 0 lie elsewhere, in such memory or not: all go through the slots."""
    comm, x = Comm(), filled(500_000, Comm().rank)
    for mine in (x[200_000:], torch.zeros(300_000)):
        given = x[:300_000] if comm.rank else mine
        comm.all_reduce(given)
        assert given.eq(sum(range(comm.size))).all()
        given.fill_(comm.rank)
    comm.all_reduce(x)
    assert x.eq(sum(range(comm.size))).all()


def test_ranks_may_give_different_parts(world4: World) -> None:
    world4.run(different_parts)
    world4.run(with_tiny_pieces)
    world4.run(different_parts)


def test_ranks_that_disagree_are_reported(world2: World) -> None:
    like = torch.empty(0)

    def of_its_own_size(comm: Comm) -> None:
        comm.symmetric_empty(50_000 * (1 + comm.rank), like)

    def of_its_own_type(comm: Comm) -> None:
        comm.symmetric_empty(50_000, like.double() if comm.rank else like)

    def in_something_else(comm: Comm) -> None:
        comm.all_reduce(torch.zeros(50_000)) if comm.rank else comm.symmetric_empty(50_000, like)

    for disagree in (of_its_own_size, of_its_own_type, in_something_else):
        call = partial(world2.run, lambda disagree: disagree(Comm()), disagree)
        raises("symmetric_empty", call, error=RankError)
        world2.restart()
    negative = "-5 elements; choose 0 or more"
    raises(negative, world2.run, lambda: filled(-5, 0), error=RankError)


def test_without_checks_different_sizes_are_ordinary_tensors() -> None:
    def each_its_own() -> int:
        comm = Comm()
        x = filled(100_000 * (1 + comm.rank), 1.0)
        comm.all_reduce(x[:50_000])
        return int(x[:50_000].sum())

    with World(2, transport="shm", check=False) as world:
        assert world.run(each_its_own) == [100_000, 100_000]


def test_a_rank_that_dies_takes_the_others_along(world2: World) -> None:
    def die() -> None:
        comm, x = Comm(), filled(NUMEL, 1.0)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)

    raises("rank 1 was killed", world2.run, die, error=RankError)
    world2.restart()
    assert not symmetric_files()


def test_memory_is_given_back_with_the_tensor(world2: World) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("symmetric" in line for line in maps)

    def make_and_drop() -> tuple[int, int, int]:
        x = Comm().symmetric_empty(NUMEL, like=torch.empty(0))
        small = [Comm().symmetric_empty(100, like=x) for _ in range(3)]  # not worth a mapping each
        assert [len(one) for one in small] == [100] * 3
        view, before = x[5:].view(-1), mapped()
        del x
        during = mapped()
        del view
        return before, during, mapped()

    if not os.path.exists("/proc/self/maps"):
        pytest.skip("what is mapped stands in /proc, which is Linux's")
    assert world2.run(make_and_drop) == [(1, 1, 0)] * 2
    assert not symmetric_files()


def test_memory_made_behind_an_asynchronous_operation_is_given_back_too(world2: World) -> None:
    """It is then made on the lane, whose last work is remembered."""

    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return any("symmetric" in line for line in maps)

    def make_and_drop() -> tuple[bool, bool]:
        comm = Comm()
        if comm.rank:
            time.sleep(0.2)  # so it is under way on rank 0
        handle = comm.all_reduce(torch.ones(1_000_000), async_op=True)
        x = filled(NUMEL, 1.0)
        handle.wait()  # type: ignore[union-attr]
        before = mapped()
        del x
        return before, mapped()

    if not os.path.exists("/proc/self/maps"):
        pytest.skip("what is mapped stands in /proc, which is Linux's")
    assert world2.run(make_and_drop) == [(True, False)] * 2


@pytest.mark.parametrize("who", ["all", "one"])
def test_without_room_it_is_an_ordinary_tensor_on_all_ranks(world2: World, who: str) -> None:
    def without_room() -> int:
        comm, reserve = Comm(), symmetric.RESERVE_BYTES
        if who == "all" or comm.rank == 1:
            symmetric.RESERVE_BYTES = 1 << 60
        real, symmetric.Path.exists = symmetric.Path.exists, lambda path: False  # type: ignore
        try:
            x = filled(NUMEL, comm.rank)
        finally:
            symmetric.RESERVE_BYTES, symmetric.Path.exists = reserve, real  # type: ignore
        with listen() as events:
            comm.all_reduce(x)
        assert x.eq(1).all()
        return events[0].wire_bytes

    assert all(nbytes > 4 * NUMEL for nbytes in world2.run(without_room))  # through the slots


def test_the_buckets_of_ddp_are_there(world2: World) -> None:
    def wire_over_bus() -> float:
        torch.manual_seed(0)
        model = DDP(nn.Linear(256, 256), Comm())
        model(torch.randn(4, 256)).sum().backward()
        with listen() as events:
            model(torch.randn(4, 256)).sum().backward()
        (event,) = [event for event in events if event.op == "all_reduce"]
        return event.wire_bytes / event.bus_bytes

    assert world2.run(wire_over_bus) == [pytest.approx(0.5, abs=0.01)] * 2  # through slots 1.5


# --- faults that must be found -------------------------------------------------------------------


@replaces(symmetric.Symmetric, "write")
def writes_only_its_own(
    real: Any, self: symmetric.Symmetric, x: torch.Tensor, rank: int, begin: int
) -> Any:
    return real(self, x, rank, begin) if rank == self._rank else 0


@replaces(Slots, "wait")
def returns_before_the_others_have_written(real: Any, self: Slots, ranks: Any, stage: int) -> None:
    if stage != REDUCED:
        real(self, ranks, stage)


@replaces(Slots, "agree")
def takes_everything_for_equal(real: Any, self: Slots) -> bool:
    return True


@replaces(symmetric.Symmetric, "part")
def reads_its_own(real: Any, self: symmetric.Symmetric, rank: int, *where: Any) -> Any:
    return real(self, self._rank, *where)


@replaces(symmetric.Symmetric, "write")
def late(real: Any, self: symmetric.Symmetric, *args: Any) -> Any:
    if self._rank == 1:
        time.sleep(0.05)
    return real(self, *args)


def late_writer() -> None:
    with late():
        x = filled(NUMEL, 1.0)
        Comm().all_reduce(x)
        assert x.eq(2).all()


def sums() -> None:
    both("sum")


FAULTS = [
    Mutation(writes_only_its_own, sums),
    Mutation(returns_before_the_others_have_written, late_writer),
    Mutation(takes_everything_for_equal, different_parts),
    Mutation(reads_its_own, sums),
]
shm = {"size": 2, "transport": "shm"}
test_a_fault_is_found = pytest.mark.slow(noticed(FAULTS, on_ranks, RankError, **shm))


@pytest.mark.slow
def test_without_a_fault_all_is_green(worlds: Any) -> None:
    for check in (sums, late_writer, different_parts):
        on_ranks(worlds(2, transport="shm"), nullcontext, check)
