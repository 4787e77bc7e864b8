"""`step_trace(sizes, layout, global_batch, cluster)`: the step of a layout as a trace, to be drawn.

    stage 0   ▕F0▏▕F1▏   ▕ B0 ▏▕F2▏ ...  ▕ B7 ▏ data  tied  step       rank 0 represents dp x tp
    stage 1       ▕F0▏▕ B0 ▏▕F1▏▕ B1 ▏ ...      data  tied  step       rank dp x tp as many

Every micro-batch runs on the virtual clock of `labkit.replaying.engine`; `step_report` gives the
same numbers sooner. Collectives of tensor parallelism are inside the spans of micro-batches.

    >>> plot.timeline(step_trace(sizes, layout, 64, cluster("selene")))
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from labkit.clusters import Cluster
from labkit.comm.mesh import rank_at
from labkit.events import CommEvent
from labkit.predict.wires import bus_factor
from labkit.replaying.costs import Costs
from labkit.replaying.engine import Timed
from labkit.replaying.microbatches import action_of
from labkit.replaying.pipeline import pipeline_trace
from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.communication import message_bytes
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.placement import mesh_sizes
from labkit.replaying.planning.step_end import Sent, StageEnd
from labkit.replaying.planning.steps import plan_step
from labkit.replaying.replays import set_times
from labkit.schedules import Action, Message
from labkit.trace import RankTrace, Span, Step, Trace

STEP = 0


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

    Arguments and errors are those of `step_report`. There is a span for each action of the
    schedule, at 20 us each: a step of many micro-batches on many stages takes a while.
    """
    planned = plan_step(sizes, layout, global_batch, cluster, costs, core)
    chunks, stages = planned.chunks, layout.pp

    def seconds(stage: int, action: Action) -> float:
        chunk = chunks[stage][action.chunk]
        return chunk.forward_s if action.phase == "forward" else chunk.backward_s

    def message_s(message: Message) -> float:
        return planned.messages_s[min(message.source, message.target) % stages]

    trace = pipeline_trace(
        schedule_of(stages, planned.microbatches, layout.chunks), seconds, message_s,
        message_bytes(sizes, layout),
    )  # fmt: skip
    ends = planned.ends(*_last_backwards(trace, layout))
    step_s = max(end.ended_s for end in ends)
    first = [rank_at(mesh_sizes(layout), {"pp": k, "dp": 0, "tp": 0}) for k in range(stages)]
    ranks = {
        first[stage]: _with_end(trace.ranks[stage], end, first, step_s, layout)
        for stage, end in enumerate(ends)
    }
    about = {"what": f"{layout.in_words}, replayed", "world_size": layout.ranks}
    return Trace(ranks, about)


def _last_backwards(trace: Trace, layout: Layout) -> tuple[list[float], list[list[float]]]:
    """When the last backward of each stage ended, and when the last of each of its chunks began."""
    ended, lasts = [], []
    for one in trace.ranks.values():
        backward = [span for span in one.spans if span.phase == "backward"]
        ended.append(max(span.ended_s for span in backward))
        chunks = [(action_of(span).chunk, span.began_s) for span in backward]
        lasts.append([max(s for c, s in chunks if c == k) for k in range(layout.chunks)])
    return ended, lasts


def _with_end(
    one: RankTrace, end: StageEnd, first: Sequence[int], step_s: float, layout: Layout
) -> RankTrace:
    """The stage as its first rank, with what follows its last backward."""
    stage = one.rank
    others = range(first[stage], first[stage] + layout.dp * layout.tp)
    update = Span(
        "optimizer", "", STEP, end.update_began_s, end.update_began_s + end.update_s, 0, "AdamW"
    )
    comms = [replace(event, ranks=tuple(first)) for event in one.comms]
    over_s = max(span.ended_s for span in one.spans)  # its last backward
    comms += _collectives(end.sent, stage, first, layout, over_s)
    return RankTrace(
        first[stage], layout.ranks, steps=[Step(STEP, 0.0, step_s)], spans=[*one.spans, update],
        comms=comms, alike=tuple(rank for rank in others if rank != first[stage]),
    )  # fmt: skip


def _collectives(
    sent: Sequence[Sent], stage: int, first: Sequence[int], layout: Layout, over_s: float
) -> Iterator[CommEvent]:
    """Each bucket on the wire; the stage waits for the last of each kind."""
    replicas = tuple(first[stage] + k * layout.tp for k in range(layout.dp))
    ends = (first[0], first[-1])
    for seq, one in enumerate(sent, start=1):
        ranks = replicas if one.axis == "data" else ends
        bus_bytes = round(bus_factor(one.op, len(ranks)) * one.nbytes)
        group = f"data {stage}" if one.axis == "data" else "tied"
        event = CommEvent(
            one.op, group, ranks, ranks.index(first[stage]), seq if one.axis == "data" else 1,
            "bfloat16", (), one.nbytes, bus_bytes, blocking=False, step=STEP,
        )  # fmt: skip
        wait = None
        if seq == len(sent) or (sent[seq].op, sent[seq].axis) != (one.op, one.axis):
            wait_began_s = max(one.issued_s, over_s)  # not before the last backward is over
            wait = Timed(wait_began_s, max(wait_began_s, one.ended_s))
        set_times(event, one.issued_s, Timed(one.began_s, one.ended_s), wait)
        yield event
