"""Faulty ZeRO-3 must turn its tests red: a test that cannot fail proves nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

import test_zero3 as proofs
from labkit import RankError, World, ZeRO3
from labkit.parallel.zero3 import flat as zero3_flat
from labkit.parallel.zero3 import passes
from labkit.parallel.zero3 import units as zero3_units
from labkit.parallel.zero3.flat import Flat, ResizableBuffer
from zero3_contract import check_zero3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=20) as world:
        yield world


def with_fault(fault: Callable[[], Any], module: nn.Module) -> ZeRO3:
    """On a rank, which is a process: the fault stays for this model's life, not for the next."""
    model = ZeRO3(module)
    change = fault()
    change.__enter__()
    model._fault = change  # type: ignore[assignment]
    take = model.full_state_dict

    def whole_state() -> Any:
        change.__exit__(None, None, None)
        return take()

    model.full_state_dict = whole_state  # type: ignore[method-assign]
    return model


def skips_a_reduce() -> Any:
    send = Flat.send_gradients

    def some(self: Flat, async_op: bool) -> None:
        if len(self.places) > 2:
            return send(self, async_op)
        send(self, async_op)
        assert self._handle is not None
        self._handle.wait()
        self._arriving = self.partition.share_of(self.unreduced.flat, self.comm.rank).clone()
        self._are_new = False
        return None

    return patch.object(Flat, "send_gradients", some)


def divides_twice() -> Any:
    receive = Flat.receive_gradients

    def again(self: Flat) -> None:
        receive(self)
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.div_(self.comm.size)

    return patch.object(Flat, "receive_gradients", again)


def gathers_twice() -> Any:
    gather = Flat.gather

    def twice(self: Flat, async_op: bool) -> Any:
        gather(self, async_op=False)
        return gather(self, async_op)

    return patch.object(Flat, "gather", twice)


def keeps_stale_parameters() -> Any:
    """Gathered once, and not again after the optimizer's step."""
    gather = Flat.gather
    done: set[Flat] = set()

    def once(self: Flat, async_op: bool) -> Any:
        found = None if self in done else gather(self, async_op=False)
        done.add(self)
        return found

    stack = ExitStack()
    stack.enter_context(patch.object(Flat, "gather", once))
    stack.enter_context(patch.object(ResizableBuffer, "free", lambda self: None))
    return stack


@pytest.mark.parametrize(
    "fault", [skips_a_reduce, divides_twice, gathers_twice, keeps_stale_parameters]
)
def test_a_fault_turns_the_contract_red(pair: World, fault: Callable[[], Any]) -> None:
    with pytest.raises((AssertionError, RankError), match="AssertionError|off by|bytes"):
        check_zero3(pair, partial(with_fault, fault), "gpt", "adamw")
    pair.restart()  # the ranks of an exception are kept, and their fault with them


def shards_nothing(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, persist_below=1 << 40)


def test_one_that_shards_nothing_turns_the_contract_red(pair: World) -> None:
    with pytest.raises(AssertionError):
        check_zero3(pair, shards_nothing, "gpt", "adamw")


def test_one_that_frees_nothing_turns_red() -> None:
    def change() -> None:
        zero3_flat.ResizableBuffer.free = lambda self: None  # type: ignore[method-assign]

    with World(2) as world:
        world.run(change)
        with pytest.raises(AssertionError):
            proofs.test_what_is_gathered_is_freed_and_never_more_than_two_units(world)


def test_one_that_prefetches_nothing_turns_red() -> None:
    def change() -> None:
        passes.Order.coming = lambda self, number: []  # type: ignore[method-assign]

    with World(2) as world:
        world.run(change)
        with pytest.raises(AssertionError):
            proofs.test_gathers_leave_ahead_and_gradients_while_backward_runs(world)


def frees_with_the_last_gradient() -> None:
    """Though a frozen weight of the unit is still needed."""
    make = zero3_flat.Unit.__init__

    def blind(self: Any, *args: Any) -> None:
        make(self, *args)
        self.has_frozen = False

    zero3_flat.Unit.__init__ = blind  # type: ignore[method-assign]


def frees_only_with_the_last_gradient() -> None:
    ZeRO3._after_backward = lambda self, unit, gradient: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "block", "again"),
    [
        (frees_with_the_last_gradient, proofs.FrozenNorm, True),
        (frees_with_the_last_gradient, proofs.Adapter, True),
        (frees_only_with_the_last_gradient, proofs.Adapter, False),
        (frees_only_with_the_last_gradient, proofs.OneUnused, True),
        (frees_only_with_the_last_gradient, proofs.AllFrozen, False),
    ],
)
def test_one_that_frees_too_early_or_too_late_turns_red(
    change: Callable[[], None], block: Callable[[], nn.Module], again: bool
) -> None:
    with World(2, timeout_s=20) as world:
        world.run(change)
        with pytest.raises((AssertionError, RankError)):
            proofs.test_a_unit_is_freed_when_backward_is_through_with_it(world, block, again)


def test_a_projection_that_is_not_sharded_turns_red(pair: World) -> None:
    """As a parameter does that no unit has: every rank keeps and trains its own."""

    def forgets(module: nn.Module) -> ZeRO3:
        walk = zero3_units._walk

        def some(*args: Any) -> Any:
            return (one for one in walk(*args) if "up.weight" not in one[1].name)

        with patch.object(zero3_units, "_walk", some):
            return ZeRO3(module)

    with pytest.raises(Exception):  # noqa: B017
        check_zero3(pair, forgets, "gpt", "adamw")
    pair.restart()


def test_the_contract_is_green_on_the_real_one(pair: World) -> None:
    check_zero3(pair, ZeRO3, "gpt", "adamw")
