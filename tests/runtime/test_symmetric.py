"""Symmetric memory: what the ranks of a world reduce where all can reach it."""

import os
import signal
import time
from typing import Any
from unittest.mock import patch

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
from worlds import on_each_rank, world_fixture

world2 = world_fixture(2, transport="shm")
world4 = world_fixture(4, transport="shm")
NUMEL = 70_001  # above what is reduced at once; no slice is as long as another


def symmetric_files() -> list[str]:
    """Those that still have a name."""
    names = [name for folder in in_shared_memory() for name in os.listdir(MEMORY / folder)]
    return [name for name in names if "symmetric" in name]


def mapped_count() -> int:
    """How often this rank has such memory mapped."""
    with open("/proc/self/maps") as maps:
        return sum("symmetric" in line for line in maps)


needs_maps = pytest.mark.skipif(
    not os.path.exists("/proc/self/maps"), reason="what is mapped stands in /proc, which is Linux's"
)


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
        comm.all_reduce(shared[part], op, async_op=True).wait()  # type: ignore
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


@on_each_rank("world4")
def test_a_rank_copies_its_slice_to_the_others_and_nothing_else() -> None:
    comm, x = Comm(), filled(64_000, 0)
    with listen() as events:
        comm.all_reduce(x)
        comm.all_reduce(torch.zeros(64_000))
    part_bytes = x.nbytes // 4
    assert [event.wire_bytes for event in events] == [3 * part_bytes, 7 * part_bytes]


def different_parts() -> None:
    """Those of rank 0 lie elsewhere, in such memory or not: all go through the slots."""
    comm, x = Comm(), filled(500_000, Comm().rank)
    for of_rank_0 in (x[200_000:], torch.zeros(300_000)):
        given = x[:300_000] if comm.rank else of_rank_0
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
    """About the size, the type, the operation."""
    like, x = torch.empty(0), torch.zeros(50_000)
    for call in (
        lambda comm: comm.symmetric_empty(50_000 * (1 + comm.rank), like),
        lambda comm: comm.symmetric_empty(50_000, like.double() if comm.rank else like),
        lambda comm: comm.all_reduce(x) if comm.rank else comm.symmetric_empty(50_000, like),
    ):
        raises("symmetric_empty", world2.run, lambda call: call(Comm()), call, error=RankError)
    negative = r"symmetric_empty\(-5\): choose 0 elements or more"
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


@needs_maps
def test_memory_is_given_back_with_the_tensor(world2: World) -> None:
    def make_and_drop() -> None:
        x = Comm().symmetric_empty(NUMEL, like=torch.empty(0))
        small = [Comm().symmetric_empty(100, like=x) for _ in range(3)]  # not worth a mapping each
        assert [len(tensor) for tensor in small] == [100] * 3
        view = x[5:].view(-1)
        assert mapped_count() == 1
        del x
        assert mapped_count() == 1
        del view
        assert mapped_count() == 0

    world2.run(make_and_drop)
    assert not symmetric_files()


@needs_maps
@on_each_rank("world2")
def test_memory_made_behind_an_asynchronous_operation_is_given_back_too() -> None:
    """It is then made on the lane, whose last work is remembered."""
    comm = Comm()
    if comm.rank:
        time.sleep(0.2)  # so it is under way on rank 0
    handle = comm.all_reduce(torch.ones(1_000_000), async_op=True)
    x = filled(NUMEL, 1.0)
    handle.wait()  # type: ignore[union-attr]
    assert mapped_count() == 1
    del x
    assert mapped_count() == 0


@pytest.mark.parametrize("full_ranks", [(0, 1), (1,)])
@on_each_rank("world2")
def test_without_room_it_is_an_ordinary_tensor_on_all_ranks(full_ranks: tuple[int, ...]) -> None:
    comm = Comm()
    reserve_bytes = 1 << 60 if comm.rank in full_ranks else symmetric.RESERVE_BYTES
    with (
        patch.object(symmetric, "RESERVE_BYTES", reserve_bytes),
        patch.object(symmetric.Path, "exists", lambda path: False),
    ):
        x = filled(NUMEL, comm.rank)
    with listen() as events:
        comm.all_reduce(x)
    assert x.eq(1).all() and events[0].wire_bytes > x.nbytes  # through the slots


@on_each_rank("world2")
def test_the_buckets_of_ddp_are_there() -> None:
    torch.manual_seed(0)
    model = DDP(nn.Linear(256, 256), Comm())
    model(torch.randn(4, 256)).sum().backward()
    with listen() as events:
        model(torch.randn(4, 256)).sum().backward()
    (event,) = [event for event in events if event.op == "all_reduce"]
    assert event.wire_bytes / event.bus_bytes == pytest.approx(0.5, abs=0.01)  # through slots 1.5


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


FAULTS = [
    Mutation(writes_only_its_own, both, "sum"),
    Mutation(returns_before_the_others_have_written, late_writer),
    Mutation(takes_everything_for_equal, different_parts),
    Mutation(reads_its_own, both, "sum"),
]
shm = {"size": 2, "transport": "shm"}
test_a_fault_is_found = pytest.mark.slow(noticed(FAULTS, on_ranks, RankError, **shm))


@pytest.mark.slow
def test_without_a_fault_all_is_green(world2: World) -> None:
    world2.run(both, "sum")
    world2.run(late_writer)
    world2.run(different_parts)
