"""The stages of a layout: which layers each has, and what they take on a cluster.

    GPT of 5 blocks, pp 2           stage 0  embedding, 3 blocks       stage 1  2 blocks, head
    pp 2, 2 chunks: virtual stages  0  embedding, 2 blocks   1  block  2  block   3  block, head

Chunk c of stage r is virtual stage c p + r. Blocks are distributed as `labkit.split` does, with the
embedding on the first virtual stage and the head on the last.

    host        │launch│launch│launch│ ...     does not wait for the device
    computing          ███    ████████████     one operation after the other, at the device's rates,
                                               and none before its launch
    wire                 [all-reduce of dx]    one collective after the other, on the ranks of tp
    exposed                            ▒▒▒     the rank waits for it

All ranks of a tensor-parallel group do the same at the same time, so one rank is enough, and a
layer begins and ends with nothing in flight: the seconds of layers add up.

Small operations wait for their launches, large ones do not. A host runs ahead within the forward or
the backward of a layer, but not into the next: over a whole step, it would hide a slow forward
behind a long backward, and measured steps do not show that (calibrate.py). Models of width 1,024
with short micro-batches are limited by their host; models of billions of parameters never are. A
cluster without `host_s` has hosts that launch in no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from labkit.events import chunk_sizes
from labkit.replaying.costs import Costs
from labkit.replaying.planning.layers import (
    Layer,
    LayerPass,
    Shape,
    recorded,
    recorded_update,
    shape_of,
)
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.placement import Groups, moved, slowest, tensor_groups


@dataclass(frozen=True)
class VirtualStage:
    """Layers in order: the shape of each kind, and how many there are."""

    layers: tuple[tuple[Shape, int], ...]
    tied_elements: int = 0  # of a head that is the embedding, on the same rank

    def __iter__(self) -> Iterator[Shape]:
        for shape, count in self.layers:
            for _ in range(count):
                yield shape

    def recorded(self) -> Iterator[tuple[Layer, int]]:
        for shape, count in self.layers:
            yield recorded(shape), count

    @property
    def parameters(self) -> int:
        """Elements on one rank."""
        return sum(sum(one.gradients) * n for one, n in self.recorded()) - self.tied_elements

    @property
    def sent_bytes(self) -> int:
        """Over the tensor-parallel axis, for a micro-batch."""
        return sum(one.sent_bytes * count for one, count in self.recorded())


def virtual_stages(sizes: Sizes, layout: Layout, core: str = "fused") -> list[VirtualStage]:
    """All, in the model's order. Raises ValueError for more virtual stages than blocks."""
    count = layout.pp * layout.chunks
    if sizes.depth < count:
        raise ValueError(
            f"{sizes.depth} blocks cannot be dealt out to pp={layout.pp} x chunks={layout.chunks} "
            f"virtual stages, each has at least one; choose at most {sizes.depth} of them"
        )
    embedding, block, head = (
        shape_of(kind, sizes, layout, core) for kind in ("embedding", "block", "head")
    )
    layers = [[(block, blocks)] for blocks in chunk_sizes(sizes.depth, count)]
    layers[0].insert(0, (embedding, 1))
    layers[-1].append((head, 1))
    tied_elements = vocabulary_elements(sizes, layout) if sizes.tied and layout.pp == 1 else 0
    return [
        *(VirtualStage(tuple(some)) for some in layers[:-1]),
        VirtualStage(tuple(layers[-1]), tied_elements),
    ]


