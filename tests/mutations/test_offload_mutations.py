"""Offload with a deliberate fault: each must turn a proof of test_offload.py red."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import test_offload as proofs
from harness import Mutation, here, noticed, replaces
from labkit.memory.offload import Moved, Offload, Ticket


@replaces(Offload, "_may_leave")
def moves_parameters(real: Any, self: Offload, x: torch.Tensor) -> bool:
    return x.device == self._device


@replaces(Offload, "_moved")
def forgets_what_has_left(real: Any, self: Offload, x: torch.Tensor) -> Any:
    self._of.pop(x.untyped_storage(), None)
    return real(self, x)


@replaces(Offload, "_moved")
def lets_all_leave_at_once(real: Any, self: Offload, x: torch.Tensor) -> Any:
    self._in_flight = 10**6
    return real(self, x)


@replaces(Offload, "_unpack")
def never_prefetches(real: Any, self: Offload, kept: Any) -> Any:
    before, self._in_flight = self._in_flight, 0
    try:
        return real(self, kept)
    finally:
        self._in_flight = before


@replaces(Offload, "_pack")
def forgets_the_stride(real: Any, self: Offload, x: torch.Tensor) -> Any:
    packed = real(self, x)
    if isinstance(packed, Ticket):
        return replace(packed, stride=torch.empty(x.shape, device="meta").stride())
    return packed


@replaces(Offload, "_pack")
def forgets_the_conjugation(real: Any, self: Offload, x: torch.Tensor) -> Any:
    packed = real(self, x)
    return replace(packed, conj=False, neg=False) if isinstance(packed, Ticket) else packed


@replaces(Offload, "_unpack")
def misses_changes_of_what_stays(real: Any, self: Offload, kept: Any) -> Any:
    return real(self, kept) if isinstance(kept, Ticket) else kept[0]


@replaces(Moved, "leave")
def leaves_before_the_copy_is_over(real: Any, self: Moved) -> None:
    self._here = self._seen = None


@replaces(Moved, "use")
def misses_changes(real: Any, self: Moved) -> torch.Tensor:
    if self._seen is None:
        self._trip.wait()
    return self._here


tied: list[torch.Tensor] = []  # outputs whose graph holds them; no garbage collector sees that


@replaces(Offload, "_pack")
def keeps_the_output_itself(real: Any, self: Offload, x: torch.Tensor) -> Any:
    packed = real(self, x)
    if isinstance(packed, Ticket):
        return packed
    tied.append(x)
    return x, x._version


@pytest.fixture(autouse=True)
def no_graph_outlives_its_test() -> Iterator[None]:
    """A backward pass lets go of all that was saved: later tests count what a process holds."""
    yield
    if tied:
        tied[-1].sum().backward()
        tied.clear()


FAULTS = [
    Mutation(moves_parameters, proofs.test_each_memory_goes_once_and_parameters_stay),
    Mutation(forgets_what_has_left, proofs.test_each_memory_goes_once_and_parameters_stay),
    Mutation(lets_all_leave_at_once, proofs.test_memory_on_the_device_is_bounded),
    Mutation(never_prefetches, proofs.test_copies_run_ahead_in_both_directions),
    Mutation(forgets_the_stride, proofs.test_a_view_comes_back_as_it_was),
    Mutation(forgets_the_conjugation, proofs.test_what_is_conjugated_or_turned_comes_back_so),
    Mutation(misses_changes_of_what_stays, proofs.test_a_change_of_what_stays_is_found, {}),
    Mutation(leaves_before_the_copy_is_over, proofs.test_copies_run_ahead_in_both_directions),
    Mutation(misses_changes, proofs.test_a_change_in_place_is_found),
    Mutation(
        keeps_the_output_itself, proofs.test_small_memory_that_stays_does_not_keep_its_graph_alive
    ),
]
test_a_fault_turns_its_proof_red = noticed(
    FAULTS, here, (AssertionError, RuntimeError, pytest.fail.Exception)
)
