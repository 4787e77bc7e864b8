"""Pictures with sliders: a recorded run, a plan, a collective step by step."""

import html
from base64 import b64encode
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from labkit.plot.choice import choose_ranks, choose_step
from labkit.plot.figure import png
from labkit.plot.memories import detailed_step, memory
from labkit.plot.movements import movement
from labkit.plot.plans import compared_with_best
from labkit.plot.timelines import TimelineView
from labkit.replaying.planning.layout import Layout
from labkit.trace import Trace
from labkit.trace.movement import Movement

if TYPE_CHECKING:
    from labkit.replaying.planning.plan import Plan

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "sliders need ipywidgets, which is not installed: pip install 'labkit[lab]'; "
        "plot.timeline, plot.memory, plot.plan, plot.movement and plot.bits draw without it"
    ) from error


class PictureWidget(ipywidgets.VBox):
    """Controls over one picture, which is drawn again when a control moves.

    `picture.value` is the PNG that is shown. Where no kernel runs (a page on the web, an exported
    notebook), that is all there is, as it was when the cell was run.

    A subclass makes its controls, passes them to `_arrange`, and draws in `_draw`.
    """

    def __init__(self) -> None:
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self._pngs: dict[Hashable, bytes] = {}
        super().__init__()

    def _arrange(self, controls: Iterable[Any], *rows: Any, below: Sequence[Any] = ()) -> None:
        """Observe the controls, and show rows (a widget, or several) over the picture."""
        for control in controls:
            control.observe(lambda change: self._draw(), names="value")
        layout = {"flex_flow": "row wrap", "align_items": "center"}
        above = [
            ipywidgets.Box(row, layout=layout) if isinstance(row, Sequence) else row for row in rows
        ]
        self.children = [*above, self.picture, *below]
        self._draw()

    def _draw(self) -> None:
        """Set `picture.value` to what the controls ask for."""
        raise NotImplementedError

    def _show_once_drawn(self, key: Hashable, draw: Callable[[], Figure]) -> None:
        """Show what was drawn for this key, or draw it now."""
        if key not in self._pngs:
            self._pngs[key] = png(draw())
        self.picture.value = self._pngs[key]

    def _static(self) -> bytes:
        """The PNG for a page that shows no widgets."""
        return bytes(self.picture.value)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        as_text = b64encode(self._static()).decode()
        return {**super()._repr_mimebundle_(**kwargs), "image/png": as_text}


class View(PictureWidget):
    """Look through a recorded run: the timeline of a step, or the memory of the detailed one, for
    the ranks that are pressed.

    Raises ValueError when the run is empty."""

    def __init__(self, trace: Trace):
        super().__init__()
        self._trace, self._timeline = trace, TimelineView(trace)
        first = choose_step(trace)
        self.what = ipywidgets.ToggleButtons(
            options=["timeline", "memory"] if _has_memory(trace) else ["timeline"],
            style={"button_width": "7em"},
        )
        self.step = ipywidgets.SelectionSlider(
            options=_steps_of(trace), value="all" if first is None else first,
            description="step", layout={"width": "22em"},
        )  # fmt: skip
        self.zoom = ipywidgets.FloatRangeSlider(
            value=(0, 100), min=0, max=100, step=0.5, description="zoom, %", readout_format=".0f",
            layout={"width": "30em"},
        )  # fmt: skip
        self.ranks = [
            ipywidgets.ToggleButton(value=True, description=str(rank), layout={"width": "3.2em"})
            for rank in choose_ranks(trace)
        ]
        controls = [self.what, self.step, self.zoom]
        self._arrange([*controls, *self.ranks], controls, [ipywidgets.Label("ranks"), *self.ranks])

    def _draw(self) -> None:
        """Redraw on the same axes."""
        every = choose_ranks(self._trace)
        chosen = [rank for rank, button in zip(every, self.ranks) if button.value] or every
        of_memory = self.what.value == "memory"
        self.step.disabled = self.zoom.disabled = of_memory  # one whole step has memory
        if of_memory:  # of all ranks, as many as fit
            ranks = None if chosen == every else chosen
            self._show_once_drawn(tuple(chosen), lambda: memory(self._trace, ranks))
            return
        begin, end = self.zoom.value
        if end - begin < 0.5:
            begin, end = (begin, begin + 0.5) if begin < 99.5 else (99.5, 100.0)
        step = None if self.step.value == "all" else self.step.value
        self._timeline.redraw(step, chosen, (begin / 100, end / 100))
        self.picture.value = png(self._timeline.figure)


def _steps_of(trace: Trace) -> Sequence[int | str]:
    return trace.steps() or ["all"]


def _has_memory(trace: Trace) -> bool:
    try:
        detailed_step(trace)
    except ValueError:
        return False
    return True


class PlanView(PictureWidget):
    """Compare any layout of a plan with its best: sliders over tp, pp and the micro-batch; all
    other choices are the fastest ones.

    `report` is the chosen step, None where no such layout fits; `said.value` is why it loses."""

    def __init__(self, planned: "Plan"):
        super().__init__()
        self._planned = planned
        every = [*planned.layouts, *(x.layout for x in planned.too_large)]
        controls = [
            ipywidgets.SelectionSlider(
                options=sorted({getattr(layout, name) for layout in every}),
                value=getattr(planned.best.layout, name), description=label,
                layout={"width": "20em"},
            )
            for name, label in (("tp", "tp"), ("pp", "pp"), ("microbatch", "micro-batch"))
        ]  # fmt: skip
        self.tp, self.pp, self.microbatch = controls
        self.said = ipywidgets.HTML()
        self._arrange(controls, controls, self.said)

    def _draw(self) -> None:
        asked = (self.tp.value, self.pp.value, self.microbatch.value)
        matching = (x for x in self._planned.reports if _axes(x.layout) == asked)
        self.report = next(matching, None)  # ranked: the first is the fastest
        self.said.value = html.escape(self._verdict(asked))
        key = None if self.report is None else id(self.report)
        self._show_once_drawn(key, lambda: compared_with_best(self._planned, self.report))

    def _verdict(self, asked: tuple[int, int, int]) -> str:
        """Why the chosen layout loses, or why there is none."""
        if self.report is not None:
            times = self.report.step_s / self._planned.best.step_s
            return f"{times:.2f} × the best: {self._planned.why(self.report.layout)}"
        for large in self._planned.too_large:  # the smallest first
            if _axes(large.layout) == asked:
                return self._planned.why(large.layout)
        return (
            "tp {} · pp {} · b {} is no layout: these do not divide the ranks and the rows"
        ).format(*asked)


def _axes(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.microbatch


class Steps(PictureWidget):
    """Walk through the steps of a recorded collective, with a slider and a button that plays them.

    Where no kernel runs, all steps are shown at once."""

    def __init__(self, shown: Movement):
        super().__init__()
        self._shown = shown
        last = len(shown.frames) + 1
        play = ipywidgets.Play(min=1, max=last, value=1, interval=1200)
        self.step = ipywidgets.IntSlider(min=1, max=last, value=1, description="step")
        ipywidgets.jslink((play, "value"), (self.step, "value"))
        self._arrange([self.step], [play, self.step])

    def _draw(self) -> None:
        step = self.step.value
        self._show_once_drawn(step, lambda: movement(self._shown, [step]))

    def _static(self) -> bytes:
        return png(movement(self._shown))


view, plan_view, steps = View, PlanView, Steps  # of labkit.plot
