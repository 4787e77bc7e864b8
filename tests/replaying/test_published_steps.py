"""Replays beside step times that others have measured on A100s: nothing is fitted to them.

Megatron-DeepSpeed, mixed precision, full recompute, attention that stores its scores: written here
with labkit's own GPT and DDP, and torch's checkpoint. What is not alike: ours has its parameters
and moments in bf16, theirs in fp32 as well; their Adam is one kernel.
Source: vTrain (MIT licence), ground truth; rows of data parallelism alone (tp 1, pp 1).
"""

import csv
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from labkit import DDP, GPT, Batch, cluster, dry_run, loss, replay, split_of
from labkit.models import PlainAttention
from places import PUBLISHED


class Row(NamedTuple):
    file: str
    ranks: int  # all of them replicas
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    step_ms: float


# Over all 24 such rows of up to 4 micro-batches, the replay takes 0.58 to 1.15 of the time that
# was measured, 0.95 in the mean; the least where a GPU has 1 short sequence at a time.
ROWS = [
    Row("a100_step_times_cluster.csv", 64, 512, 8, 3072, 32, 30, 2048, 3566.5),
    Row("a100_step_times_node.csv", 4, 16, 2, 2048, 16, 12, 1024, 172.740218),
    Row("a100_step_times_node.csv", 2, 4, 1, 2048, 16, 12, 1024, 121.359312),
]


def train(row: Row) -> None:
    model = GPT(51200, row.hidden, row.layers, row.heads, row.sequence).to(torch.bfloat16)
    for block in model.blocks:
        block.attn.core = PlainAttention(0.0)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(row.micro_batch, row.sequence, dtype=torch.long)
    count = row.global_batch // row.ranks // row.micro_batch
    batch = Batch(x, x, count * x.numel())
    with ddp.no_sync():
        for _ in range(count - 1):
            loss(ddp(x), batch).backward()
    loss(ddp(x), batch).backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ranks} A100, {row.hidden}")
def test_a_replay_takes_what_others_have_measured(row: Row) -> None:
    replayed = replay(dry_run(train, row, ranks=row.ranks, step=0), cluster("selene"))
    assert split_of(replayed).step_s * 1e3 == pytest.approx(row.step_ms, rel=0.2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ranks} A100, {row.hidden}")
def test_the_rows_are_those_of_the_file(row: Row) -> None:
    with (PUBLISHED / row.file).open() as file:
        every = [
            (one["gpus"], one["dp"], one["tp"], one["pp"], one["global_batch"], one["micro_batch"],
             one["hidden"], one["heads"], one["layers"], one["sequence"], float(one["step_ms"]))
            for one in csv.DictReader(file)
        ]  # fmt: skip
    ranks = str(row.ranks)
    sizes = map(str, row[2:-1])
    assert (ranks, ranks, "1", "1", *sizes, row.step_ms) in every
