"""Deliberate faults in recompute; each must turn its proof red."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import test_recompute as proofs
from harness import Mutation, edits, here, noticed, replaces
from labkit.memory import conditions, policies
from labkit.memory import edits as of_models
from labkit.memory import recompute as module

pytestmark = pytest.mark.slow


@replaces(module._Inputs, "__init__")
def hides_inputs_from_autograd(real: Any, self: Any, args: Any, kwargs: Any) -> None:
    """Hooks from outside do not see them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        real(self, args, kwargs)


once_more = proofs.test_one_backward_runs_it_once_more_and_a_policy_runs_less
changes = proofs.test_a_function_that_changes_between_its_runs_is_reported
functions = proofs.test_any_function_and_any_number_of_backwards


def gradients(edit: str = "full") -> None:
    proofs.test_gradients_and_masks_are_those_without_bit_for_bit(edit, torch.float32, True)


def casts(region: Callable[..., Any]) -> None:
    proofs.test_casts_are_the_same_again("all again", region)


NEW_MASKS = "draws new masks", "            restore(self.states)\n", ""
NOT_BACK = "does not restore the generator", "stack.callback(restore, ", "(lambda states: None)("
NO_CASTS = "forgets casts", "if then != _autocast(kind):", "if False:"
DETACHED = (
    "detaches parameters",
    "output = self.fn(*args, **kwargs)",
    "output = torch.no_grad()(self.fn)(*args, **kwargs).requires_grad_()",
)
NOT_COMPARED = "compares nothing", 'if check == "none":', "if True:"
ALL_NEW = (
    "takes shared memory for new",
    "return {x.untyped_storage()._cdata for x in tensors}",
    "return set()",
)
FAULTS = [
    Mutation(
        hides_inputs_from_autograd, proofs.test_hooks_from_outside_see_the_inputs_and_only_those
    ),
    *edits(
        conditions,
        (*NEW_MASKS, gradients),
        (*NEW_MASKS, proofs.test_the_same_masks_are_drawn_again, None),
        (*NOT_BACK, proofs.test_random_numbers_drawn_later_are_unchanged),
        (*NOT_BACK, proofs.test_the_generator_is_put_back_after_an_error_too),
        ("forgets every state", "self.states = used(self.states)", "self.states = []", gradients),
        (*NO_CASTS, casts, partial(torch.autocast, "cpu")),
        (*NO_CASTS, casts, proofs.autocast),
        ("forgets modes",
         "if self._modes != _modes():", "if False:",
         proofs.test_modes_are_entered_again, proofs.Doubled),
    ),
    *edits(
        module,
        ("keeps everything",
         "slot = _Slot()\n", "slot = _Slot()\n        slot.tensor = x.detach()\n",
         proofs.test_a_layer_keeps_the_bytes_that_are_published, "full"),
        ("keeps what was recomputed",
         "x, slot.tensor = slot.tensor, None", "x = slot.tensor",
         proofs.test_memory_of_the_second_run_is_let_go),
        ("runs from other inputs",
         "leaves[i] = x\n", "leaves[i] = x * 1.01 if x.is_floating_point() else x\n", gradients),
        (*DETACHED, gradients),
        (*DETACHED, proofs.test_parameters_get_gradients_where_no_input_has_one),
        (*NOT_COMPARED, changes, "another shape"),
        (*NOT_COMPARED, changes, "another type"),
        (*NOT_COMPARED, proofs.test_other_values_are_reported_on_request),
        ("ignores changed inputs",
         "        inputs.check_unchanged(tensors_in((args, kwargs)))\n", "",
         proofs.test_an_input_changed_in_place_is_reported),
    ),
    *edits(
        policies,
        ("serves the graph of forward",  # and what holds the graph in which it was made is a cycle
         "value = tree_map_only(torch.Tensor, _same_version, out)", "value = out",
         proofs.test_nothing_is_held_when_backward_is_over, "products"),
        ("serves in any order",
         "kept = self.results[op][call]", "kept = self.results[op][-1]",
         gradients, "products kept"),
        ("ignores kept draws",
         "        restore(kept.random)\n", "",
         proofs.test_a_kept_draw_leaves_the_generator_as_if_it_had_been_drawn),
        ("keeps all",
         "elif self.policy(op):", "else:", proofs.test_a_policy_keeps_its_results_and_no_more),
        ("keeps nothing", "elif self.policy(op):", "elif False:", once_more),
        ("keeps what is overwritten",
         "_Mode(self._keep, self._written)", "_Mode(self._keep)",
         functions, "in place inside", "keep all"),
        (*ALL_NEW, proofs.test_a_batched_matmul_that_the_user_changed_is_reported, False),
        (*ALL_NEW, functions, "in place behind a product", "keep all"),
    ),
    *edits(
        of_models,
        ("edits every second block", "return blocks\n", "return blocks[::2]\n", once_more),
    ),
]  # fmt: skip
ERRORS = (AssertionError, ValueError, RuntimeError, pytest.fail.Exception)
test_a_fault_turns_its_proof_red = noticed(FAULTS, here, ERRORS)
