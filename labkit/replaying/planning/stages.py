"""The stages of a layout: their layers, the placement of their ranks, and their times.

    GPT of 5 blocks, pp 2           stage 0  embedding, 3 blocks       stage 1  2 blocks, head
    pp 2, 2 chunks: virtual stages  0  embedding, 2 blocks   1  block  2  block   3  block, head

Chunk c of stage r is virtual stage c p + r.

    host        │launch│launch│launch│ ...     does not wait for the device
    computing          ███    ████████████     one operation at a time, each after its launch
    link                 [all-reduce of dx]    one collective at a time, over the tp ranks
    exposed                            ▒▒▒     the rank waits for the collective

A layer begins and ends with no communication in flight, so the layers' times add up. The host runs
ahead within one pass of a layer, but not into the next pass: running ahead through a whole step
would hide a slow forward behind a long backward, unlike in measured steps (calibrate.py).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from labkit.comm.mesh import rank_at
from labkit.events import chunk_sizes
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.planning.layers import (
    Layer,
    LayerPass,
    Shape,
    recorded,
    recorded_update,
    shape_of,
)
from labkit.replaying.planning.layout import Layout, Sizes

Ranks = tuple[int, ...]
Groups = tuple[Ranks, ...]
CompletedGradients = tuple[tuple[float, int], ...]  # (seconds into the backward, elements)


# ---- layers


@dataclass(frozen=True)
class VirtualStage:
    """Layers in order, as (shape, number of consecutive layers)."""

    layers: tuple[tuple[Shape, int], ...]
    tied_elements: int = 0  # elements of a head tied to an embedding on the same rank

    def __iter__(self) -> Iterator[Shape]:
        for shape, count in self.layers:
            yield from [shape] * count

    def recorded(self) -> Iterator[tuple[Layer, int]]:
        for shape, count in self.layers:
            yield recorded(shape), count

    @property
    def parameters(self) -> int:
        """Parameter elements on one rank."""
        elements = sum(sum(layer.gradients) * count for layer, count in self.recorded())
        return elements - self.tied_elements

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends along the tensor-parallel axis per micro-batch."""
        return sum(layer.sent_bytes * count for layer, count in self.recorded())


def virtual_stages(sizes: Sizes, layout: Layout, core: str = "fused") -> list[VirtualStage]:
    """The model's virtual stages, in order. Raises ValueError if there are too few blocks."""
    count = layout.pp * layout.chunks
    if sizes.depth < count:
        raise ValueError(
            f"{sizes.depth} blocks are too few for pp={layout.pp} x chunks={layout.chunks} virtual "
            f"stages of at least one block; choose at most {sizes.depth} virtual stages"
        )
    embedding, block, head = (
        shape_of(kind, sizes, layout, core) for kind in ("embedding", "block", "head")
    )
    layers = [[(block, blocks)] for blocks in chunk_sizes(sizes.depth, count)]
    layers[0].insert(0, (embedding, 1))
    layers[-1].append((head, 1))
    tied_elements = vocabulary_elements(sizes, layout) if sizes.tied and layout.pp == 1 else 0
    *before, last = map(tuple, layers)
    return [*map(VirtualStage, before), VirtualStage(last, tied_elements)]


