"""Deliberate faults in the runner of pipelines; each must turn the check of its promise red."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import pipeline_cases as cases
from labkit import RankError, World
from labkit.parallel.pipeline import deferred_weights, virtual_stage
from labkit.parallel.pipeline.p2p import P2PChannel
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.tied import Tied
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.parallel.pipeline.weight_versions import WeightVersions
from pipeline_cases import Fault

pytestmark = pytest.mark.slow

NO_TIME = 4  # seconds: some of the faults let ranks wait for each other


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    with World(3, timeout_s=NO_TIME) as world:
        yield world


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4, timeout_s=NO_TIME) as world:
        yield world


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """`owner.name` replaced by what `make` makes of it."""
    return patch.object(owner, name, make(getattr(owner, name)))


# ---- gradients


def drops_a_gradient() -> AbstractContextManager[Any]:
    """Micro-batch 1 sends no more than zeros back."""

    def make(real: Any) -> Any:
        def backward(self: Any, flight: Any, dy: Any, k: int) -> Any:
            dx = real(self, flight, dy, k)
            return torch.zeros_like(dx) if k == 1 and dx is not None else dx

        return backward

    return instead(VirtualStage, "_backward", make)


def drops_a_weight_gradient() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        return lambda later, also=(): real(later[1:], also)

    return instead(virtual_stage, "run_later", make)


def computes_both_halves_at_once_and_again() -> AbstractContextManager[Any]:
    """The first half makes the gradient of the weights, too, and the second once more."""

    def make(real: Any) -> Any:
        def backward(ctx: Any, dy: Tensor) -> Any:
            found = real(ctx, dy)
            x, weight = ctx.saved_tensors
            dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = dw if weight.grad is None else weight.grad + dw
            return found

        return staticmethod(backward)

    return instead(deferred_weights._InputHalf, "backward", make)


def divides_twice() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        return lambda self, out, k: real(self, out, k) / self.microbatches

    return instead(Pipeline, "_loss_of", make)


def takes_all_micro_batches_for_equal() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def begin(self: Any, x: Tensor, y: Tensor) -> None:
            real(self, x, y)
            self._shares = [1 / self.microbatches] * self.microbatches

        return begin

    return instead(Pipeline, "_begin", make)


def forgets_the_tie() -> AbstractContextManager[Any]:
    return patch.object(Tied, "sum_gradients", lambda self: None)


def ties_what_was_summed_before() -> AbstractContextManager[Any]:
    """As if both owners' copies counted: the sum, twice."""

    def make(real: Any) -> Any:
        def twice(self: Any) -> None:
            real(self)
            for parameter, _ in self._copies:
                parameter.grad *= 2

        return twice

    return instead(Tied, "sum_gradients", make)


def lets_copies_begin_apart() -> AbstractContextManager[Any]:
    from labkit import Comm

    return patch.object(Comm, "broadcast", lambda self, x, src=0, async_op=False: None)


# ---- messages


def swaps_two_messages() -> AbstractContextManager[Any]:
    """Activations leave in pairs, the second first."""
    held: list[Any] = []

    def make(real: Any) -> Any:
        def post(self: Any, x: Tensor, message: Any) -> None:
            held.append((x, message))
            if message.what == "gradient" or message.microbatch % 2:
                while held:
                    real(self, *held.pop())

        return post

    return instead(P2PChannel, "_post_send", make)


def tells_the_look_each_time() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        return lambda self, rows, device, afresh: real(self, rows, device, True)

    return instead(P2PChannel, "begin", make)


def sends_in_double_precision() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        return lambda self, x, message: real(self, torch.cat([x, x]), message)

    return instead(P2PChannel, "_post_send", make)


def waits_to_send() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def post(self: Any, x: Tensor, message: Any) -> None:
            real(self, x, message)
            self._leaving[-1].wait()

        return post

    return instead(P2PChannel, "_post_send", make)


def posts_nothing_ahead() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def post(self: Any, source: int, wanted: bool) -> None:
            if wanted:
                real(self, source, wanted)

        return post

    return instead(P2PChannel, "_post_next", make)


def sends_late() -> AbstractContextManager[Any]:
    """A result leaves when the next one is there."""
    held: list[Any] = []

    def make(real: Any) -> Any:
        def post(self: Any, x: Tensor, message: Any) -> None:
            held.append((x, message))
            if message.what == "gradient" or message.microbatch > 0:
                real(self, *held.pop(0))
            if message.microbatch == len(self._rows) - 1:
                while held:
                    real(self, *held.pop(0))

        return post

    return instead(P2PChannel, "_post_send", make)


# ---- what is kept


def keeps_activations() -> AbstractContextManager[Any]:
    """The end of each graph, in a list that outlives the step."""

    def make(real: Any) -> Any:
        def forward(self: Any, k: int, x: Tensor) -> Tensor:
            y = real(self, k, x)
            self.__dict__.setdefault("kept", []).append(self.in_flight[k].end)
            return y

        return forward

    return instead(VirtualStage, "_forward", make)


def keeps_graphs_until_the_end() -> AbstractContextManager[Any]:
    """Each flight ends, but its graph goes with the last one only."""
    kept: list[Any] = []

    def make(real: Any) -> Any:
        def backward(self: Any, flight: Any, dy: Any, k: int) -> Any:
            kept.append(flight.end)
            found = real(self, flight, dy, k)
            if not self.in_flight:
                kept.clear()
            return found

        return backward

    return instead(VirtualStage, "_backward", make)


def retains_what_is_saved() -> AbstractContextManager[Any]:
    real = torch.autograd.backward
    kept: list[Any] = []

    def retaining(end: Any, gradient: Any = None) -> None:
        kept.append(end)
        real(end, gradient, retain_graph=True)

    return patch.object(torch.autograd, "backward", retaining)


