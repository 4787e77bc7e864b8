"""Bars of several parts, one for each strategy: shared by the pictures that compare them.

They lie, so that the names beside them have room, however many there are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from labkit.plot.style import PAPER

LEGEND_IN = 0.5  # below the axes: under the numbers and the unit


class Part(NamedTuple):
    """One part of every bar."""

    label: str
    lengths: Sequence[float]
    colour: str
    hatch: str = ""
    edge: str = PAPER


def stack(axes: Axes, parts: Sequence[Part]) -> None:
    """Draw the parts of each bar after each other, with a legend below."""
    base = [0.0] * len(parts[0].lengths)
    most = max(map(sum, zip(*(part.lengths for part in parts))))
    for place, part in enumerate(parts):
        edges = [0.7 if length > 0.005 * most else 0.0 for length in part.lengths]
        axes.barh(
            range(len(base)), part.lengths, 0.6, left=base, color=part.colour, label=part.label,
            hatch=part.hatch, edgecolor=part.edge, linewidth=edges, zorder=2 - place / 100,
        )  # fmt: skip
        base = [left + length for left, length in zip(base, part.lengths)]
    axes.set_xlim(0, most * 1.05 or 1)
    legend_below(axes)


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Beside the bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def legend_below(axes: Axes) -> None:
    """A legend under the axes, in line with their names."""
    below = axes.transAxes + ScaledTranslation(0, -LEGEND_IN, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, 0), bbox_transform=below, borderaxespad=0,
        handlelength=1.4,
    )  # fmt: skip
