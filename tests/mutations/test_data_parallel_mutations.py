"""Faulty data parallelism must turn the contract red."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import check_equal_to_single
from harness import Mutation, around, edits, given, noticed
from labkit import DDP, Comm, NaiveDDP
from labkit.parallel import naive_ddp
from labkit.parallel.common import data_parallel, flat
from labkit.parallel.ddp import ddp

pytestmark = pytest.mark.slow


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


TRAINS: Any = check_equal_to_single, DDP, "gpt"
SENT = "bucket.handle = self.hook(bucket.fill(self._join.divisor), self.comm, async_op)"
FAULTS = [
    *edits(
        ddp,
        ("skips the second bucket",
         "bucket.fill(self._join.divisor)",
         "torch.zeros(1) if bucket is self._buckets[1] else bucket.fill(self._join.divisor)",
         check_equal_to_single, partial(DDP, bucket_mb=0.01), "gpt"),
        ("divides twice", "self._join.divisor)", "self._join.divisor**2)", *TRAINS),
        ("forgets to divide", "self._join.divisor)", "1)", *TRAINS),
        ("never sends", SENT, "bucket.handle = None", *TRAINS),
    ),
    *edits(
        naive_ddp,
        ("sends twice",  # right weights, double the bytes
         "self.comm.all_reduce(gradient)\n",
         "[self.comm.all_reduce(gradient, op) for op in ('mean', 'sum')]\n",
         check_equal_to_single, NaiveDDP, "gpt"),
    ),
    *edits(
        data_parallel,
        ("every replica begins with its own weights",
         "broadcast_tensors([*module.parameters(), *module.buffers()], self.comm)", "pass",
         *TRAINS),
    ),
    *edits(
        flat,
        ("averages the stale memory of unused parameters",
         "fill_(-0.0)", "fill_(1.0)", check_equal_to_single, DDP, "awkward"),
    ),
]  # fmt: skip
pair = {"size": 2, "timeout_s": 20}
test_a_fault_turns_the_contract_red = noticed(FAULTS, around, AssertionError, **pair)
test_a_faulty_strategy_turns_the_contract_red = noticed(
    [Mutation(AveragesWeights, check_equal_to_single, "gpt")], given, AssertionError, **pair
)
