"""Pictures of number formats show what the formats hold; the widget's parts follow each other."""

from fractions import Fraction

import pytest
import torch
from matplotlib.colors import to_hex

from labkit import FORMATS, Format, plot
from labkit.plot.bit_patterns import CLEAR, SET, formula
from labkit.plot.format_ranges import lost
from tables import cases, raises
from test_plot import assert_readable, words

ipywidgets = pytest.importorskip("ipywidgets", reason="the widget needs it")


def test_each_bit_is_a_box_in_the_colour_of_its_field():
    figure = plot.bits(-1.5, "fp16", "e4m3")
    kinds = ["sign"] + 5 * ["exponent"] + 10 * ["fraction"]
    digits = zip("1011111000000000", kinds, strict=True)
    expected = [(SET if digit == "1" else CLEAR)[kind].upper() for digit, kind in digits]
    (axes,) = figure.axes
    fp16, e4m3 = axes.collections
    assert [to_hex(x).upper() for x in fp16.get_facecolor()] == expected
    assert len(e4m3.get_facecolor()) == 8
    text = " ".join(words(figure))
    assert "− $2^{15-15}$ × (1 + 512/1024) = -1.5   (exact)" in text
    assert "fp16" in text and "16 bits" in text


@pytest.mark.parametrize("names", [list(FORMATS), ["e4m3"]], ids=str)
def test_texts_of_bits_do_not_lie_on_each_other(names: list[str]):
    assert_readable(plot.bits(Fraction(1, 3), *names), slack_px=0)


@cases(
    ("fp16", 0x0001, "+ $2^{1-15}$ × (0 + 1/1024) = 5.9604645e-8   (subnormal)"),
    ("fp16", 0x8000, "− 0"),
    ("fp16", 0xFC00, "− infinity"),
    ("fp16", 0x7E00, "NaN: not a number"),
    ("e4m3", 0x7F, "NaN: not a number"),
    ("e4m3", 0x7E, "+ $2^{15-7}$ × (1 + 6/8) = 448"),
    ("x87", 0x3FFF << 64 | 3 << 62, "+ $2^{16383-16383}$ × 1.5 = 1.5"),
)
def test_the_formula_says_what_a_pattern_is(name: str, pattern: int, says: str):
    assert formula(FORMATS[name], pattern) == says


def test_the_rounding_error_is_reported():
    text = " ".join(words(plot.bits(0.1, "bf16")))
    assert "0.10009766   error 9.8e-5, relative 0.00098" in text
    assert "infinity" in " ".join(words(plot.bits(1e9, "fp16")))
    raises("name at least one format", plot.bits, 1.0)


def test_flipping_a_bit_gives_the_number_of_that_pattern():
    shown = plot.flip_bits(1.0, "fp16")
    assert shown.pattern == 0x3C00 and len(shown.buttons) == 16
    before = shown.picture.value
    assert shown._repr_mimebundle_()["image/png"], "the picture, where no kernel runs"
    shown.buttons[15].value = True  # the lowest bit
    assert shown.pattern == 0x3C01 and shown.step.value == 0x3C01
    assert shown.picture.value != before
    assert shown.buttons[15].description == "1"
    assert "spacing 0.000976562" in shown.neighbors.value
    shown.buttons[0].value = True
    assert shown.pattern == 0xBC01
    shown.step.value = 0x7C00
    assert "".join(button.description for button in shown.buttons) == f"{0x7C00:016b}"
    assert shown.neighbors.value == "<b>infinity</b>"
    shown.pattern = 0
    assert "away from zero: 5.96046448e-8" in shown.neighbors.value
    raises("not a bit pattern of fp16", setattr, shown, "pattern", 1 << 16)


def test_another_format_shows_the_nearest_number():
    shown = plot.flip_bits(0.1, "fp32")
    shown.format.value = FORMATS["e4m3"]
    assert shown.pattern == FORMATS["e4m3"].encode(0.1) and len(shown.buttons) == 8
    assert shown.step.max == 255
    shown.format.value = FORMATS["bf16"]
    assert FORMATS["bf16"].decode(shown.pattern) == FORMATS["e4m3"].round(0.1)


def test_another_format_is_drawn_once(monkeypatch: pytest.MonkeyPatch):
    from labkit.plot import widgets

    shown, drawn = plot.flip_bits(0.1, "fp32"), []
    monkeypatch.setattr(widgets, "bits", lambda value, format, **_: drawn.append(format.name))
    monkeypatch.setattr(widgets, "png", lambda figure: b"")
    for name in ("e4m3", "bf16", "fp32"):  # fewer bits, then more
        shown.format.value = FORMATS[name]
    assert drawn == ["e4m3", "bf16", "fp32"]
    shown.step.value = 0
    drawn.clear()
    shown.format.value = FORMATS["fp16"]  # the same pattern: the slider does not move
    assert drawn == ["fp16"] and len(shown.buttons) == 16


def test_a_format_of_your_own_and_one_that_is_too_long():
    assert len(plot.flip_bits(1, Format("mine", 3, 2)).buttons) == 6
    raises("fp64 has 64 bits, too many for buttons", plot.flip_bits, 1.0, "fp64")


def test_bars_reach_from_the_smallest_to_the_largest_number():
    figure = plot.number_line(["fp16"], near_zero=())
    (axes,) = figure.axes
    subnormal, normal = axes.patches
    assert subnormal.get_x() == pytest.approx(-7.22, abs=0.01)  # 2^-24 = 6e-8
    assert normal.get_x() == pytest.approx(-4.21, abs=0.01)  # 2^-14
    assert normal.get_x() + normal.get_width() == pytest.approx(4.82, abs=0.01)  # 2^16
    assert "6e-8 to 6.55e+4,  11 bits" in words(figure)


def test_every_number_near_zero_is_a_line():
    figure = plot.number_line(["e4m3"], near_zero=["e4m3"], upto=2**-4)
    lines = [segment[0][0] for one in figure.axes[-1].collections for segment in one.get_segments()]
    assert sorted(lines) == [float(x) for x in FORMATS["e4m3"].numbers() if x <= 2**-4]
    raises("fp16 has 11,265 values up to 0.0625, and at most", plot.number_line, near_zero=["fp16"])


def test_values_are_counted_that_become_zero():
    values = torch.tensor([0.0, 1e-8, 1e-7, 1.0, -1e-9])
    assert lost(values, FORMATS["fp16"]) == 0.5  # of four that are not zero
    figure = plot.number_line(["fp32", "fp16"], values=values)
    assert {"0.0% become zero", "50.0% become zero"} <= set(words(figure))
    assert "5 values by magnitude; 1 are zero" in words(figure)
    assert sum(patch.get_height() for patch in figure.axes[0].patches) == 4


@pytest.mark.parametrize(
    "values", [None, torch.tensor([1.0, 1e-30]), torch.zeros(3)], ids=["none", "two", "zeros"]
)
def test_texts_of_the_number_line_do_not_lie_on_each_other(values: torch.Tensor | None):
    assert_readable(plot.number_line(values=values), slack_px=0)
