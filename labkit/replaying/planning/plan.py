"""Planning results (ranking.py) as tables and JSON: a ranked `Plan`, or a `Fit`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from labkit.clusters import Cluster
from labkit.clusters import cluster as find_cluster
from labkit.predict.tables import Table
from labkit.replaying.planning.layout import Layout, Sizes, described
from labkit.replaying.planning.report import GB, PARTS, StepReport, seconds, why, why_not

FORMAT = "labkit plan 1"
AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "microbatch": "micro-batch"}
SENT_AXES = ("tensor", "pipeline", "data")
HEADS = (
    "", "tp", "pp", "dp", "b", "chunks", "zero", "seq", "recompute", "step s", "MFU",
    "bubble", "exposed", "peak GB", "tensor GB", "pipeline GB", "data GB", "why it is slower",
)  # fmt: skip


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit. `memory_bytes`: by category, a lower bound if `at_least`."""

    layout: Layout
    memory_bytes: Mapping[str, float]
    at_least: bool = False

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class Fit:
    """The layout with the lowest peak and whether it fits; or the largest model that fits."""

    report: StepReport
    budget_bytes: float  # usable memory per device

    @property
    def fits(self) -> bool:
        return self.report.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        sizes, layout = self.report.sizes, self.report.layout
        held, budget = self.report.peak_bytes / GB, self.budget_bytes / GB
        model = (
            f"{sizes.parameters / 1e9:,.1f}B parameters ({sizes.depth} blocks of width "
            f"{sizes.width}) on {layout.ranks} device{'s' * (layout.ranks > 1)}"
        )
        if self.fits:
            return f"{model}: fits with {described(layout)}: {held:.1f} GB of {budget:.1f} GB"
        return (
            f"{model}: does not fit; the lowest peak is {held:.1f} GB with {described(layout)}, "
            f"but the limit is {budget:.1f} GB: {held - budget:.1f} GB too much"
        )

    def table(self) -> Table:
        """Peak memory by category, for the stage with the highest peak."""
        free = self.budget_bytes - self.report.peak_bytes
        parts = {name: held for name, held in self.report.memory_bytes.items() if held}
        parts["free" if free >= 0 else "too much"] = abs(free)
        rows: list[tuple[str, ...]] = [
            (name, f"{nbytes / GB:.2f}", f"{nbytes / self.budget_bytes:.1%}", "")
            for name, nbytes in parts.items()
        ]
        return Table(("at the peak", "GB", "of a device", ""), rows)

    def _repr_html_(self) -> str:
        return f"<p>{self}</p>{self.table()._repr_html_()}"


