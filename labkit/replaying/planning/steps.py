"""A training step of a large model on a large cluster, from recordings of its layers (step_model).

stage 0   F F F .. B F .. B F .. B . B . B │ data │ tied │ step │
stage 1     F F B F B F B F B B            │ data │ tied │ step │

>>> gpt3 = Sizes(width=12288, depth=96, heads=96)
>>> layout = Layout(tp=8, pp=8, dp=16, sequence=True, recompute="full")
>>> step_report(gpt3, layout, 1536, cluster("selene")).step_s
>>> plot.timeline(step_trace(gpt3, layout, 1536, cluster("selene")))
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from labkit.clusters import Cluster
from labkit.comm.mesh import rank_at
from labkit.events import CommEvent
from labkit.predict.transformer import step_flops
from labkit.predict.wires import bus_factor
from labkit.replaying.costs import Costs
from labkit.replaying.engine import Timed
from labkit.replaying.microbatches import action_of
from labkit.replaying.pipeline import pipeline_trace
from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.communication import message_bytes, sent_bytes
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.peak_memory import peak_memory
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.stages import mesh_sizes
from labkit.replaying.planning.step_model import Sent, StageEnd, step_ends, step_model
from labkit.replaying.replays import set_times
from labkit.schedules import Action, Message
from labkit.trace import RankTrace, Span, Step, Trace

DTYPE = "bfloat16"
STEP = 0  # its number in a trace


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
    than the cluster has. Where the cluster has a time for launches (`host_s`), no operation begins
    before its launch.
    """
    model = step_model(sizes, layout, global_batch, cluster, costs, core)
    m, timing = model.microbatches, model.timing()
    ends = step_ends(model, timing.ended_s.tolist(), timing.last_s.tolist())
    step_s = max(end.ended_s for end in ends)
    every_chunk = [chunk for of_stage in model.chunks for chunk in of_stage]
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
    peak = model.costs.cluster.device.peak_flops_of(DTYPE)
    return StepReport(
        sizes, layout, global_batch, sum(means.values()), **means,
        memory_bytes=peak_memory(sizes, layout, model.stages, m),
        sent_bytes=sent_bytes(sizes, layout, m, model.stages),
        model_flops=flops, mfu=flops / (step_s * layout.ranks * peak),
    )  # fmt: skip


def _mean(some: Iterable[float]) -> float:
    every = list(some)
    return float(sum(every) / len(every))


def step_trace(
    sizes: Sizes,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    *,
    costs: Costs | None = None,
    core: str = "fused",
) -> Trace:
    """One step: of each stage the rank dp 0, tp 0, which represents the others (RankTrace.alike).
    Collectives of tensor parallelism are inside the spans of micro-batches.

    Arguments and errors are those of `step_report`. There is a span for each action of the
    schedule, at 20 us each: a step of many micro-batches on many stages takes a while.
    """
    model = step_model(sizes, layout, global_batch, cluster, costs, core)

    def seconds(stage: int, action: Action) -> float:
        chunk = model.chunks[stage][action.chunk]
        return chunk.forward_s if action.phase == "forward" else chunk.backward_s

    def message_s(message: Message) -> float:
        return model.messages_s[min(message.source, message.target) % layout.pp]

    schedule = schedule_of(layout.pp, model.microbatches, layout.chunks)
    trace = pipeline_trace(schedule, seconds, message_s, message_bytes(sizes, layout))
    ended_s, lasts_s = [], []
    for one in trace.ranks.values():
        backward = [span for span in one.spans if span.phase == "backward"]
        ended_s.append(max(span.ended_s for span in backward))
        began = {action_of(span).chunk: span.began_s for span in backward}  # the last of each
        lasts_s.append([began[chunk] for chunk in range(layout.chunks)])
    ends = step_ends(model, ended_s, lasts_s)
    step_s = max(end.ended_s for end in ends)
    mesh = mesh_sizes(layout)
    first = [rank_at(mesh, {"pp": k, "dp": 0, "tp": 0}) for k in range(layout.pp)]
    ranks = {
        first[stage]: _with_end(trace.ranks[stage], end, first, step_s, layout)
        for stage, end in enumerate(ends)
    }
    about = {"what": f"{layout.in_words}, replayed", "world_size": layout.ranks}
    return Trace(ranks, about)


def _with_end(
    one: RankTrace, end: StageEnd, first: Sequence[int], step_s: float, layout: Layout
) -> RankTrace:
    """The stage as its first rank, with what follows its last backward."""
    rank = first[one.rank]
    began_s, ended_s = end.update_began_s, end.update_began_s + end.update_s
    update = Span("optimizer", "", STEP, began_s, ended_s, 0, "AdamW")
    over_s = max(span.ended_s for span in one.spans)  # its last backward
    messages = [replace(event, ranks=tuple(first)) for event in one.comms]
    return RankTrace(
        rank, layout.ranks, steps=[Step(STEP, 0.0, step_s)], spans=[*one.spans, update],
        comms=[*messages, *_collectives(end.sent, one.rank, first, layout, over_s)],
        alike=tuple(range(rank + 1, rank + layout.dp * layout.tp)),
    )  # fmt: skip


def _collectives(
    sent: Sequence[Sent], stage: int, first: Sequence[int], layout: Layout, over_s: float
) -> Iterator[CommEvent]:
    """Each bucket on the wire; the stage waits for the last of each kind."""
    replicas = tuple(first[stage] + k * layout.tp for k in range(layout.dp))
    ends = (first[0], first[-1])
    for seq, one in enumerate(sent, start=1):
        is_data = one.axis == "data"
        ranks, group = (replicas, f"data {stage}") if is_data else (ends, "tied")
        bus_bytes = round(bus_factor(one.op, len(ranks)) * one.nbytes)
        event = CommEvent(
            one.op, group, ranks, ranks.index(first[stage]), seq if is_data else 1, DTYPE, (),
            one.nbytes, bus_bytes, blocking=False, step=STEP,
        )  # fmt: skip
        wait = None
        if seq == len(sent) or (sent[seq].op, sent[seq].axis) != (one.op, one.axis):
            wait_began_s = max(one.issued_s, over_s)  # not before the last backward is over
            wait = Timed(wait_began_s, max(wait_began_s, one.ended_s))
        set_times(event, one.issued_s, Timed(one.began_s, one.ended_s), wait)
        yield event
