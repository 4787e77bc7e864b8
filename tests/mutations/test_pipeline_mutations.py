"""Deliberate faults in the pipeline; each must turn the check of its promise red."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import pipeline_cases as cases
from harness import Change, Mutation, instead, noticed, replaces
from labkit import Comm, World
from labkit.parallel.pipeline import deferred_weights, virtual_stage
from labkit.parallel.pipeline.p2p import P2PChannel
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.synchronising import Tied
from labkit.parallel.pipeline.virtual_stage import VirtualStage, WeightVersions

pytestmark = pytest.mark.slow


@replaces(VirtualStage, "_backward")
def drops_a_gradient(real: Any, self: Any, flight: Any, dy: Any, k: int) -> Any:
    """Micro-batch 1 sends only zeros back."""
    dx = real(self, flight, dy, k)
    return torch.zeros_like(dx) if k == 1 and dx is not None else dx


@replaces(virtual_stage, "run_later")
def drops_a_weight_gradient(real: Any, later: Any, also: Any = ()) -> Any:
    return real(later[1:], also)


@replaces(deferred_weights._InputHalf, "backward")
def computes_both_halves_at_once_and_again(real: Any, ctx: Any, dy: Tensor) -> Any:
    """The first half also computes the weight's gradient, and the second computes it again."""
    gradients = real(ctx, dy)
    x, weight = ctx.saved_tensors
    dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
    weight.grad = dw if weight.grad is None else weight.grad + dw
    return gradients


@replaces(Pipeline, "_loss_of")
def divides_twice(real: Any, self: Any, out: Tensor, k: int) -> Any:
    return real(self, out, k) / self.microbatches


@replaces(Pipeline, "_begin")
def weighs_all_micro_batches_alike(real: Any, self: Any, *args: Any) -> None:
    real(self, *args)
    self._shares = [1 / self.microbatches] * self.microbatches


never_sums_the_tie = instead("never_sums_the_tie", Tied, "sum_gradients", lambda self: None)


@replaces(Tied, "sum_gradients")
def sums_the_tie_twice(real: Any, self: Any) -> None:
    """As if both owners' copies counted."""
    real(self)
    for parameter, _ in self._copies:
        parameter.grad *= 2


@replaces(Comm, "broadcast")
def copies_begin_apart(real: Any, *_: Any, **__: Any) -> None:
    pass


@replaces(P2PChannel, "_post_send")
def swaps_two_messages(real: Any, self: Any, x: Tensor, message: Any) -> None:
    """Activations leave in pairs, the second first."""
    held = self.__dict__.setdefault("held", [])
    held.append((x, message))
    if message.what == "gradient" or message.microbatch % 2:
        while held:
            real(self, *held.pop())


@replaces(P2PChannel, "begin")
def sends_the_shape_each_time(real: Any, self: Any, rows: Any, device: Any, afresh: bool) -> Any:
    return real(self, rows, device, True)


@replaces(P2PChannel, "_post_send")
def sends_in_double_precision(real: Any, self: Any, x: Tensor, message: Any) -> None:
    real(self, torch.cat([x, x]), message)


@replaces(P2PChannel, "_post_send")
def waits_to_send(real: Any, self: Any, x: Tensor, message: Any) -> None:
    real(self, x, message)
    self._leaving[-1].wait()


@replaces(P2PChannel, "_post_next")
def posts_nothing_ahead(real: Any, self: Any, source: int, wanted: bool) -> None:
    if wanted:
        real(self, source, wanted)


@replaces(P2PChannel, "_post_send")
def sends_late(real: Any, self: Any, x: Tensor, message: Any) -> None:
    """A result leaves when the next one is there."""
    held = self.__dict__.setdefault("held", [])
    held.append((x, message))
    if message.what == "gradient" or message.microbatch > 0:
        real(self, *held.pop(0))
    if message.microbatch == len(self._rows) - 1:
        while held:
            real(self, *held.pop(0))


@replaces(VirtualStage, "_forward")
def keeps_activations(real: Any, self: Any, k: int, x: Tensor) -> Tensor:
    """The end of each graph, in a list that outlives the step."""
    y: Tensor = real(self, k, x)
    self.__dict__.setdefault("kept", []).append(self.in_flight[k].end)
    return y


@replaces(VirtualStage, "_backward")
def keeps_graphs_until_the_end(real: Any, self: Any, flight: Any, dy: Any, k: int) -> Any:
    """Each flight ends, but its graph goes only with the last one."""
    kept = self.__dict__.setdefault("kept", [])
    kept.append(flight.end)
    dx = real(self, flight, dy, k)
    if not self.in_flight:
        kept.clear()
    return dx


def retains_what_is_saved() -> Any:
    real = torch.autograd.backward
    kept: list[Any] = []

    def retaining(end: Any, gradient: Any = None) -> None:
        kept.append(end)
        real(end, gradient, retain_graph=True)

    return patch.object(torch.autograd, "backward", retaining)