@dataclass(frozen=True)
class Plan:
    """Every layout of a model on a cluster, ranked."""

    cluster: Cluster
    reports: tuple[StepReport, ...]  # layouts that fit, fastest step first
    too_large: tuple[TooLarge, ...]  # layouts that do not fit, lowest memory first
    budget_bytes: float  # usable memory per device
    took_s: float = 0.0  # planning time

    @property
    def best(self) -> StepReport:
        return self.reports[0]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that fit, fastest first."""
        return tuple(report.layout for report in self.reports)

    def report(self, layout: Layout) -> StepReport:
        """The report of a layout. Raises ValueError if the layout does not fit or is unknown."""
        if layout in self._reports:
            return self._reports[layout]
        reason = "is not in this plan; choose one of plan.layouts"
        if layout in self._too_large:
            reason = self.why(layout)
        raise ValueError(f"{described(layout)} {reason}")

    def why(self, layout: Layout) -> str:
        """One sentence that says why the layout is slower than the best or does not fit."""
        if large := self._too_large.get(layout):
            return why_not(large.memory_bytes, self.budget_bytes, large.at_least)
        return why(self.best, self.report(layout), self.cluster)

    @cached_property
    def _reports(self) -> dict[Layout, StepReport]:
        return {report.layout: report for report in self.reports}

    @cached_property
    def _too_large(self) -> dict[Layout, TooLarge]:
        return {large.layout: large for large in self.too_large}

    def fastest(self, choice: str) -> dict[Any, StepReport]:
        """The fastest layout for each value of a field such as "tp" or "microbatch"."""
        if choice not in Layout.__dataclass_fields__:
            fields = ", ".join(Layout.__dataclass_fields__)
            raise ValueError(f"{choice!r} is not a field of a layout; choose one of {fields}")
        fastest: dict[Any, StepReport] = {}
        for report in self.reports:  # ranked: the first report per value is the fastest
            fastest.setdefault(getattr(report.layout, choice), report)
        return dict(sorted(fastest.items()))

    def trades(self, near: int | None = None) -> Table:
        """The fastest layout for each tp, pp, dp and micro-batch, and why it is slower than the
        best: the takeaways of arXiv 2104.04473, section 3, for this model. `near`: show this many
        values on either side of the best, and the first tp beyond one node; None: every value."""
        rows: list[tuple[str, ...]] = []
        node = self.cluster.devices_per_node
        for choice, name in AXES.items():
            every = self.fastest(choice)
            values = list(every)
            at = values.index(getattr(self.best.layout, choice))
            past_node = min((i for i, tp in enumerate(values) if tp > node), default=at)
            for i, (value, report) in enumerate(every.items()):
                if near is None or abs(i - at) <= near or (choice == "tp" and i == past_node):
                    times = f"{report.step_s / self.best.step_s:.2f} ×"
                    rows.append(
                        (name, str(value), described(report.layout), times, self.why(report.layout))
                    )
        return Table(("", "", "fastest layout", "step", "why it is slower"), rows)

    def table(self, top: int | None = 10) -> Table:
        """The `top` fastest layouts, or all that fit if None. "exposed" is the sum over axes."""
        rows = []
        for place, report in enumerate(self.reports[:top], 1):
            layout, exposed_s = report.layout, report.tensor_s + report.pipeline_s + report.data_s
            rows.append(
                (
                    *map(str, (place, layout.tp, layout.pp, layout.dp, layout.microbatch)),
                    str(layout.chunks), str(layout.zero), "yes" * layout.sequence,
                    layout.recompute, f"{report.step_s:.2f}", f"{report.mfu:.1%}",
                    f"{report.bubble_s / report.step_s:.1%}", f"{exposed_s / report.step_s:.1%}",
                    f"{report.peak_bytes / GB:.1f}",
                    *(f"{report.sent_bytes.get(axis, 0) / GB:.1f}" for axis in SENT_AXES),
                    self.why(layout),
                )
            )  # fmt: skip
        return Table(HEADS, rows)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_json(self) -> str:
        """The complete plan as JSON, for other programs and `Plan.from_json`."""
        best = self.best
        contents = {
            "format": FORMAT,
            "model": {**asdict(best.sizes), "parameters": best.sizes.parameters},
            "cluster": self.cluster.name,
            "gpus": best.layout.ranks,
            "global_batch": best.global_batch,
            "budget_bytes": self.budget_bytes,
            "took_s": self.took_s,
            "layouts": [
                {
                    "layout": asdict(report.layout),
                    "step_s": report.step_s,
                    "seconds": seconds(report),
                    "memory_bytes": dict(report.memory_bytes),
                    "sent_bytes": dict(report.sent_bytes),
                    "model_flops": report.model_flops,
                    "mfu": report.mfu,
                    "why": self.why(report.layout),
                }
                for report in self.reports
            ],
            "too_large": [asdict(large) for large in self.too_large],
        }
        return json.dumps(contents, indent=1)

    @staticmethod
    def from_json(text: str, cluster: Cluster | None = None) -> "Plan":
        """Parse `to_json` output, or raise ValueError. `cluster` replaces the named cluster."""
        try:
            parsed = json.loads(text)
            if parsed["format"] != FORMAT:
                raise ValueError(f'its format is {parsed["format"]!r}, not "{FORMAT}"')
            model = {name: x for name, x in parsed["model"].items() if name != "parameters"}
            reports = tuple(
                StepReport(
                    Sizes(**model), Layout(**x["layout"]), parsed["global_batch"], x["step_s"],
                    **{f"{part}_s": x["seconds"][part] for part in PARTS},
                    memory_bytes=x["memory_bytes"], sent_bytes=x["sent_bytes"],
                    model_flops=x["model_flops"], mfu=x["mfu"],
                )
                for x in parsed["layouts"]
            )  # fmt: skip
            large = tuple(
                TooLarge(Layout(**x["layout"]), x["memory_bytes"], x["at_least"])
                for x in parsed["too_large"]
            )
            name, *rest = (parsed[key] for key in ("cluster", "budget_bytes", "took_s"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"this is not a plan from `Plan.to_json`: {error}") from None
        return Plan(cluster or find_cluster(name), reports, large, *rest)
