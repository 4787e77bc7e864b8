"""`labkit plan`: the layouts that fit, the fastest first, and why each of the others loses.

    layouts(...)  ──>  lower bound  ──>  a replayed step  ──>  ranked, with reasons
    all that divide    of its memory     seconds, peak         `Plan`
                            └── more than a device has ──┴──> `too_large`

The lower bounds are formulas without temporary tensors: they never overestimate, and rule out most
layouts that do not fit. All layouts share one `Costs`, which remembers what each stage takes: a
thousand layouts need some dozens of recordings.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
MOST_BLOCKS = 1 << 20  # of one stage

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
    """All layouts of a model on a cluster that fit, ranked by the replayed seconds of a step.

    Args:
        global_batch: rows of a step, over all replicas.
        gpus: use so many of the cluster's devices; all if None.
        max_memory_bytes: that each may hold; all it has if None.
        constraints: tp, pp, dp, microbatch, chunks, zero, sequence, recompute, as `layouts` takes
            them: a value, or several to choose from.

    Raises ValueError where no layout divides, with the numbers that would, and where none fits, by
    how much.

    >>> plan(Sizes(12288, 96, 96), cluster("selene"), 1536, gpus=1024).best.layout.in_words
    """
    began_s = time.monotonic()
    every = layouts(sizes, _devices(cluster, gpus), global_batch, **constraints)
    budget_bytes = _budget(cluster, max_memory_bytes)
    search = sizes, global_batch, budget_bytes, reporter(cluster, global_batch)
    reports, large = ranked(every, *search)
    if not reports:
        raise ValueError(
            f"no layout fits: {lowest_peak(every, *search)}; take more devices, a smaller "
            "model, or recompute full and zero 1 if they were left out"
        )
    return Plan(cluster, reports, large, budget_bytes, time.monotonic() - began_s)


def fits(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    *,
    gpus: int | None = None,
    max_memory_bytes: float | None = None,
    **constraints: Any,
) -> Fit:
    """Whether a model fits at all, and the layout with the lowest peak. Arguments as for `plan`."""
    every = layouts(sizes, _devices(cluster, gpus), global_batch, **constraints)
    budget_bytes = _budget(cluster, max_memory_bytes)
    return lowest_peak(every, sizes, global_batch, budget_bytes, reporter(cluster, global_batch))


def largest_that_fits(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    *,
    gpus: int | None = None,
    max_memory_bytes: float | None = None,
    **constraints: Any,
) -> Fit:
    """The deepest model of this width that fits; the depth of `sizes` is ignored.

    Arguments as for `plan`; by default micro-batches have one row and stages one chunk, which need
    the least memory. Raises ValueError where not even one block a stage fits."""
    ranks, budget_bytes = _devices(cluster, gpus), _budget(cluster, max_memory_bytes)
    chosen = {"microbatch": 1, "chunks": 1, **constraints}
    # Any number of stages divides some depth: this one, which all of them divide, represents it.
    depth = lcm(ranks, *several(chosen.get("pp")), *several(chosen["chunks"]))
    every = layouts(replace(sizes, depth=depth), ranks, global_batch, **chosen)
    found = deepest(every, sizes, global_batch, budget_bytes, reporter(cluster, global_batch))
    if found is None:
        raise ValueError(
            f"not one block of width {sizes.width} for each stage fits into "
            f"{budget_bytes / 1e9:.1f} GB on {ranks} devices; take a smaller width or vocabulary"
        )
    return found


def reporter(cluster: Cluster, global_batch: int) -> Report:
    """Replays steps on the cluster, all with the same costs of stages."""
    from labkit.replaying.costs import Costs
    from labkit.replaying.planning.steps import step_report

    costs = Costs(cluster)
    return lambda sizes, one: step_report(sizes, one, global_batch, cluster, costs=costs)


def _devices(cluster: Cluster, gpus: int | None) -> int:
    """How many are used. Raises ValueError for more than the cluster has."""
    if gpus is None:
        return cluster.size
    if not 1 <= gpus <= cluster.size:
        raise ValueError(
            f"gpus={gpus}: {cluster.name} has {cluster.size} devices ({cluster.nodes} nodes of "
            f"{cluster.devices_per_node}); take 1 to {cluster.size}, or another cluster "
            "(dataclasses.replace(cluster, nodes=...))"
        )
    return gpus


def _budget(cluster: Cluster, max_memory_bytes: float | None) -> float:
    """Bytes that a device may hold. Raises ValueError for more than it has, or none."""
    has = cluster.device.memory_bytes
    if max_memory_bytes is None:
        return has
    if not 0 < max_memory_bytes <= has:
        raise ValueError(
            f"max_memory_bytes={max_memory_bytes:g}: {cluster.device.name} has {has:g}; take more "
            "than 0, and no more than that"
        )
    return max_memory_bytes


# ---- the search


def least_bytes(sizes: Sizes, layout: Layout, global_batch: int) -> dict[str, float]:
    """A lower bound of the first stage's peak, in bytes by category.

    States (arXiv 1910.02054) of the weight matrices alone, and what its blocks keep for the
    micro-batches in flight (arXiv 2205.05198), without dropout or scores."""
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


def _by_bound(every: Iterable[Layout], sizes: Sizes, global_batch: int) -> list[TooLarge]:
    """The layouts with their lower bounds, the smallest first."""
    bounds = [TooLarge(one, least_bytes(sizes, one, global_batch), True) for one in every]
    return sorted(bounds, key=lambda bound: bound.peak_bytes)


def ranked(
    every: Sequence[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> tuple[tuple[StepReport, ...], tuple[TooLarge, ...]]:
    """Reports of the layouts that fit, the fastest first (at equal speed, the lower peak), and the
    others, the smallest first."""
    bounds = _by_bound(every, sizes, global_batch)
    large = [bound for bound in bounds if bound.peak_bytes > budget_bytes]
    reports = []
    for bound in slow_progress(bounds[: len(bounds) - len(large)], "replaying layouts"):
        found = report(sizes, bound.layout)
        if found.peak_bytes <= budget_bytes:
            reports.append(found)
        else:
            large.append(TooLarge(bound.layout, found.memory_bytes))
    return (
        tuple(sorted(reports, key=lambda one: (one.step_s, one.peak_bytes))),
        tuple(sorted(large, key=lambda one: one.peak_bytes)),
    )


def lowest_peak(
    every: Iterable[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit:
    """The layout with the lowest recorded peak."""
    bounds = _by_bound(every, sizes, global_batch)
    best, recorded = report(sizes, bounds[0].layout), 1
    for bound in slow_progress(bounds[1:], "recording layouts"):
        if bound.peak_bytes >= best.peak_bytes:
            break
        best = min(best, report(sizes, bound.layout), key=lambda found: found.peak_bytes)
        recorded += 1
    return Fit(best, budget_bytes, len(bounds) - recorded)


def deepest(
    every: Sequence[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit | None:
    """The most blocks of this width, over all these layouts, by bisection of each; None if one
    block a stage is too much. A layout whose bound allows no more than the best is not recorded."""

    def bound(one: Layout) -> int:
        """Blocks that the formulas allow, on all stages."""

        def too_large(blocks: int) -> bool:
            held = least_bytes(replace(sizes, depth=one.pp * blocks), one, global_batch)
            return sum(held.values()) > budget_bytes

        return one.pp * bisect_left(range(1, MOST_BLOCKS), True, key=too_large)

    best: StepReport | None = None
    recorded, deepest_so_far = 0, 0
    bounds = sorted(((bound(one), one) for one in every), key=lambda x: -x[0])
    for depth, one in slow_progress(bounds, "recording layouts"):
        if depth <= deepest_so_far:
            break
        found: dict[int, StepReport] = {}

        def too_large(blocks: int, one: Layout = one, found: dict = found) -> bool:
            found[blocks] = report(replace(sizes, depth=one.pp * blocks), one)
            return found[blocks].peak_bytes > budget_bytes

        blocks = bisect_left(range(1, depth // one.pp + 1), True, key=too_large)
        recorded += 1
        if one.pp * blocks > deepest_so_far:
            best, deepest_so_far = found[blocks], one.pp * blocks
    return Fit(best, budget_bytes, len(bounds) - recorded) if best else None