@replaces(P2PChannel, "send")
def keeps_outputs(real: Any, self: Any, message: Any, x: Any) -> None:
    self.__dict__.setdefault("kept", []).append(x)
    real(self, message, x)


synchronises_on_every_micro_batch = instead(
    "synchronises_on_every_micro_batch", VirtualStage, "_without_sync", lambda *_: nullcontext()
)


@replaces(VirtualStage, "__init__")
def never_synchronises(real: Any, self: Any, *args: Any) -> None:
    real(self, *args)
    self._synchronised = set()


never_recomputes = instead("never_recomputes", virtual_stage, "Recomputed", lambda fn: fn)


@replaces(VirtualStage, "_weight")
def keeps_the_inputs_of_a_weight(real: Any, self: Any, flight: Any, action: Any, k: int) -> None:
    real(self, flight, action, k)
    self.in_flight[k] = flight


@replaces(virtual_stage, "Recomputed")
def recomputes_with_new_masks(real: Any, fn: Any) -> Any:
    return real(fn, preserve_rng=False)


@replaces(WeightVersions, "forward")
def goes_back_through_the_newest_weights(real: Any, self: Any, k: int, x: Tensor) -> Any:
    """What PipeDream's versions prevent."""
    if self._newest is None and self._used:  # one version for all, changed in place
        self._newest = next(iter(self._used.values()))
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                self._newest[name].data = p.detach().clone()
    return real(self, k, x)


@replaces(WeightVersions, "update")
def skips_an_update(real: Any, self: Any, k: int) -> None:
    if k == 1:
        for p in self._used.pop(k).values():
            p.grad = None
        self._gradients.pop(k)
    else:
        real(self, k)


FAULTS = [
    *(Mutation(fault, cases.equals_one_process, [3], [name], ms=[m])
      for fault, name, m in (
          (drops_a_gradient, "1f1b", 4),
          (drops_a_gradient, "zb-h1", 4),
          (drops_a_weight_gradient, "zb-h1", 4),
          (computes_both_halves_at_once_and_again, "zb-h1", 4),
          (divides_twice, "gpipe", 4),
          (weighs_all_micro_batches_alike, "1f1b", 4),
          (swaps_two_messages, "gpipe", 4),  # both arrive, each as the other
          (swaps_two_messages, "1f1b", 3),  # the last never leaves
      )),
    Mutation(sends_in_double_precision, cases.sends_exactly_its_bytes, "1f1b"),
    Mutation(sends_the_shape_each_time, cases.sends_exactly_its_bytes, "1f1b"),
    Mutation(waits_to_send, cases.does_not_wait_for_sends),
    Mutation(posts_nothing_ahead, cases.sends_overlap_compute),
    Mutation(sends_late, cases.sends_overlap_compute),
    Mutation(never_sums_the_tie, cases.a_gpt_with_a_tied_embedding, 3),
    Mutation(sums_the_tie_twice, cases.a_gpt_with_a_tied_embedding, 3),
    Mutation(copies_begin_apart, cases.a_gpt_with_a_tied_embedding, 3),
    Mutation(keeps_activations, cases.frees_activations, "1f1b", 6),
    Mutation(keeps_graphs_until_the_end, cases.frees_activations, "1f1b", 6),
    Mutation(keeps_the_inputs_of_a_weight, cases.frees_activations, "zb-h1", 6),
    Mutation(retains_what_is_saved, cases.frees_what_is_saved, "1f1b", 6),
    Mutation(keeps_outputs, cases.outputs_go_when_they_are_sent),
    Mutation(never_recomputes, cases.recompute_is_equal_to_the_bit, "1f1b"),
    Mutation(recomputes_with_new_masks, cases.recompute_is_equal_to_the_bit, "1f1b"),
    Mutation(goes_back_through_the_newest_weights, cases.pipedream_equals_stale_weights, 4),
    Mutation(skips_an_update, cases.pipedream_equals_stale_weights, 4),
]  # fmt: skip
REPLICAS = [
    Mutation(fault, cases.replicas_synchronise_once, name)
    for fault in (synchronises_on_every_micro_batch, never_synchronises)
    for name in ("1f1b", "zb-h1")
]


def in_pipeline(world: World, change: Change, check: Any, *args: Any) -> None:
    """Ranks that fail a promise end what they do, so that the others need not wait for them."""

    def run() -> str:
        try:
            with change():
                check(*args)
        except AssertionError as error:
            return str(error) or "an assertion"
        return ""

    assert not any(world.run(run))


some_ranks_wait = {"timeout_s": 4}  # under some of the faults
test_a_fault_turns_its_check_red = noticed(FAULTS, in_pipeline, size=3, **some_ranks_wait)
test_faulty_replicas_turn_their_check_red = noticed(
    REPLICAS, in_pipeline, size=4, **some_ranks_wait
)
