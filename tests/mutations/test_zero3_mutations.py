"""Faulty ZeRO-3 must turn its tests red."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

import test_zero3 as proofs
from data_parallel_contract import check_equal_to_single
from harness import Mutation, around, given, instead, noticed, replaces
from labkit import World, ZeRO3
from labkit.parallel.zero3 import passes, units
from labkit.parallel.zero3.flat import Flat, ResizableBuffer

pytestmark = pytest.mark.slow


@replaces(Flat, "send_gradients")
def skips_a_reduce(real: Any, self: Flat, async_op: bool) -> None:
    real(self, async_op)
    if len(self.places) <= 2:
        self._handle.wait()
        self._arriving = self.partition.share_of(self.unreduced.flat, self.comm.rank).clone()
        self._are_new = False


@replaces(Flat, "receive_gradients")
def divides_twice(real: Any, self: Flat) -> None:
    real(self)
    for shard in self.shards:
        if shard.grad is not None:
            shard.grad.div_(self.comm.size)


@replaces(Flat, "gather")
def gathers_twice(real: Any, self: Flat, async_op: bool) -> Any:
    real(self, async_op=False)
    return real(self, async_op)


never_frees = instead("never_frees", ResizableBuffer, "free", lambda self: None)


@contextmanager
def keeps_stale_parameters() -> Iterator[None]:
    """Gathered once, and not again after the optimizer's step."""
    done: set[Flat] = set()

    @replaces(Flat, "gather")
    def once(real: Any, self: Flat, async_op: bool) -> Any:
        handle = None if self in done else real(self, async_op=False)
        done.add(self)
        return handle

    with once(), never_frees():
        yield


never_prefetches = instead("never_prefetches", passes.Order, "after", lambda self, unit, number: [])
frees_only_with_the_last_gradient = instead(
    "frees_only_with_the_last_gradient", units.Unit, "note_input_gradient", lambda *_: None
)


@replaces(units.Unit, "__init__")
def frees_with_the_last_gradient(real: Any, self: Any, *args: Any) -> None:
    """Though a frozen weight of the unit is still needed."""
    real(self, *args)
    self.has_frozen = False


def trains(world: World, wrap: Any = ZeRO3) -> None:
    check_equal_to_single(world, proofs.zero3(wrap), "gpt")


freed = proofs.test_a_unit_is_freed_when_backward_is_through_with_it
RESULTS = [
    Mutation(fault, trains)
    for fault in (skips_a_reduce, divides_twice, gathers_twice, keeps_stale_parameters)
]
MEMORY = [
    Mutation(never_frees, proofs.test_gathered_units_are_freed_and_never_more_than_two),
    Mutation(never_prefetches, proofs.test_gathers_leave_ahead_and_gradients_while_backward_runs),
    *(Mutation(fault, freed, block, again)
      for fault, block, again in (
          (frees_with_the_last_gradient, "FrozenNorm", True),
          (frees_with_the_last_gradient, "Adapter", True),
          (frees_only_with_the_last_gradient, "Adapter", False),
          (frees_only_with_the_last_gradient, "OneUnused", True),
          (frees_only_with_the_last_gradient, "AllFrozen", False),
      )),
]  # fmt: skip


def shards_nothing(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, persist_below=1 << 40)


def leaves_a_projection_whole(module: nn.Module) -> ZeRO3:
    """A parameter that no unit has: every rank keeps and trains its own."""
    walk = units._walk

    def some(*args: Any) -> Any:
        return (found for found in walk(*args) if "up.weight" not in found[1].name)

    with patch.object(units, "_walk", some):
        return ZeRO3(module)


pair = {"size": 2, "timeout_s": 20}
test_a_fault_turns_the_contract_red = noticed(
    RESULTS, around, match="AssertionError|off by|bytes", **pair
)
test_a_fault_in_memory_or_order_turns_its_proof_red = noticed(MEMORY, around, **pair)
test_a_model_that_shards_nothing_turns_the_contract_red = noticed(
    [Mutation(shards_nothing, trains)], given, AssertionError, **pair
)
test_a_projection_that_is_not_sharded_turns_the_contract_red = noticed(
    [Mutation(leaves_a_projection_whole, trains)], given, Exception, **pair
)
