"""The stages of a layout: which layers each has, what it takes and sends for a micro-batch.

    GPT of 5 blocks, pp 2           stage 0  embedding, 3 blocks       stage 1  2 blocks, head
    pp 2, 2 chunks: virtual stages  0  embedding, 2 blocks   1  block  2  block   3  block, head

Chunk c of stage r is virtual stage c p + r. Blocks are dealt out as `labkit.split` does; the ends
go along.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from labkit.events import chunk_sizes
from labkit.replaying.costs import Costs
from labkit.replaying.planning.layers import Layer, Shape, recorded, shape_of
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.places import moved, tensor_groups
from labkit.replaying.planning.seconds import kept, layer_seconds


@dataclass(frozen=True)
class VirtualStage:
    """Layers in order: of each kind its shape, and how many there are."""

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
    """All, in the model's order.

    Raises ValueError for more virtual stages than blocks.
    """
    count = layout.pp * layout.chunks
    if sizes.depth < count:
        raise ValueError(
            f"{sizes.depth} blocks cannot be dealt out to pp={layout.pp} x chunks={layout.chunks} "
            f"virtual stages, each has at least one; choose at most {sizes.depth} of them"
        )
    embedding, block, head = (
        shape_of(kind, sizes, layout, core) for kind in ("embedding", "block", "head")
    )
    found = []
    for index, blocks in enumerate(chunk_sizes(sizes.depth, count)):
        layers = [(block, blocks)]
        if index == 0:
            layers.insert(0, (embedding, 1))
        if index == count - 1:
            layers.append((head, 1))
        found.append(VirtualStage(tuple(layers)))
    if sizes.tied and layout.pp == 1:
        last = found[-1]
        found[-1] = VirtualStage(last.layers, vocabulary_elements(sizes, layout))
    return found


def vocabulary_elements(sizes: Sizes, layout: Layout) -> int:
    """Of the table of tokens, on one rank: padded so that it divides."""
    return -(-sizes.vocab // layout.tp) * sizes.width


def stages_of(virtual: list[VirtualStage], layout: Layout) -> list[list[VirtualStage]]:
    """Of each stage its chunks."""
    return [virtual[stage :: layout.pp] for stage in range(layout.pp)]


class ChunkSeconds(NamedTuple):
    """One chunk of a stage, for one micro-batch."""

    forward_s: float
    backward_s: float
    compute_s: float  # of both
    exposed_s: float
    gradients: tuple[tuple[float, int], ...]  # in its backward: when, how many elements


def chunk_seconds(chunk: VirtualStage, layout: Layout, stage: int, costs: Costs) -> ChunkSeconds:
    """The sum over its layers."""
    per_node = costs.cluster.devices_per_node
    groups = moved(tensor_groups(layout, stage, per_node), per_node)
    return kept(
        costs, ("chunk", chunk.layers, groups), lambda: _chunk_seconds(chunk, groups, costs)
    )


def _chunk_seconds(
    chunk: VirtualStage, groups: tuple[tuple[int, ...], ...], costs: Costs
) -> ChunkSeconds:
    forward_s = backward_s = compute_s = exposed_s = 0.0
    gradients: list[tuple[float, int]] = []
    for shape in reversed(list(chunk)):
        forward, backward = layer_seconds(shape, costs, groups)
        gradients += [(backward_s + when_s, numel) for when_s, numel in backward.gradients]
        forward_s, backward_s = forward_s + forward.sum_s, backward_s + backward.sum_s
        compute_s += forward.compute_s + backward.compute_s
        exposed_s += forward.exposed_s + backward.exposed_s
    return ChunkSeconds(forward_s, backward_s, compute_s, exposed_s, tuple(gradients))
