"""Peak memory of a rank in a layout, computed from recorded layers.

    states        2 + 2 + 12 bytes per parameter; ZeRO shards the 12 over dp
    in flight     bytes that layers keep per micro-batch, from its forward to its backward
    working       temporary peak of a layer or the optimizer, e.g. logits or a recomputed block
    messages      one message being sent and one received early
    tied          a second copy of ZeRO's tied-embedding gradient shard, on both end stages

The batch of tokens and the device's software (CUDA context, libraries) are not counted.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from labkit.replaying.planning.clock import schedule_of
from labkit.replaying.planning.layers import recorded_update
from labkit.replaying.planning.stages import VirtualStage
from labkit.replaying.planning.step_model import StepModel
from labkit.trace import CATEGORIES

PARAMETER_BYTES, GRADIENT_BYTES, MASTER_BYTES = 2, 2, 12  # bf16; bf16; fp32 and two moments
STEP_COUNT_BYTES = 4  # Adam's step counter per tensor; an upper bound with ZeRO
PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, OTHER = map(
    CATEGORIES.index,
    ("parameters", "gradients", "optimizer state", "communication buffers", "other"),
)

Held = np.ndarray  # bytes by category: [len(CATEGORIES)]
InFlight = tuple[tuple[int, tuple[int, ...]], ...]
"""Per working chunk: (chunk, micro-batches in flight per chunk when their total peaks). The
micro-batch in progress is not counted."""


def peak_memory(model: StepModel) -> Mapping[str, float]:
    """Bytes by category at the peak, on a rank of the stage with the highest peak."""
    layout = model.layout
    in_flight = _in_flight(layout.pp, min(model.microbatches, 2 * layout.pp), layout.chunks)
    stages = zip(model.stages, in_flight, strict=True)
    peaks = [_peak(chunks, layout.shards, counts) for chunks, counts in stages]
    if layout.pp > 1:
        for peak in peaks:
            peak[BUFFERS] += 2 * model.message_bytes
    if layout.zero:
        for stage in model.tied_stages:
            peaks[stage][OTHER] += model.tied_bytes
    return dict(zip(CATEGORIES, max(peaks, key=np.sum).tolist(), strict=True))


def _peak(chunks: Sequence[VirtualStage], shards: int, in_flight: InFlight) -> Held:
    elements = sum(chunk.parameters for chunk in chunks)
    layers = [layer for chunk in chunks for layer in chunk.recorded()]
    tensors = sum(len(layer.gradients) * count for layer, count in layers)
    states = np.zeros(len(CATEGORIES), dtype=int)
    states[PARAMETERS] = PARAMETER_BYTES * elements
    states[GRADIENTS] = GRADIENT_BYTES * elements
    states[OPTIMIZER] = MASTER_BYTES * elements // shards + STEP_COUNT_BYTES * tensors
    kept, working = zip(*(_microbatch(chunk) for chunk in chunks), strict=True)
    updates = [recorded_update(tuple(layer.gradients)).peak for layer, _ in layers]
    moments = [np.array(max(updates, key=sum))]  # optimizer step: no micro-batch in flight
    for chunk, counts in in_flight:
        moments.append(working[chunk] + sum(n * k for n, k in zip(counts, kept, strict=True)))
    return states + max(moments, key=np.sum)


@lru_cache(maxsize=4096)
def _microbatch(chunk: VirtualStage) -> tuple[Held, Held]:
    """Bytes kept from a micro-batch's forward to its backward, and the peak of both passes."""
    kept = most = np.zeros(len(CATEGORIES), dtype=int)
    for layer, count in chunk.recorded():
        before = kept + (count - 1) * np.array(layer.kept)  # when the last of `count` layers runs
        peaks = [before + peak for peak in (layer.forward.peak, layer.backward.peak)]
        most = max(most, *peaks, key=np.sum)
        kept = before + layer.kept
    return kept, most


@lru_cache(maxsize=1024)
def _in_flight(stages: int, microbatches: int, chunks: int) -> tuple[InFlight, ...]:
    """Micro-batches in flight per stage, in 1F1B, or interleaved 1F1B if `chunks` > 1."""
    if chunks == 1:
        return tuple(((0, (min(stages - stage, microbatches) - 1,)),) for stage in range(stages))
    by_stage = []
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
        by_stage.append(tuple(most.items()))
    return tuple(by_stage)
