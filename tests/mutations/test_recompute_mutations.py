"""Deliberate faults in recompute; each must turn its proof red."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch

import test_recompute as proofs
from labkit.memory import conditions, edits, policies
from labkit.memory import recompute as module
from labkit.memory.conditions import Conditions
from labkit.memory.policies import Kept

pytestmark = pytest.mark.slow


# ---- faults


def draws_new_masks() -> Any:
    return patch.object(Conditions, "again", lambda self: nullcontext())


def leaves_the_generators_elsewhere() -> Any:
    @contextmanager
    def again(self: Conditions) -> Any:
        conditions.restore(self.states)
        yield

    return patch.object(Conditions, "again", again)


def forgets_every_state() -> Any:
    def forget(self: Conditions) -> None:
        self.states = []

    return patch.object(Conditions, "forget_unused", forget)


def forgets_casts() -> Any:
    return patch.object(conditions, "_autocast", lambda kind: None)


def forgets_modes() -> Any:
    return patch.object(conditions, "_modes", lambda: [])


def keeps_everything() -> Any:
    def save(self: Any, x: torch.Tensor) -> Any:
        slot = module._Slot()
        slot.tensor = x.detach()
        self.saved.append((ref(slot), None))
        return slot

    return patch.object(module._Call, "save", save)


def keeps_what_was_computed_again() -> Any:
    def wanted(self: Any, slot: Any) -> torch.Tensor:
        if slot.tensor is None:
            self.run_again()
        return slot.tensor  # type: ignore[no-any-return]

    return patch.object(module._Call, "wanted", wanted)


def runs_from_other_inputs() -> Any:
    again = module._Inputs.again

    def other(self: Any) -> Any:
        args, kwargs = again(self)
        return tuple(
            x * 1.01 if torch.is_tensor(x) and x.dtype.is_floating_point else x for x in args
        ), kwargs

    return patch.object(module._Inputs, "again", other)


def detaches_parameters() -> Any:
    """What runs in forward is cut off: inputs and parameters get no gradients."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            out = self.fn(*args, **kwargs)
        return out.requires_grad_() if torch.is_tensor(out) else out

    return patch.object(module.Recomputed, "__call__", call)


def holds_inputs_past_autograd() -> Any:
    """Hooks from outside do not see them."""
    init = module._Inputs.__init__

    def hold(self: Any, args: Any, kwargs: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            init(self, args, kwargs)

    return patch.object(module._Inputs, "__init__", hold)


def compares_nothing() -> Any:
    return patch.object(module, "_looks", lambda x, check: None)


def does_not_look_at_its_inputs() -> Any:
    return patch.object(module._Inputs, "check_unchanged", lambda self, tensors: None)


def serves_the_graph_of_forward() -> Any:
    """What a policy kept holds the graph in which it was made: a cycle."""
    return patch.object(policies, "_same_version", lambda x: x)


def serves_in_any_order() -> Any:
    value = Kept._value

    def last(self: Kept, op: Any, kept: Any) -> Any:
        there = [x for x in self.results[op] if x is not None] or [kept]
        return value(self, op, there[-1])

    return patch.object(Kept, "_value", last)


def a_kept_draw_is_no_draw() -> Any:
    return patch.object(policies, "restore", lambda states: None)


def a_policy_keeps_all() -> Any:
    init = Kept.__init__
    return patch.object(Kept, "__init__", lambda self, policy: init(self, lambda op: True))


def a_policy_keeps_nothing() -> Any:
    init = Kept.__init__
    return patch.object(Kept, "__init__", lambda self, policy: init(self, lambda op: False))


def keeps_what_is_written_over() -> Any:
    return patch.object(Kept, "_written", lambda self, x: None)


def takes_shared_memory_for_new() -> Any:
    return patch.object(policies, "_memories", lambda value: set())


def edits_every_second_block() -> Any:
    blocks = edits.blocks_of
    return patch.object(edits, "blocks_of", lambda model: blocks(model)[::2])


# ---- the proofs that see them


def gradients(edit: str = "full") -> None:
    proofs.test_gradients_and_masks_are_those_without_bit_for_bit(edit, torch.float32, True)


def functions(name: str, policy: str = "all again") -> None:
    proofs.test_any_function_and_any_number_of_backwards(name, policy)


def casts(region: Callable[..., Any]) -> None:
    proofs.test_casts_are_the_same_again("all again", region)


FAULTS: list[tuple[Callable[[], Any], Callable[[], None]]] = [
    (draws_new_masks, gradients),
    (draws_new_masks, lambda: proofs.test_the_same_masks_are_drawn_again(None)),
    (leaves_the_generators_elsewhere, proofs.test_what_is_drawn_later_is_what_it_would_have_been),
    (
        leaves_the_generators_elsewhere,
        proofs.test_the_generator_is_put_back_after_an_error_too,
    ),
    (forgets_every_state, gradients),
    (forgets_casts, lambda: casts(partial(torch.autocast, "cpu"))),
    (forgets_casts, lambda: casts(proofs.autocast)),
    (forgets_modes, lambda: proofs.test_modes_are_entered_again(proofs.Doubled)),
    (keeps_everything, lambda: proofs.test_a_layer_keeps_the_bytes_that_are_published("full")),
    (keeps_what_was_computed_again, proofs.test_memory_of_the_second_run_is_let_go),
    (runs_from_other_inputs, gradients),
    (detaches_parameters, gradients),
    (detaches_parameters, proofs.test_parameters_get_gradients_where_no_input_has_one),
    (holds_inputs_past_autograd, proofs.test_hooks_from_outside_see_the_inputs_and_only_those),
    (compares_nothing, proofs.test_tensors_that_look_otherwise_are_told),
    (compares_nothing, proofs.test_other_numbers_are_told_on_request),
    (does_not_look_at_its_inputs, proofs.test_an_input_that_is_changed_in_place_is_told),
    (
        serves_the_graph_of_forward,
        lambda: proofs.test_nothing_is_held_when_backward_is_over("products"),
    ),
    (serves_in_any_order, lambda: gradients("products kept")),
    (
        a_kept_draw_is_no_draw,
        proofs.test_a_kept_draw_leaves_the_generator_as_if_it_had_been_drawn,
    ),
    (a_policy_keeps_all, proofs.test_a_policy_keeps_its_results_and_no_more),
    (a_policy_keeps_nothing, proofs.test_one_backward_runs_it_once_more_and_a_policy_runs_less),
    (keeps_what_is_written_over, lambda: functions("in place inside", "keep all")),
    (
        takes_shared_memory_for_new,
        lambda: proofs.test_a_product_of_three_dimensions_that_the_user_changed_is_told(False),
    ),
    (takes_shared_memory_for_new, lambda: functions("in place behind a product", "keep all")),
    (
        edits_every_second_block,
        proofs.test_one_backward_runs_it_once_more_and_a_policy_runs_less,
    ),
]


@pytest.mark.parametrize(
    ("fault", "proof"), FAULTS, ids=[f"{i} {fault.__name__}" for i, (fault, _) in enumerate(FAULTS)]
)
def test_a_fault_is_seen(fault: Callable[[], Any], proof: Callable[[], None]) -> None:
    proof()
    with fault(), pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception)):
        proof()
