"""What a training step takes, holds and sends in a layout, as replayed on a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.replaying.planning.layout import Layout, Sizes


@dataclass(frozen=True)
class StepReport:
    """One step of `sizes` on `global_batch` rows.

    The seconds are means over the stages and add up to `step_s`, exactly. Memory is that of the
    stage that holds the most; bytes sent are bus bytes of the rank that sends the most on that
    axis.
    """

    sizes: Sizes
    layout: Layout
    global_batch: int
    step_s: float
    compute_s: float  # forward, backward and what is recomputed
    optimizer_s: float
    tensor_s: float  # exposed: the stage stands still for a collective of this axis ...
    data_s: float
    pipeline_s: float  # ... or for a message that is on its way
    bubble_s: float  # ... or for a stage that has not come to it
    memory_bytes: Mapping[str, float]  # by category, at the peak of the fullest stage
    sent_bytes: Mapping[str, float]  # by axis: "tensor", "pipeline", "data"
    model_flops: float  # of the whole step, as an MFU counts them (nothing recomputed)
    mfu: float  # of the peak of all devices, 0 to 1

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())
