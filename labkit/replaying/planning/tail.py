"""The end of a step, when a stage is through with its micro-batches.

    last backward   ████████████│           │
    data                 [bucket][bucket][b]│            all-reduces, or ZeRO's reduce-scatters
    tied                                    [embedding]   first and last stage; of ZeRO's a share
    optimizer                                          ███
    data                                                  [parameters]   ZeRO's all-gather

Buckets leave while the last backward runs, as soon as they are full and the wire is free.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from labkit.replaying.costs import Costs, Sending
from labkit.replaying.planning.layers import ELEMENT_BYTES, recorded
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.places import data_groups, ends_groups, moved
from labkit.replaying.planning.seconds import slowest, update_seconds
from labkit.replaying.planning.sends import tied_bytes
from labkit.replaying.planning.stages import ChunkSeconds, VirtualStage

BUCKET_BYTES = 25 * 2**20  # of DDP and ZeroOptimizer, as they come


class Sent(NamedTuple):
    """A collective of this stage."""

    op: str
    axis: str
    nbytes: int
    issued_s: float
    began_s: float
    ended_s: float


class Tail(NamedTuple):
    """Of one stage. `data_s`: it stood still for gradients or parameters; `tied_s` for the tied
    embedding; `late_s` for the other end of that."""

    sent: list[Sent]
    data_s: float
    late_s: float
    tied_s: float
    update_s: float
    update_began_s: float
    ended_s: float


def tails(
    sizes: Sizes,
    layout: Layout,
    stages: Sequence[Sequence[VirtualStage]],
    chunks: Sequence[Sequence[ChunkSeconds]],
    ended_s: Sequence[float],
    lasts_s: Sequence[Sequence[float]],
    costs: Costs,
) -> list[Tail]:
    """Of all stages. `ended_s`: when each was through with its last backward; `lasts_s`: when the
    last backward of each of its chunks began."""
    sent = [
        gradients_sent(its, lasts_s[stage], layout, stage, costs)
        for stage, its in enumerate(chunks)
    ]
    there_s = [
        max([began_s, *(one.ended_s for one in its)])
        for began_s, its in zip(ended_s, sent, strict=True)
    ]
    tied = sizes.tied and layout.pp > 1
    tied_s = tied_seconds(sizes, layout, costs) if tied else 0.0
    found = []
    for stage, its in enumerate(stages):
        at_end = tied and stage in (0, layout.pp - 1)
        met_s = max(there_s[0], there_s[-1]) if at_end else there_s[stage]
        if at_end:
            nbytes = tied_bytes(sizes, layout)
            sent[stage].append(
                Sent("all_reduce", "pipeline", nbytes, there_s[stage], met_s, met_s + tied_s)
            )
        began_s = met_s + (tied_s if at_end else 0.0)
        update_s = _update_s(its, layout, costs)
        gathers = _parameters_sent(its, layout, stage, began_s + update_s, costs)
        over_s = max([began_s + update_s, *(one.ended_s for one in gathers)])
        sent[stage] += gathers
        found.append(
            Tail(
                sent[stage],
                there_s[stage] - ended_s[stage] + over_s - began_s - update_s,
                met_s - there_s[stage],
                tied_s if at_end else 0.0,
                update_s,
                began_s,
                over_s,
            )
        )
    return found


def gradients_sent(
    chunks: Sequence[ChunkSeconds],
    lasts_s: Sequence[float],
    layout: Layout,
    stage: int,
    costs: Costs,
) -> list[Sent]:
    """The buckets of a stage's gradients; empty with one replica."""
    if layout.dp == 1:
        return []
    op = "reduce_scatter" if layout.zero else "all_reduce"
    takes = _takes(op, layout, stage, costs)
    found: list[Sent] = []
    free_s = 0.0
    for last_s, chunk in sorted(zip(lasts_s, chunks, strict=True), key=lambda x: x[0]):
        for full_s, nbytes in buckets(chunk.gradients):
            one = takes(nbytes)
            began_s = max(free_s, last_s + full_s)
            free_s = began_s + one.seconds
            found.append(Sent(op, "data", nbytes, last_s + full_s, began_s, free_s + one.latency_s))
    return found


def _takes(op: str, layout: Layout, stage: int, costs: Costs) -> Callable[[int], Sending]:
    """What a collective over the replicas takes, by its bytes."""
    per_node = costs.cluster.devices_per_node
    groups = moved(data_groups(layout, stage, per_node), per_node)
    return cache(lambda nbytes: slowest(op, nbytes, costs, groups))


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
    one = slowest("all_reduce", tied_bytes(sizes, layout), costs, groups)
    return one.seconds + one.latency_s


def _update_s(stage: Sequence[VirtualStage], layout: Layout, costs: Costs) -> float:
    shares = layout.dp if layout.zero else 1
    layers = ((layer, count) for chunk in stage for layer, count in chunk.recorded())
    return sum(count * update_seconds(layer, costs, shares) for layer, count in layers)


def _parameters_sent(
    stage: Sequence[VirtualStage], layout: Layout, number: int, began_s: float, costs: Costs
) -> list[Sent]:
    """ZeRO's all-gathers of what each rank has stepped on."""
    if not layout.zero or layout.dp == 1:
        return []
    takes = _takes("all_gather", layout, number, costs)
    gradients = [(0.0, n) for chunk in stage for shape in chunk for n in recorded(shape).gradients]
    found, free_s = [], began_s
    for _, nbytes in buckets(gradients):
        one = takes(nbytes)
        found.append(
            Sent(
                "all_gather", "data", nbytes, began_s, free_s, free_s + one.seconds + one.latency_s
            )
        )
        free_s += one.seconds
    return found
