"""Histograms of magnitudes: what the picture says of a cast is what the cast does."""

import pytest
import torch
from matplotlib.colors import to_rgba

from labkit import plot
from labkit.plot.style import ORANGE
from tables import raises


def test_the_shares_are_those_of_the_cast() -> None:
    x = torch.tensor([2.0**-26, 2.0**-20, 1.0, 1e5])
    both = plot.magnitudes({"as it is": x, "scaled": [x[:3] * 4, None, torch.zeros(1)]})
    zeros_alone = plot.magnitudes({"x": torch.zeros(4)})
    assert [axes.get_title(loc="left") for axes in (*both.axes, *zeros_alone.axes)] == [
        "as it is:  25.0% become 0, 25.0% become inf",
        "scaled:  0.0% become 0, 25.0% are 0 already",
        "x:  0.0% become 0, 100.0% are 0 already",
    ]


def test_the_lines_stand_where_the_type_ends() -> None:
    (axes,) = plot.magnitudes({"x": torch.ones(3)}, torch.float16).axes
    marks = [line.get_xdata()[0] for line in axes.lines]
    assert marks == pytest.approx([-25, -14, 16], abs=1e-3)
    for exponent, is_zero in ((-25, True), (-24, False)):
        assert (torch.tensor(1.0 * 2.0**exponent).half() == 0).item() is is_zero
    (axes,) = plot.magnitudes({"x": torch.ones(3)}, torch.bfloat16).axes
    assert [line.get_xdata()[0] for line in axes.lines][1] == -126


def test_every_number_is_in_the_histogram_and_panels_share_their_axis() -> None:
    picture = plot.magnitudes({"x": torch.randn(500), "y": torch.randn(500) * 1e-6})
    for axes in picture.axes:
        hill = [bar for bar in axes.patches if bar.get_facecolor() == to_rgba(ORANGE)]
        assert sum(bar.get_height() for bar in hill) == 500
    assert picture.axes[0].get_xlim() == picture.axes[1].get_xlim()


@pytest.mark.parametrize("nothing", [{}, {"x": torch.zeros(0)}, {"x": [None]}])
def test_nothing_to_draw_is_reported(nothing: dict) -> None:
    raises("magnitudes: no values to draw", plot.magnitudes, nothing)
