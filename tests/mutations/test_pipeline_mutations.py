"""Deliberate faults in the pipeline; each must turn the check of its promise red."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline_cases as cases
from harness import Change, Edit, Mutation, edits, instead, noticed, replaces
from labkit import World
from labkit.parallel.pipeline import deferred_weights, grad_sync, p2p, pipeline, virtual_stage
from labkit.parallel.pipeline.grad_sync import Tied
from labkit.parallel.pipeline.p2p import P2PChannel
from labkit.parallel.pipeline.virtual_stage import VirtualStage, WeightVersions

pytestmark = pytest.mark.slow


@replaces(deferred_weights._InputHalf, "backward")
def computes_both_halves_at_once_and_again(real: Any, ctx: Any, dy: Tensor) -> Any:
    """The first half also computes the weight's gradient, and the second computes it again."""
    gradients = real(ctx, dy)
    x, weight = ctx.saved_tensors
    dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
    weight.grad = dw if weight.grad is None else weight.grad + dw
    return gradients


never_sums_the_tie = instead("never_sums_the_tie", Tied, "sum_gradients", lambda self: None)


@replaces(P2PChannel, "_post_send")
def swaps_two_messages(real: Any, self: Any, x: Tensor, message: Any) -> None:
    """Activations leave in pairs, the second first."""
    held = self.__dict__.setdefault("held", [])
    held.append((x, message))
    if message.what == "gradient" or message.microbatch % 2:
        while held:
            real(self, *held.pop())


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


@replaces(VirtualStage, "_backward")
def keeps_graphs_until_the_end(real: Any, self: Any, flight: Any, dy: Any, k: int) -> Any:
    """Each flight ends, but its graph goes only with the last one."""
    kept = self.__dict__.setdefault("kept", [])
    kept.append(flight.root)
    dx = real(self, flight, dy, k)
    if not self.in_flight:
        kept.clear()
    return dx


synchronises_on_every_micro_batch = instead(
    "synchronises_on_every_micro_batch", VirtualStage, "_without_sync", lambda *_: nullcontext()
)


@replaces(WeightVersions, "forward")
def goes_back_through_the_newest_weights(real: Any, self: Any, k: int, x: Tensor) -> Any:
    """What PipeDream's versions prevent."""
    if self._newest is None and self._used:  # one version for all, changed in place
        self._newest = next(iter(self._used.values()))
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                self._newest[name].data = p.detach().clone()
    return real(self, k, x)


EQUAL = cases.equals_one_process, [3]
TIED = cases.a_gpt_with_a_tied_embedding, 3
FREED = cases.frees_activations
SAME_BITS = cases.recompute_is_equal_to_the_bit, "1f1b"
STALE = cases.pipedream_equals_stale_weights, 4
BACKWARD = """torch.autograd.backward(flight.root, dy)
            flight.root = None"""
RETAINING = """torch.autograd.backward(flight.root, dy, retain_graph=True)
            vars(self)[k] = flight.root"""
without_a_gradient = "if x.grad is None else", "if x.grad is None or k == 1 else"
FAULTS = [
    Mutation(computes_both_halves_at_once_and_again, *EQUAL, ["zb-h1"], [4]),
    Mutation(swaps_two_messages, *EQUAL, ["gpipe"], [4]),  # both arrive, each as the other
    Mutation(swaps_two_messages, *EQUAL, ["1f1b"], [3]),  # the last never leaves
    Mutation(sends_late, cases.sends_overlap_compute),
    Mutation(never_sums_the_tie, *TIED),
    Mutation(keeps_graphs_until_the_end, FREED, "1f1b", 6),
    Mutation(goes_back_through_the_newest_weights, *STALE),
    *edits(
        virtual_stage,
        ("micro-batch 1 sends zeros back", *without_a_gradient, *EQUAL, ["1f1b"], [4]),
        ("micro-batch 1 sends zeros back", *without_a_gradient, *EQUAL, ["zb-h1"], [4]),
        ("keeps the end of each graph",
         "root = get_gradient_edge(out)", "root = vars(self)[k] = get_gradient_edge(out)",
         FREED, "1f1b", 6),
        ("keeps the inputs of a weight",
         'self.in_flight[k] if phase == "input"', 'self.in_flight[k] if phase != "backward"',
         FREED, "zb-h1", 6),
        ("retains what is saved", BACKWARD, RETAINING, cases.frees_what_is_saved, "1f1b", 6),
        ("never recomputes", "if self.recompute else", "if False else", *SAME_BITS),
        ("recomputes with new masks",
         "Recomputed(function)", "Recomputed(function, preserve_rng=False)", *SAME_BITS),
        ("skips an update",
         "self.optimizer.step()", "microbatch == 1 or self.optimizer.step()", *STALE),
    ),
    *edits(
        deferred_weights,
        ("drops a weight gradient",
         "for make in later]", "for make in later[1:]]", *EQUAL, ["zb-h1"], [4]),
    ),
    *edits(
        pipeline,
        ("divides twice",
         "share = loss * self._shares[k]", "share = loss * self._shares[k] / self.microbatches",
         *EQUAL, ["gpipe"], [4]),
        ("weighs all micro-batches alike",
         "[n / len(x) for n in rows]", "[1 / len(rows) for n in rows]", *EQUAL, ["1f1b"], [4]),
    ),
    *edits(
        grad_sync,
        ("sums the tie as if both copies counted",
         "group.all_reduce(parameter.grad)", "group.all_reduce(parameter.grad.mul_(2))", *TIED),
        ("copies begin apart", "group.broadcast(parameter.detach(), 0)", "pass", *TIED),
    ),
    *edits(
        p2p,
        ("sends twice the bytes",
         "x, message, message.what", "torch.cat([x, x]), message, message.what",
         cases.sends_exactly_its_bytes, "1f1b"),
        ("sends the shape each time",
         "if changed:", "if True:", cases.sends_exactly_its_bytes, "1f1b"),
        ("waits to send",
         "self._pending_sends.append(PendingSend(handle, x, version, what))",
         "PendingSend(handle, x, version, what).wait()", cases.does_not_wait_for_sends),
        ("posts nothing ahead",
         "self._post_next(source, wanted=False)", "pass", cases.sends_overlap_compute),
        ("keeps outputs",
         "self._release_sent()\n        if message.what",
         "vars(self)[message] = x\n        if message.what",
         cases.outputs_go_when_they_are_sent),
    ),
]  # fmt: skip
never_synchronises = Edit(
    "never_synchronises", virtual_stage.__name__, "set(last_of.values())", "set()"
)
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
