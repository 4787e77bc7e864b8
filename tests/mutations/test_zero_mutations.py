"""Faulty ZeRO must turn the contract red."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data_parallel_contract import Strategy, check_equal_to_single, torchs_own
from harness import Mutation, instead, noticed, on_ranks
from labkit import DDP, World, ZeroOptimizer
from labkit.parallel.zero.buckets import Stage2Bucket, ZeroBucket
from test_data_parallel import check_accumulation
from test_zero import zero

pytestmark = pytest.mark.slow


class Faulty(ZeroOptimizer):
    """`spoil` changes it when it is made."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.spoil()

    def spoil(self) -> None: ...


class SkipsAReduce(Faulty):
    """The second bucket keeps its own gradients."""

    def spoil(self) -> None:
        self.skipped = self._buckets[1]

    def _send(self, bucket: ZeroBucket, async_op: bool) -> None:
        if bucket is not self.skipped:
            return super()._send(bucket, async_op)
        gradients = bucket.fill()
        own = bucket.partition.share_of(gradients, self.comm.rank)
        bucket.receives_in(gradients).copy_(own)


class SkipsAGather(Faulty):
    def spoil(self) -> None:
        self._buckets[1].gather = lambda async_op: None


class DividesTwice(Faulty):
    factor = 1 / 2  # on 2 ranks

    def step(self, closure: Any = None) -> Any:
        for g in self.gradient_pieces()[0]:
            g.mul_(self.factor)
        return super().step(closure)


class ForgetsToDivide(DividesTwice):
    factor = 2


class GathersTwice(Faulty):
    """Right weights, more bytes."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        self.after_load()
        return value


class StepsOnOneShareOnly(Faulty):
    """Only rank 0's optimizer steps: the state of the others stays empty."""

    def spoil(self) -> None:
        if self.comm.rank == 1:
            self.inner.step = lambda *_: None


class KeepsWholeState(Faulty):
    """Beside its share, each rank keeps the moments of all."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for p in self._bucket_of:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        return value


class Forgetful(Faulty):
    """An unused parameter is stepped on and decays, where Single leaves it alone."""

    def spoil(self) -> None:
        for bucket in self._buckets:
            bucket._used_elsewhere = lambda _, bucket=bucket: [
                bucket.parameters[piece.index] for piece in bucket.pieces
            ]


class FreesNoGradients(Stage2Bucket):
    def _cover(self, averaged: Sequence[torch.Tensor]) -> None:
        super()._cover(averaged)
        for p in averaged:
            p.grad = self.in_pieces[p] = torch.zeros_like(p)


class KeepsGradients(Faulty):
    def spoil(self) -> None:
        for bucket in self._buckets:
            bucket.__class__ = FreesNoGradients


def strategy(world: World, faulty: Any, check: Any, stage: int, case: str) -> None:
    check(world, zero(stage, faulty), case)


def promise(world: World, real: Strategy, check: Any, stage: int, case: str) -> None:
    """Another strategy under the promises of this stage."""
    promised = zero(stage)
    check(world, Strategy(real.wrap, real.optimizer, promised.predict, promised.sharded), case)


FAULTS = [
    Mutation(faulty, check_equal_to_single, stage, "gpt")
    for faulty in (SkipsAReduce, SkipsAGather, DividesTwice, ForgetsToDivide, GathersTwice,
                   StepsOnOneShareOnly, KeepsWholeState)
    for stage in (1, 2)
]  # fmt: skip
FAULTS += [Mutation(Forgetful, check_equal_to_single, stage, "awkward") for stage in (1, 2)]
FAULTS += [Mutation(KeepsGradients, check_equal_to_single, 2, "gpt", match="gradient_bytes")]
SHARDS_NOTHING = [
    Mutation(Strategy(DDP, torchs_own), check_equal_to_single, 1, "gpt", match="optimizer_bytes"),
    Mutation(Strategy(DDP, torchs_own), check_equal_to_single, 2, "gpt",
             match="optimizer_bytes|gradient_bytes"),
    Mutation(zero(1), check_equal_to_single, 2, "gpt", match="gradient_bytes"),
]  # fmt: skip
leaves_other_shares_dirty = instead(
    "leaves_other_shares_dirty", ZeroBucket, "_averages_are_there", lambda self: None
)

pair = {"size": 2, "timeout_s": 20}
test_a_faulty_optimizer_turns_the_contract_red = noticed(FAULTS, strategy, AssertionError, **pair)
test_a_stage_that_shards_too_little_turns_the_contract_red = noticed(
    SHARDS_NOTHING, promise, AssertionError, **pair
)
test_stage_1_that_leaves_other_shares_dirty_adds_them_twice = noticed(
    [Mutation(leaves_other_shares_dirty, check_accumulation, "zero-1", 0)], on_ranks, **pair
)
