"""`step_report(sizes, layout, global_batch, cluster)`: a training step of a large model on a large
cluster, from recordings of its layers.

    layers      each kind recorded once, without data                      layers.py
    seconds     what they take on the cluster's devices and wires          seconds.py, places.py
    stages      layers added up                                            stages.py
    clock       the schedule tiles them with all micro-batches             clock.py
    sends       messages between stages, bytes of each axis                sends.py
    tail        gradients over dp, the tied embedding, the optimizer       tail.py
    memory      states, and what is in flight                              holding.py

    stage 0   F F F .. B F .. B F .. B . B . B │ data │ tied │ step │
    stage 1     F F B F B F B F B B            │ data │ tied │ step │

    >>> from labkit.clusters import cluster
    >>> from labkit.replaying.planning.layout import Layout, Sizes
    >>> gpt3 = Sizes(width=12288, depth=96, heads=96)
    >>> layout = Layout(tp=8, pp=8, dp=16, sequence=True, recompute="full")
    >>> report = step_report(gpt3, layout, 1536, cluster("selene"))
    >>> report.step_s, report.mfu, report.memory_bytes, report.sent_bytes

Constants of your own: `step_report(..., costs=Costs(cluster))` with a subclass of
labkit.replaying.costs.Costs; what is recorded is kept apart from what it costs, so that many of
them are quick.

What is assumed: gradients travel as labkit's DDP and ZeRO send them, in buckets, while the last
micro-batch's backward runs; new parameters of ZeRO after the step, with nothing beside them. A
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
from labkit.replaying.planning.holding import memory_of
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.sends import messages_s, sent_bytes
from labkit.replaying.planning.stages import (
    ChunkSeconds,
    VirtualStage,
    chunk_seconds,
    stages_of,
    virtual_stages,
)
from labkit.replaying.planning.tail import Tail, tails

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
        costs: constants of your own, on the same cluster; or `Costs(cluster)`, shared by many
            layouts.
        core: of attention: "fused" keeps no scores, "plain" stores them all.

    Raises ValueError where the layout does not divide the model or the batch, or takes more ranks
    than the cluster has.

    Where the cluster tells what its hosts take to launch (`host_s`), no operation begins before it
    was launched (seconds.py).
    """
    planned = plan_step(sizes, layout, global_batch, cluster, costs, core)
    m, chunks, costs = planned.microbatches, planned.chunks, planned.costs
    timing = pipeline_timing(
        m,
        np.array([[one.forward_s for one in its] for its in chunks]),
        np.array([[one.backward_s for one in its] for its in chunks]),
        np.array(planned.messages_s),
    )
    ends = planned.tails(timing.ended_s.tolist(), timing.last_s.tolist())
    step_s = max(one.ended_s for one in ends)
    means = {
        "compute_s": _mean(m * one.compute_s for its in chunks for one in its) * layout.chunks,
        "tensor_s": _mean(m * one.exposed_s for its in chunks for one in its) * layout.chunks,
        "optimizer_s": _mean(one.update_s for one in ends),
        "data_s": _mean(one.data_s for one in ends),
        "pipeline_s": _mean(timing.pipeline_s) + _mean(one.tied_s for one in ends),
        "bubble_s": _mean(timing.bubble_s) + _mean(x.late_s + step_s - x.ended_s for x in ends),
    }
    flops = step_flops(
        sizes.vocab, sizes.width, sizes.depth, sizes.heads, global_batch, sizes.context
    )
    peak = costs.cluster.device.peak_flops_of(DTYPE)
    return StepReport(
        sizes, layout, global_batch, sum(means.values()), **means,
        memory_bytes=memory_of(sizes, layout, planned.stages, m),
        sent_bytes=sent_bytes(sizes, layout, m, planned.stages),
        model_flops=flops, mfu=flops / (step_s * layout.ranks * peak),
    )  # fmt: skip


def _mean(some: Iterable[float]) -> float:
    every = list(some)
    return float(sum(every) / len(every))


class Planned(NamedTuple):
    """All that a step's clock needs to know."""

    sizes: Sizes
    layout: Layout
    microbatches: int
    costs: Costs
    stages: list[list[VirtualStage]]  # of each stage its chunks
    chunks: list[list[ChunkSeconds]]
    messages_s: list[float]

    def tails(self, ended_s: Sequence[float], lasts_s: Sequence[Sequence[float]]) -> list[Tail]:
        of = self.sizes, self.layout, self.stages, self.chunks
        return tails(*of, ended_s, lasts_s, self.costs)


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
    stages = stages_of(virtual_stages(sizes, layout, core), layout)
    chunks = [
        [chunk_seconds(chunk, layout, stage, costs) for chunk in its]
        for stage, its in enumerate(stages)
    ]
    return Planned(
        sizes, layout, layout.microbatches(global_batch), costs, stages, chunks,
        messages_s(sizes, layout, costs),
    )  # fmt: skip


def check(sizes: Sizes, layout: Layout, global_batch: int, cluster: Cluster) -> None:
    """Raises ValueError for a layout that cannot be, with what would do."""
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
    if layout.zero not in (0, 1):
        raise ValueError(
            f"zero={layout.zero}: here are 0 (DDP) and 1; stages 2 and 3 send for each micro-batch "
            "again (labkit.predict.bytes_by_axis counts that)"
        )
    if layout.recompute not in ("none", "full"):
        raise ValueError(f"recompute={layout.recompute!r}: choose 'none' or 'full'")
