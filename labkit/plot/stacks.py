"""Bars of several parts, one for each strategy: shared by the pictures that compare them."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from labkit.plot.style import PAPER


class Part(NamedTuple):
    """One part of every bar."""

    label: str
    heights: Sequence[float]
    colour: str
    hatch: str = ""
    edge: str = PAPER


def stack(axes: Axes, parts: Sequence[Part], room: float = 1.25) -> None:
    """Draw the parts on each other, with a legend in the room over the highest bar."""
    base = [0.0] * len(parts[0].heights)
    most = max(map(sum, zip(*(part.heights for part in parts))))
    for part in parts:
        edges = [0.7 if height > 0.005 * most else 0.0 for height in part.heights]
        axes.bar(
            range(len(base)), part.heights, 0.6, bottom=base, color=part.colour, label=part.label,
            hatch=part.hatch, edgecolor=part.edge, linewidth=edges,
        )  # fmt: skip
        base = [low + height for low, height in zip(base, part.heights)]
    axes.set_ylim(0, most * room or 1)


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
