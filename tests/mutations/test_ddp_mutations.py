"""Deliberate faults in what DDP does beyond averaging; each must turn its check red."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ddp_checks
from labkit import DDP, Comm, RankError, World
from labkit.parallel.ddp import buckets as arrivals
from labkit.parallel.ddp.buckets import Bucket
from labkit.parallel.ddp.comm_hooks import UnderWay, bf16_compress_hook
from labkit.parallel.ddp.joining import JoinCoordinator

pytestmark = pytest.mark.slow

NO_TIME = 5  # seconds: some of the faults let ranks wait for each other


class NeverRebuilds(DDP):
    def _rebuild(self, came: list[nn.Parameter]) -> None:
        self._came = None


class RebuildsEachTime(DDP):
    def _rebuild(self, came: list[nn.Parameter]) -> None:
        super()._rebuild(came)
        self._came = []


class EachRankHasItsOwnOrder(DDP):
    """The order is told, and nobody listens."""

    def _rebuild(self, came: list[nn.Parameter]) -> None:
        real = arrivals.agreed_order
        mine = list(came)

        def own(*args: Any) -> Any:
            real(*args)
            rest = [p for p in self._parameters_to_average if p not in set(mine)]
            return mine + rest

        DDP._rebuild.__globals__["agreed_order"] = own
        try:
            super()._rebuild(came)
        finally:
            DDP._rebuild.__globals__["agreed_order"] = real


class LeavesGradientsInOldBuckets(DDP):
    """The first step is as it was; its gradients are no views."""

    def _set_buckets(self, buckets: Any) -> None:
        for bucket in buckets:
            bucket.__dict__["take_over"] = lambda: None
        super()._set_buckets(buckets)

    def _rebuild(self, came: list[nn.Parameter]) -> None:
        grads = {p: p.grad for p in self._parameters_to_average}
        super()._rebuild(came)
        for p, grad in grads.items():
            p.grad = None if grad is None else grad.clone()


class TakesOverNothing(DDP):
    def _rebuild(self, came: list[nn.Parameter]) -> None:
        super()._rebuild(came)
        for bucket in self._buckets:
            bucket.flat.zero_()


class NotStatic(DDP):
    """static_graph=True is taken and forgotten."""

    def __init__(self, module: nn.Module, **how: Any):
        super().__init__(module, **{**how, "static_graph": False})


class StaticWithoutALook(DDP):
    """What a static graph no longer uses goes unnoticed."""

    def _end_backward(self) -> None:
        self._finish()


class StaticOfOneRank(DDP):
    """Rank 0's used parameters count for all, unasked."""

    def _rebuild(self, came: list[nn.Parameter]) -> None:
        every = Comm().all_gather_object
        self.comm.all_gather_object = lambda thing: [every(thing)[0]] * self.comm.size  # type: ignore[method-assign]
        super()._rebuild(came)


class SendsEachMicroBatch(DDP):
    def accumulate(self, parts: Any) -> Iterator[Any]:
        yield from parts


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=NO_TIME) as world:
        yield world


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (NeverRebuilds, ddp_checks.buckets_follow_the_order_of_arrival),
        (RebuildsEachTime, ddp_checks.buckets_follow_the_order_of_arrival),
        (LeavesGradientsInOldBuckets, ddp_checks.buckets_follow_the_order_of_arrival),
        (EachRankHasItsOwnOrder, ddp_checks.ranks_with_other_orders_agree),
        (TakesOverNothing, ddp_checks.ranks_with_other_orders_agree),
        (NotStatic, ddp_checks.a_static_graph_sends_what_is_used),
        (NotStatic, ddp_checks.a_static_graph_may_not_change),
        (StaticWithoutALook, ddp_checks.a_static_graph_may_not_change),
        (StaticOfOneRank, ddp_checks.a_static_graph_may_not_change),
        (SendsEachMicroBatch, ddp_checks.accumulation_equals_one_batch),
    ],
    ids=lambda one: one.__name__,
)
def test_a_fault_turns_its_check_red(
    pair: World, faulty: type[DDP], check: Callable[[Any], None]
) -> None:
    with pytest.raises((AssertionError, RankError)):
        pair.run(check, faulty)


# ---- hooks


def forgets_to_cast_back(flat: torch.Tensor, comm: Comm, async_op: bool) -> UnderWay | None:
    return comm.all_reduce(flat.to(torch.bfloat16), async_op=async_op)


def halves_nothing(flat: torch.Tensor, comm: Comm, async_op: bool) -> UnderWay | None:
    flat.copy_(flat.to(torch.bfloat16))
    return comm.all_reduce(flat, async_op=async_op)


class DividesAfterwards(DDP):
    """By a hook's time the gradients are whole: bf16 bears it, and rounds as before; fp16 would
    overflow."""

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        super()._send(bucket, async_op)
        assert bucket.flat is not None
        bucket.handle = _Divided(bucket.flat, bucket.handle, self.comm.size)


class _Divided:
    def __init__(self, flat: torch.Tensor, handle: UnderWay | None, size: int):
        self.flat, self.handle, self.size = flat, handle, size

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.flat.div_(self.size)


@pytest.mark.parametrize(
    ("strategy", "hook"),
    [(DDP, forgets_to_cast_back), (DDP, halves_nothing), (DividesAfterwards, bf16_compress_hook)],
)
def test_a_faulty_hook_turns_its_check_red(pair: World, strategy: Any, hook: Any) -> None:
    with pytest.raises((AssertionError, RankError)):
        pair.run(ddp_checks.a_hook_halves_the_bytes, strategy, hook, torch.bfloat16)


# ---- joining


class DividesByTheOthers(DDP):
    def join(self, divide_by_active: bool = False) -> Any:
        return super().join(divide_by_active=not divide_by_active)


class JoinsWithStaleGradients(DDP):
    """A joined rank goes on sending its last gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._join is None or self._join.is_active:
            super().zero_grad(set_to_none)


class EndsWithTheModelOfRank0(DDP):
    def join(self, divide_by_active: bool = False) -> Any:
        JoinCoordinator.first = property(lambda self: 0)  # type: ignore[assignment,method-assign]
        return super().join(divide_by_active)


@pytest.mark.parametrize(
    "faulty", [DividesByTheOthers, JoinsWithStaleGradients, EndsWithTheModelOfRank0]
)
def test_faulty_joining_turns_its_check_red(faulty: type[DDP]) -> None:
    with World(3, timeout_s=NO_TIME) as trio, pytest.raises((AssertionError, RankError)):
        trio.run(ddp_checks.ranks_whose_data_ends_join, faulty, [2, 4, 5], False)
