"""Reports of steps for tests of planning: by hand, and by `formula_step`, which has the trades of
arXiv 2104.04473, section 3, and nothing of their exact size, in place of a replay."""

from typing import Any

from labkit.clusters import Cluster
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.ranking import least_bytes
from labkit.replaying.planning.report import StepReport

PEAK_FLOPS = 312e12
SMALL = Sizes(width=960, depth=12, heads=12, context=512, vocab=1000)


def step_of(
    layout: Layout, global_batch: int = 64, sizes: Sizes = SMALL, **parts: Any
) -> StepReport:
    """A report with these seconds (compute=8.0, ...), memory and bytes; the rest is nothing."""
    names = ("compute", "optimizer", "tensor", "data", "pipeline", "bubble")
    seconds = {name: float(parts.pop(name, 0.0)) for name in names}
    step_s = sum(seconds.values())
    flops = sizes.step_flops(global_batch)
    return StepReport(
        sizes, layout, global_batch, step_s, **{f"{name}_s": value for name, value in
        seconds.items()}, memory_bytes=parts.pop("held", {"parameters": 1e9}),
        sent_bytes=parts.pop("sent", {}), model_flops=flops,
        mfu=parts.pop("mfu", flops / (step_s * layout.ranks * PEAK_FLOPS)), **parts,
    )  # fmt: skip


def formula_step(sizes: Sizes, layout: Layout, global_batch: int, cluster: Cluster) -> StepReport:
    """A step by formulas alone; it holds what `least_bytes` promises, and a tenth more."""
    again = 4 / 3 if layout.recompute == "full" else 1.0
    count = layout.microbatches(global_batch)
    rows = sizes.context * layout.microbatch
    device = cluster.device
    flops = sizes.step_flops(global_batch)
    rate = device.matmul_flops_per_s("bfloat16", (rows, sizes.width // layout.tp, sizes.width))
    compute_s = flops * again / layout.ranks / rate
    wire = cluster.level_of(range(layout.tp))
    message_bytes = 2 * rows * sizes.width
    tensor_bytes = 8 * sizes.depth / layout.pp * count * message_bytes * (layout.tp - 1) / layout.tp
    held = {name: 1.1 * value for name, value in least_bytes(sizes, layout, global_batch).items()}
    data_bytes = 2 * held["gradients"] / 1.1 * (layout.dp - 1) / layout.dp
    between = cluster.between or cluster.inside
    busy_s = compute_s + tensor_bytes / wire.bytes_per_s
    return step_of(
        layout, global_batch, sizes, compute=compute_s, optimizer=held["optimizer state"] / 2e12,
        tensor=tensor_bytes / wire.bytes_per_s, data=data_bytes / between.bytes_per_s,
        bubble=busy_s * (layout.pp - 1) / count / layout.chunks, held=held,
        pipeline=1e-3 * (layout.pp - 1) * layout.chunks,
        sent={"tensor": tensor_bytes, "data": data_bytes,
              "pipeline": 2.0 * count * layout.chunks * message_bytes * (layout.pp > 1)},
    )  # fmt: skip
