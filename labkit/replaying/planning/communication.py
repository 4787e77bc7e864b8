"""What the ranks of a layout send along each axis, and how long a message between stages takes.

    tensor     as recorded, for each micro-batch and layer
    pipeline   b s w elements (or 1/tp of them) a boundary, direction and micro-batch; once in a
               step the gradient of a tied embedding, between the ends; with ZeRO a share, 1/dp
    data       2(dp-1)/dp of the gradients, once in a step; ZeRO pads them to dp equal shares

With scatter/gather each of tp ranks sends one part, and the receivers all-gather it, on the tensor
axis. Source: Narayanan et al., arXiv 2104.04473, section 4.1.
"""

from collections.abc import Sequence

from labkit.events import CommEvent
from labkit.predict.wires import bus_factor
from labkit.replaying.costs import Costs
from labkit.replaying.planning.layers import ELEMENT_BYTES
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.stages import (
    VirtualStage,
    pipeline_groups,
    slowest,
    tensor_groups,
    vocabulary_elements,
)


def message_bytes(sizes: Sizes, layout: Layout) -> int:
    """Bytes that one rank sends to the next stage: b s w elements, or 1/tp of them."""
    parts = layout.tp if layout.sequence or layout.scatter_gather else 1
    return layout.microbatch * sizes.context * sizes.width * ELEMENT_BYTES // parts


def tied_bytes(sizes: Sizes, layout: Layout) -> int:
    """Bytes of a tied embedding's gradient that a rank of the first stage sums with one of the
    last: V w / t elements, or with ZeRO this rank's share."""
    return -(-vocabulary_elements(sizes, layout) // layout.shards) * ELEMENT_BYTES


def messages_s(sizes: Sizes, layout: Layout, costs: Costs) -> list[float]:
    """Seconds of a message from each stage to the next, or back; the last entry is from the last
    stage to the first."""
    if layout.pp == 1:
        return [0.0]
    nbytes, per_node = message_bytes(sizes, layout), costs.cluster.devices_per_node
    seconds = []
    for stage in range(layout.pp):
        following = (stage + 1) % layout.pp
        sends = [
            CommEvent("send", "pipeline", ends, 0, 0, "", (), nbytes, nbytes, False, peer=1)
            for ends in pipeline_groups(layout, (stage, following), per_node)
        ]
        seconds.append(max(costs.sending(send).total_s for send in sends))
        if layout.gathers_messages:
            groups = tensor_groups(layout, following, per_node)
            seconds[-1] += slowest("all_gather", nbytes * layout.tp, costs, groups).total_s
    return seconds


def sent_bytes(
    sizes: Sizes, layout: Layout, microbatches: int, stages: Sequence[Sequence[VirtualStage]]
) -> dict[str, float]:
    """Bus bytes of the rank that sends the most along each axis, in a step."""
    pp, last = layout.pp, layout.pp * layout.chunks - 1
    message = message_bytes(sizes, layout)
    # Each virtual stage sends forward, but for the last, and backward, but for the first.
    ways = [sum((v > 0) + (v < last) for v in range(stage, last + 1, pp)) for stage in range(pp)]
    pipeline = [microbatches * count * message if pp > 1 else 0 for count in ways]
    if sizes.tied and pp > 1:
        pipeline[0] += tied_bytes(sizes, layout)
        pipeline[-1] += tied_bytes(sizes, layout)
    tensor: float = microbatches * max(sum(chunk.sent_bytes for chunk in one) for one in stages)
    if layout.gathers_messages:
        gathered = bus_factor("all_gather", layout.tp) * message * layout.tp
        tensor += microbatches * max(ways) * gathered
    averaged = []  # elements of each stage; ZeRO has a bucket for tied ones alone
    for stage, chunks in enumerate(stages):
        at_end = sizes.tied and pp > 1 and stage in (0, pp - 1)
        tied = vocabulary_elements(sizes, layout) if at_end else 0
        untied = sum(chunk.parameters for chunk in chunks) - tied
        averaged.append(sum(-(-n // layout.shards) * layout.shards for n in (untied, tied)))
    data = (
        max(averaged) * ELEMENT_BYTES * bus_factor("all_reduce", layout.dp)
    )  # ZeRO: in two halves
    return {"tensor": float(tensor), "pipeline": float(max(pipeline)), "data": float(data)}
