"""A recorded collective, one step at a time, with a slider and a button that plays it."""

from base64 import b64encode
from typing import Any

from labkit.plot.movements import movement
from labkit.plot.picture import png
from labkit.trace.movement import Movement

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "plot.steps needs ipywidgets, which is not installed: pip install 'labkit[lab]'; "
        "plot.movement draws all steps at once without it"
    ) from error


def steps(shown: Movement) -> "Steps":
    """Walk through the steps of a recorded collective. Raises ImportError without ipywidgets."""
    return Steps(shown)


class Steps(ipywidgets.VBox):
    """A slider over the pictures of the steps; `picture.value` is the PNG that is shown.

    Where no kernel runs, all steps are shown at once."""

    def __init__(self, shown: Movement):
        self._shown = shown
        last = len(shown.frames) + 1
        self._pngs: dict[int, bytes] = {}  # those that were shown, by step
        play = ipywidgets.Play(min=1, max=last, value=1, interval=1200)
        self.step = ipywidgets.IntSlider(min=1, max=last, value=1, description="step")
        ipywidgets.jslink((play, "value"), (self.step, "value"))
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.step.observe(lambda change: self._draw(), names="value")
        super().__init__([ipywidgets.HBox([play, self.step]), self.picture])
        self._draw()

    def _draw(self) -> None:
        step = self.step.value
        if step not in self._pngs:
            self._pngs[step] = png(movement(self._shown, [step]))
        self.picture.value = self._pngs[step]

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and all steps for whoever cannot show one."""
        as_text = b64encode(png(movement(self._shown))).decode()
        return {**super()._repr_mimebundle_(**kwargs), "image/png": as_text}
