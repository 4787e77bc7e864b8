"""Offload with a deliberate fault: each must turn a proof of test_offload.py red."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import test_offload as proofs
from labkit.memory.offload import Moved, Offload, Ticket


def moves_parameters(self: Offload, x: torch.Tensor) -> bool:
    return x.device == self._device


def forgets_what_has_gone(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Offload, x: torch.Tensor) -> Any:
        self._of.pop(x.untyped_storage(), None)
        return unbroken(self, x)

    return moved


def lets_all_leave_at_once(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Offload, x: torch.Tensor) -> Any:
        self._in_flight = 10**6
        return unbroken(self, x)

    return moved


def asks_for_nothing_ahead(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def unpack(self: Offload, kept: Any) -> torch.Tensor:
        before, self._in_flight = self._in_flight, 0
        try:
            return unbroken(self, kept)
        finally:
            self._in_flight = before

    return unpack


def forgets_the_stride(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def pack(self: Offload, x: torch.Tensor) -> Any:
        found = unbroken(self, x)
        if isinstance(found, Ticket):
            return replace(found, stride=torch.empty(x.shape, device="meta").stride())
        return found

    return pack


def forgets_the_conjugation(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def pack(self: Offload, x: torch.Tensor) -> Any:
        found = unbroken(self, x)
        return replace(found, conj=False, neg=False) if isinstance(found, Ticket) else found

    return pack


def forgets_changes_of_what_stays(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def unpack(self: Offload, kept: Any) -> torch.Tensor:
        return unbroken(self, kept) if isinstance(kept, Ticket) else kept[0]

    return unpack


def leaves_before_the_copy_is_over(self: Moved) -> None:
    self._here = self._seen = None


def forgets_changes(self: Moved) -> torch.Tensor:
    if self._seen is None:
        self._trip.wait()
    assert self._here is not None
    return self._here


tied: list[torch.Tensor] = []  # outputs whose graph holds them; no garbage collector sees that


def keeps_the_output_itself(unbroken: Callable[..., Any]) -> Callable[..., Any]:
    def pack(self: Offload, x: torch.Tensor) -> Any:
        found = unbroken(self, x)
        if isinstance(found, Ticket):
            return found
        tied.append(x)
        return x, x._version

    return pack


@pytest.fixture(autouse=True)
def no_graph_outlives_its_test() -> Iterator[None]:
    """A backward pass lets go of all that was saved: later tests count what a process holds."""
    yield
    if tied:
        tied[-1].sum().backward()
        tied.clear()


def red(proof: Callable[[], None]) -> bool:
    try:
        proof()
    except (AssertionError, RuntimeError, pytest.fail.Exception):
        return True
    return False


FAULTS: list[tuple[type, str, Callable[..., Any], Callable[[], None]]] = [
    (Offload, "_may_leave", moves_parameters,
     proofs.test_each_memory_goes_once_and_parameters_stay),
    (Offload, "_moved", forgets_what_has_gone(Offload._moved),
     proofs.test_each_memory_goes_once_and_parameters_stay),
    (Offload, "_moved", lets_all_leave_at_once(Offload._moved),
     proofs.test_memory_on_the_device_is_bounded),
    (Offload, "_unpack", asks_for_nothing_ahead(Offload._unpack),
     proofs.test_copies_run_ahead_in_both_directions),
    (Offload, "_pack", forgets_the_stride(Offload._pack),
     proofs.test_a_view_comes_back_as_it_was),
    (Offload, "_pack", forgets_the_conjugation(Offload._pack),
     proofs.test_what_is_conjugated_or_turned_comes_back_so),
    (Offload, "_unpack", forgets_changes_of_what_stays(Offload._unpack),
     partial(proofs.test_a_change_of_what_stays_is_found, {})),
    (Moved, "leave", leaves_before_the_copy_is_over,
     proofs.test_copies_run_ahead_in_both_directions),
    (Moved, "use", forgets_changes, proofs.test_a_change_in_place_is_found),
    (Offload, "_pack", keeps_the_output_itself(Offload._pack),
     proofs.test_small_memory_that_stays_does_not_keep_its_graph_alive),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "fault", "proof"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_fault_turns_its_proof_red(
    owner: type,
    name: str,
    fault: Callable[..., Any],
    proof: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(owner, name, fault)
    assert red(proof)
