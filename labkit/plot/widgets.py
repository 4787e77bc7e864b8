"""Interactive pictures of a recorded run, a plan, a collective, and the bits of a number."""

import html
from base64 import b64encode
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from matplotlib.figure import Figure

from labkit.plot.bit_patterns import bits, field_of
from labkit.plot.choice import choose_ranks, choose_step
from labkit.plot.figure import png
from labkit.plot.memories import detailed_step, memory
from labkit.plot.movements import movement
from labkit.plot.plans import compared_with_best
from labkit.plot.timelines import TimelineView
from labkit.precision.formats import FORMATS, Exact, Format, decimal, format_of
from labkit.replaying.planning.layout import Layout
from labkit.replaying.planning.plan import Plan
from labkit.trace import Trace
from labkit.trace.movement import Movement

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "sliders need ipywidgets, which is not installed: pip install 'labkit[lab]'; "
        "plot.timeline, plot.memory, plot.plan, plot.movement and plot.bits work without it"
    ) from error

MOST_BITS = 32  # buttons, in two rows
BUTTON_STYLES = {"sign": "danger", "exponent": "info", "fraction": "success"}  # from ipywidgets


class PictureWidget(ipywidgets.VBox):
    """Controls above one picture, which is redrawn when a control changes. `picture.value` is the
    PNG shown; a page without a kernel shows only the PNG from `_static`.

    A subclass creates its controls, passes them to `_arrange`, and draws in `_draw`.
    """

    def __init__(self) -> None:
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self._pngs: dict[Hashable, bytes] = {}
        super().__init__()

    def _arrange(self, controls: Iterable[Any], *rows: Any, below: Sequence[Any] = ()) -> None:
        """Observe the controls, and show rows (of one or several widgets) above the picture."""
        for control in controls:
            control.observe(lambda change: self._draw(), names="value")
        layout = {"flex_flow": "row wrap", "align_items": "center"}
        above = [
            ipywidgets.Box(row, layout=layout) if isinstance(row, Sequence) else row for row in rows
        ]
        self.children = [*above, self.picture, *below]
        self._draw()

    def _draw(self) -> None:
        """Set `picture.value` according to the controls."""
        raise NotImplementedError

    def _show_once_drawn(self, key: Hashable, draw: Callable[[], Figure]) -> None:
        """Show the picture cached under `key`, drawing it first if missing."""
        if key not in self._pngs:
            self._pngs[key] = png(draw())
        self.picture.value = self._pngs[key]

    def _static(self) -> bytes:
        """The PNG for a page that cannot show widgets."""
        return bytes(self.picture.value)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        as_text = b64encode(self._static()).decode()
        return {**super()._repr_mimebundle_(**kwargs), "image/png": as_text}


