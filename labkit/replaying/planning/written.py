"""A plan as a table for readers, and as JSON for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import rich.table
from rich import box

from labkit.clusters import Cluster, cluster
from labkit.predict.tables import Table
from labkit.replaying.planning.fits import GB, TooLarge, described
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.reasons import seconds
from labkit.replaying.planning.report import StepReport

if TYPE_CHECKING:
    from labkit.replaying.planning.ranking import Plan

FORMAT = "labkit plan 1"
AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "microbatch": "micro-batch"}
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


def trades_table(plan: "Plan", near: int | None) -> Table:
    """A row for each value of each axis: the fastest layout that has it."""
    rows: list[tuple[str, ...]] = []
    node = plan.cluster.devices_per_node
    for choice, name in AXES.items():
        every = plan.fastest(choice)
        values = list(every)
        at = values.index(getattr(plan.best.layout, choice))
        past_node = min((i for i, tp in enumerate(values) if tp > node), default=at)
        for place, (value, one) in enumerate(every.items()):
            if near is None or abs(place - at) <= near or (choice == "tp" and place == past_node):
                times = one.step_s / plan.best.step_s
                reason = plan.why(one.layout)
                rows.append((name, str(value), described(one.layout), f"{times:.2f} ×", reason))
    return Table(("", "", "the fastest with it", "step", "why it loses"), rows)


def in_terminal(words: Table) -> rich.table.Table:
    """A table whose last column wraps."""
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in words.heads[:-1]:
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column(words.heads[-1])
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
    from labkit.replaying.planning.ranking import Plan

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