def keeps_outputs() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def send(self: Any, message: Any, x: Any) -> None:
            self.__dict__.setdefault("kept", []).append(x)
            real(self, message, x)

        return send

    return instead(P2PChannel, "send", make)


# ---- replicas, recompute, versions


def synchronises_on_every_micro_batch() -> AbstractContextManager[Any]:
    return patch.object(VirtualStage, "_without_sync", lambda self, action: nullcontext())


def never_synchronises() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            real(self, *args)
            self._synchronised = set()

        return init

    return instead(VirtualStage, "__init__", make)


def never_recomputes() -> AbstractContextManager[Any]:
    return patch.object(virtual_stage, "Recomputed", lambda fn: fn)


def keeps_what_later_needs() -> AbstractContextManager[Any]:
    """A weight's half of backward leaves its inputs behind."""

    def make(real: Any) -> Any:
        def weight(self: Any, flight: Any, action: Any, k: int) -> None:
            real(self, flight, action, k)
            self.in_flight[k] = flight

        return weight

    return instead(VirtualStage, "_weight", make)


def draws_anew_in_recompute() -> AbstractContextManager[Any]:
    real = virtual_stage.Recomputed
    return patch.object(virtual_stage, "Recomputed", lambda fn: real(fn, preserve_rng=False))


def goes_back_through_the_newest_weights() -> AbstractContextManager[Any]:
    """What PipeDream's versions are there against."""

    def make(real: Any) -> Any:
        def forward(self: Any, k: int, x: Tensor) -> Any:
            if self._newest is None and self._used:  # one version for all, changed in place
                self._newest = next(iter(self._used.values()))
                with torch.no_grad():
                    for name, p in self.module.named_parameters():
                        self._newest[name].data = p.detach().clone()
            return real(self, k, x)

        return forward

    return instead(WeightVersions, "forward", make)


def forgets_to_update_once() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def update(self: Any, k: int) -> None:
            if k == 1:
                for p in self._used.pop(k).values():
                    p.grad = None
                self._gradients.pop(k)
            else:
                real(self, k)

        return update

    return instead(WeightVersions, "update", make)


def one_process(name: str, m: int = 4) -> Callable[[Fault], Any]:
    return lambda fault: cases.equals_one_process([3], [name], fault, [m])


FAULTS: list[tuple[Fault, Callable[[Fault], Any]]] = [
    (drops_a_gradient, one_process("1f1b")),
    (drops_a_gradient, one_process("zb-h1")),
    (drops_a_weight_gradient, one_process("zb-h1")),
    (computes_both_halves_at_once_and_again, one_process("zb-h1")),
    (divides_twice, one_process("gpipe")),
    (takes_all_micro_batches_for_equal, one_process("1f1b")),
    (swaps_two_messages, one_process("gpipe", 4)),  # both arrive, each as the other
    (swaps_two_messages, one_process("1f1b", 3)),  # the last never leaves
    (sends_in_double_precision, lambda fault: cases.sends_exactly_its_bytes("1f1b", fault)),
    (tells_the_look_each_time, lambda fault: cases.sends_exactly_its_bytes("1f1b", fault)),
    (waits_to_send, lambda fault: cases.does_not_wait_for_sends(fault)),
    (posts_nothing_ahead, lambda fault: cases.sends_overlap_compute(fault)),
    (sends_late, lambda fault: cases.sends_overlap_compute(fault)),
    (forgets_the_tie, lambda fault: cases.a_gpt_with_a_tied_embedding(3, fault=fault)),
    (ties_what_was_summed_before, lambda fault: cases.a_gpt_with_a_tied_embedding(3, fault=fault)),
    (lets_copies_begin_apart, lambda fault: cases.a_gpt_with_a_tied_embedding(3, fault=fault)),
    (keeps_activations, lambda fault: cases.frees_activations("1f1b", 6, fault)),
    (keeps_graphs_until_the_end, lambda fault: cases.frees_activations("1f1b", 6, fault)),
    (retains_what_is_saved, lambda fault: cases.frees_what_is_saved("1f1b", 6, fault)),
    (keeps_outputs, lambda fault: cases.outputs_go_when_they_are_sent(fault)),
    (never_recomputes, lambda fault: cases.recompute_is_equal_to_the_bit("1f1b", fault)),
    (keeps_what_later_needs, lambda fault: cases.frees_activations("zb-h1", 6, fault)),
    (draws_anew_in_recompute, lambda fault: cases.recompute_is_equal_to_the_bit("1f1b", fault)),
    (
        goes_back_through_the_newest_weights,
        lambda fault: cases.pipedream_equals_stale_weights(4, fault),
    ),
    (forgets_to_update_once, lambda fault: cases.pipedream_equals_stale_weights(4, fault)),
]


@pytest.mark.parametrize(
    ("fault", "check"), FAULTS, ids=[f"{fault.__name__}-{i}" for i, (fault, _) in enumerate(FAULTS)]
)
def test_a_fault_turns_its_check_red(three: World, fault: Fault, check: Any) -> None:
    def run() -> str:
        try:
            check(fault)
        except AssertionError as error:
            return str(error) or "an assertion"
        return ""

    try:
        told = three.run(run)
    except RankError as error:  # ranks that wait for each other, or that torch stops
        told = [str(error)]
    assert any(told), f"{fault.__name__} is not found"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("fault", [synchronises_on_every_micro_batch, never_synchronises])
def test_faulty_replicas_are_found(four: World, fault: Fault, name: str) -> None:
    with pytest.raises(RankError) as caught:
        four.run(cases.replicas_synchronise_once, name, fault)
    assert "AssertionError" in str(caught.value)