class View(PictureWidget):
    """Explore a recorded run: the timeline of a step, or the memory of the detailed step, for the
    selected ranks. Raises ValueError if the run is empty."""

    def __init__(self, trace: Trace):
        super().__init__()
        self._trace, self._timeline = trace, TimelineView(trace)
        first, shown = choose_step(trace), ["timeline"]
        with suppress(ValueError):  # raised if no step was recorded in detail
            detailed_step(trace)
            shown.append("memory")
        self.what = ipywidgets.ToggleButtons(options=shown, style={"button_width": "7em"})
        self.step = ipywidgets.SelectionSlider(
            options=list[int | str](trace.steps()) or ["all"], description="step",
            value="all" if first is None else first, layout={"width": "22em"},
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
        every = choose_ranks(self._trace)
        chosen = [rank for rank, button in zip(every, self.ranks) if button.value] or every
        of_memory = self.what.value == "memory"
        self.step.disabled = self.zoom.disabled = of_memory  # only the detailed step has memory
        if of_memory:  # ranks=None draws as many as fit
            ranks = None if chosen == every else chosen
            self._show_once_drawn(tuple(chosen), lambda: memory(self._trace, ranks))
            return
        begin, end = self.zoom.value
        if end - begin < 0.5:
            begin, end = (begin, begin + 0.5) if begin < 99.5 else (99.5, 100.0)
        step = None if self.step.value == "all" else self.step.value
        self._timeline.redraw(step, chosen, (begin / 100, end / 100))
        self.picture.value = png(self._timeline.figure)


class PlanView(PictureWidget):
    """Compare a plan's best layout with the fastest one for the tp, pp and micro-batch chosen.

    `report`: the step of that layout, or None if no matching layout fits; `verdict.value`: why the
    layout is slower or does not exist.
    """

    def __init__(self, planned: Plan):
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
        self.verdict = ipywidgets.HTML()
        self._arrange(controls, controls, self.verdict)

    def _draw(self) -> None:
        asked = (self.tp.value, self.pp.value, self.microbatch.value)
        matching = (x for x in self._planned.reports if _axes(x.layout) == asked)
        self.report = next(matching, None)  # sorted: the first is the fastest
        self.verdict.value = html.escape(self._verdict(asked))
        key = None if self.report is None else id(self.report)
        self._show_once_drawn(key, lambda: compared_with_best(self._planned, self.report))

    def _verdict(self, asked: tuple[int, int, int]) -> str:
        """Why the chosen layout is slower than the best, or does not exist."""
        if self.report is not None:
            times = self.report.step_s / self._planned.best.step_s
            return f"{times:.2f} × the best: {self._planned.why(self.report.layout)}"
        for large in self._planned.too_large:  # smallest first
            if _axes(large.layout) == asked:
                return self._planned.why(large.layout)
        tp, pp, b = asked
        return f"tp {tp} · pp {pp} · b {b} is not a layout: ranks or rows cannot be split evenly"


def _axes(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.microbatch


class Steps(PictureWidget):
    """Step through a recorded collective; without a kernel, all steps are shown at once."""

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


class FlipBits(PictureWidget):
    """Flip the bits of a number, with a button per bit and a slider over all bit patterns.
    `pattern` is the bit pattern shown.

    Raises ValueError for a format of more than 32 bits.
    """

    def __init__(self, value: Exact | int = 1.0, format: Format | str = "fp16"):
        format = format_of(format)
        if format.width_bits > MOST_BITS:
            raise ValueError(
                f"flip_bits: {format.name} has {format.width_bits} bits, too many for buttons "
                f"(at most {MOST_BITS}); see plot.bits({value}, {format.name!r})"
            )
        super().__init__()
        small = {x.name: x for x in FORMATS.values() if x.width_bits <= MOST_BITS}
        self.format = ipywidgets.Dropdown(
            options={**small, format.name: format}, value=format, description="format",
            layout={"width": "14em"},
        )  # fmt: skip
        self.step = ipywidgets.IntSlider(
            description="pattern", readout_format="d", layout={"width": "34em"}
        )
        self.buttons: list[Any] = []
        self._row = ipywidgets.Box(layout={"flex_flow": "row wrap"})
        self.neighbors = ipywidgets.HTML()
        self._new_buttons(format.encode(value))
        self.format.observe(self._other_format, names="value")
        self._arrange([self.step], [self.format, self.step], self._row, self.neighbors)

    @property
    def pattern(self) -> int:
        return int(self.step.value)

    @pattern.setter
    def pattern(self, pattern: int) -> None:
        self.format.value.fields(pattern)  # raises ValueError for a pattern that is too long
        self.step.value = pattern

    def _other_format(self, change: dict[str, Any]) -> None:
        """Show the same number, rounded to the new format."""
        before = self.pattern
        self._new_buttons(change["new"].encode(change["old"].decode(before)))
        if self.pattern == before:  # otherwise the slider's change has redrawn the picture
            self._draw()

    def _new_buttons(self, pattern: int) -> None:
        format = self.format.value
        self.buttons = [
            ipywidgets.ToggleButton(
                button_style=BUTTON_STYLES[field_of(format, place)],
                layout={"width": "1.95em", "padding": "0", "margin": "1px"},
            )
            for place in range(format.width_bits)
        ]
        for button in self.buttons:
            button.observe(self._flipped, names="value")
        self._row.children = self.buttons
        with self.step.hold_trait_notifications():
            self.step.max, self.step.value = 2**format.width_bits - 1, pattern

    def _flipped(self, change: dict[str, Any]) -> None:
        bit = 1 << (len(self.buttons) - 1 - self.buttons.index(change["owner"]))
        self.step.value = self.pattern | bit if change["new"] else self.pattern & ~bit

    def _draw(self) -> None:
        format, pattern = self.format.value, self.pattern
        for button, digit in zip(self.buttons, f"{pattern:0{format.width_bits}b}", strict=True):
            button.value, button.description = digit == "1", digit
        self.neighbors.value = neighbors(format, pattern)
        self.picture.value = png(bits(0, format, patterns=[pattern]))


def neighbors(format: Format, pattern: int) -> str:
    """The kind of a number, its spacing, and its neighbors toward and away from zero."""
    kind = format.kind(pattern)
    if kind in ("nan", "infinity"):
        return f"<b>{kind}</b>"
    words = [f"<b>{kind}</b>", f"spacing {decimal(format.ulp(format.decode(pattern)), 6)}"]
    if pattern % 2 ** (format.width_bits - 1):
        words.append(f"toward zero: {decimal(format.decode(pattern - 1), 9)}")
    return "  ·  ".join([*words, f"away from zero: {decimal(format.decode(pattern + 1), 9)}"])


view, plan_view, steps, flip_bits = View, PlanView, Steps, FlipBits  # names in labkit.plot
