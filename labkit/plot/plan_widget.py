"""A plan with sliders: move tp, pp and the micro-batch, and see what the step gains and loses."""

import html
from base64 import b64encode
from typing import Any

from labkit.plot.picture import png
from labkit.plot.plans import chosen
from labkit.replaying.planning.layout import Layout
from labkit.replaying.planning.ranking import Plan

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "plot.plan_view needs ipywidgets, which is not installed: pip install 'labkit[lab]'; "
        "plot.plan draws the fastest layouts without it"
    ) from error


def plan_view(planned: Plan) -> "PlanView":
    """Compare any layout of a plan with its best. Raises ImportError without ipywidgets."""
    return PlanView(planned)


class PlanView(ipywidgets.VBox):
    """Sliders over the values that the plan has; all other choices are the fastest for them.

    `report` is the chosen step, None where no such layout fits; `said.value` is why it loses, and
    `picture.value` the PNG. Where no kernel runs, the picture is shown as it was."""

    def __init__(self, planned: Plan):
        self._planned = planned
        self._pngs: dict[int | None, bytes] = {}
        best, every = (
            planned.best.layout,
            [*planned.layouts, *(x.layout for x in planned.too_large)],
        )
        self.tp, self.pp, self.microbatch = (
            ipywidgets.SelectionSlider(
                options=sorted({getattr(one, name) for one in every}), value=getattr(best, name),
                description=words, layout={"width": "20em"},
            )
            for name, words in (("tp", "tp"), ("pp", "pp"), ("microbatch", "micro-batch"))
        )  # fmt: skip
        self.said = ipywidgets.HTML()
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        controls = [self.tp, self.pp, self.microbatch]
        for control in controls:
            control.observe(lambda change: self._draw(), names="value")
        row = ipywidgets.Box(controls, layout={"flex_flow": "row wrap"})
        super().__init__([row, self.said, self.picture])
        self._draw()

    def _draw(self) -> None:
        asked = (self.tp.value, self.pp.value, self.microbatch.value)
        of = (one for one in self._planned.reports if _place(one.layout) == asked)
        self.report = next(of, None)  # ranked: the first is the fastest
        self.said.value = html.escape(self._sentence(asked))
        key = None if self.report is None else id(self.report)
        if key not in self._pngs:
            self._pngs[key] = png(chosen(self._planned, self.report))
        self.picture.value = self._pngs[key]

    def _sentence(self, asked: tuple[int, int, int]) -> str:
        """Why the chosen layout loses, or why it is none."""
        if self.report is not None:
            times = self.report.step_s / self._planned.best.step_s
            return f"{times:.2f} × the best: {self._planned.why(self.report.layout)}"
        for large in self._planned.too_large:  # the smallest first
            if _place(large.layout) == asked:
                return self._planned.why(large.layout)
        return (
            "tp {} · pp {} · b {} is no layout: these do not divide the ranks and the rows"
        ).format(*asked)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and the picture for whoever cannot show one."""
        as_text = b64encode(self.picture.value).decode()
        return {**super()._repr_mimebundle_(**kwargs), "image/png": as_text}


def _place(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.microbatch
