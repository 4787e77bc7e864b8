"""Figures that a notebook shows once, as a PNG, and elements shared by plots: axes with margins in
inches, stacked bars, row labels, legends, notes."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox, ScaledTranslation

from labkit.plot.style import CATEGORIES, DPI, FAINT, PAPER, SETTINGS, SMALL_PT, WIDTH_IN

LEGEND_IN = 0.5  # distance from the axes down to the legend; the tick labels are in between

styled = matplotlib.rc_context(SETTINGS)  # decorator: our settings replace the notebook's


class Picture(Figure):
    """A matplotlib Figure to use as a cell's value. After pyplot is imported, IPython shows any
    Figure as a PNG; before the import, IPython calls `_repr_png_`."""

    def __init__(self, height_in: float, **options: Any):
        whole_pixels = round(height_in * DPI)
        super().__init__(figsize=(WIDTH_IN, whole_pixels / DPI), dpi=DPI, **options)
        FigureCanvasAgg(self)

    def get_tightbbox(self, *args: Any, **kwargs: Any) -> Bbox:
        """Return the whole figure's box; IPython would otherwise crop our margins."""
        return Bbox.from_bounds(0, 0, *self.get_size_inches())

    def _repr_png_(self) -> bytes:
        return png(self)


def constrained(figure: Figure | None, height_in: float) -> Figure:
    """`figure`, or a new figure of this height, with matplotlib's constrained layout."""
    figure = figure or Picture(height_in)
    if figure.get_layout_engine() is None:
        figure.figure.set_layout_engine("constrained")  # the root figure, for a subfigure
    return figure


@styled
def png(figure: Figure) -> bytes:
    """Encode the figure as a PNG file, lightly compressed to keep sliders fast."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi, pil_kwargs={"compress_level": 3})
    return file.getvalue()


def size_in(figure: Figure) -> tuple[float, float]:
    """Width and height of a figure or subfigure, in inches."""
    return figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi


def lane_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes for lanes over time; `left`, `right`, `top` and `bottom` are margins in inches."""
    width, height = size_in(figure)
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes(place)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    return axes


class BarPart(NamedTuple):
    """A category of stacked bars: one segment in each bar."""

    label: str
    lengths: Sequence[float]
    color: str
    hatch: str = ""
    edge: str = PAPER


def memory_parts(memories: Sequence[Mapping[str, float]], scale: float) -> list[BarPart]:
    """The bar segments of each category that occurs in `memories`, in units of `scale` bytes."""
    return [
        BarPart(category, [memory.get(category, 0) / scale for memory in memories], color)
        for category, color in CATEGORIES.items()
        if any(memory.get(category) for memory in memories)
    ]


def stacked_bars(
    axes: Axes, parts: Sequence[BarPart], names: Sequence[str] = (), columns: int = 1
) -> None:
    """Draw horizontal stacked bars, labeled with `names` if given, and a legend below."""
    base = [0.0] * len(parts[0].lengths)
    most = max(map(sum, zip(*(part.lengths for part in parts))))
    for place, part in enumerate(parts):
        edges = [0.7 if length > 0.005 * most else 0.0 for length in part.lengths]
        axes.barh(
            range(len(base)), part.lengths, 0.6, left=base, color=part.color, label=part.label,
            hatch=part.hatch, edgecolor=part.edge, linewidth=edges, zorder=2 - place / 100,
        )  # fmt: skip
        base = [left + length for left, length in zip(base, part.lengths)]
    axes.set_xlim(0, most * 1.05 or 1)
    if names:
        name_rows(axes, names)
    legend_below(axes, columns)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows, with the first name at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def open_rows(axes: Axes) -> None:
    """Hide the left axis line and tick marks, and draw vertical grid lines."""
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Add a legend below the axes, aligned with the row labels."""
    below = axes.transAxes + ScaledTranslation(0, -LEGEND_IN, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, 0), bbox_transform=below, borderaxespad=0,
        handlelength=1.4, ncols=columns,
    )  # fmt: skip


def legend_row(figure: Figure, handles: Sequence[Artist], **options: Any) -> None:
    """Add a one-row legend at the bottom of a figure with constrained layout."""
    columns = len(handles) or 1
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **options)


def legend_strip(figure: Figure, entries: Mapping[str, Any]) -> Legend:
    """Add a legend at the bottom edge of the figure, in one or two rows."""
    inches = sum(0.5 + 0.075 * len(name) for name in entries)
    rows = 1 if inches < WIDTH_IN else 2
    return figure.legend(
        list(entries.values()), list(entries), loc="lower center", ncols=-(-len(entries) // rows),
        handlelength=1.3, handleheight=0.9, columnspacing=1.5, borderaxespad=0.3,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def note(
    axes: Axes, text: str, place: tuple[float, float], offset_pt: tuple[float, float],
    **options: Any,
) -> Annotation:  # fmt: skip
    """Add text at an offset from a point on the axes."""
    return axes.annotate(text, place, offset_pt, textcoords="offset points", **options)


def label(axes: Axes, place: tuple[float, float], text: str, **options: Any) -> Text:
    """Add text centered on a point of the axes."""
    usual: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}
    return axes.text(*place, text, **usual | options)
