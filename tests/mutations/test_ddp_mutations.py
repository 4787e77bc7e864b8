"""Deliberate faults in what DDP does beyond averaging; each must turn its check red."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ddp_checks
from harness import Mutation, given_on_ranks, instead, noticed, on_ranks
from labkit import DDP, Comm
from labkit.parallel.ddp.comm_hooks import UnderWay, bf16_compress_hook
from labkit.parallel.ddp.ddp import Bucket
from labkit.parallel.ddp.extras import JoinCoordinator, agreed_order

pytestmark = pytest.mark.slow


class NeverRebuilds(DDP):
    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        self._arrived = None


class RebuildsEachTime(DDP):
    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        super()._rebuild(arrived)
        self._arrived = []


class EachRankHasItsOwnOrder(DDP):
    """The ranks agree on an order and do not use it."""

    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        mine = list(arrived)

        def own(*args: Any) -> Any:
            agreed_order(*args)
            rest = [p for p in self._parameters_to_average if p not in set(mine)]
            return mine + rest

        DDP._rebuild.__globals__["agreed_order"] = own
        try:
            super()._rebuild(arrived)
        finally:
            DDP._rebuild.__globals__["agreed_order"] = agreed_order


class LeavesGradientsInOldBuckets(DDP):
    """The first step is as it was; its gradients are no views."""

    def _set_buckets(self, buckets: Any) -> None:
        for bucket in buckets:
            bucket.__dict__["take_over"] = lambda: None
        super()._set_buckets(buckets)

    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        grads = {p: p.grad for p in self._parameters_to_average}
        super()._rebuild(arrived)
        for p, grad in grads.items():
            p.grad = None if grad is None else grad.clone()


class TakesOverNothing(DDP):
    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        super()._rebuild(arrived)
        for bucket in self._buckets:
            bucket.flat.zero_()


class NotStatic(DDP):
    """Ignores static_graph=True."""

    def __init__(self, module: nn.Module, **how: Any):
        super().__init__(module, **{**how, "static_graph": False})


class StaticWithoutACheck(DDP):
    """Never checks which parameters a static graph uses."""

    def _end_backward(self) -> None:
        self._finish()


class StaticOfOneRank(DDP):
    """Rank 0's used parameters count for all, unasked."""

    def _rebuild(self, arrived: list[nn.Parameter]) -> None:
        every = Comm().all_gather_object
        self.comm.all_gather_object = lambda thing: [every(thing)[0]] * self.comm.size
        super()._rebuild(arrived)


class SendsEachMicroBatch(DDP):
    def accumulate(self, parts: Any) -> Iterator[Any]:
        yield from parts


ORDER = ddp_checks.buckets_follow_the_order_of_arrival
STATIC = ddp_checks.a_static_graph_may_not_change
FAULTS = [
    Mutation(NeverRebuilds, ORDER),
    Mutation(RebuildsEachTime, ORDER),
    Mutation(LeavesGradientsInOldBuckets, ORDER),
    Mutation(EachRankHasItsOwnOrder, ddp_checks.ranks_with_other_orders_agree),
    Mutation(TakesOverNothing, ddp_checks.ranks_with_other_orders_agree),
    Mutation(NotStatic, ddp_checks.a_static_graph_sends_what_is_used),
    Mutation(NotStatic, STATIC),
    Mutation(StaticWithoutACheck, STATIC),
    Mutation(StaticOfOneRank, STATIC),
    Mutation(SendsEachMicroBatch, ddp_checks.accumulation_equals_one_batch),
]
some_ranks_wait = {"timeout_s": 5}  # under some of the faults


def forgets_to_cast_back(flat: torch.Tensor, comm: Comm, async_op: bool) -> UnderWay | None:
    return comm.all_reduce(flat.to(torch.bfloat16), async_op=async_op)


def halves_nothing(flat: torch.Tensor, comm: Comm, async_op: bool) -> UnderWay | None:
    flat.copy_(flat.to(torch.bfloat16))
    return comm.all_reduce(flat, async_op=async_op)


class DividesAfterwards(DDP):
    """A hook sees whole gradients: bf16 bears it and rounds as before; fp16 would overflow."""

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        super()._send(bucket, async_op)
        bucket.handle = _Divided(bucket.flat, bucket.handle, self.comm.size)


class _Divided:
    def __init__(self, flat: torch.Tensor, handle: UnderWay | None, size: int):
        self.flat, self.handle, self.size = flat, handle, size

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.flat.div_(self.size)


FAULTS += [
    Mutation(strategy, ddp_checks.a_hook_halves_the_bytes, hook, torch.bfloat16)
    for strategy, hook in ((DDP, forgets_to_cast_back), (DDP, halves_nothing),
                           (DividesAfterwards, bf16_compress_hook))
]  # fmt: skip
test_a_fault_turns_its_check_red = noticed(FAULTS, given_on_ranks, size=2, **some_ranks_wait)


class DividesByTheOthers(DDP):
    def join(self, divide_by_active: bool = False) -> Any:
        return super().join(divide_by_active=not divide_by_active)


class JoinsWithStaleGradients(DDP):
    """A joined rank goes on sending its last gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.comm.rank in self._join.active:
            super().zero_grad(set_to_none)


JOIN = ddp_checks.ranks_whose_data_ends_join
JOINING = [
    Mutation(DividesByTheOthers, JOIN, [2, 4, 5], False),
    Mutation(JoinsWithStaleGradients, JOIN, [2, 4, 5], False),
]
ends_with_the_model_of_rank_0 = instead(
    "ends_with_the_model_of_rank_0", JoinCoordinator, "first", property(lambda self: 0)
)
trio = {"size": 3, **some_ranks_wait}
test_faulty_joining_turns_its_check_red = noticed(JOINING, given_on_ranks, **trio)
test_the_wrong_final_model_turns_its_check_red = noticed(
    [Mutation(ends_with_the_model_of_rank_0, JOIN, DDP, [2, 4, 5], False)], on_ranks, **trio
)
