"""Deliberate faults in recompute; each must turn its proof red."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import test_recompute as proofs
from harness import Edit, Mutation, here, instead, noticed, replaces
from labkit.memory import conditions, edits, policies
from labkit.memory import recompute as module
from labkit.memory.conditions import Conditions
from labkit.memory.policies import Kept

pytestmark = pytest.mark.slow


draws_new_masks = instead("draws_new_masks", Conditions, "again", lambda self: nullcontext())


@replaces(Conditions, "again")
@contextmanager
def does_not_restore_the_generator(real: Any, self: Conditions) -> Any:
    conditions.restore(self.states)
    yield


forgets_every_state = instead(
    "forgets_every_state", Conditions, "forget_unused", lambda self: self.states.clear()
)
forgets_casts = instead("forgets_casts", conditions, "_autocast", lambda kind: None)
forgets_modes = instead("forgets_modes", conditions, "_modes", lambda: [])


slot = "slot = _Slot()\n"
keeps_everything = Edit(
    "keeps_everything", module.__name__, slot, f"{slot}        slot.tensor = x.detach()\n"
)
keeps_what_was_recomputed = Edit(
    "keeps_what_was_recomputed",
    module.__name__,
    "x, slot.tensor = slot.tensor, None",
    "x = slot.tensor",
)
runs_from_other_inputs = Edit(
    "runs_from_other_inputs", module.__name__, "leaves[i] = x\n",
    "leaves[i] = x * 1.01 if x.is_floating_point() else x\n",
)  # fmt: skip


@replaces(module.Recomputed, "__call__")
def detaches_parameters(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What runs in forward is cut off: inputs and parameters get no gradients."""
    with torch.no_grad():
        out = self.fn(*args, **kwargs)
    return out.requires_grad_() if torch.is_tensor(out) else out


@replaces(module._Inputs, "__init__")
def hides_inputs_from_autograd(real: Any, self: Any, args: Any, kwargs: Any) -> None:
    """Hooks from outside do not see them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        real(self, args, kwargs)


compares_nothing = instead("compares_nothing", module, "_looks", lambda x, check: None)
ignores_changed_inputs = instead(
    "ignores_changed_inputs", module._Inputs, "check_unchanged", lambda self, tensors: None
)
# What a policy kept holds the graph in which it was made: a cycle.
serves_the_graph_of_forward = instead(
    "serves_the_graph_of_forward", policies, "_same_version", lambda x: x
)


@replaces(Kept, "_value")
def serves_in_any_order(real: Any, self: Kept, op: Any, kept: Any) -> Any:
    there = [x for x in self.results[op] if x is not None] or [kept]
    return real(self, op, there[-1])


ignores_kept_draws = instead("ignores_kept_draws", policies, "restore", lambda states: None)


@replaces(Kept, "__init__")
def a_policy_keeps_all(real: Any, self: Kept, policy: Any) -> None:
    real(self, lambda op: True)


@replaces(Kept, "__init__")
def a_policy_keeps_nothing(real: Any, self: Kept, policy: Any) -> None:
    real(self, lambda op: False)


keeps_what_is_overwritten = instead(
    "keeps_what_is_overwritten", Kept, "_written", lambda self, x: None
)
takes_shared_memory_for_new = instead(
    "takes_shared_memory_for_new", policies, "_memories", lambda value: set()
)


@replaces(edits, "blocks_of")
def edits_every_second_block(real: Any, model: Any) -> Any:
    return real(model)[::2]


once_more = proofs.test_one_backward_runs_it_once_more_and_a_policy_runs_less
changes = proofs.test_a_function_that_changes_between_its_runs_is_reported
functions = proofs.test_any_function_and_any_number_of_backwards
batched = proofs.test_a_batched_matmul_that_the_user_changed_is_reported


def gradients(edit: str = "full") -> None:
    proofs.test_gradients_and_masks_are_those_without_bit_for_bit(edit, torch.float32, True)


def casts(region: Callable[..., Any]) -> None:
    proofs.test_casts_are_the_same_again("all again", region)


FAULTS = [
    Mutation(draws_new_masks, gradients),
    Mutation(draws_new_masks, proofs.test_the_same_masks_are_drawn_again, None),
    Mutation(does_not_restore_the_generator, proofs.test_random_numbers_drawn_later_are_unchanged),
    Mutation(
        does_not_restore_the_generator, proofs.test_the_generator_is_put_back_after_an_error_too
    ),
    Mutation(forgets_every_state, gradients),
    Mutation(forgets_casts, casts, partial(torch.autocast, "cpu")),
    Mutation(forgets_casts, casts, proofs.autocast),
    Mutation(forgets_modes, proofs.test_modes_are_entered_again, proofs.Doubled),
    Mutation(keeps_everything, proofs.test_a_layer_keeps_the_bytes_that_are_published, "full"),
    Mutation(keeps_what_was_recomputed, proofs.test_memory_of_the_second_run_is_let_go),
    Mutation(runs_from_other_inputs, gradients),
    Mutation(detaches_parameters, gradients),
    Mutation(detaches_parameters, proofs.test_parameters_get_gradients_where_no_input_has_one),
    Mutation(
        hides_inputs_from_autograd, proofs.test_hooks_from_outside_see_the_inputs_and_only_those
    ),
    Mutation(compares_nothing, changes, "another shape"),
    Mutation(compares_nothing, changes, "another type"),
    Mutation(compares_nothing, proofs.test_other_values_are_reported_on_request),
    Mutation(ignores_changed_inputs, proofs.test_an_input_changed_in_place_is_reported),
    Mutation(
        serves_the_graph_of_forward, proofs.test_nothing_is_held_when_backward_is_over, "products"
    ),
    Mutation(serves_in_any_order, gradients, "products kept"),
    Mutation(
        ignores_kept_draws, proofs.test_a_kept_draw_leaves_the_generator_as_if_it_had_been_drawn
    ),
    Mutation(a_policy_keeps_all, proofs.test_a_policy_keeps_its_results_and_no_more),
    Mutation(a_policy_keeps_nothing, once_more),
    Mutation(keeps_what_is_overwritten, functions, "in place inside", "keep all"),
    Mutation(takes_shared_memory_for_new, batched, False),
    Mutation(takes_shared_memory_for_new, functions, "in place behind a product", "keep all"),
    Mutation(edits_every_second_block, once_more),
]
ERRORS = (AssertionError, ValueError, RuntimeError, pytest.fail.Exception)
test_a_fault_turns_its_proof_red = noticed(FAULTS, here, ERRORS)
