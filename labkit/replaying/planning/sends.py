"""What the ranks of a layout send along each axis, and how long a message between stages takes.

    tensor     as recorded, for each micro-batch and layer
    pipeline   b s w elements (or one of tp parts) a boundary, direction and micro-batch; once in a
               step the gradient of a tied embedding, between the ends; of ZeRO's, a share, 1/dp
    data       2(dp-1)/dp of the gradients, once in a step; ZeRO's are padded to dp equal shares

With scatter/gather each of tp ranks sends one part, and the receivers put it together: that
all-gather is of the tensor axis, and is in a message's time. With sequence parallelism what travels
is a part already. Source: Narayanan et al., arXiv 2104.04473, section 4.1.
"""

from collections.abc import Sequence

from labkit.events import CommEvent
from labkit.predict.wires import bus_factor
from labkit.replaying.costs import Costs
from labkit.replaying.planning.layers import ELEMENT_BYTES
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.places import boundary, tensor_groups
from labkit.replaying.planning.seconds import slowest
from labkit.replaying.planning.stages import VirtualStage, vocabulary_elements


def message_bytes(sizes: Sizes, layout: Layout) -> int:
    """Of one message between stages, from one rank: b s w elements, or one of tp parts."""
    cut = layout.tp if layout.sequence or layout.scatter_gather else 1
    return layout.microbatch * sizes.context * sizes.width * ELEMENT_BYTES // cut


def tied_bytes(sizes: Sizes, layout: Layout) -> int:
    """Of a tied embedding's gradient, what a rank of the first stage sums with one of the last:
    V w / t elements, or of ZeRO's this rank's share."""
    return -(-vocabulary_elements(sizes, layout) // _shares(layout)) * ELEMENT_BYTES


def _shares(layout: Layout) -> int:
    return layout.dp if layout.zero else 1


def messages_s(sizes: Sizes, layout: Layout, costs: Costs) -> list[float]:
    """From each stage to the next one, or back; of the last one to the first."""
    if layout.pp == 1:
        return [0.0]
    nbytes, per_node = message_bytes(sizes, layout), costs.cluster.devices_per_node
    found = []
    for stage in range(layout.pp):
        ways = [
            costs.sending(
                CommEvent("send", "pipeline", ends, 0, 0, "", (), nbytes, nbytes, False, peer=1)
            )
            for ends in boundary(layout, stage, per_node)
        ]
        found.append(max(one.seconds + one.latency_s for one in ways))
        if layout.scatter_gather and layout.tp > 1 and not layout.sequence:
            groups = tensor_groups(layout, (stage + 1) % layout.pp, per_node)
            gather = slowest("all_gather", nbytes * layout.tp, costs, groups)
            found[-1] += gather.seconds + gather.latency_s
    return found


def sent_bytes(
    sizes: Sizes, layout: Layout, microbatches: int, stages: Sequence[Sequence[VirtualStage]]
) -> dict[str, float]:
    """Bus bytes of the rank that sends the most along each axis, in a step."""
    tensor: float = microbatches * max(sum(chunk.sent_bytes for chunk in its) for its in stages)
    message = message_bytes(sizes, layout)
    ways = [
        sum(
            (v > 0) + (v < layout.pp * layout.chunks - 1)
            for v in range(r, layout.pp * layout.chunks, layout.pp)
        )
        for r in range(layout.pp)
    ]
    pipeline = [microbatches * count * message if layout.pp > 1 else 0 for count in ways]
    if sizes.tied and layout.pp > 1:
        tied = tied_bytes(sizes, layout)
        pipeline[0], pipeline[-1] = pipeline[0] + tied, pipeline[-1] + tied
    if layout.scatter_gather and layout.tp > 1 and not layout.sequence and layout.pp > 1:
        gathered = bus_factor("all_gather", layout.tp) * message * layout.tp
        tensor += microbatches * max(ways) * gathered
    gradients = max(_averaged(its, sizes, layout, k) for k, its in enumerate(stages))
    data = gradients * ELEMENT_BYTES * bus_factor("all_reduce", layout.dp)  # ZeRO's in two halves
    return {"tensor": float(tensor), "pipeline": float(max(pipeline)), "data": float(data)}


def _averaged(chunks: Sequence[VirtualStage], sizes: Sizes, layout: Layout, stage: int) -> int:
    """Elements of a stage, over its replicas; under ZeRO what is tied lies in a bucket alone."""
    elements, shares = sum(chunk.parameters for chunk in chunks), _shares(layout)
    at_end = sizes.tied and layout.pp > 1 and stage in (0, layout.pp - 1)
    alone = vocabulary_elements(sizes, layout) if at_end else 0
    return sum(-(-one // shares) * shares for one in (elements - alone, alone))
