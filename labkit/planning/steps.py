"""`step_report(sizes, layout, global_batch, cluster)`: a training step of a large model on a large
cluster, from recordings of its layers.

    layers      each kind recorded once, without data                      layers.py
    seconds     what they take on the cluster's devices and wires          seconds.py, places.py
    stages      layers added up                                            stages.py
    clock       the schedule tiles them with all micro-batches             clock.py
    tail        gradients over dp, the tied embedding, the optimizer       here
    memory      states, and what is in flight                              holding.py

    stage 0   F F F .. B F .. B F .. B . B . B │ data │ tied │ step │
    stage 1     F F B F B F B F B B            │ data │ tied │ step │

    >>> from labkit.clusters import cluster
    >>> from labkit.planning.layout import Layout, Sizes
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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.planning.clock import pipeline_timing
from labkit.planning.holding import memory_of
from labkit.planning.layers import ELEMENT_BYTES, recorded
from labkit.planning.layout import Layout, Sizes
from labkit.planning.places import boundary, data_groups, ends_groups, tensor_groups
from labkit.planning.report import StepReport
from labkit.planning.seconds import layer_seconds, slowest, update_seconds
from labkit.planning.stages import (
    VirtualStage,
    stages_of,
    virtual_stages,
    vocabulary_elements,
)
from labkit.predict.transformer import step_flops
from labkit.predict.wires import bus_factor
from labkit.replaying.costs import Costs

BUCKET_BYTES = 25 * 2**20  # of DDP and ZeroOptimizer, as they come
DTYPE = "bfloat16"


class ChunkSeconds(NamedTuple):
    """One chunk of a stage, for one micro-batch."""

    forward_s: float
    backward_s: float
    compute_s: float  # of both
    exposed_s: float
    gradients: tuple[tuple[float, int], ...]  # in its backward: when, how many elements


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
        costs: constants of your own, on the same cluster.
        core: of attention: "fused" keeps no scores, "plain" stores them all.

    Raises ValueError where the layout does not divide the model or the batch, or takes more ranks
    than the cluster has.
    """
    check(sizes, layout, global_batch, cluster)
    costs = Costs(cluster) if costs is None else costs
    microbatches = layout.microbatches(global_batch)
    stages = stages_of(virtual_stages(sizes, layout, core), layout)
    chunks = [
        [chunk_seconds(chunk, layout, stage, costs) for chunk in its]
        for stage, its in enumerate(stages)
    ]
    timing = pipeline_timing(
        microbatches,
        np.array([[one.forward_s for one in its] for its in chunks]),
        np.array([[one.backward_s for one in its] for its in chunks]),
        np.array(messages_s(sizes, layout, costs)),
    )
    bubble, pipeline = timing.bubble_s.copy(), timing.pipeline_s.copy()
    data, update, ended = np.zeros(layout.pp), np.zeros(layout.pp), timing.ended_s.copy()
    for stage in range(layout.pp):
        over_s = gradients_over_s(chunks[stage], timing.last_s[stage], layout, stage, costs)
        data[stage] = max(over_s - ended[stage], 0.0)
    ended += data
    if sizes.tied and layout.pp > 1:
        tied_s = tied_seconds(sizes, layout, costs)
        for stage in (0, layout.pp - 1):
            bubble[stage] += max(ended[0], ended[-1]) - ended[stage]
            pipeline[stage] += tied_s
        ended[0] = ended[-1] = max(ended[0], ended[-1]) + tied_s
    for stage, its in enumerate(stages):
        update[stage] = _update_s(its, layout, costs)
        gather_s = _parameters_s(its, layout, stage, costs)
        data[stage] += gather_s
        ended[stage] += update[stage] + gather_s
    compute = microbatches * np.array([sum(one.compute_s for one in its) for its in chunks])
    tensor = microbatches * np.array([sum(one.exposed_s for one in its) for its in chunks])
    step_s = float(ended.max())
    bubble += step_s - ended
    flops = step_flops(
        sizes.vocab, sizes.width, sizes.depth, sizes.heads, global_batch, sizes.context
    )
    peak = costs.cluster.device.peak_flops_of(DTYPE)
    return StepReport(
        sizes, layout, global_batch, step_s,
        compute_s=float(compute.mean()), optimizer_s=float(update.mean()),
        tensor_s=float(tensor.mean()), data_s=float(data.mean()),
        pipeline_s=float(pipeline.mean()), bubble_s=float(bubble.mean()),
        memory_bytes=memory_of(stages, layout, microbatches),
        sent_bytes=sent_bytes(sizes, layout, microbatches, stages),
        model_flops=flops, mfu=flops / (step_s * layout.ranks * peak),
    )  # fmt: skip


def check(sizes: Sizes, layout: Layout, global_batch: int, cluster: Cluster) -> None:
    """Raises ValueError for a layout that cannot be, with what would do."""
    rows = layout.dp * layout.microbatch
    if global_batch < 1 or global_batch % rows:
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
    if layout.zero not in (0, 1, 2):
        raise ValueError(f"zero={layout.zero}: here are 0 (DDP), 1 and 2")
    if layout.recompute not in ("none", "full"):
        raise ValueError(f"recompute={layout.recompute!r}: choose 'none' or 'full'")


def chunk_seconds(chunk: VirtualStage, layout: Layout, stage: int, costs: Costs) -> ChunkSeconds:
    """The sum over its layers."""
    groups = tensor_groups(layout, stage, costs.cluster.devices_per_node)
    forward_s = backward_s = compute_s = exposed_s = 0.0
    gradients: list[tuple[float, int]] = []
    for shape in reversed(list(chunk)):
        forward, backward = layer_seconds(shape, costs, groups)
        gradients += [(backward_s + when_s, numel) for when_s, numel in backward.gradients]
        forward_s, backward_s = forward_s + forward.sum_s, backward_s + backward.sum_s
        compute_s += forward.compute_s + backward.compute_s
        exposed_s += forward.exposed_s + backward.exposed_s
    return ChunkSeconds(forward_s, backward_s, compute_s, exposed_s, tuple(gradients))


