"""A faulty communicator must turn the contract red."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import comm_contract as contract
from comm_contract import check_bytes, check_kernel_bytes, events_of
from comm_faults import FAULTS
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


WRONG_RESULTS = {
    "skips a step": contract.all_reduce,
    "leaves partial sums in its input": contract.reduce_scatter,
    "forgets the division": contract.all_reduce,
    "divides twice": contract.all_reduce,
    "gathers in another order": contract.all_gather,
    "stops a round early": contract.broadcast,
    "scatters the first chunk to all": contract.gather_and_scatter,
    "gathers the root's chunk only": contract.gather_and_scatter,
    "forgets the last peer": contract.all_to_all,
    "returns its own tensor": contract.ring_exchange,
    "is no barrier": contract.objects_and_barrier,
    "keeps partial sums on all ranks": contract.reduce,
    "never copies back": contract.all_reduce,
    "does not wait": contract.point_to_point,
}
WRONG_BYTES = ("is an all-reduce", "gathers twice", "counts half", "sends all from the root",
               "counts other chunks", "counts the whole")  # fmt: skip


def kept(world: World, change: Change, part: Callable[[Comm], None]) -> None:
    on_ranks(world, change, lambda: part(Comm()))


def counted(world: World, change: Change, check: Callable[..., None]) -> None:
    check(on_ranks(world, change, lambda: events_of(Comm(), 1001)), 1001)


gloo = {"size": 4, "backend": "gloo"}
test_a_wrong_result_is_noticed = noticed(
    [Mutation(FAULTS[label], part) for label, part in WRONG_RESULTS.items()],
    kept, RankError, match="AssertionError", **gloo,
)  # fmt: skip
test_a_wrong_byte_count_is_noticed = noticed(
    [Mutation(FAULTS[label], check_bytes) for label in WRONG_BYTES], counted, AssertionError, **gloo
)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count its loopback")
@pytest.mark.parametrize(
    ("label", "op"),
    [("is an all-reduce and hides it", "reduce_scatter"),
     ("gathers twice and hides it", "all_gather")],
)  # fmt: skip
def test_hidden_bytes_are_noticed_in_the_kernels_count(worlds: Any, label: str, op: str) -> None:
    world, fault = worlds(**gloo), FAULTS[label]
    counted(world, fault, check_bytes)  # labkit's own count is as it should be
    with pytest.raises(AssertionError, match=op):
        around(world, fault, check_kernel_bytes, op)


def test_without_a_fault_all_is_green(worlds: Any) -> None:
    """The other parts of the contract are green in test_comm.py."""
    world = worlds(**gloo)
    world.run(lambda: contract.broadcast(Comm()))
    check_bytes(world.run(lambda: events_of(Comm(), 1001)), 1001)
