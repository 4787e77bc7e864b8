"""A faulty communicator must turn the contract red."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import comm_contract as contract
import comm_faults as faults
from comm_contract import check_bytes, check_kernel_bytes, events_of
from harness import Change, Mutation, around, noticed, on_ranks
from labkit import Comm, RankError, World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def algorithms_that_the_faults_replace() -> Any:
    rings = "all_reduce:ring,all_gather:ring,reduce_scatter:ring"
    flat_and_trees = "broadcast:tree,reduce:tree,gather:flat,scatter:flat"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_ALGO", f"{rings},{flat_and_trees}")
        yield


WRONG_RESULTS = [
    Mutation(faults.skips_a_step, contract.all_reduce),
    Mutation(faults.overwrites_its_input, contract.reduce_scatter),
    Mutation(faults.forgets_the_division, contract.all_reduce),
    Mutation(faults.divides_every_chunk, contract.all_reduce),
    Mutation(faults.gathers_in_another_order, contract.all_gather),
    Mutation(faults.stops_a_round_early, contract.broadcast),
    Mutation(faults.scatters_the_first_chunk_to_all, contract.gather_and_scatter),
    Mutation(faults.gathers_the_roots_chunk_only, contract.gather_and_scatter),
    Mutation(faults.forgets_the_last_peer, contract.all_to_all),
    Mutation(faults.returns_its_own_tensor, contract.ring_exchange),
    Mutation(faults.is_no_barrier, contract.objects_and_barrier),
    Mutation(faults.keeps_partial_sums, contract.reduce),
    Mutation(faults.never_copies_back, contract.all_reduce),
    Mutation(faults.does_not_wait, contract.point_to_point),
]
WRONG_BYTES = [
    Mutation(fault, check_bytes)
    for fault in (faults.is_an_all_reduce, faults.gathers_twice, faults.counts_half,
                  faults.sends_all_from_the_root, faults.counts_other_chunks,
                  faults.counts_the_whole)
]  # fmt: skip


def kept(world: World, change: Change, part: Callable[[Comm], None]) -> None:
    on_ranks(world, change, lambda: part(Comm()))


def counted(world: World, change: Change, check: Callable[..., None]) -> None:
    check(on_ranks(world, change, lambda: events_of(Comm(), 1001)), 1001)


gloo = {"size": 4, "backend": "gloo"}
test_a_wrong_result_is_noticed = noticed(
    WRONG_RESULTS, kept, RankError, match="AssertionError", **gloo
)
test_a_wrong_byte_count_is_noticed = noticed(WRONG_BYTES, counted, AssertionError, **gloo)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count its loopback")
@pytest.mark.parametrize(
    ("fault", "op"),
    [(faults.is_an_all_reduce_and_hides_it, "reduce_scatter"),
     (faults.gathers_twice_and_hides_it, "all_gather")],
    ids=str,
)  # fmt: skip
def test_hidden_bytes_are_noticed_in_the_kernels_count(worlds: Any, fault: Any, op: str) -> None:
    world = worlds(**gloo)
    counted(world, fault, check_bytes)  # labkit's own count is as it should be
    with pytest.raises(AssertionError, match=op):
        around(world, fault, check_kernel_bytes, op)


def test_without_a_fault_all_is_green(worlds: Any) -> None:
    """The other parts of the contract are green in test_comm.py."""
    world = worlds(**gloo)
    world.run(lambda: contract.broadcast(Comm()))
    check_bytes(world.run(lambda: events_of(Comm(), 1001)), 1001)
