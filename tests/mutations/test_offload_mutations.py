"""Offload with a deliberate fault: each must turn a proof of test_offload.py red."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import test_offload as proofs
from harness import Mutation, edits, here, noticed, replaces
from labkit.memory import offload
from labkit.memory.offload import Offload, Ticket

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


each_memory = proofs.test_each_memory_goes_once_and_parameters_stay
ahead = proofs.test_copies_run_ahead_in_both_directions
conjugated = proofs.test_what_is_conjugated_or_turned_comes_back_so
changed = proofs.test_a_change_in_place_is_found
FAULTS = [
    Mutation(
        keeps_the_output_itself, proofs.test_small_memory_that_stays_does_not_keep_its_graph_alive
    ),
    *edits(
        offload,
        ("moves parameters", " and storage._cdata not in self._stay", "", each_memory),
        ("forgets what has left",
         "self._of[storage]() if storage in self._of else", "", each_memory),
        ("lets all leave at once",
         "while len(self._leaving) >= self._in_flight", "while False",
         proofs.test_memory_on_the_device_is_bounded),
        ("never prefetches", "moved.number - 1 - self._in_flight", "moved.number - 1", ahead),
        ("forgets the stride",
         "kept.stride)", 'torch.empty(kept.shape, device="meta").stride())',
         proofs.test_a_view_comes_back_as_it_was),
        ("forgets the conjugation", "torch._conj(x) if kept.conj else x", "x", conjugated),
        ("forgets the sign", "torch._neg_view(x) if kept.neg else x", "x", conjugated),
        ("leaves before the copy is over",
         "._trip.wait()\n        self._changed", "._changed", ahead),
        ("misses changes", "if self._changed or", "if False and", changed),
        ("misses changes of what stays",
         "x._version != version", "0", proofs.test_a_change_of_what_stays_is_found, {}),
    ),
]  # fmt: skip
test_a_fault_turns_its_proof_red = noticed(
    FAULTS, here, (AssertionError, RuntimeError, pytest.fail.Exception)
)
