"""Faulty ZeRO must turn the contract red: a test that cannot fail proves nothing."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from data_parallel_contract import Strategy, check_equal_to_single, torchs_own
from labkit import DDP, World, ZeroOptimizer
from labkit.parallel.zero.buckets import Stage2Bucket, ZeroBucket
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
        own = bucket.layout.share_of(gradients, self.comm.rank)
        bucket.receives_in(gradients).copy_(own)


class SkipsAGather(Faulty):
    def spoil(self) -> None:
        self._buckets[1].gather = lambda async_op: None  # type: ignore[method-assign]


class DividesTwice(Faulty):
    def step(self, closure: Any = None) -> Any:
        for g in self.gradient_pieces()[0]:
            g.div_(self.comm.size)
        return super().step(closure)


class ForgetsToDivide(Faulty):
    def step(self, closure: Any = None) -> Any:
        for g in self.gradient_pieces()[0]:
            g.mul_(self.comm.size)
        return super().step(closure)


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
            self.inner.step = lambda *_: None  # type: ignore[method-assign]


class KeepsWholeState(Faulty):
    """Sharded in name: beside its share, each rank has the moments of all."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for p in self._bucket_of:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        return value


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=20) as world:
        yield world


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "faulty",
    [SkipsAReduce, SkipsAGather, DividesTwice, ForgetsToDivide, GathersTwice, StepsOnOneShareOnly,
     KeepsWholeState],
)  # fmt: skip
def test_a_faulty_optimizer_turns_the_contract_red(
    pair: World, faulty: type[Faulty], stage: int
) -> None:
    with pytest.raises(AssertionError):
        check_equal_to_single(pair, zero(stage, faulty), "gpt")


def test_the_contract_is_green_on_the_real_ones(pair: World) -> None:
    for stage in (1, 2):
        check_equal_to_single(pair, zero(stage, Faulty), "gpt")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_strategy_that_shards_nothing_turns_red(pair: World, stage: int) -> None:
    promised = zero(stage)
    with pytest.raises(AssertionError, match="optimizer_bytes|gradient_bytes"):
        check_equal_to_single(
            pair, Strategy(DDP, torchs_own, promised.predict, promised.sharded), "gpt"
        )


def test_a_stage_2_that_frees_nothing_turns_red(pair: World) -> None:
    class Keeps(Stage2Bucket):
        def _cover(self, averaged: Sequence[torch.Tensor]) -> None:
            super()._cover(averaged)
            for p in averaged:
                p.grad = self.in_pieces[p] = torch.zeros_like(p)

    class KeepsGradients(Faulty):
        def spoil(self) -> None:
            for bucket in self._buckets:
                bucket.__class__ = Keeps

    promised = zero(2)
    one = partial(ZeroOptimizer, stage=1, bucket_mb=0.01)
    for strategy in (
        zero(2, KeepsGradients),
        Strategy(promised.wrap, one, promised.predict, promised.sharded),
    ):
        with pytest.raises(AssertionError, match="gradient_bytes"):
            check_equal_to_single(pair, strategy, "gpt")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_that_forgets_what_was_not_used_turns_red(
    pair: World, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unused parameter that is stepped on decays, where Single leaves it alone."""

    class Forgetful(Faulty):
        def spoil(self) -> None:
            for bucket in self._buckets:
                bucket._used_elsewhere = lambda _, bucket=bucket: [  # type: ignore[method-assign,misc]
                    bucket.parameters[one.index] for one in bucket.pieces
                ]

    with pytest.raises(AssertionError):
        check_equal_to_single(pair, zero(stage, Forgetful), "awkward")


def test_stage_1_that_leaves_the_other_shares_dirty_adds_them_twice(pair: World) -> None:
    from test_zero import test_accumulation_is_the_sum_of_means as accumulation

    class Dirty(ZeroBucket):
        def _averages_are_there(self) -> None:
            pass

    def patch(on: bool) -> None:
        from labkit.parallel.zero import buckets as zero_buckets

        kind = zero_buckets.ZeroBucket
        if on:
            kind._kept = kind._averages_are_there  # type: ignore[attr-defined]
            kind._averages_are_there = Dirty._averages_are_there  # type: ignore[method-assign]
        else:
            kind._averages_are_there = kind._kept  # type: ignore[attr-defined,method-assign]

    pair.run(patch, True)
    try:
        with pytest.raises(AssertionError):
            accumulation(pair)
    finally:
        pair.run(patch, False)
    accumulation(pair)
