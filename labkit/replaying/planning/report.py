"""Time, memory and bytes sent in a step of a layout, and why a step is slower than the best.

    best    ███████████ compute ██ tensor █ bubble
    other   ███████████ compute ██ tensor █████████████ bubble
                                           └──────────┘ the largest difference is the reason

The reason names the trade-off of arXiv 2104.04473: collectives between nodes use the slower network
(3.2); the bubble is (pp - 1) / (m chunks) of the ideal step time (3.2, 3.3.1); matmuls made thin by
a large tp or a small micro-batch run slower (3.4); gradients are reduced once per step (3.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from labkit.clusters import Cluster
from labkit.replaying.planning.layout import Layout, Sizes

PARTS = ("compute", "optimizer", "tensor", "pipeline", "data", "bubble")
AS_FAST, ALMOST_AS_FAST = 1e-4, 0.005  # maximum slowdown, relative to the best step
GB = 1e9


@dataclass(frozen=True)
class StepReport:
    """One step of `sizes` on `global_batch` rows, replayed on a cluster. The parts are means over
    stages and add up exactly to `step_s`. Memory is that of the stage with the highest peak; bytes
    sent are bus bytes of the rank that sends the most along each axis."""

    sizes: Sizes
    layout: Layout
    global_batch: int
    step_s: float
    compute_s: float  # forward, backward and recomputation
    optimizer_s: float
    tensor_s: float  # exposed: the stage waits for a collective along this axis ...
    data_s: float
    pipeline_s: float  # ... or for a message in flight
    bubble_s: float  # ... or for a stage that has not sent its message yet
    memory_bytes: Mapping[str, float]  # by category, on the stage with the highest peak
    sent_bytes: Mapping[str, float]  # by axis: "tensor", "pipeline", "data"
    model_flops: float  # per step over all ranks, without recomputation
    mfu: float  # model FLOPs utilization, 0 to 1

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())


def seconds(report: StepReport) -> dict[str, float]:
    """Seconds per part of a step, which add up to `step_s`."""
    return {part: getattr(report, f"{part}_s") for part in PARTS}


def reached(report: StepReport) -> float:
    """The fraction of peak FLOP/s (0 to 1) reached while computing, including recomputation."""
    again = 4 / 3 if report.layout.recompute == "full" else 1.0
    return report.mfu * report.step_s / report.compute_s * again


def cause(best: StepReport, other: StepReport) -> str:
    """The part of the step in which `other` exceeds `best` the most."""
    ours, theirs = seconds(best), seconds(other)
    return max(PARTS, key=lambda part: theirs[part] - ours[part])


def why(best: StepReport, other: StepReport, cluster: Cluster) -> str:
    """One sentence: why `other` is slower than `best`, with figures from both reports."""
    if other.layout == best.layout:
        return "the best"
    slower = other.step_s / best.step_s - 1
    if slower <= AS_FAST:
        more = (other.peak_bytes - best.peak_bytes) / GB
        return f"as fast; each device uses {abs(more):.1f} GB {'more' if more >= 0 else 'less'}"
    reason = _reason(cause(best, other), best, other, cluster)
    return f"almost as fast: {reason}" if slower <= ALMOST_AS_FAST else reason


def why_not(memory_bytes: Mapping[str, float], budget_bytes: float, at_least: bool = False) -> str:
    """One sentence: the budget, and an oversized layout's peak and largest category."""
    peak, budget = sum(memory_bytes.values()) / GB, budget_bytes / GB
    largest = max(memory_bytes, key=lambda name: memory_bytes[name])
    digits = 1 if f"{peak:.1f}" != f"{budget:.1f}" else 3
    return (
        f"does not fit: {'at least ' * at_least}{peak:.{digits}f} GB of {budget:.{digits}f} GB, "
        f"{largest} {memory_bytes[largest] / GB:.1f} GB"
    )


def _reason(part: str, best: StepReport, other: StepReport, cluster: Cluster) -> str:
    layout, node = other.layout, cluster.devices_per_node
    exposed = f"are exposed for {_share(other, part)} of the step (best: {_share(best, part)})"
    match part:
        case "compute":
            return _compute_reason(best, other)
        case "optimizer":
            return (
                f"the optimizer takes {other.optimizer_s * 1e3:,.0f} ms with zero {layout.zero} "
                f"over dp {layout.dp} (best: {best.optimizer_s * 1e3:,.0f} ms with zero "
                f"{best.layout.zero} over dp {best.layout.dp})"
            )
        case "bubble":
            return (
                f"bubble {_share(other, part)}: {_bubble_terms(other)} (best: "
                f"{_share(best, part)}, {_bubble_terms(best)})"
            )
        case "tensor" if layout.tp > node >= best.layout.tp and cluster.between is not None:
            return (
                f"tp {layout.tp} leaves the node of {node}: its collectives go over "
                f"{cluster.between.name} and {exposed}"
            )
        case "tensor":
            what = f"collectives of tp {layout.tp}"
        case "data":
            what = f"gradients of dp {layout.dp}"
        case _:
            chunks = f"{layout.pp * layout.chunks} model chunks on " * (layout.chunks > 1)
            what = f"messages between {chunks}{layout.pp} stages"
    ours, theirs = best.sent_bytes.get(part, 0.0), other.sent_bytes.get(part, 0.0)
    times = theirs / ours if ours else inf
    more = f", {times:.1f} × the best's" if 1.05 < times < inf else ""
    return f"{what} {exposed}; a rank sends {theirs / GB:.1f} GB{more}"


def _compute_reason(best: StepReport, other: StepReport) -> str:
    again_s = other.compute_s / 4  # the second forward pass: a quarter of the compute time
    if (
        other.layout.recompute == "full"
        and best.layout.recompute == "none"
        and again_s > (other.compute_s - best.compute_s) / 2
    ):
        return (
            f"computes every block's forward twice: {other.compute_s:.2f} s of compute "
            f"instead of {best.compute_s:.2f}"
        )
    ours, theirs = reached(best), reached(other)
    if theirs >= ours:
        return f"computes for longer: {other.compute_s:.2f} s (best: {best.compute_s:.2f})"
    choices, bests = (f"tp {x.layout.tp} and b {x.layout.microbatch}" for x in (other, best))
    return (
        f"smaller matmuls: they reach {theirs:.0%} of the peak with {choices} (best: {ours:.0%} "
        f"with {bests})"
    )


def _bubble_terms(report: StepReport) -> str:
    """The terms of the bubble fraction, (pp - 1) / (m chunks)."""
    layout = report.layout
    count = layout.microbatches(report.global_batch)
    chunks = f" in {layout.chunks} chunks" if layout.chunks > 1 else ""
    return f"pp - 1 = {layout.pp - 1} over {count} micro-batch{'es' * (count != 1)}{chunks}"


def _share(report: StepReport, part: str) -> str:
    share = seconds(report)[part] / report.step_s
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"
