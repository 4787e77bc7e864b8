"""A step of GPT-3 on 1,024 A100, recorded without data and replayed, timed; and GPTs of 1.7B to
1008B parameters on up to 3,072."""

import resource
import sys
import time
from dataclasses import dataclass

from rich.table import Table

from labkit.clusters import cluster
from labkit.replaying.planning.layers import recorded
from labkit.replaying.planning.layout import Layout
from labkit.replaying.planning.published import GPT3, MEGATRON
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.stages import virtual_stages
from labkit.replaying.planning.steps import step_report
from labkit.replaying.planning.traces import step_trace

LAYOUT = Layout(tp=8, pp=8, dp=16, microbatch=1, recompute="full")
BATCH, CLUSTER = 1536, "selene"


@dataclass(frozen=True)
class Scaled:
    """What it took here, and what the replay says of the steps."""

    recorded_s: float
    layers: int  # recorded
    replayed_s: float  # every action on the virtual clock
    reported_s: float  # the same in numbers
    memory_bytes: float  # of this process, at most so far
    gpt3: StepReport
    others: tuple[StepReport, ...]


def bench_scale(others: bool = True) -> Scaled:
    """Record and replay. `others`: the ten models of Megatron-LM's table, too."""
    where = cluster(CLUSTER)
    began_s = time.perf_counter()
    shapes = {shape for stage in virtual_stages(GPT3, LAYOUT) for shape, _ in stage.layers}
    for shape in shapes:
        recorded(shape)
    recorded_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    step_trace(GPT3, LAYOUT, BATCH, where)
    replayed_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    gpt3 = step_report(GPT3, LAYOUT, BATCH, where)
    reported_s = time.perf_counter() - began_s
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Scaled(
        recorded_s, len(shapes), replayed_s, reported_s,
        largest * (1 if sys.platform == "darwin" else 1024), gpt3,
        tuple(
            step_report(one.sizes, one.layout, one.batch, where) for one in MEGATRON if others
        ),
    )  # fmt: skip


def table(found: Scaled) -> Table:
    """What `bench_scale` found."""
    shown = Table(
        title=f"steps on {CLUSTER}, without data: GPT-3 recorded in {found.recorded_s:.1f} s "
        f"({found.layers} layers; aim 60 s), replayed in {found.replayed_s:.2f} s (aim 10 s), "
        f"its report in {found.reported_s * 1e3:.0f} ms; this process held "
        f"{found.memory_bytes / 1e9:.2f} GB (aim 4 GB)",
        title_justify="left",
    )
    names = ("parameters", "GPUs", "layout", "step", "computing", "optimizer", "tensor", "data",
             "pipeline", "bubble", "MFU", "peak memory")  # fmt: skip
    for name in names:
        shown.add_column(name, justify="left" if name == "layout" else "right")
    for one in (found.gpt3, *found.others):
        parts = (one.compute_s, one.optimizer_s, one.tensor_s, one.data_s, one.pipeline_s)
        shown.add_row(
            f"{one.sizes.parameters / 1e9:.1f}B", f"{one.layout.ranks:,}", one.layout.in_words,
            f"{one.step_s:.2f} s", *(f"{x / one.step_s:.1%}" for x in (*parts, one.bubble_s)),
            f"{one.mfu:.1%}", f"{one.peak_bytes / 1e9:.1f} GB",
        )  # fmt: skip
    return shown
