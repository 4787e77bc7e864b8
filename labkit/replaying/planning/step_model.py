"""Costs of a step: the model shared by the report, the plan, the trace and the calibration.

    last backward   ████████████│           │
    data                 [bucket][bucket][b]│            all-reduces, or ZeRO's reduce-scatters
    tied                                    [embedding]   on end stages; with ZeRO, a shard
    optimizer                                          ███
    data                                                  [parameters]   ZeRO's all-gather

A bucket is sent as soon as it is full and the link is free; the all-gather of updated parameters is
not overlapped. A message waits neither for its receiver nor for earlier messages. With
scatter/gather, each of the tp ranks sends one shard, and the receivers all-gather the shards (arXiv
2104.04473, section 4.1).
"""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.parallel.common.flat import cut
from labkit.predict.sizes import check_counts
from labkit.replaying.costs import Costs
from labkit.replaying.planning.clock import Timing, pipeline_timing
from labkit.replaying.planning.layers import DTYPE, ELEMENT_BYTES, recorded
from labkit.replaying.planning.layout import RECOMPUTE, ZERO_STAGES, Layout, Sizes
from labkit.replaying.planning.stages import (
    Groups,
    chunk_seconds,
    rank_groups,
    slowest,
    update_seconds,
    virtual_stages,
    vocabulary_elements,
)

COUNTS = ("tp", "pp", "dp", "microbatch", "chunks")  # count fields of a layout
BUCKET_BYTES = 25 * 2**20  # default bucket size of DDP and ZeroOptimizer


