"""`step_trace(sizes, layout, global_batch, cluster)`: the step of a layout as a trace, to be drawn.

    stage 0   ▕F0▏▕F1▏   ▕ B0 ▏▕F2▏ ...  ▕ B7 ▏ data  tied  step       rank 0 stands for dp x tp
    stage 1       ▕F0▏▕ B0 ▏▕F1▏▕ B1 ▏ ...      data  tied  step       rank dp x tp for as many

Every micro-batch is on the virtual clock of `labkit.replaying.engine`; `step_report` says the same
in numbers, sooner. Collectives of tensor parallelism are inside the micro-batches' spans.

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
from labkit.replaying.pipeline import pipeline_trace
from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.places import mesh_sizes
from labkit.replaying.planning.sends import message_bytes
from labkit.replaying.planning.steps import Planned, plan_step
from labkit.replaying.planning.tail import Sent, Tail
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
    """One step: of each stage the rank dp 0, tp 0, which stands for the others (RankTrace.alike).

    Arguments and errors are those of `step_report`. It has a span for each action of the schedule,
    so a step of many micro-batches on many stages takes a while: 20 us each.
    """
    planned = plan_step(sizes, layout, global_batch, cluster, costs, core)
    chunks, stages = planned.chunks, layout.pp

    def seconds(stage: int, action: Action) -> float:
        of = chunks[stage][action.chunk]
        return of.forward_s if action.phase == "forward" else of.backward_s

    def message_s(message: Message) -> float:
        return planned.messages_s[min(message.source, message.target) % stages]

    trace = pipeline_trace(
        schedule_of(stages, planned.microbatches, layout.chunks), seconds, message_s,
        message_bytes(sizes, layout),
    )  # fmt: skip
    ends = planned.tails(*_backwards(trace, layout))
    step_s = max(one.ended_s for one in ends)
    first = [rank_at(mesh_sizes(layout), {"pp": k, "dp": 0, "tp": 0}) for k in range(stages)]
    ranks = {
        first[stage]: _with_tail(trace.ranks[stage], end, first, step_s, planned)
        for stage, end in enumerate(ends)
    }
    about = {"what": f"{layout.in_words}, replayed", "world_size": layout.ranks}
    return Trace(ranks, about)


def _backwards(trace: Trace, layout: Layout) -> tuple[list[float], list[list[float]]]:
    """Of each stage, when its last backward is over, and when the last of each chunk began."""
    ended, lasts = [], []
    for one in trace.ranks.values():
        backward = [span for span in one.spans if span.phase == "backward"]
        ended.append(max(span.ended_s for span in backward))
        lasts.append(
            [
                max(x.began_s for x in backward if _chunk(x) == chunk)
                for chunk in range(layout.chunks)
            ]
        )
    return ended, lasts


def _chunk(span: Span) -> int:
    """A span is called after its micro-batch, "3", and after its chunk where there are several,
    "3.1"."""
    return int(span.module.partition(".")[2] or 0)


def _with_tail(
    one: RankTrace, end: Tail, first: Sequence[int], step_s: float, planned: Planned
) -> RankTrace:
    """The stage as its first rank, with what comes after its last backward."""
    layout, stage = planned.layout, one.rank
    others = range(first[stage], first[stage] + layout.dp * layout.tp)
    update = Span(
        "optimizer", "", STEP, end.update_began_s, end.update_began_s + end.update_s, 0, "AdamW"
    )
    comms = [replace(event, ranks=tuple(first)) for event in one.comms]
    over_s = max(span.ended_s for span in one.spans)  # its last backward
    comms += _events(end.sent, stage, first, layout, over_s)
    return RankTrace(
        first[stage], layout.ranks, steps=[Step(STEP, 0.0, step_s)], spans=[*one.spans, update],
        comms=comms, alike=tuple(rank for rank in others if rank != first[stage]),
    )  # fmt: skip


def _events(
    sent: Sequence[Sent], stage: int, first: Sequence[int], layout: Layout, over_s: float
) -> Iterator[CommEvent]:
    """Each bucket on the wire; the stage waits for the last of them."""
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
        set_times(event, one.issued_s, Timed(one.began_s, one.ended_s), _wait(sent, seq, over_s))
        yield event


def _wait(sent: Sequence[Sent], seq: int, over_s: float) -> Timed | None:
    """From the last backward on, until the last of its kind has ended; for others there is none."""
    one = sent[seq - 1]
    if seq < len(sent) and (sent[seq].op, sent[seq].axis) == (one.op, one.axis):
        return None
    began_s = max(one.issued_s, over_s)
    return Timed(began_s, max(began_s, one.ended_s))
