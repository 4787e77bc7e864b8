"""A recorded run with sliders: steps, ranks, zoom, timeline or memory."""

from base64 import b64encode
from typing import Any

from labkit.plot.choice import choose_ranks, choose_step
from labkit.plot.memories import detailed_step, memory
from labkit.plot.picture import png
from labkit.plot.timelines import TimelineView
from labkit.trace import Trace

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "plot.view needs ipywidgets, which is not installed: pip install 'labkit[lab]'; "
        "plot.timeline and plot.memory draw the same pictures without it"
    ) from error


def view(trace: Trace) -> "View":
    """Look through a recorded run. Raises ValueError when it is empty, ImportError without
    ipywidgets."""
    return View(trace)


class View(ipywidgets.VBox):
    """Controls over one picture. `picture.value` is the PNG that they have made last.

    Where no kernel runs (a page on the web, an exported notebook) the picture is shown as it was
    when the cell was run, without the controls.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._timeline = TimelineView(trace)
        self._memories: dict[tuple[int, ...], bytes] = {}
        first = choose_step(trace)
        steps: list[Any] = [*trace.steps()] or ["all"]
        ranks = choose_ranks(trace)
        self.what = ipywidgets.ToggleButtons(
            options=["timeline", "memory"] if _has_memory(trace) else ["timeline"],
            style={"button_width": "7em"},
        )
        self.step = ipywidgets.SelectionSlider(
            options=steps, value="all" if first is None else first,
            description="step", layout={"width": "22em"},
        )  # fmt: skip
        self.zoom = ipywidgets.FloatRangeSlider(
            value=(0, 100), min=0, max=100, step=0.5, description="zoom, %", readout_format=".0f",
            layout={"width": "30em"},
        )  # fmt: skip
        self.ranks = [
            ipywidgets.ToggleButton(value=True, description=str(rank), layout={"width": "3.2em"})
            for rank in ranks
        ]
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        for control in (self.what, self.step, self.zoom, *self.ranks):
            control.observe(lambda change: self._draw(), names="value")
        row = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
        super().__init__(
            [
                ipywidgets.Box([self.what, self.step, self.zoom], layout=row),
                ipywidgets.Box([ipywidgets.Label("ranks"), *self.ranks], layout=row),
                self.picture,
            ]
        )
        self._draw()

    def _draw(self) -> None:
        """Redraw what the controls say, on the axes that are there."""
        every = choose_ranks(self._trace)
        chosen = [rank for rank, button in zip(every, self.ranks) if button.value] or every
        of_memory = self.what.value == "memory"
        self.step.disabled = self.zoom.disabled = of_memory  # one step has memory, and all of it
        if of_memory:
            key = tuple(chosen)
            if key not in self._memories:
                whole = chosen == every  # then as many as fit
                self._memories[key] = png(memory(self._trace, None if whole else chosen))
            self.picture.value = self._memories[key]
        else:
            begin, end = self.zoom.value
            if end - begin < 0.5:
                begin, end = (begin, begin + 0.5) if begin < 99.5 else (99.5, 100.0)
            step = None if self.step.value == "all" else self.step.value
            self._timeline.redraw(step, chosen, (begin / 100, end / 100))
            self.picture.value = png(self._timeline.figure)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and the picture for whoever cannot show one."""
        as_text = b64encode(self.picture.value).decode()
        return {**super()._repr_mimebundle_(**kwargs), "image/png": as_text}


def _has_memory(trace: Trace) -> bool:
    try:
        detailed_step(trace)
    except ValueError:
        return False
    return True