def message_bytes(sizes: Sizes, layout: Layout) -> int:
    """Of one message between stages, from one rank: b s w elements, or one of tp parts."""
    cut = layout.tp if layout.sequence or layout.scatter_gather else 1
    return layout.microbatch * sizes.context * sizes.width * ELEMENT_BYTES // cut


def messages_s(sizes: Sizes, layout: Layout, costs: Costs) -> list[float]:
    """From each stage to the next one, or back; of the last one to the first."""
    if layout.pp == 1:
        return [0.0]
    nbytes, per_node = message_bytes(sizes, layout), costs.cluster.devices_per_node
    found = []
    for stage in range(layout.pp):
        ways = [
            costs.sending(
                CommEvent("send", "pipeline", ends, 0, 0, "", (), nbytes, nbytes, False, peer=1)
            )
            for ends in boundary(layout, stage, per_node)
        ]
        found.append(max(one.seconds + one.latency_s for one in ways))
        if layout.scatter_gather and layout.tp > 1 and not layout.sequence:
            groups = tensor_groups(layout, (stage + 1) % layout.pp, per_node)
            gather = slowest("all_gather", nbytes * layout.tp, costs, groups)
            found[-1] += gather.seconds + gather.latency_s
    return found


def gradients_over_s(
    chunks: Sequence[ChunkSeconds],
    lasts_s: Sequence[float],
    layout: Layout,
    stage: int,
    costs: Costs,
) -> float:
    """When the last bucket of gradients has arrived; each leaves as soon as it is full and the wire
    is free. `lasts_s`: when the last backward of each chunk began."""
    if layout.dp == 1:
        return 0.0
    groups = data_groups(layout, stage, costs.cluster.devices_per_node)
    op = "reduce_scatter" if layout.zero else "all_reduce"
    free_s = over_s = 0.0
    for began_s, chunk in sorted(zip(lasts_s, chunks, strict=True), key=lambda x: x[0]):
        for full_s, nbytes in buckets(chunk.gradients):
            one = slowest(op, nbytes, costs, groups)
            free_s = max(free_s, began_s + full_s) + one.seconds
            over_s = free_s + one.latency_s
    return over_s


def buckets(gradients: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """When each bucket is full, and its bytes. A gradient that is larger has its own."""
    found: list[tuple[float, int]] = []
    filling, full_s = 0, 0.0
    for when_s, numel in gradients:
        nbytes = numel * ELEMENT_BYTES
        if filling and filling + nbytes > BUCKET_BYTES:
            found.append((full_s, filling))
            filling = 0
        filling, full_s = filling + nbytes, when_s
    return [*found, (full_s, filling)]


def tied_seconds(sizes: Sizes, layout: Layout, costs: Costs) -> float:
    """The all-reduce of the embedding's gradient between the first and the last stage."""
    groups = ends_groups(layout, costs.cluster.devices_per_node)
    nbytes = vocabulary_elements(sizes, layout) * ELEMENT_BYTES
    one = slowest("all_reduce", nbytes, costs, groups)
    return one.seconds + one.latency_s


def _update_s(stage: Sequence[VirtualStage], layout: Layout, costs: Costs) -> float:
    shares = layout.dp if layout.zero else 1
    layers = ((layer, count) for chunk in stage for layer, count in chunk.recorded())
    return sum(count * update_seconds(layer, costs, shares) for layer, count in layers)


def _parameters_s(
    stage: Sequence[VirtualStage], layout: Layout, number: int, costs: Costs
) -> float:
    """ZeRO's all-gather of what each rank has stepped on."""
    if not layout.zero or layout.dp == 1:
        return 0.0
    groups = data_groups(layout, number, costs.cluster.devices_per_node)
    gradients = [(0.0, n) for chunk in stage for shape in chunk for n in recorded(shape).gradients]
    every = [slowest("all_gather", nbytes, costs, groups) for _, nbytes in buckets(gradients)]
    return sum(one.seconds for one in every) + every[-1].latency_s


def sent_bytes(
    sizes: Sizes, layout: Layout, microbatches: int, stages: Sequence[Sequence[VirtualStage]]
) -> dict[str, float]:
    """Bus bytes of the rank that sends the most along each axis, in a step."""
    tensor: float = microbatches * max(sum(chunk.sent_bytes for chunk in its) for its in stages)
    message = message_bytes(sizes, layout)
    ways = [
        sum(
            (v > 0) + (v < layout.pp * layout.chunks - 1)
            for v in range(r, layout.pp * layout.chunks, layout.pp)
        )
        for r in range(layout.pp)
    ]
    pipeline = [microbatches * count * message if layout.pp > 1 else 0 for count in ways]
    if sizes.tied and layout.pp > 1:
        tied = vocabulary_elements(sizes, layout) * ELEMENT_BYTES
        pipeline[0], pipeline[-1] = pipeline[0] + tied, pipeline[-1] + tied
    if layout.scatter_gather and layout.tp > 1 and not layout.sequence and layout.pp > 1:
        gathered = bus_factor("all_gather", layout.tp) * message * layout.tp
        tensor += microbatches * max(ways) * gathered
    gradients = max(sum(chunk.parameters for chunk in its) for its in stages) * ELEMENT_BYTES
    data = gradients * bus_factor("all_reduce", layout.dp)  # with ZeRO in two halves
    return {"tensor": float(tensor), "pipeline": float(max(pipeline)), "data": float(data)}
