"""`labkit plan`: the layouts that fit, fastest first, and why the other layouts are slower.

    layouts(...)  ──>  lower bound  ──>  a replayed step  ──>  ranked, with reasons
    valid layouts      on memory         seconds, peak         `Plan`
                            └─── over a device's memory ─┴──> `too_large`

The lower bounds are formulas that ignore temporary tensors. They never overestimate, yet rule out
most layouts that do not fit. All layouts share one `Costs`, which caches stage times, so a thousand
layouts need only a few dozen recordings.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import lcm
from typing import Any

from labkit.clusters import Cluster
from labkit.predict.activations import activation_terms
from labkit.predict.pipelines import interleaved
from labkit.predict.states import MIXED_ADAM
from labkit.replaying.planning.layout import Layout, Sizes, layouts, several
from labkit.replaying.planning.plan import Fit, Plan, TooLarge
from labkit.replaying.planning.report import StepReport
from labkit.runtime.progress import slow_progress

DROPOUT_MASKS = "dropout: two masks"  # a step at scale is recorded without dropout
MAX_BLOCKS = 1 << 20  # maximum per stage

Report = Callable[[Sizes, Layout], StepReport]


def plan(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    *,
    gpus: int | None = None,
    max_memory_bytes: float | None = None,
    **constraints: Any,
) -> Plan:
    """Plan a model on a cluster: the layouts that fit, ranked by replayed step time.

    Args:
        global_batch: rows per step, over all replicas.
        gpus: the number of devices to use; the whole cluster if None.
        max_memory_bytes: memory limit per device; the device's memory if None.
        constraints: tp, pp, dp, microbatch, chunks, zero, sequence, recompute, as for `layouts`.

    Raises ValueError, with valid rank counts if no layout exists, or the shortfall if none fits.

    >>> plan(Sizes(12288, 96, 96), cluster("selene"), 1536, gpus=1024).best.layout.in_words
    """
    began_s = time.monotonic()
    bounds = _bounds(sizes, cluster, global_batch, gpus, constraints)
    budget_bytes, report_of = _budget(cluster, max_memory_bytes), reporter(cluster, global_batch)
    large = [bound for bound in bounds if bound.peak_bytes > budget_bytes]
    reports = []
    for bound in slow_progress(bounds[: len(bounds) - len(large)], "replaying layouts"):
        report = report_of(sizes, bound.layout)
        if report.peak_bytes <= budget_bytes:
            reports.append(report)
        else:
            large.append(TooLarge(bound.layout, report.memory_bytes))
    if not reports:
        raise ValueError(
            f"no layout fits: {_lowest_peak(sizes, bounds, budget_bytes, report_of)}; use more "
            "devices, a smaller model, or recompute full and zero 1 if you excluded them"
        )
    reports.sort(key=lambda report: (report.step_s, report.peak_bytes))
    large.sort(key=lambda layout: layout.peak_bytes)
    took_s = time.monotonic() - began_s
    return Plan(cluster, tuple(reports), tuple(large), budget_bytes, took_s)


def fits(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    *,
    gpus: int | None = None,
    max_memory_bytes: float | None = None,
    **constraints: Any,
) -> Fit:
    """Whether a model fits in the layout with the lowest peak memory. Arguments as for `plan`."""
    bounds = _bounds(sizes, cluster, global_batch, gpus, constraints)
    budget_bytes = _budget(cluster, max_memory_bytes)
    return _lowest_peak(sizes, bounds, budget_bytes, reporter(cluster, global_batch))


def largest_that_fits(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    *,
    gpus: int | None = None,
    max_memory_bytes: float | None = None,
    **constraints: Any,
) -> Fit:
    """The deepest model of this width that fits, found by bisection in each layout; the depth of
    `sizes` is ignored. Arguments as for `plan`, but by default one row per micro-batch and one
    chunk per stage, for the least memory. Raises ValueError if one block per stage does not fit."""
    ranks, budget_bytes = _devices(cluster, gpus), _budget(cluster, max_memory_bytes)
    report_of = reporter(cluster, global_batch)
    chosen = {"microbatch": 1, "chunks": 1, **constraints}
    # A depth divisible by every stage count, so that `layouts` excludes none of them.
    depth = lcm(ranks, *several(chosen.get("pp")), *several(chosen["chunks"]))

    def most_blocks(layout: Layout) -> int:

        def is_too_large(blocks: int) -> bool:
            held = least_bytes(replace(sizes, depth=layout.pp * blocks), layout, global_batch)
            return sum(held.values()) > budget_bytes

        return bisect_left(range(1, MAX_BLOCKS), True, key=is_too_large)

    def deepest(layout: Layout, blocks: int) -> StepReport | None:
        at = cache(lambda count: report_of(replace(sizes, depth=layout.pp * count), layout))
        counts = range(1, blocks + 1)
        fitting = bisect_left(counts, True, key=lambda count: at(count).peak_bytes > budget_bytes)
        return at(fitting) if fitting else None

    every = layouts(replace(sizes, depth=depth), ranks, global_batch, **chosen)
    bounds = sorted(zip(every, map(most_blocks, every)), key=lambda x: -x[0].pp * x[1])
    best: StepReport | None = None
    for layout, blocks in slow_progress(bounds, "recording layouts"):
        if layout.pp * blocks <= (best.sizes.depth if best else 0):
            break
        report = deepest(layout, blocks)
        if report and (best is None or report.sizes.depth > best.sizes.depth):
            best = report
    if best is None:
        raise ValueError(
            f"one block of width {sizes.width} per stage does not fit in {budget_bytes / 1e9:.1f} "
            f"GB per device on {ranks} devices; choose a smaller width or vocabulary"
        )
    return Fit(best, budget_bytes)


def reporter(cluster: Cluster, global_batch: int) -> Report:
    """A function that replays steps on the cluster; all its calls share one `Costs`."""
    from labkit.replaying.costs import Costs
    from labkit.replaying.planning.steps import step_report

    costs = Costs(cluster)
    return lambda sizes, layout: step_report(sizes, layout, global_batch, cluster, costs=costs)


def least_bytes(sizes: Sizes, layout: Layout, global_batch: int) -> dict[str, float]:
    """A lower bound on the first stage's peak, by category: states (arXiv 1910.02054) of weight
    matrices only, and activations in flight (arXiv 2205.05198) without dropout or scores."""
    width, tp = sizes.width, layout.tp
    blocks = sizes.depth // layout.pp
    elements = (12 * width**2 * blocks + sizes.vocab * width) / tp
    terms = activation_terms(
        sizes.context, layout.microbatch, width, sizes.heads, tp, layout.sequence,
        "full" if layout.recompute == "full" else "selective",
    )  # fmt: skip
    kept = sum(held for name, held in terms.items() if name != DROPOUT_MASKS)
    count = layout.microbatches(global_batch)
    in_flight = interleaved(layout.pp, count, 1, 2, layout.chunks).peak_microbatches
    return {
        "parameters": elements * MIXED_ADAM.parameter,
        "gradients": elements * MIXED_ADAM.gradient,
        "optimizer state": elements * MIXED_ADAM.optimizer / layout.shards,
        "activations": kept * blocks * in_flight,
    }


def _devices(cluster: Cluster, gpus: int | None) -> int:
    """The device count. Raises ValueError unless 1 <= `gpus` <= the cluster size."""
    if gpus is not None and not 1 <= gpus <= cluster.size:
        raise ValueError(
            f"gpus={gpus}: {cluster.name} has {cluster.size} devices ({cluster.nodes} nodes of "
            f"{cluster.devices_per_node}); choose 1 to {cluster.size}, or another cluster "
            "(dataclasses.replace(cluster, nodes=...))"
        )
    return cluster.size if gpus is None else gpus


def _budget(cluster: Cluster, max_memory_bytes: float | None) -> float:
    """Bytes usable per device. Raises ValueError unless positive and at most the device memory."""
    device = cluster.device
    if max_memory_bytes is None:
        return device.memory_bytes
    if not 0 < max_memory_bytes <= device.memory_bytes:
        raise ValueError(
            f"max_memory_bytes={max_memory_bytes:g}: {device.name} has {device.memory_bytes:g}; "
            "choose more than 0 and no more than the device has"
        )
    return max_memory_bytes


def _bounds(
    sizes: Sizes, cluster: Cluster, global_batch: int, gpus: int | None, constraints: Any
) -> list[TooLarge]:
    every = layouts(sizes, _devices(cluster, gpus), global_batch, **constraints)
    bounds = [TooLarge(x, least_bytes(sizes, x, global_batch), at_least=True) for x in every]
    return sorted(bounds, key=lambda bound: bound.peak_bytes)


def _lowest_peak(
    sizes: Sizes, bounds: list[TooLarge], budget_bytes: float, report_of: Report
) -> Fit:
    best = report_of(sizes, bounds[0].layout)
    for bound in slow_progress(bounds[1:], "recording layouts"):
        if bound.peak_bytes >= best.peak_bytes:
            break
        report = report_of(sizes, bound.layout)
        best = min(best, report, key=lambda report: report.peak_bytes)
    return Fit(best, budget_bytes)
