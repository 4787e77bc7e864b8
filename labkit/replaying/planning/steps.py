"""`step_report(sizes, layout, global_batch, cluster)`: a training step of a large model on a large
cluster, from recordings of its layers.

    layers          each kind recorded once, without data
    placement       where ranks sit on nodes, and what a collective takes there
    stages          what a stage takes: a sum over its layers
    communication   messages between stages, bytes along each axis
    clock           the schedule, over all micro-batches
    step_end        gradients over dp, the tied embedding, the optimizer
    peak_memory     states, and what is in flight

    stage 0   F F F .. B F .. B F .. B . B . B │ data │ tied │ step │
    stage 1     F F B F B F B F B B            │ data │ tied │ step │

    >>> gpt3 = Sizes(width=12288, depth=96, heads=96)
    >>> layout = Layout(tp=8, pp=8, dp=16, sequence=True, recompute="full")
    >>> report = step_report(gpt3, layout, 1536, cluster("selene"))
    >>> report.step_s, report.mfu, report.memory_bytes, report.sent_bytes

Your own constants: `step_report(..., costs=Costs(cluster))` with a subclass of
labkit.replaying.costs.Costs. Recordings do not depend on costs, so that trying many is quick.

Assumptions: gradients travel as labkit's DDP and ZeRO send them, in buckets, while the backward of
the last micro-batch runs; ZeRO's updated parameters travel after the step, overlapping nothing. A
message does not wait for its receiver, nor for the messages before it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from labkit.clusters import Cluster
from labkit.predict.sizes import check_counts
from labkit.predict.transformer import step_flops
from labkit.replaying.costs import Costs
from labkit.replaying.planning.clock import pipeline_timing
from labkit.replaying.planning.communication import messages_s, sent_bytes
from labkit.replaying.planning.layout import RECOMPUTE, ZERO_STAGES, Layout, Sizes
from labkit.replaying.planning.peak_memory import peak_memory
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.stages import (
    ChunkSeconds,
    VirtualStage,
    chunk_seconds,
    virtual_stages,
)
from labkit.replaying.planning.step_end import StageEnd, step_ends

DTYPE = "bfloat16"
COUNTS = ("tp", "pp", "dp", "microbatch", "chunks")  # of a layout
CORES = ("fused", "plain")


def step_report(
    sizes: Sizes,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    *,
    costs: Costs | None = None,
    core: str = "fused",
) -> StepReport:
    """One step of the model on `global_batch` rows.

    Args:
        costs: your own constants, on the same cluster; or `Costs(cluster)`, shared by many layouts.
        core: of attention: "fused" keeps no scores, "plain" stores them all.

    Raises ValueError where the layout does not divide the model or the batch, or takes more ranks
    than the cluster has.

    Where the cluster has a time for launches (`host_s`), no operation begins before its launch.
    """
    planned = plan_step(sizes, layout, global_batch, cluster, costs, core)
    m, chunks, costs = planned.microbatches, planned.chunks, planned.costs
    timing = pipeline_timing(
        m,
        np.array([[chunk.forward_s for chunk in of_stage] for of_stage in chunks]),
        np.array([[chunk.backward_s for chunk in of_stage] for of_stage in chunks]),
        np.array(planned.messages_s),
    )
    ends = planned.ends(timing.ended_s.tolist(), timing.last_s.tolist())
    step_s = max(end.ended_s for end in ends)
    every_chunk = [chunk for of_stage in chunks for chunk in of_stage]
    means = {
        "compute_s": _mean(m * chunk.compute_s for chunk in every_chunk) * layout.chunks,
        "tensor_s": _mean(m * chunk.exposed_s for chunk in every_chunk) * layout.chunks,
        "optimizer_s": _mean(end.update_s for end in ends),
        "data_s": _mean(end.data_s for end in ends),
        "pipeline_s": _mean(timing.pipeline_s) + _mean(end.tied_s for end in ends),
        "bubble_s": _mean(timing.bubble_s) + _mean(x.late_s + step_s - x.ended_s for x in ends),
    }
    flops = step_flops(
        sizes.vocab, sizes.width, sizes.depth, sizes.heads, global_batch, sizes.context
    )
    peak = costs.cluster.device.peak_flops_of(DTYPE)
    return StepReport(
        sizes, layout, global_batch, sum(means.values()), **means,
        memory_bytes=peak_memory(sizes, layout, planned.stages, m),
        sent_bytes=sent_bytes(sizes, layout, m, planned.stages),
        model_flops=flops, mfu=flops / (step_s * layout.ranks * peak),
    )  # fmt: skip


def _mean(some: Iterable[float]) -> float:
    every = list(some)
    return float(sum(every) / len(every))


class Planned(NamedTuple):
    """A step's costs before the clock runs: what the report, the trace and the calibration
    share."""

    sizes: Sizes
    layout: Layout
    microbatches: int
    costs: Costs
    stages: list[list[VirtualStage]]  # the chunks of each stage
    chunks: list[list[ChunkSeconds]]
    messages_s: list[float]

    def ends(self, ended_s: Sequence[float], lasts_s: Sequence[Sequence[float]]) -> list[StageEnd]:
        """As `step_ends`, of this step."""
        of_step = self.sizes, self.layout, self.stages, self.chunks
        return step_ends(*of_step, ended_s, lasts_s, self.costs)


def plan_step(
    sizes: Sizes,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    costs: Costs | None = None,
    core: str = "fused",
) -> Planned:
    """Arguments and errors as those of `step_report`."""
    check(sizes, layout, global_batch, cluster)
    if core not in CORES:
        raise ValueError(f"core={core!r}: choose 'fused' or 'plain'")
    costs = Costs(cluster) if costs is None else costs
    virtual = virtual_stages(sizes, layout, core)
    stages = [virtual[stage :: layout.pp] for stage in range(layout.pp)]
    chunks = [
        [chunk_seconds(chunk, layout, stage, costs) for chunk in of_stage]
        for stage, of_stage in enumerate(stages)
    ]
    return Planned(
        sizes, layout, layout.microbatches(global_batch), costs, stages, chunks,
        messages_s(sizes, layout, costs),
    )  # fmt: skip


def check(sizes: Sizes, layout: Layout, global_batch: int, cluster: Cluster) -> None:
    """Raises ValueError for an invalid layout, naming a valid choice."""
    check_counts(**{name: getattr(layout, name) for name in COUNTS}, global_batch=global_batch)
    rows = layout.dp * layout.microbatch
    if global_batch % rows:
        raise ValueError(
            f"a batch of {global_batch} rows does not divide over dp={layout.dp} replicas in "
            f"micro-batches of {layout.microbatch}; choose a multiple of {rows}"
        )
    if layout.ranks > cluster.size:
        raise ValueError(
            f"{layout.in_words} takes {layout.ranks:,} ranks, and {cluster.title} has "
            f"{cluster.size:,}; dataclasses.replace(cluster, nodes=...) has more"
        )
    if layout.chunks > 1 and (layout.pp == 1 or layout.microbatches(global_batch) % layout.pp):
        raise ValueError(
            f"chunks={layout.chunks} with pp={layout.pp} and {layout.microbatches(global_batch)} "
            "micro-batches: interleaved 1F1B needs several stages, and micro-batches in whole "
            "groups of pp"
        )
    if sizes.heads % layout.tp:
        raise ValueError(
            f"{sizes.heads} heads do not divide over tp={layout.tp}; choose a tp that divides them"
        )
    if layout.sequence and sizes.context % layout.tp:
        raise ValueError(
            f"{sizes.context} positions do not divide over tp={layout.tp}; choose another context, "
            "or sequence=False"
        )
    if layout.zero not in ZERO_STAGES:
        raise ValueError(
            f"zero={layout.zero}: here are 0 (DDP) and 1; stages 2 and 3 send for each micro-batch "
            "again (labkit.predict.bytes_by_axis counts that)"
        )
    if layout.recompute not in RECOMPUTE:
        raise ValueError(f"recompute={layout.recompute!r}: choose 'none' or 'full'")
