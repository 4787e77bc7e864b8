"""Faulty data parallelism must turn the contract red."""

import pytest
import torch
from torch import nn

from data_parallel_contract import check_equal_to_single
from harness import Mutation, given, noticed
from labkit import DDP, Comm, NaiveDDP
from labkit.parallel.ddp.ddp import Bucket

pytestmark = pytest.mark.slow


class SkipsABucket(DDP):
    """The second bucket is not averaged."""

    def __init__(self, module: nn.Module):
        super().__init__(module, bucket_mb=0.01)

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        if bucket is self._buckets[1]:
            bucket.handle = Comm().all_reduce(torch.zeros(1), async_op=True)
        else:
            super()._send(bucket, async_op)


class DividesTwice(DDP):
    factor = 1 / 2  # on 2 ranks

    def _finish(self) -> None:
        super()._finish()
        for bucket in self._buckets:
            bucket.flat.mul_(self.factor)


class ForgetsToDivide(DividesTwice):
    factor = 2


class AveragesWeights(nn.Module):
    """Local steps, then the mean of the weights: the bytes are right, the training is not."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.comm = Comm()
        for x in module.state_dict().values():
            self.comm.broadcast(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.module.parameters():
                self.comm.all_reduce(parameter, "mean")
        return self.module(x)


class NeverSends(DDP):
    """n models that never communicate."""

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        bucket.handle = None


class SendsTwice(NaiveDDP):
    """Right weights, double the bytes."""

    def _average(self) -> None:
        super()._average()
        super()._average()


class KeepsOwnStart(DDP):
    """Every replica begins with its own weights."""

    def __init__(self, module: nn.Module):
        before = {name: x.clone() for name, x in module.state_dict().items()}
        super().__init__(module)
        module.load_state_dict(before)


class Forgetful(DDP):
    """An unused parameter whose stale memory is averaged gets a gradient that Single has not."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        for bucket in self._buckets:
            bucket.flat.fill_(1.0)
            bucket.__class__ = _ForgetfulBucket


class _ForgetfulBucket(Bucket):
    def fill(self, divisor: float) -> torch.Tensor:
        return self.flat


FAULTS = [
    *(Mutation(faulty, check_equal_to_single, "gpt")
      for faulty in (SkipsABucket, DividesTwice, ForgetsToDivide, AveragesWeights, NeverSends,
                     SendsTwice, KeepsOwnStart)),
    Mutation(Forgetful, check_equal_to_single, "awkward"),
]  # fmt: skip

pair = {"size": 2, "timeout_s": 20}
test_a_faulty_strategy_turns_the_contract_red = noticed(FAULTS, given, AssertionError, **pair)
