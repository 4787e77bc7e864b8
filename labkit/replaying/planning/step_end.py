"""The end of a step, when a stage has finished its micro-batches.

    last backward   ████████████│           │
    data                 [bucket][bucket][b]│            all-reduces, or ZeRO's reduce-scatters
    tied                                    [embedding]   first and last stage; with ZeRO a share
    optimizer                                          ███
    data                                                  [parameters]   ZeRO's all-gather

Buckets leave while the last backward runs, as soon as they are full and the wire is free.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from labkit.parallel.common.flat import cut
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.planning.communication import tied_bytes
from labkit.replaying.planning.layers import DTYPE, recorded
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.placement import data_groups, moved, slowest, tied_groups
from labkit.replaying.planning.stages import ChunkSeconds, VirtualStage, update_seconds

BUCKET_BYTES = 25 * 2**20  # the default of DDP and ZeroOptimizer


class Sent(NamedTuple):
    """A collective of this stage."""

    op: str
    axis: str
    nbytes: int
    issued_s: float
    began_s: float
    ended_s: float


class StageEnd(NamedTuple):
    """How one stage ends its step. Seconds waited: `data_s` for gradients or parameters, `tied_s`
    for the all-reduce of the tied embedding, `late_s` for the other end to join it."""

    sent: list[Sent]
    data_s: float
    late_s: float
    tied_s: float
    update_s: float
    update_began_s: float
    ended_s: float


def step_ends(
    sizes: Sizes,
    layout: Layout,
    stages: Sequence[list[VirtualStage]],
    chunks: Sequence[Sequence[ChunkSeconds]],
    ended_s: Sequence[float],
    lasts_s: Sequence[Sequence[float]],
    costs: Costs,
) -> list[StageEnd]:
    """The ends of all stages. `ended_s`: when each finished its last backward; `lasts_s`: when the
    last backward of each of its chunks began."""
    gradients = [
        _gradients_sent(one, lasts_s[stage], layout, stage, costs)
        for stage, one in enumerate(chunks)
    ]
    averaged_s = [
        max([over_s, *(one.ended_s for one in sent)])
        for over_s, sent in zip(ended_s, gradients, strict=True)
    ]
    tied = sizes.tied and layout.pp > 1
    takes_s = _tied_seconds(sizes, layout, costs) if tied else 0.0
    ends = []
    for stage, virtual in enumerate(stages):
        sent, there_s = gradients[stage], averaged_s[stage]
        met_s, tied_s = there_s, 0.0
        if tied and stage in (0, layout.pp - 1):
            met_s, tied_s = max(averaged_s[0], averaged_s[-1]), takes_s
            nbytes = tied_bytes(sizes, layout)
            sent.append(Sent("all_reduce", "pipeline", nbytes, there_s, met_s, met_s + tied_s))
        began_s, update_s = met_s + tied_s, update_seconds(virtual, costs, layout.shards)
        updated_s = began_s + update_s
        sent += (gathers := _parameters_sent(virtual, layout, stage, updated_s, costs))
        over_s = max([updated_s, *(one.ended_s for one in gathers)])
        data_s = there_s - ended_s[stage] + over_s - began_s - update_s
        ends.append(StageEnd(sent, data_s, met_s - there_s, tied_s, update_s, began_s, over_s))
    return ends


def _gradients_sent(
    chunks: Sequence[ChunkSeconds], lasts_s: Sequence[float], layout: Layout, stage: int,
    costs: Costs,
) -> list[Sent]:  # fmt: skip
    """The buckets of a stage's gradients; empty with one replica."""
    if layout.dp == 1:
        return []
    op = "reduce_scatter" if layout.zero else "all_reduce"
    sending = _over_replicas(op, layout, stage, costs)
    sent: list[Sent] = []
    free_s = 0.0
    for last_s, chunk in sorted(zip(lasts_s, chunks, strict=True), key=lambda x: x[0]):
        for place, nbytes in _buckets(tuple(numel for _, numel in chunk.gradients)):
            full_s, takes = last_s + chunk.gradients[place][0], sending(nbytes)
            began_s = max(free_s, full_s)
            free_s = began_s + takes.seconds
            sent.append(Sent(op, "data", nbytes, full_s, began_s, free_s + takes.latency_s))
    return sent


def _parameters_sent(
    chunks: Sequence[VirtualStage], layout: Layout, stage: int, began_s: float, costs: Costs
) -> list[Sent]:
    """ZeRO's all-gathers of the parameters that each rank has updated."""
    if layout.shards == 1:
        return []
    sending = _over_replicas("all_gather", layout, stage, costs)
    elements = tuple(n for chunk in chunks for shape in chunk for n in recorded(shape).gradients)
    sent, free_s = [], began_s
    for _, nbytes in _buckets(elements):
        takes = sending(nbytes)
        arrives_s = free_s + takes.seconds + takes.latency_s
        sent.append(Sent("all_gather", "data", nbytes, began_s, free_s, arrives_s))
        free_s += takes.seconds
    return sent


def _over_replicas(op: str, layout: Layout, stage: int, costs: Costs) -> Callable[[int], Sending]:
    """What a collective over the replicas of a stage takes, by its bytes."""
    per_node = costs.cluster.devices_per_node
    groups = moved(data_groups(layout, stage, per_node), per_node)
    return cache(lambda nbytes: slowest(op, nbytes, costs, groups))


@lru_cache(maxsize=4096)
def _buckets(elements: tuple[int, ...]) -> list[tuple[int, int]]:
    """The buckets that DDP makes of gradients of these sizes, in the order in which they complete:
    of each the place of its last gradient, and its bytes."""
    gradients = [torch.empty(numel, dtype=DTYPE, device="meta") for numel in elements]
    found, place = [], -1
    for bucket in cut(gradients[::-1], BUCKET_BYTES):
        place += len(bucket)
        found.append((place, sum(gradient.nbytes for gradient in bucket)))
    return found


def _tied_seconds(sizes: Sizes, layout: Layout, costs: Costs) -> float:
    """The all-reduce of the embedding's gradient between the first and the last stage."""
    groups = tied_groups(layout, costs.cluster.devices_per_node)
    return slowest("all_reduce", tied_bytes(sizes, layout), costs, groups).total_s