def vocabulary_elements(sizes: Sizes, layout: Layout) -> int:
    """Of the embedding table on one rank, padded to a multiple of tp rows."""
    return -(-sizes.vocab // layout.tp) * sizes.width


class PassSeconds(NamedTuple):
    """`compute_s`: including waits for launches. `gradients`: when each gradient was complete, and
    its elements."""

    compute_s: float
    exposed_s: float
    gradients: tuple[tuple[float, int], ...] = ()

    @property
    def sum_s(self) -> float:
        return self.compute_s + self.exposed_s


class ChunkSeconds(NamedTuple):
    """One chunk of a stage, for one micro-batch."""

    forward_s: float
    backward_s: float
    compute_s: float  # of both
    exposed_s: float
    gradients: tuple[tuple[float, int], ...]  # in its backward: when complete, how many elements


def chunk_seconds(chunk: VirtualStage, layout: Layout, stage: int, costs: Costs) -> ChunkSeconds:
    """The sum over its layers."""
    per_node = costs.cluster.devices_per_node
    groups = moved(tensor_groups(layout, stage, per_node), per_node)
    key = "chunk", chunk.layers, groups
    return costs.remembered(key, lambda: _chunk_seconds(chunk, groups, costs))


def _chunk_seconds(chunk: VirtualStage, groups: Groups, costs: Costs) -> ChunkSeconds:
    forward_s = backward_s = compute_s = exposed_s = 0.0
    gradients: list[tuple[float, int]] = []
    for shape in reversed(list(chunk)):
        forward, backward = _layer_seconds(shape, costs, groups)
        gradients += [(backward_s + when_s, numel) for when_s, numel in backward.gradients]
        forward_s, backward_s = forward_s + forward.sum_s, backward_s + backward.sum_s
        compute_s += forward.compute_s + backward.compute_s
        exposed_s += forward.exposed_s + backward.exposed_s
    return ChunkSeconds(forward_s, backward_s, compute_s, exposed_s, tuple(gradients))


def _layer_seconds(shape: Shape, costs: Costs, groups: Groups) -> tuple[PassSeconds, PassSeconds]:
    """Forward and backward, on that of the `groups` which is slowest."""

    def simulated() -> tuple[PassSeconds, PassSeconds]:
        layer = recorded(shape)
        return (
            _pass_seconds(layer.forward, costs, groups),
            _pass_seconds(layer.backward, costs, groups),
        )

    return costs.remembered((shape, groups), simulated)


def _pass_seconds(layer_pass: LayerPass, costs: Costs, groups: Groups) -> PassSeconds:
    compute_s = exposed_s = wire_free_s = launched_s = 0.0
    arrives_s: dict[int, float] = {}
    gradients = []
    for kind, what in layer_pass.events:
        now_s = compute_s + exposed_s
        if kind == "compute":
            launched_s += costs.cluster.device.host_s
            compute_s = max(compute_s, launched_s - exposed_s) + costs.compute_s(what)
        elif kind == "issue":
            sending = slowest(what.op, what.payload_bytes, costs, groups)
            wire_free_s = max(now_s, wire_free_s) + sending.seconds
            arrives_s[id(what)] = wire_free_s + sending.latency_s
        elif kind == "wait":
            exposed_s += max(arrives_s[id(what)] - now_s, 0.0)
        else:
            gradients.append((now_s, what))
    return PassSeconds(compute_s, exposed_s, tuple(gradients))


def update_seconds(chunks: list[VirtualStage], costs: Costs, shards: int = 1) -> float:
    """The optimizer's step on one of so many shards of a stage: AdamW treats each element by
    itself."""
    return sum(
        count * _layer_update_seconds(tuple(layer.gradients), costs, shards)
        for chunk in chunks
        for layer, count in chunk.recorded()
    )


def _layer_update_seconds(parameters: tuple[int, ...], costs: Costs, shards: int) -> float:
    def simulated() -> float:
        ended_s = 0.0
        for count, operation in enumerate(recorded_update(parameters).operations, 1):
            launched_s = count * costs.cluster.device.host_s
            share = operation._replace(moved_bytes=operation.moved_bytes // shards)
            ended_s = max(ended_s, launched_s) + costs.compute_s(share)
        return ended_s

    return costs.remembered(("update", parameters, shards), simulated)
