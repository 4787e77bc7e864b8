"""Recording a rank of a thousand that trains 175B parameters, and replaying it, timed."""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from labkit import predict
from labkit.clusters import cluster
from labkit.data import Batch, loss
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.replaying.dry_runs import dry_run
from labkit.replaying.memory import peak_of
from labkit.replaying.replays import replay
from labkit.trace import Split, split_of

# GPT-3: Brown et al., arXiv 2005.14165, table 2.1. The vocabulary is padded to a multiple of 1024.
SIZES: dict[str, Any] = {"vocab": 51200, "width": 12288, "heads": 96, "context": 2048}
RANKS, CLUSTER = 1024, "dgx-h100"


@dataclass(frozen=True)
class AtScale:
    """What recording and replaying took here, and what the replay says of the step there."""

    parameters: int
    recorded_s: float
    memory_bytes: float  # of this process, at most so far
    operations: int
    replayed_s: float
    split: Split
    mfu: float
    peak_bytes: int


def train(depth: int) -> None:
    """Two steps of DDP, of one sequence a rank."""
    model = DDP(GPT(depth=depth, **SIZES).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(1, SIZES["context"], dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), Batch(x, x, x.numel())).backward()
        optimizer.step()


def bench_dry_run(depth: int = 96) -> AtScale:
    """Record and replay a model of so many layers."""
    began_s = time.perf_counter()
    trace = dry_run(train, depth, ranks=RANKS)
    recorded_s = time.perf_counter() - began_s
    where = cluster(CLUSTER)
    began_s = time.perf_counter()
    split = split_of(replay(trace, where))
    replayed_s = time.perf_counter() - began_s
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return AtScale(
        predict.parameters(**SIZES, depth=depth), recorded_s,
        largest * (1 if sys.platform == "darwin" else 1024),
        len(trace.ranks[0].operations), replayed_s, split,
        split.mfu(where.device.peak_flops_of("bfloat16")), sum(peak_of(trace).values()),
    )  # fmt: skip


def table(found: AtScale) -> Table:
    """What `bench_dry_run` found."""
    shown = Table(
        title=f"DDP of a GPT of {found.parameters / 1e9:.1f}B parameters on {RANKS:,} ranks, "
        "without data",
        title_justify="left",
    )
    for name in ("", "found", "aim"):
        shown.add_column(name, justify="left" if not name else "right")
    shown.add_row("recorded in", f"{found.recorded_s:.1f} s", "60 s")
    shown.add_row("memory of this process", f"{found.memory_bytes / 1e9:.2f} GB", "4 GB")
    shown.add_row("operations of a rank's step", f"{found.operations:,}", "")
    shown.add_row("replayed in", f"{found.replayed_s:.2f} s", "10 s")
    shown.add_row(f"its step on {CLUSTER}", str(found.split), "")
    shown.add_row("model FLOPs utilization there", f"{found.mfu:.0%}", "")
    shown.add_row("peak memory of a rank", f"{found.peak_bytes / 1e9:,.0f} GB", "")
    return shown
