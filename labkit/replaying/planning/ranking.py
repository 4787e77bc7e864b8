"""`labkit plan`: the layouts that fit, the fastest first, and why each of the others loses.

    layouts(...)  ──>  lower bound  ──>  a replayed step  ──>  ranked, with reasons
    all that divide    of its memory     seconds, peak         `Plan`
                            └── more than a device has ──┴──> `too_large`

All layouts share one `Costs`, which remembers what each stage takes: a thousand layouts need some
dozens of recordings.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from labkit.clusters import Cluster
from labkit.predict.tables import Table
from labkit.replaying.planning.feasibility import (
    Fit,
    Report,
    TooLarge,
    by_bound,
    deepest,
    lowest_peak,
)
from labkit.replaying.planning.layout import Layout, Sizes, described, layouts, several
from labkit.replaying.planning.render import parse_plan, plan_json, plan_table, trades_table
from labkit.replaying.planning.report import StepReport, why, why_not
from labkit.runtime.progress import slow_progress


@dataclass(frozen=True)
class Plan:
    """All layouts of a model on a cluster, ranked.

    Attributes:
        reports: of the layouts that fit, by the seconds of a step.
        too_large: those that do not, the smallest first.
        budget_bytes: what a device may hold.
        took_s: seconds that the planning took.
    """

    cluster: Cluster
    reports: tuple[StepReport, ...]
    too_large: tuple[TooLarge, ...]
    budget_bytes: float
    took_s: float = 0.0

    @property
    def best(self) -> StepReport:
        return self.reports[0]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Ranked."""
        return tuple(report.layout for report in self.reports)

    def report(self, layout: Layout) -> StepReport:
        """Raises ValueError for a layout that is not among those that fit."""
        if layout in self._reports:
            return self._reports[layout]
        reason = "is not in this plan; its layouts are plan.layouts"
        if layout in self._too_large:
            reason = self.why(layout)
        raise ValueError(f"{described(layout)} {reason}")

    def why(self, layout: Layout) -> str:
        """One sentence: what this layout loses to the best, or by how much it does not fit."""
        if large := self._too_large.get(layout):
            return why_not(large.memory_bytes, self.budget_bytes, large.at_least)
        return why(self.best, self.report(layout), self.cluster)

    @cached_property
    def _reports(self) -> dict[Layout, StepReport]:
        return {one.layout: one for one in self.reports}

    @cached_property
    def _too_large(self) -> dict[Layout, TooLarge]:
        return {one.layout: one for one in self.too_large}

    def fastest(self, choice: str) -> dict[Any, StepReport]:
        """The fastest layout for each value of "tp", "pp", "microbatch" or another field: what a
        choice costs when all others are optimal."""
        if choice not in Layout.__dataclass_fields__:
            fields = ", ".join(Layout.__dataclass_fields__)
            raise ValueError(f"{choice!r} is no field of a layout; there are {fields}")
        found: dict[Any, StepReport] = {}
        for report in self.reports:  # ranked: the first of each value is the fastest
            found.setdefault(getattr(report.layout, choice), report)
        return dict(sorted(found.items()))

    def trades(self, near: int | None = None) -> Table:
        """The fastest layout with each tp, pp, dp and micro-batch, and what it loses on: the
        takeaways of arXiv 2104.04473, section 3, for this model.

        Args:
            near: show so many values to each side of the best, and the first tp that leaves the
                node; all of them if None.
        """
        return trades_table(self, near)

    def table(self, top: int | None = 10) -> Table:
        """The `top` layouts, all of them if None, with what they take, hold and send."""
        return plan_table(self, top)

    def to_json(self) -> str:
        """The whole plan, for other programs and for `Plan.from_json`."""
        return plan_json(self)

    @staticmethod
    def from_json(text: str, cluster: Cluster | None = None) -> "Plan":
        """Read what `to_json` wrote. `cluster` is needed for one that labkit does not know.

        Raises ValueError for any other text."""
        return Plan(*parse_plan(text, cluster))

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


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
    every = layouts(sizes, devices(cluster, gpus), global_batch, **constraints)
    search = sizes, global_batch, budget(cluster, max_memory_bytes), reporter(cluster, global_batch)
    reports, large = ranked(every, *search)
    if not reports:
        raise ValueError(
            f"no layout fits: {lowest_peak(every, *search)}; take more devices, a smaller "
            "model, or recompute full and zero 1 if they were left out"
        )
    return Plan(cluster, reports, large, search[2], time.monotonic() - began_s)


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
    every = layouts(sizes, devices(cluster, gpus), global_batch, **constraints)
    budget_bytes = budget(cluster, max_memory_bytes)
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
    ranks, budget_bytes = devices(cluster, gpus), budget(cluster, max_memory_bytes)
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


def ranked(
    every: Sequence[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> tuple[tuple[StepReport, ...], tuple[TooLarge, ...]]:
    """Reports of the layouts that fit, the fastest first (at equal speed, the lower peak), and the
    others, the smallest first."""
    bounds = by_bound(every, sizes, global_batch)
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


def devices(cluster: Cluster, gpus: int | None) -> int:
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


def budget(cluster: Cluster, max_memory_bytes: float | None) -> float:
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
