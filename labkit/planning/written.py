"""A plan as a table for readers, and as JSON for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import rich.table
from rich import box

from labkit.clusters import Cluster, cluster
from labkit.planning.fits import GB, TooLarge
from labkit.planning.layout import Layout, Sizes
from labkit.planning.reasons import seconds
from labkit.planning.report import StepReport
from labkit.predict.tables import Table

if TYPE_CHECKING:
    from labkit.planning.ranking import Plan

FORMAT = "labkit plan 1"
HEADS = (
    "", "tp", "pp", "dp", "b", "chunks", "zero", "seq", "recompute", "step s", "MFU",
    "bubble", "exposed", "GB held", "tensor GB", "pipeline GB", "data GB", "why it loses",
)  # fmt: skip


def plan_table(plan: "Plan", top: int | None) -> Table:
    """A row for each layout. Exposed: waited for what is on the wire, of all axes."""
    return Table(
        HEADS,
        [
            (str(place), *_choices(one.layout), *_numbers(one), plan.why(one.layout))
            for place, one in enumerate(plan.reports[:top], 1)
        ],
    )


def _choices(layout: Layout) -> tuple[str, ...]:
    numbers = (layout.tp, layout.pp, layout.dp, layout.microbatch, layout.chunks, layout.zero)
    return *map(str, numbers), "yes" if layout.sequence else "", layout.recompute


def _numbers(report: StepReport) -> tuple[str, ...]:
    exposed_s = report.tensor_s + report.pipeline_s + report.data_s
    return (
        f"{report.step_s:.2f}",
        f"{report.mfu:.1%}",
        f"{report.bubble_s / report.step_s:.1%}",
        f"{exposed_s / report.step_s:.1%}",
        f"{report.peak_bytes / GB:.1f}",
        *(f"{report.sent_bytes.get(axis, 0) / GB:.1f}" for axis in ("tensor", "pipeline", "data")),
    )


def rich_table(plan: "Plan", top: int | None) -> rich.table.Table:
    """The same for a terminal, where the reasons wrap."""
    words = plan_table(plan, top)
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in words.heads:
        shown.add_column(
            head, justify="left" if head == HEADS[-1] else "right", no_wrap=head != HEADS[-1]
        )
    for row in words.rows:
        shown.add_row(*row)
    return shown


def plan_json(plan: "Plan") -> str:
    """The whole plan; the seconds of a step by their parts, bytes by category and axis."""
    best = plan.best
    told = {
        "format": FORMAT,
        "model": {**asdict(best.sizes), "parameters": best.sizes.parameters},
        "cluster": plan.cluster.name,
        "gpus": best.layout.ranks,
        "global_batch": best.global_batch,
        "budget_bytes": plan.budget_bytes,
        "took_s": plan.took_s,
        "layouts": [
            {
                "layout": asdict(one.layout),
                "step_s": one.step_s,
                "seconds": seconds(one),
                "memory_bytes": dict(one.memory_bytes),
                "sent_bytes": dict(one.sent_bytes),
                "model_flops": one.model_flops,
                "mfu": one.mfu,
                "why": plan.why(one.layout),
            }
            for one in plan.reports
        ],
        "too_large": [
            {
                "layout": asdict(one.layout),
                "memory_bytes": dict(one.memory_bytes),
                "at_least": one.at_least,
            }
            for one in plan.too_large
        ],
    }
    return json.dumps(told, indent=1)


def plan_of(text: str, where: Cluster | None) -> "Plan":
    """What `plan_json` wrote; `where` is needed for a cluster that labkit does not know."""
    from labkit.planning.ranking import Plan

    try:
        told = json.loads(text)
        if told["format"] != FORMAT:
            raise ValueError(f'its format is {told["format"]!r}, and not "{FORMAT}"')
        of_model = {name: value for name, value in told["model"].items() if name != "parameters"}
        sizes, rows = Sizes(**of_model), told["global_batch"]
        reports = tuple(_report(one, sizes, rows) for one in told["layouts"])
        large = tuple(
            TooLarge(Layout(**one["layout"]), one["memory_bytes"], one["at_least"])
            for one in told["too_large"]
        )
        budget_bytes, took_s, name = told["budget_bytes"], told["took_s"], told["cluster"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"this is no plan that `Plan.to_json` wrote: {error}") from None
    return Plan(where or cluster(name), reports, large, budget_bytes, took_s)


def _report(one: Mapping[str, Any], sizes: Sizes, global_batch: int) -> StepReport:
    return StepReport(
        sizes, Layout(**one["layout"]), global_batch, one["step_s"],
        **{f"{part}_s": value for part, value in one["seconds"].items()},
        memory_bytes=one["memory_bytes"], sent_bytes=one["sent_bytes"],
        model_flops=one["model_flops"], mfu=one["mfu"],
    )  # fmt: skip