def vocabulary_elements(sizes: Sizes, layout: Layout) -> int:
    """Embedding elements on one rank, with the vocabulary padded to a multiple of tp."""
    return -(-sizes.vocab // layout.tp) * sizes.width


# ---- placement


@lru_cache(maxsize=65536)
def rank_groups(
    pp: int, dp: int, tp: int, axis: str, stages: tuple[int, ...], per_node: int
) -> Groups:
    """Groups of ranks along an axis of Mesh(pp, dp, tp), on nodes of `per_node` ranks: one group
    per distribution over nodes, because equally distributed groups take equal times. Groups along
    "tp" or "dp" are within one stage; groups along "pp" contain one rank per stage. Ranks count
    from the group's first node, so that stages with equal placement share a cached result."""
    mesh = {"pp": pp, "dp": dp, "tp": tp}
    members = stages if axis == "pp" else range(mesh[axis])
    others = [other for other in ("dp", "tp") if other != axis]
    kinds: dict[Ranks, Ranks] = {}
    # Placements repeat after `per_node` indices.
    for indices in product(*(range(min(mesh[other], per_node)) for other in others)):
        fixed = {"pp": stages[0], **dict(zip(others, indices, strict=True))}
        ranks = tuple(rank_at(mesh, fixed | {axis: member}) for member in members)
        on_node = Counter(rank // per_node for rank in ranks)
        first = min(on_node) * per_node
        kinds.setdefault(tuple(sorted(on_node.values())), tuple(rank - first for rank in ranks))
    return tuple(kinds.values())


def slowest(op: str, nbytes: int, costs: Costs, groups: Groups) -> Sending:
    """The time of a collective in the group where it takes longest."""
    return max((costs.collective(op, nbytes, ranks) for ranks in groups), key=lambda x: x.total_s)


# ---- times


class StageSeconds(NamedTuple):
    """Times of one micro-batch in a chunk of a stage, or in one layer."""

    forward_s: float
    backward_s: float
    compute_s: float  # forward and backward, including waits for launches
    exposed_s: float
    gradients: CompletedGradients


def chunk_seconds(costs: Costs, chunk: VirtualStage, groups: Groups) -> StageSeconds:
    """Times summed over a chunk's layers, with collectives in the slowest tensor-parallel group."""
    forward_s = backward_s = compute_s = exposed_s = 0.0
    gradients: list[tuple[float, int]] = []
    for shape in reversed(list(chunk)):
        layer = costs.cached(_layer_seconds, shape, groups)
        gradients += [(backward_s + when_s, numel) for when_s, numel in layer.gradients]
        forward_s, backward_s = forward_s + layer.forward_s, backward_s + layer.backward_s
        compute_s, exposed_s = compute_s + layer.compute_s, exposed_s + layer.exposed_s
    return StageSeconds(forward_s, backward_s, compute_s, exposed_s, tuple(gradients))


def _layer_seconds(costs: Costs, shape: Shape, groups: Groups) -> StageSeconds:
    layer = recorded(shape)
    forward_s, waited_s, _ = _pass_seconds(layer.forward, costs, groups)
    backward_s, exposed_s, gradients = _pass_seconds(layer.backward, costs, groups)
    return StageSeconds(
        forward_s + waited_s, backward_s + exposed_s, forward_s + backward_s, waited_s + exposed_s,
        gradients,
    )  # fmt: skip


def _pass_seconds(
    layer_pass: LayerPass, costs: Costs, groups: Groups
) -> tuple[float, float, CompletedGradients]:
    """Compute seconds, exposed seconds, and when each gradient completes."""
    compute_s = exposed_s = link_free_s = launched_s = 0.0
    arrives_s: dict[int, float] = {}
    gradients = []
    for kind, record in layer_pass.events:
        now_s = compute_s + exposed_s
        if kind == "compute":
            launched_s += costs.cluster.device.host_s
            compute_s = max(compute_s, launched_s - exposed_s) + costs.compute_s(record)
        elif kind == "issue":
            sending = slowest(record.op, record.payload_bytes, costs, groups)
            link_free_s = max(now_s, link_free_s) + sending.seconds
            arrives_s[id(record)] = link_free_s + sending.latency_s
        elif kind == "wait":
            exposed_s += max(arrives_s[id(record)] - now_s, 0.0)
        else:
            gradients.append((now_s, record))
    return compute_s, exposed_s, tuple(gradients)


def update_seconds(chunks: Sequence[VirtualStage], costs: Costs, shards: int) -> float:
    """Seconds of an optimizer step (AdamW) in which the rank updates 1/`shards` of its elements."""
    seconds = 0.0
    for chunk in chunks:
        for layer, count in chunk.recorded():
            parameters = tuple(layer.gradients)
            seconds += count * costs.cached(_layer_update_seconds, parameters, shards)
    return seconds


def _layer_update_seconds(costs: Costs, parameters: tuple[int, ...], shards: int) -> float:
    ended_s = 0.0
    for count, operation in enumerate(recorded_update(parameters).all_of("compute"), 1):
        launched_s = count * costs.cluster.device.host_s
        share = operation._replace(moved_bytes=operation.moved_bytes // shards)
        ended_s = max(ended_s, launched_s) + costs.compute_s(share)
    return ended_s
