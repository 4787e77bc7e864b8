"""A plan as a table for readers, and as JSON for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from labkit.clusters import Cluster, cluster
from labkit.predict.tables import Table
from labkit.replaying.planning.feasibility import TooLarge
from labkit.replaying.planning.layout import Layout, Sizes, described
from labkit.replaying.planning.report import GB, StepReport, seconds

if TYPE_CHECKING:
    from labkit.replaying.planning.ranking import Plan

FORMAT = "labkit plan 1"
AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "microbatch": "micro-batch"}
SENT_AXES = ("tensor", "pipeline", "data")
HEADS = (
    "", "tp", "pp", "dp", "b", "chunks", "zero", "seq", "recompute", "step s", "MFU",
    "bubble", "exposed", "GB held", "tensor GB", "pipeline GB", "data GB", "why it loses",
)  # fmt: skip


def plan_table(plan: "Plan", top: int | None) -> Table:
    """A row for each layout. Exposed: waiting for communication, over all axes."""
    rows = []
    for place, report in enumerate(plan.reports[:top], 1):
        layout, exposed_s = report.layout, report.tensor_s + report.pipeline_s + report.data_s
        rows.append(
            (
                str(place), str(layout.tp), str(layout.pp), str(layout.dp), str(layout.microbatch),
                str(layout.chunks), str(layout.zero), "yes" * layout.sequence, layout.recompute,
                f"{report.step_s:.2f}", f"{report.mfu:.1%}",
                f"{report.bubble_s / report.step_s:.1%}", f"{exposed_s / report.step_s:.1%}",
                f"{report.peak_bytes / GB:.1f}",
                *(f"{report.sent_bytes.get(axis, 0) / GB:.1f}" for axis in SENT_AXES),
                plan.why(layout),
            )
        )  # fmt: skip
    return Table(HEADS, rows)


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


def plan_json(plan: "Plan") -> str:
    """The whole plan; the seconds of a step by their parts, bytes by category and axis."""
    best = plan.best
    contents = {
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
        "too_large": [asdict(one) for one in plan.too_large],
    }
    return json.dumps(contents, indent=1)


def parse_plan(
    text: str, where: Cluster | None
) -> tuple[Cluster, tuple[StepReport, ...], tuple[TooLarge, ...], float, float]:
    """The fields of the plan that `plan_json` wrote; `where` as in `Plan.from_json`."""
    try:
        parsed = json.loads(text)
        if parsed["format"] != FORMAT:
            raise ValueError(f'its format is {parsed["format"]!r}, and not "{FORMAT}"')
        model = {name: value for name, value in parsed["model"].items() if name != "parameters"}
        sizes = Sizes(**model)
        reports = tuple(_report(one, sizes, parsed["global_batch"]) for one in parsed["layouts"])
        large = tuple(
            TooLarge(Layout(**one["layout"]), one["memory_bytes"], one["at_least"])
            for one in parsed["too_large"]
        )
        rest = parsed["cluster"], parsed["budget_bytes"], parsed["took_s"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"this is no plan that `Plan.to_json` wrote: {error}") from None
    name, budget_bytes, took_s = rest
    return where or cluster(name), reports, large, budget_bytes, took_s


def _report(one: Mapping[str, Any], sizes: Sizes, global_batch: int) -> StepReport:
    return StepReport(
        sizes, Layout(**one["layout"]), global_batch, one["step_s"],
        **{f"{part}_s": value for part, value in one["seconds"].items()},
        memory_bytes=one["memory_bytes"], sent_bytes=one["sent_bytes"],
        model_flops=one["model_flops"], mfu=one["mfu"],
    )  # fmt: skip
