"""A faulty door must turn the contract red: a test that cannot fail proves nothing."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import comm_contract
import comm_faults as faults
import labkit.events as events
from comm_contract import check_bytes, check_kernel_bytes, events_of
from labkit import Comm, RankError, World
from labkit.comm import collectives as algorithms
from labkit.comm.handle import Handle
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.transports.send_receive import SendReceive

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """On ranks that take the algorithms which the faults replace."""
    rings = "all_reduce:ring,all_gather:ring,reduce_scatter:ring"
    flat_and_trees = "broadcast:tree,reduce:tree,gather:flat,scatter:flat"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_ALGO", f"{rings},{flat_and_trees}")
        with World(4, backend="gloo") as world:
            yield world


WRONG_RESULTS = {
    faults.skips_a_step: (algorithms, "ring_reduce_scatter", comm_contract.all_reduce),
    faults.writes_on_its_input: (algorithms, "ring_reduce_scatter", comm_contract.reduce_scatter),
    faults.forgets_the_division: (algorithms, "ring_all_reduce", comm_contract.all_reduce),
    faults.divides_every_chunk: (algorithms, "ring_all_reduce", comm_contract.all_reduce),
    faults.gathers_in_another_order: (algorithms, "ring_all_gather", comm_contract.all_gather),
    faults.stops_a_round_early: (algorithms, "tree_broadcast", comm_contract.broadcast),
    faults.gives_everyone_the_first: (algorithms, "flat_scatter", comm_contract.gather_and_scatter),
    faults.keeps_its_own_only: (algorithms, "flat_gather", comm_contract.gather_and_scatter),
    faults.forgets_the_last_peer: (algorithms, "pairwise_all_to_all", comm_contract.all_to_all),
    faults.gives_back_its_own: (algorithms, "next_ring_exchange", comm_contract.ring_exchange),
    faults.lets_all_pass: (algorithms, "dissemination_barrier", comm_contract.objects_and_barrier),
    faults.keeps_partial_sums: (SendReceive, "reduce", comm_contract.reduce),
    faults.never_copies_back: (Dispatcher, "stage", comm_contract.all_reduce),
    faults.waits_for_nothing: (Handle, "wait", comm_contract.point_to_point),
}
WRONG_BYTES = {
    faults.is_an_all_reduce_inside: (algorithms, "ring_reduce_scatter"),
    faults.gathers_twice: (algorithms, "ring_all_gather"),
    faults.counts_half: (algorithms, "ring_all_gather"),
    faults.sends_all_from_the_root: (algorithms, "tree_broadcast"),
    faults.counts_all_but_its_own: (events, "all_gather_bus_bytes"),
    faults.counts_the_whole: (events, "reduce_scatter_bus_bytes"),
}
HIDDEN_BYTES = {
    faults.is_an_all_reduce_inside_and_hides_it: ("ring_reduce_scatter", "reduce_scatter"),
    faults.gathers_twice_and_hides_it: ("ring_all_gather", "all_gather"),
}


def run_with(world: World, owner: Any, name: str, fault: Any, then: Callable[[Comm], Any]) -> Any:
    """Run `then` on ranks whose `owner.name` is the fault. (Ranks that fail are made anew.)"""

    def on_rank() -> Any:
        with faults.replaced(owner, name, fault):
            return then(Comm())

    return world.run(on_rank)


@pytest.mark.parametrize("fault", WRONG_RESULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_result_is_found(world: World, fault: Callable[..., Any]) -> None:
    owner, name, part = WRONG_RESULTS[fault]
    with pytest.raises(RankError, match="AssertionError"):
        run_with(world, owner, name, fault, part)


@pytest.mark.parametrize("fault", WRONG_BYTES, ids=lambda fault: fault.__name__)
def test_a_byte_too_many_or_too_few_is_found(world: World, fault: Callable[..., Any]) -> None:
    told = run_with(world, *WRONG_BYTES[fault], fault, lambda comm: events_of(comm, 1001))
    with pytest.raises(AssertionError):
        check_bytes(told, 1001)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count its loopback")
@pytest.mark.parametrize("fault", HIDDEN_BYTES, ids=lambda fault: fault.__name__)
def test_bytes_that_are_not_told_are_found_in_the_kernels_count(
    world: World, fault: Callable[..., Any]
) -> None:
    name, op = HIDDEN_BYTES[fault]
    told = run_with(world, algorithms, name, fault, lambda comm: events_of(comm, 1001))
    check_bytes(told, 1001)  # by its own word, all is well
    world.run(lambda: faults.replace(algorithms, name, fault))
    try:
        with pytest.raises(AssertionError, match=op):
            check_kernel_bytes(world, op)
    finally:
        world.restart()


def test_without_a_fault_all_is_green(world: World) -> None:
    """The other parts of the contract are green in test_comm.py."""
    world.run(lambda: comm_contract.broadcast(Comm()))
    check_bytes(world.run(lambda: events_of(Comm(), 1001)), 1001)
