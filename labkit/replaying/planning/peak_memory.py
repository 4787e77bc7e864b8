"""Peak memory of a rank in a layout.

    states        2 + 2 + 12 bytes for each of its parameters, less what ZeRO shards over dp
    in flight     for each micro-batch between its forward and its backward, what its layers keep;
                  the schedule says how many there are: p - stage with 1F1B
    working       on top, the moment in a forward or backward, or in the optimizer's step, at which
                  a layer holds the most: the logits, or what a block recomputes

    messages      one being sent, and one received early
    tied          ZeRO's share of the gradient of the embedding, once more, on the first and the
                  last stage

All as recorded for a layer without data, and summed over whole layers. Not counted: the batch of
tokens, and what the device's own software takes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.communication import message_bytes, tied_bytes
from labkit.replaying.planning.layers import Bytes, recorded_update
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.stages import VirtualStage
from labkit.trace import CATEGORIES

NOTHING: Bytes = (0,) * len(CATEGORIES)
PARAMETER_BYTES, GRADIENT_BYTES, MASTER_BYTES = 2, 2, 12  # bf16; bf16; fp32 and two moments
STEP_COUNT_BYTES = 4  # Adam's, for each tensor; with ZeRO a rank has a part of these

InFlight = tuple[tuple[int, tuple[int, ...]], ...]
"""For each chunk at work, the micro-batches in flight on all chunks of its stage besides the one it
works on, at their maximum."""


def peak_memory(
    sizes: Sizes, layout: Layout, stages: Sequence[Sequence[VirtualStage]], microbatches: int
) -> Mapping[str, float]:
    """Bytes by category, on a rank of the stage that holds the most."""
    in_flight = _in_flight(layout.pp, min(microbatches, 2 * layout.pp), layout.chunks)
    peaks = [_peak(chunks, layout, some) for chunks, some in zip(stages, in_flight, strict=True)]
    if layout.pp > 1:
        messages = _only("communication buffers", 2 * message_bytes(sizes, layout))
        peaks = [_sum(peak, messages) for peak in peaks]
        if sizes.tied and layout.zero:
            share = _only("other", tied_bytes(sizes, layout))
            peaks[0], peaks[-1] = _sum(peaks[0], share), _sum(peaks[-1], share)
    return dict(zip(CATEGORIES, max(peaks, key=sum), strict=True))


def _peak(chunks: Sequence[VirtualStage], layout: Layout, in_flight: InFlight) -> Bytes:
    """Of one stage."""
    elements = sum(chunk.parameters for chunk in chunks)
    tensors = sum(len(layer.gradients) * n for chunk in chunks for layer, n in chunk.recorded())
    states = _sum(
        _only("parameters", PARAMETER_BYTES * elements),
        _only("gradients", GRADIENT_BYTES * elements),
        _only(
            "optimizer state",
            MASTER_BYTES * elements // layout.shards + STEP_COUNT_BYTES * tensors,
        ),
    )
    kept, working = zip(*(_microbatch(chunk) for chunk in chunks), strict=True)
    moments = [_updating(chunks)]
    for chunk, counts in in_flight:
        moments.append(_sum(working[chunk], *(_times(n, k) for n, k in zip(counts, kept))))
    return _sum(states, max(moments, key=sum))


@lru_cache(maxsize=4096)
def _microbatch(chunk: VirtualStage) -> tuple[Bytes, Bytes]:
    """What a micro-batch keeps between forward and backward, and its peak in either."""
    kept, most = NOTHING, NOTHING
    for layer, count in chunk.recorded():
        before = _sum(kept, _times(count - 1, layer.kept))  # when its last copy works
        peaks = (layer.forward.peak, layer.backward.peak)
        most = max(most, *(_sum(before, peak) for peak in peaks), key=sum)
        kept = _sum(before, layer.kept)
    return kept, most


def _updating(chunks: Sequence[VirtualStage]) -> Bytes:
    """In the optimizer's step; nothing is in flight then."""
    every = {tuple(layer.gradients) for chunk in chunks for layer, _ in chunk.recorded()}
    return max((recorded_update(one).peak for one in every), key=sum)


@lru_cache(maxsize=1024)
def _in_flight(stages: int, microbatches: int, chunks: int) -> tuple[InFlight, ...]:
    """Of each stage."""
    if chunks == 1:
        return tuple(((0, (min(stages - stage, microbatches) - 1,)),) for stage in range(stages))
    found = []
    for actions in schedule_of(stages, microbatches, chunks):
        now = [0] * chunks
        most: dict[int, tuple[int, ...]] = {}
        for action in actions:
            if action.phase == "backward":
                now[action.chunk] -= 1
            if action.chunk not in most or sum(now) > sum(most[action.chunk]):
                most[action.chunk] = tuple(now)
            if action.phase == "forward":
                now[action.chunk] += 1
        found.append(tuple(most.items()))
    return tuple(found)


def _only(category: str, nbytes: int) -> Bytes:
    return tuple(nbytes if name == category else 0 for name in CATEGORIES)


def _sum(*some: Bytes) -> Bytes:
    return tuple(map(sum, zip(*some, strict=True)))


def _times(count: int, some: Bytes) -> Bytes:
    return tuple(count * nbytes for nbytes in some)
