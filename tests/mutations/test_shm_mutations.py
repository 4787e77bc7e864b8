"""Faulty shared memory must turn its tests red: a test that cannot fail proves nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import comm_contract
import shm_faults as faults
from comm_contract import check_bytes, events_of
from labkit import Comm, RankError, World
from labkit.runtime.transports.shm import collectives, slots
from labkit.runtime.transports.shm.mail import Inbox
from labkit.runtime.transports.shm.ring import Ring
from labkit.runtime.transports.shm.slots import Slots
from labkit.runtime.transports.shm.transport import Shared
from test_comm_mutations import run_with
from test_shm import ours_and_gloos, use_everything, with_tiny_pieces

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, transport="shm", timeout_s=5) as world:
        yield world


def bits(_: Comm) -> None:
    ours_and_gloos("sum")


WRONG_RESULTS: dict[Callable[..., Any], tuple[Any, str, Callable[[Comm], None]]] = {
    faults.forgets_the_last_rank: (collectives, "_reduce", comm_contract.all_reduce),
    faults.begins_with_itself: (collectives, "_reduce", bits),
    faults.forgets_the_division: (collectives, "_reduce", comm_contract.all_reduce),
    faults.waits_for_nobody: (Slots, "wait", comm_contract.all_gather),
    faults.writes_over_what_is_read: (Slots, "begin", faults.a_fast_root),
    faults.takes_from_the_first: (Slots, "take", comm_contract.all_gather),
    faults.knows_its_own_length_only: (Slots, "longest", comm_contract.gather_and_scatter),
    faults.shares_nothing: (collectives, "share_memory", comm_contract.reduce_scatter),
    faults.ignores_tags: (Inbox, "receive", comm_contract.point_to_point),
    faults.expects_no_tags: (Inbox, "_expect", comm_contract.point_to_point),
    faults.calls_taken_what_is_kept: (Inbox, "_expect", faults.a_send_is_taken),
    faults.ends_at_the_end: (Ring, "_spans", comm_contract.point_to_point),
    faults.overtakes: (Shared, "_start", comm_contract.in_flight),
}


@pytest.mark.parametrize("fault", WRONG_RESULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_result_is_found(world: World, fault: Callable[..., Any]) -> None:
    owner, name, part = WRONG_RESULTS[fault]
    world.restart()
    world.run(with_tiny_pieces)
    with pytest.raises(RankError):
        run_with(world, owner, name, fault, part)


def test_a_byte_too_few_is_found(world: World) -> None:
    told = run_with(world, slots, "copy", faults.counts_half, lambda comm: events_of(comm, 1001))
    with pytest.raises(AssertionError):
        check_bytes(told, 1001)


def test_a_file_that_keeps_its_name_is_found(world: World) -> None:
    world.restart()
    left = run_with(world, Path, "unlink", faults.keeps_its_name, lambda _: use_everything())
    assert left != [[]] * 4


def test_without_a_fault_all_is_green(world: World) -> None:
    """In tiny pieces, all that is named above."""
    world.restart()
    world.run(with_tiny_pieces)
    for part in {part for *_, part in WRONG_RESULTS.values()}:
        world.run(lambda part: part(Comm()), part)