class StepModel:
    """Costs of a step before pipeline simulation; arguments and errors as in `step_report`."""

    def __init__(
        self,
        sizes: Sizes,
        layout: Layout,
        global_batch: int,
        cluster: Cluster,
        costs: Costs | None = None,
        core: str = "fused",
    ):
        _check(sizes, layout, global_batch, cluster)
        if core not in ("fused", "plain"):
            raise ValueError(f'core={core!r}: choose "fused" or "plain"')
        self.sizes, self.layout = sizes, layout
        self.microbatches = layout.microbatches(global_batch)
        self.costs = Costs(cluster) if costs is None else costs
        virtual = virtual_stages(sizes, layout, core)
        # Chunks per stage, and their times.
        self.stages = [virtual[stage :: layout.pp] for stage in range(layout.pp)]
        self.chunks = [
            [self.costs.cached(chunk_seconds, chunk, self.groups("tp", stage)) for chunk in chunks]
            for stage, chunks in enumerate(self.stages)
        ]
        # The stages that all-reduce the gradient of a tied embedding, and the gradient's bytes per
        # rank: V w / t elements, divided by dp with ZeRO.
        self.tied_stages = (0, layout.pp - 1) if sizes.tied and layout.pp > 1 else ()
        self.tied_bytes = -(-vocabulary_elements(sizes, layout) // layout.shards) * ELEMENT_BYTES
        # Bytes per rank and message to a neighboring stage; seconds from each stage to the next.
        x_bytes = layout.microbatch * sizes.context * sizes.width * ELEMENT_BYTES
        is_sharded = layout.sequence or layout.scatter_gather
        self.message_bytes = x_bytes // layout.tp if is_sharded else x_bytes
        self.messages_s = [self._message_s(stage) for stage in range(layout.pp)]

    def groups(self, axis: str, *stages: int) -> Groups:
        """One group per placement along an axis; see `rank_groups`."""
        layout, per_node = self.layout, self.costs.cluster.devices_per_node
        return rank_groups(layout.pp, layout.dp, layout.tp, axis, stages, per_node)

    def timing(self) -> Timing:
        forward_s = np.array([[chunk.forward_s for chunk in stage] for stage in self.chunks])
        backward_s = np.array([[chunk.backward_s for chunk in stage] for stage in self.chunks])
        return pipeline_timing(self.microbatches, forward_s, backward_s, np.array(self.messages_s))

    def _message_s(self, stage: int) -> float:
        if self.layout.pp == 1:
            return 0.0
        following, nbytes = (stage + 1) % self.layout.pp, self.message_bytes
        sends = [
            CommEvent("send", "pipeline", ends, 0, 0, "", (), nbytes, nbytes, False, peer=1)
            for ends in self.groups("pp", stage, following)
        ]
        seconds = max(self.costs.sending(send).total_s for send in sends)
        if self.layout.gathers_messages:
            groups = self.groups("tp", following)
            seconds += slowest("all_gather", nbytes * self.layout.tp, self.costs, groups).total_s
        return seconds


def _check(sizes: Sizes, layout: Layout, global_batch: int, cluster: Cluster) -> None:
    """Raises ValueError (with a valid choice) for an invalid layout."""
    check_counts(**{name: getattr(layout, name) for name in COUNTS}, global_batch=global_batch)
    rows = layout.dp * layout.microbatch
    if global_batch % rows:
        raise ValueError(
            f"a batch of {global_batch} rows is not divisible by dp={layout.dp} x "
            f"microbatch={layout.microbatch}; choose a multiple of {rows}"
        )
    if layout.ranks > cluster.size:
        raise ValueError(
            f"{layout.in_words} needs {layout.ranks:,} ranks, but {cluster.title} has "
            f"{cluster.size:,}; add nodes with dataclasses.replace(cluster, nodes=...)"
        )
    if layout.chunks > 1 and (layout.pp == 1 or layout.microbatches(global_batch) % layout.pp):
        raise ValueError(
            f"chunks={layout.chunks} with pp={layout.pp} and {layout.microbatches(global_batch)} "
            "micro-batches: interleaved 1F1B needs several stages, and a number of micro-batches "
            "divisible by pp"
        )
    if sizes.heads % layout.tp:
        raise ValueError(
            f"{sizes.heads} heads are not divisible by tp={layout.tp}; choose a divisor"
        )
    if layout.sequence and sizes.context % layout.tp:
        raise ValueError(
            f"{sizes.context} positions are not divisible by tp={layout.tp}; choose "
            "another context, or sequence=False"
        )
    if layout.zero not in ZERO_STAGES:
        raise ValueError(
            f"zero={layout.zero}: choose 0 (DDP) or 1; stages 2 and 3 communicate in every "
            "micro-batch (labkit.predict.bytes_by_axis counts those bytes)"
        )
    if layout.recompute not in RECOMPUTE:
        raise ValueError(f'recompute={layout.recompute!r}: choose "none" or "full"')


# ---- the end of a step


class Sent(NamedTuple):
    """A collective of one stage along the "data" or "pipeline" axis."""

    op: str
    axis: str
    nbytes: int
    issued_s: float
    began_s: float
    ended_s: float


class StageEnd(NamedTuple):
    """The end of one stage's step. Wait times: `data_s` for gradients or parameters, `tied_s` for
    the tied embedding's all-reduce, `late_s` for the other end stage to join the all-reduce."""

    sent: list[Sent]
    data_s: float
    late_s: float
    tied_s: float
    update_s: float
    update_began_s: float
    ended_s: float


def step_ends(model: StepModel, timing: Timing) -> list[StageEnd]:
    """Simulate the end of the step on every stage, after the last backward."""
    ended_s, lasts_s = timing.ended_s.tolist(), timing.last_s.tolist()
    gradients = [_gradients_sent(model, stage, last_s) for stage, last_s in enumerate(lasts_s)]
    averaged_s = [
        max([over_s, *(bucket.ended_s for bucket in sent)])
        for over_s, sent in zip(ended_s, gradients, strict=True)
    ]
    ends = []
    for stage, chunks in enumerate(model.stages):
        sent, ready_s = gradients[stage], averaged_s[stage]
        met_s, tied_s = ready_s, 0.0
        if stage in model.tied_stages:
            groups, nbytes = model.groups("pp", *model.tied_stages), model.tied_bytes
            met_s = max(averaged_s[0], averaged_s[-1])
            tied_s = slowest("all_reduce", nbytes, model.costs, groups).total_s
            sent.append(Sent("all_reduce", "pipeline", nbytes, ready_s, met_s, met_s + tied_s))
        began_s, update_s = met_s + tied_s, update_seconds(chunks, model.costs, model.layout.shards)
        updated_s = began_s + update_s
        sent += (gathers := _parameters_sent(model, stage, updated_s))
        over_s = max([updated_s, *(bucket.ended_s for bucket in gathers)])
        data_s = ready_s - ended_s[stage] + over_s - began_s - update_s
        ends.append(StageEnd(sent, data_s, met_s - ready_s, tied_s, update_s, began_s, over_s))
    return ends


def _gradients_sent(model: StepModel, stage: int, lasts_s: Sequence[float]) -> list[Sent]:
    """Collectives of a stage's gradient buckets; empty if dp is 1."""
    if model.layout.dp == 1:
        return []
    chunks = zip(lasts_s, model.chunks[stage], strict=True)
    full = [
        (last_s + chunk.gradients[place][0], nbytes)
        for last_s, chunk in sorted(chunks, key=lambda x: x[0])
        for place, nbytes in _buckets(tuple(numel for _, numel in chunk.gradients))
    ]
    return _sent("reduce_scatter" if model.layout.zero else "all_reduce", full, model, stage)


def _parameters_sent(model: StepModel, stage: int, began_s: float) -> list[Sent]:
    """ZeRO's all-gathers of a stage's updated parameters; empty without ZeRO."""
    if model.layout.shards == 1:
        return []
    shapes = [shape for chunk in model.stages[stage] for shape in chunk]
    elements = tuple(numel for shape in shapes for numel in recorded(shape).gradients)
    full = [(began_s, nbytes) for _, nbytes in _buckets(elements)]
    return _sent("all_gather", full, model, stage)


def _sent(
    op: str, full: Iterable[tuple[float, int]], model: StepModel, stage: int
) -> list[Sent]:  # fmt: skip
    """Run `op` on buckets (time when full, bytes) over the replicas, one bucket at a time."""
    groups = model.groups("dp", stage)
    sending = cache(lambda nbytes: slowest(op, nbytes, model.costs, groups))
    sent, free_s = [], 0.0
    for full_s, nbytes in full:
        began_s, takes = max(free_s, full_s), sending(nbytes)
        free_s = began_s + takes.seconds
        sent.append(Sent(op, "data", nbytes, full_s, began_s, free_s + takes.latency_s))
    return sent


@lru_cache(maxsize=4096)
def _buckets(elements: tuple[int, ...]) -> list[tuple[int, int]]:
    """DDP's buckets for gradients in completion order: (index of the last gradient, bytes)."""
    gradients = [torch.empty(numel, dtype=DTYPE, device="meta") for numel in elements]
    buckets, place = [], -1
    for bucket in cut(gradients[::-1], BUCKET_BYTES):
        place += len(bucket)
        buckets.append((place, sum(gradient.nbytes for gradient in bucket)))
    return buckets
