"""How long it takes to record steps of 175B parameters on 1,024 GPUs without data, and replay them:
DDP by a dry run of the whole step; 3D parallelism, as in `labkit plan`, from one recording of each
kind of layer.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.table import Table

from labkit import predict
from labkit.bench.harness import titled
from labkit.cli.terminal import print_table
from labkit.clusters import cluster
from labkit.data import Batch, loss
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.replaying.dry_runs import dry_run, peak_of
from labkit.replaying.planning.layers import recorded
from labkit.replaying.planning.layout import Layout
from labkit.replaying.planning.published import GPT3
from labkit.replaying.planning.stages import virtual_stages
from labkit.replaying.planning.steps import step_report, step_trace
from labkit.replaying.replays import replay
from labkit.trace import split_of

# GPT-3: Brown et al., arXiv 2005.14165, table 2.1. The vocabulary is padded to a multiple of 1024.
SIZES: dict[str, Any] = {"vocab": 51200, "width": 12288, "heads": 96, "context": 2048}
RANKS, DDP_CLUSTER = 1024, "dgx-h100"
LAYOUT = Layout(tp=8, pp=8, dp=16, microbatch=1, recompute="full")
BATCH, PLAN_CLUSTER = 1536, "selene"

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the call, and its result."""
    began_s = time.perf_counter()
    result = call()
    return time.perf_counter() - began_s, result


def process_gb() -> float:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def train(depth: int) -> None:
    """Two steps of DDP, of one sequence a rank."""
    model = DDP(GPT(depth=depth, **SIZES).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(1, SIZES["context"], dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), Batch(x, x, x.numel())).backward()
        optimizer.step()


def dry_run_table(depth: int) -> Table:
    """Record and replay DDP of a model of `depth` layers."""
    parameters, where = predict.parameters(**SIZES, depth=depth), cluster(DDP_CLUSTER)
    recorded_s, trace = timed(lambda: dry_run(train, depth, ranks=RANKS))
    replayed_s, split = timed(lambda: split_of(replay(trace, where)))
    mfu = split.mfu(where.device.peak_flops_of("bfloat16"))
    rows = [
        ("recorded in", f"{recorded_s:.1f} s", "60 s"),
        ("memory of this process", f"{process_gb():.2f} GB", "4 GB"),
        ("operations of a rank's step", f"{len(trace.ranks[0].operations):,}", ""),
        ("replayed in", f"{replayed_s:.2f} s", "10 s"),
        (f"its step on {DDP_CLUSTER}", str(split), ""),
        ("model FLOPs utilization there", f"{mfu:.0%}", ""),
        ("peak memory of a rank", f"{sum(peak_of(trace).values()) / 1e9:,.0f} GB", ""),
    ]
    title = f"DDP of a GPT of {parameters / 1e9:.1f}B parameters on {RANKS:,} ranks, no data"
    return titled(title, "", ("", "measured", "aim"), ("",), rows)


def plan_table() -> Table:
    """Record each kind of GPT-3's layers, replay its step, and report it."""
    where = cluster(PLAN_CLUSTER)
    shapes = {shape for stage in virtual_stages(GPT3, LAYOUT) for shape, _ in stage.layers}
    recorded_s, _ = timed(lambda: [recorded(shape) for shape in shapes])
    replayed_s, _ = timed(lambda: step_trace(GPT3, LAYOUT, BATCH, where))
    reported_s, report = timed(lambda: step_report(GPT3, LAYOUT, BATCH, where))
    rows = [
        (f"{len(shapes)} kinds of layers recorded in", f"{recorded_s:.1f} s", "60 s"),
        ("memory of this process", f"{process_gb():.2f} GB", "4 GB"),
        ("replayed in", f"{replayed_s:.2f} s", "10 s"),
        ("reported in", f"{reported_s * 1e3:.0f} ms", ""),
        (f"its step on {PLAN_CLUSTER}", f"{report.step_s:.2f} s", ""),
        ("model FLOPs utilization there", f"{report.mfu:.0%}", ""),
        ("peak memory of a rank", f"{report.peak_bytes / 1e9:,.0f} GB", ""),
    ]
    title = f"GPT-3 on {LAYOUT.ranks:,} ranks, no data: {LAYOUT.in_words}"
    return titled(title, "", ("", "measured", "aim"), ("",), rows)


def main(
    depth: Annotated[int, typer.Option(help="Layers in the dry run of DDP.", min=1, max=96)] = 96,
) -> None:
    """Print both tables."""
    print_table(dry_run_table(depth))
    print_table(plan_table())


if __name__ == "__main__":
    typer.run(main)
