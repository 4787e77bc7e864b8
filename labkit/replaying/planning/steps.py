"""A training step of a large model on a large cluster, from recorded layers (step_model).

>>> layout = Layout(tp=8, pp=8, dp=16, sequence=True, recompute="full")
>>> step_report(GPT3, layout, 1536, cluster("selene")).step_s
>>> plot.timeline(step_trace(GPT3, layout, 1536, cluster("selene")))
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.predict.collectives import bus_factor
from labkit.replaying.costs import Costs
from labkit.replaying.engine import Timed
from labkit.replaying.pipeline import pipeline_trace
from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.layers import ELEMENT_BYTES
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.peak_memory import peak_memory
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.stages import vocabulary_elements
from labkit.replaying.planning.step_model import Sent, StepModel, step_ends
from labkit.replaying.replays import set_times
from labkit.schedules import Action, Message
from labkit.trace import RankTrace, Span, Step, Trace

DTYPE = "bfloat16"
STEP = 0  # step index in the trace


def step_report(
    sizes: Sizes,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    *,
    costs: Costs | None = None,
    core: str = "fused",
) -> StepReport:
    """Report the time, memory and bytes sent of one step on `global_batch` rows.

    Args:
        costs: custom costs on the same cluster, or a `Costs(cluster)` shared by many layouts.
        core: attention kernel; "fused" stores no scores, "plain" stores every score.

    Raises ValueError if the model or batch is not divisible by the layout, or if the layout needs
    more ranks than the cluster has. If the device's `host_s` > 0, operations wait for their launch.
    """
    model = StepModel(sizes, layout, global_batch, cluster, costs, core)
    m, timing = model.microbatches, model.timing()
    ends = step_ends(model, timing)
    step_s = max(end.ended_s for end in ends)
    chunks = [chunk for stage in model.chunks for chunk in stage]
    means = {
        "compute_s": fmean(m * chunk.compute_s for chunk in chunks) * layout.chunks,
        "tensor_s": fmean(m * chunk.exposed_s for chunk in chunks) * layout.chunks,
        "optimizer_s": fmean(end.update_s for end in ends),
        "data_s": fmean(end.data_s for end in ends),
        "pipeline_s": fmean(timing.pipeline_s) + fmean(end.tied_s for end in ends),
        "bubble_s": fmean(timing.bubble_s) + fmean(x.late_s + step_s - x.ended_s for x in ends),
    }
    flops = sizes.step_flops(global_batch)
    peak = model.costs.cluster.device.peak_flops_of(DTYPE)
    return StepReport(
        sizes, layout, global_batch, sum(means.values()), **means,
        memory_bytes=peak_memory(model), sent_bytes=_sent_bytes(model), model_flops=flops,
        mfu=flops / (step_s * layout.ranks * peak),
    )  # fmt: skip


def _sent_bytes(model: StepModel) -> dict[str, float]:
    """Bus bytes per step and axis, for the rank that sends the most."""
    layout, pp, m = model.layout, model.layout.pp, model.microbatches
    last = pp * layout.chunks - 1
    # All virtual stages but the last send activations; all but the first send gradients.
    sends = [sum((v > 0) + (v < last) for v in range(stage, last + 1, pp)) for stage in range(pp)]
    tensor: float = m * max(sum(chunk.sent_bytes for chunk in chunks) for chunks in model.stages)
    if layout.gathers_messages:
        gathered = bus_factor("all_gather", layout.tp) * model.message_bytes * layout.tp
        tensor += m * max(sends) * gathered
    pipeline = [m * count * model.message_bytes for count in sends]
    averaged = []  # elements per stage; tied elements have a separate ZeRO bucket
    for stage, chunks in enumerate(model.stages):
        elements, tied = sum(chunk.parameters for chunk in chunks), 0
        if stage in model.tied_stages:
            pipeline[stage] += model.tied_bytes
            tied = vocabulary_elements(model.sizes, layout)
        buckets = (elements - tied, tied)
        averaged.append(sum(-(-n // layout.shards) * layout.shards for n in buckets))
    # ZeRO's reduce-scatter and all-gather are the two halves of an all-reduce.
    data = max(averaged) * ELEMENT_BYTES * bus_factor("all_reduce", layout.dp)
    return {"tensor": float(tensor), "pipeline": float(max(pipeline)), "data": float(data)}


def step_trace(
    sizes: Sizes,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    *,
    costs: Costs | None = None,
    core: str = "fused",
) -> Trace:
    """The trace of a step; arguments and errors as in `step_report`. In every stage, the rank with
    dp 0 and tp 0 represents the other ranks (RankTrace.alike). Micro-batch spans include
    tensor-parallel collectives. Building the trace takes about 20 µs per action of the schedule."""
    model = StepModel(sizes, layout, global_batch, cluster, costs, core)
    timing = model.timing()
    ends = step_ends(model, timing)
    step_s = max(end.ended_s for end in ends)

    def seconds(stage: int, action: Action) -> float:
        chunk = model.chunks[stage][action.chunk]
        return chunk.forward_s if action.phase == "forward" else chunk.backward_s

    def message_s(message: Message) -> float:
        return model.messages_s[min(message.source, message.target) % layout.pp]

    schedule = schedule_of(layout.pp, model.microbatches, layout.chunks)
    trace = pipeline_trace(schedule, seconds, message_s, model.message_bytes)
    first = range(0, layout.ranks, layout.dp * layout.tp)  # tensor parallelism is innermost
    ranks = {}
    for stage, (rank, end) in enumerate(zip(first, ends, strict=True)):
        pipeline, updated_s = trace.ranks[stage], end.update_began_s + end.update_s
        update = Span("optimizer", "", STEP, end.update_began_s, updated_s, 0, "AdamW")
        messages = [replace(event, ranks=tuple(first)) for event in pipeline.comms]
        collectives = _collectives(end.sent, stage, first, layout, float(timing.ended_s[stage]))
        ranks[rank] = RankTrace(
            rank, layout.ranks, steps=[Step(STEP, 0.0, step_s)], spans=[*pipeline.spans, update],
            comms=[*messages, *collectives], alike=tuple(range(rank + 1, rank + first.step)),
        )  # fmt: skip
    return Trace(ranks, {"what": f"{layout.in_words}, replayed", "world_size": layout.ranks})


def _collectives(
    sent: Sequence[Sent], stage: int, first: Sequence[int], layout: Layout, over_s: float
) -> Iterator[CommEvent]:
    """One event per bucket; the stage waits for the last bucket per op and axis. `first`: the first
    rank of every stage; `over_s`: the end of the stage's last backward."""
    replicas = tuple(first[stage] + k * layout.tp for k in range(layout.dp))
    for seq, bucket in enumerate(sent, start=1):
        ranks, group, number = replicas, f"data {stage}", seq
        if bucket.axis != "data":
            ranks, group, number = (first[0], first[-1]), "tied", 1
        bus_bytes = round(bus_factor(bucket.op, len(ranks)) * bucket.nbytes)
        event = CommEvent(
            bucket.op, group, ranks, ranks.index(first[stage]), number, DTYPE, (),
            bucket.nbytes, bus_bytes, blocking=False, step=STEP,
        )  # fmt: skip
        wait = None
        if seq == len(sent) or (sent[seq].op, sent[seq].axis) != (bucket.op, bucket.axis):
            wait_began_s = max(bucket.issued_s, over_s)
            wait = Timed(wait_began_s, max(wait_began_s, bucket.ended_s))
        set_times(event, bucket.issued_s, Timed(bucket.began_s, bucket.ended_s), wait)
        yield event
