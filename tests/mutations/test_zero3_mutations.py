"""Faulty ZeRO-3 must turn its tests red."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest

import test_zero3 as proofs
from data_parallel_contract import check_equal_to_single
from harness import Mutation, around, edits, instead, noticed, replaces
from labkit import World, ZeRO3
from labkit.parallel.zero3 import flat, passes, units
from labkit.parallel.zero3.flat import Flat, ResizableBuffer

pytestmark = pytest.mark.slow


@replaces(Flat, "send_gradients")
def skips_a_reduce(real: Any, self: Flat, async_op: bool) -> None:
    real(self, async_op)
    if len(self.places) <= 2:
        self._handle.wait()
        self._arriving = self.partition.share_of(self.unreduced.flat, self.comm.rank).clone()
        self._are_new = False


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


def trains(world: World, wrap: Any = ZeRO3) -> None:
    check_equal_to_single(world, proofs.zero3(wrap), "gpt")


def shards_nothing(world: World) -> None:
    trains(world, partial(ZeRO3, persist_below=1 << 40))


FREED = proofs.test_a_unit_is_freed_when_backward_is_through_with_it
GATHER = "        return self.comm.all_gather_into_tensor(full, own"
WITH_LAST = "len(self.trainable) < len(flats)", "False"  # though a frozen weight is still needed
ONLY_WITH_LAST = "self.inputs_back >= self.inputs", "False"
WALK = '_walk(root, "", root, None, False, _chooser(choice)):\n'
RESULTS = [
    Mutation(skips_a_reduce, trains),
    Mutation(keeps_stale_parameters, trains),
    Mutation(nullcontext, shards_nothing),
    *edits(
        flat,
        ("divides twice",
         "put(parameter, self.comm.size)", "put(parameter, self.comm.size**2)", trains),
        ("gathers twice", GATHER, f"{GATHER.replace('return ', '')})\n{GATHER}", trains),
    ),
    *edits(
        units,
        ("leaves a projection whole",  # which every rank trains for itself
         WALK, f"{WALK}        if place.name.endswith('up.weight'):\n            continue\n",
         trains),
    ),
]  # fmt: skip
MEMORY = [
    Mutation(never_frees, proofs.test_gathered_units_are_freed_and_never_more_than_two),
    *edits(
        passes,
        ("never prefetches", "if self._follows else []", "if False else []",
         proofs.test_gathers_leave_ahead_and_gradients_while_backward_runs),
    ),
    *edits(
        units,
        ("frees with the last gradient", *WITH_LAST, FREED, "FrozenNorm", True),
        ("frees with the last gradient", *WITH_LAST, FREED, "Adapter", True),
        ("frees only with the last gradient", *ONLY_WITH_LAST, FREED, "Adapter", False),
        ("frees only with the last gradient", *ONLY_WITH_LAST, FREED, "OneUnused", True),
        ("frees only with the last gradient", *ONLY_WITH_LAST, FREED, "AllFrozen", False),
    ),
]  # fmt: skip
pair = {"size": 2, "timeout_s": 20}
test_a_fault_turns_the_contract_red = noticed(
    RESULTS, around, match="raised AssertionError|is off by|bytes sent by all", **pair
)
test_a_fault_in_memory_or_order_turns_its_proof_red = noticed(MEMORY, around, **pair)
