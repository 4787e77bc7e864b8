"""What a report of a failure says: all who died, where each rank was, and the user's own words."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit import Comm, RankError, World
from provoke import gone
from worlds import world_fixture

world = world_fixture(4, timeout_s=60)


def failure(world: World, fn: Callable[[], object]) -> RankError:
    with pytest.raises(RankError) as info:
        world.run(fn)
    return info.value


def test_a_report_waits_for_every_death_that_has_happened(world: World) -> None:
    for _ in range(3):
        pids = world.run(os.getpid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert gone(pids)
        assert failure(world, os.getpid).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("closes", [True, False])
def test_a_death_that_is_reported_late_is_waited_for(
    world: World, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine the server reports a death late, and the kernel closes connections late:
    not before the last thread of the process has ended."""
    pids = world.run(os.getpid)
    ranks = world._alive
    assert ranks is not None
    starter, listen = ranks.starter, ranks.listen
    ends, since = starter.ends, time.monotonic()

    def late() -> dict:
        return {
            pid: end
            for pid, end in ends().items()
            if pid != pids[0] or time.monotonic() > since + 1
        }

    def without_rank_0(*args: Any) -> list:
        return [answer for answer in listen(*args) if closes or answer[0] != 0]

    monkeypatch.setattr(starter, "ends", late)
    monkeypatch.setattr(ranks, "listen", without_rank_0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(pids)
    since = time.monotonic()
    assert failure(world, os.getpid).ranks == (0, 1, 2, 3)


def test_a_killed_ranks_report_says_where_all_ranks_were(world: World) -> None:
    def die() -> None:
        comm = Comm()
        comm.all_reduce(torch.ones(3))
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_gather_into_tensor(torch.ones(8), torch.ones(2))

    error = failure(world, die)
    text = str(error)
    assert error.kind == "died" and error.ranks == (2,)
    assert "rank 2: died after all_reduce(sum) float32 [3], collective" in text
    assert "test_faults_reports.py:" in text and " in die" in text
    for rank in (0, 1, 3):
        assert f"  rank {rank}: " in text


def test_a_rank_killed_inside_an_operation_is_reported_with_it(world: World) -> None:
    victim = world.run(os.getpid)[1]

    def stay() -> None:
        if Comm().rank != 0:
            Comm().all_reduce(torch.ones(5))
        else:
            time.sleep(60)

    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    text = str(failure(world, stay))
    assert "rank 1: died in all_reduce(sum) float32 [5]" in text


@pytest.mark.parametrize(
    "users_own",
    [RuntimeError("Timed out waiting for my own queue"), RuntimeError("closed by peer"),
     OSError("Connection reset, says my own download")],
)  # fmt: skip
def test_a_users_own_error_is_neither_a_hang_nor_a_lost_peer(
    world: World, users_own: Exception
) -> None:
    def fail() -> None:
        raise users_own

    error = failure(world, fail)
    assert error.kind == "raised" and error.ranks == (0, 1, 2, 3) and str(users_own) in str(error)


def test_an_error_of_torchs_own_group_is_still_a_lost_peer(world: World) -> None:
    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 3:
            os._exit(5)
        dist.all_reduce(torch.ones(2))

    error = failure(world, fail)
    assert error.kind == "died" and error.ranks == (3,)


class NotesThatRaise(ValueError):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise KeyError("no notes")


class NotesThatAreNone(ValueError):
    __notes__ = 7  # type: ignore[assignment]


class AttributesThatRaise(ValueError):
    def __getattribute__(self, name: str) -> object:
        raise KeyError(name)


class TextThatRaises(ValueError):
    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("kind", [NotesThatRaise, NotesThatAreNone, AttributesThatRaise])
def test_an_exception_that_raises_when_it_is_read_keeps_its_message(
    world: World, kind: type[ValueError]
) -> None:
    def fail() -> None:
        raise kind("the message of the test")

    text = str(failure(world, fail))
    assert f"raised {kind.__name__}: the message of the test" in text and "in fail" in text


def test_an_exception_without_a_readable_message_is_named(world: World) -> None:
    def fail() -> None:
        raise TextThatRaises

    assert "raised TextThatRaises: (its message cannot be shown" in str(failure(world, fail))
