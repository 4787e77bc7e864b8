"""Faulty shared memory must turn its tests red."""

from collections.abc import Callable
from typing import Any

import pytest

import comm_contract as contract
import shm_faults as faults
from comm_contract import check_bytes, events_of
from harness import Change, Mutation, noticed, on_ranks
from labkit import Comm, RankError, World
from test_shm import ours_and_gloos, use_everything, with_tiny_pieces

pytestmark = pytest.mark.slow


def bits(_: Comm) -> None:
    ours_and_gloos("sum")


WRONG_RESULTS = [
    Mutation(faults.forgets_the_last_rank, contract.all_reduce),
    Mutation(faults.begins_with_itself, bits),
    Mutation(faults.forgets_the_division, contract.all_reduce),
    Mutation(faults.does_not_wait, contract.all_gather),
    Mutation(faults.overwrites_what_is_read, faults.fast_root),
    Mutation(faults.takes_from_the_first, contract.all_gather),
    Mutation(faults.knows_its_own_length_only, contract.gather_and_scatter),
    Mutation(faults.never_sees_shared_memory, contract.reduce_scatter),
    Mutation(faults.ignores_tags, contract.point_to_point),
    Mutation(faults.expects_no_tags, contract.point_to_point),
    Mutation(faults.announces_what_is_kept_as_taken, faults.send_ends_when_received),
    Mutation(faults.stops_at_the_end, contract.point_to_point),
    Mutation(faults.overtakes, contract.in_flight),
]


def in_tiny_pieces(world: World, change: Change, part: Callable[[Comm], None]) -> None:
    world.restart()
    world.run(with_tiny_pieces)
    on_ranks(world, change, lambda: part(Comm()))


shm = {"size": 4, "transport": "shm", "timeout_s": 3}
test_a_wrong_result_is_noticed = noticed(WRONG_RESULTS, in_tiny_pieces, RankError, **shm)


def test_a_missing_byte_is_noticed(worlds: Any) -> None:
    events = on_ranks(worlds(**shm), faults.counts_half, lambda: events_of(Comm(), 1001))
    with pytest.raises(AssertionError):
        check_bytes(events, 1001)


def test_a_file_that_keeps_its_name_is_noticed(worlds: Any) -> None:
    worlds(**shm).restart()
    assert on_ranks(worlds(**shm), faults.keeps_its_name, use_everything) != [[]] * 4


def test_without_a_fault_all_is_green(worlds: Any) -> None:
    world = worlds(**shm)
    world.restart()
    world.run(with_tiny_pieces)
    for part in {mutation.check for mutation in WRONG_RESULTS}:
        world.run(lambda part: part(Comm()), part)
