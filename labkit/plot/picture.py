"""A figure that a notebook shows as a PNG, once, with no state of pyplot behind it."""

import functools
from collections.abc import Callable
from io import BytesIO
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from labkit.plot.style import DPI, SETTINGS, WIDTH_IN

P = ParamSpec("P")
R = TypeVar("R")


class Picture(Figure):
    """A matplotlib Figure that is the value of its cell.

    Where pyplot has been imported, IPython shows any Figure as a PNG and does not come to
    `_repr_png_`; where it has not, that is what it calls.
    """

    def __init__(self, height_in: float, **options: Any):
        whole_pixels = round(height_in * DPI)
        super().__init__(figsize=(WIDTH_IN, whole_pixels / DPI), dpi=DPI, **options)
        FigureCanvasAgg(self)

    def get_tightbbox(self, *args: Any, **kwargs: Any) -> Bbox:
        """All of it: our margins are part of it, and IPython would cut them off."""
        return Bbox.from_bounds(0, 0, *self.get_size_inches())

    def _repr_png_(self) -> bytes:
        return png(self)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """`draw` in the house style, whatever the notebook has set."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return drawn


@styled
def png(figure: Figure) -> bytes:
    """The figure as a PNG file. Packed lightly: a slider waits for it."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi, pil_kwargs={"compress_level": 3})
    return file.getvalue()
