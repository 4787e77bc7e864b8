"""A bit pattern with bits to flip, and the number that it encodes."""

from typing import Any

from labkit.plot.bit_patterns import bits, field_of
from labkit.plot.figure import png
from labkit.plot.widgets import PictureWidget, ipywidgets
from labkit.precision.formats import FORMATS, Exact, Format, decimal, format_of

MOST_BITS = 32  # buttons, in two rows
COLOURS = {"sign": "danger", "exponent": "info", "fraction": "success"}  # of ipywidgets


class FlipBits(PictureWidget):
    """Flip bits and see the number: sign, exponent, fraction, formula and neighbours. A button for
    each bit, and a slider through all patterns in turn; `pattern` is what they show.

    Raises ValueError for a format of more than 32 bits.
    """

    def __init__(self, value: Exact | int = 1.0, format: Format | str = "fp16"):
        format = format_of(format)
        if format.width_bits > MOST_BITS:
            raise ValueError(
                f"flip_bits: {format.name} has {format.width_bits} bits, too many for buttons "
                f"({MOST_BITS}); see plot.bits({value}, {format.name!r})"
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
        self.neighbours = ipywidgets.HTML()
        self._showing = False
        self._new_buttons(format.encode(value))
        self.format.observe(self._other_format, names="value")
        self._arrange([self.step], [self.format, self.step], self._row, self.neighbours)

    @property
    def pattern(self) -> int:
        return int(self.step.value)

    @pattern.setter
    def pattern(self, pattern: int) -> None:
        self.format.value.fields(pattern)  # raises ValueError for one that is too long
        self._show(pattern)

    def _draw(self) -> None:
        self._show(self.pattern)

    def _other_format(self, change: dict[str, Any]) -> None:
        """Show the same number, rounded to the new format."""
        self._new_buttons(change["new"].encode(change["old"].decode(self.pattern)))

    def _new_buttons(self, pattern: int) -> None:
        format = self.format.value
        self.buttons = [
            ipywidgets.ToggleButton(
                button_style=COLOURS[field_of(format, place)],
                layout={"width": "1.95em", "padding": "0", "margin": "1px"},
            )
            for place in range(format.width_bits)
        ]
        for button in self.buttons:
            button.observe(lambda change: self._flipped(), names="value")
        self._row.children = self.buttons
        self._showing = True  # a slider may move when its range changes
        self.step.max = 2**format.width_bits - 1
        self._showing = False
        self._show(pattern)

    def _flipped(self) -> None:
        self._show(int("".join(str(int(button.value)) for button in self.buttons), 2))

    def _show(self, pattern: int) -> None:
        """Set all controls to the pattern, ignoring what they report meanwhile."""
        if self._showing:
            return
        self._showing = True
        format = self.format.value
        for button, digit in zip(self.buttons, f"{pattern:0{format.width_bits}b}", strict=True):
            button.value, button.description = digit == "1", digit
        self.step.value = pattern
        self.neighbours.value = neighbours(format, pattern)
        self.picture.value = png(bits(0, format, patterns=[pattern]))
        self._showing = False


flip_bits = FlipBits  # of labkit.plot


def neighbours(format: Format, pattern: int) -> str:
    """The kind of a number, and the next numbers towards zero and away from it."""
    kind = format.kind(pattern)
    if kind in ("nan", "infinity"):
        return f"<b>{kind}</b>"
    words = [f"<b>{kind}</b>", f"step here {decimal(format.ulp(format.decode(pattern)), 6)}"]
    if pattern % 2 ** (format.width_bits - 1):
        words.append(f"towards zero: {decimal(format.decode(pattern - 1), 9)}")
    return "  ·  ".join([*words, f"away from zero: {decimal(format.decode(pattern + 1), 9)}"])
