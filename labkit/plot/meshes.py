"""A mesh diagram: the position of each rank, its groups, and links between nodes."""

from collections.abc import Iterator, Mapping
from itertools import cycle, pairwise
from math import prod
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyBboxPatch

from labkit.comm import Mesh
from labkit.comm.mesh import coordinates, lines
from labkit.plot.figure import Picture, label, styled
from labkit.plot.style import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PAPER, PURPLE, SMALL_PT

NAMED = {"tp": PURPLE, "dp": ORANGE, "pp": BLUE}  # regardless of axis order
AXES = [PURPLE, ORANGE, BLUE, GREEN, "#7A5512"]  # other axes, innermost first
MOST_RANKS = 256
RADIUS, GAP = 0.27, 0.6
LARGER_PT = {12: 7, 32: 1, 96: -1, MOST_RANKS: -3}  # largest rank count -> points added to SMALL_PT

Place = tuple[float, float]


@styled
def mesh(
    shape: Mesh | Mapping[str, int], ranks_per_node: int | None = None, figure: Figure | None = None
) -> Figure:
    """The ranks of a mesh, joined along each axis by lines in the axis's color.

    Args:
        shape: a `Mesh`, or axis sizes such as {"pp": 2, "dp": 2, "tp": 2}, outermost first.
        ranks_per_node: if given, each node gets a box, and links between nodes are dashed.

    Raises ValueError for a mesh of more than 256 ranks.
    """
    sizes = dict(shape.sizes if isinstance(shape, Mesh) else shape)
    places = _places(sizes)
    if len(places) > MOST_RANKS:
        raise ValueError(
            f"a mesh of {len(places)} ranks is too large to draw; draw at most "
            f"{MOST_RANKS} ranks, for example with a smaller outermost axis"
        )
    node_of = [rank // (ranks_per_node or len(places)) for rank in range(len(places))]
    width = max(x for x, _ in places) + 2 * GAP
    height = max(y for _, y in places) + 2 * GAP
    figure = figure or Picture(min(8.0, max(2.4, 9.0 * height / width + 0.8)))
    axes = figure.add_axes((0.02, 0.0, 0.96, 0.86), aspect="equal")
    axes.set(xlim=(-GAP, width - GAP), ylim=(height - GAP, -GAP))
    axes.axis("off")
    if ranks_per_node is not None:
        axes.add_collection(PatchCollection([*_boxes(places, node_of)], fc=FAINT, ec=MUTED, lw=0.8))
    legend = []
    for axis, color in _colors(sizes).items():
        segments, styles = _links(sizes, axis, places, node_of)
        links = LineCollection(segments, colors=color, linestyles=styles, lw=2.2, zorder=2)
        axes.add_collection(links)
        legend.append(Line2D([], [], color=color, lw=2.5, label=f"{axis} = {sizes[axis]}"))
    dots = PatchCollection([Circle(place, RADIUS) for place in places], fc=PAPER, ec=INK, zorder=3)
    axes.add_collection(dots)
    larger_pt = next(pt for most, pt in LARGER_PT.items() if len(places) <= most)
    for rank, place in enumerate(places):
        label(axes, place, str(rank), fontsize=SMALL_PT + larger_pt)
    figure.legend(
        handles=legend[::-1], loc="upper left", ncols=len(legend), bbox_to_anchor=(0.02, 0.9),
        borderaxespad=0.0,
    )  # fmt: skip
    nodes = f"  ·  nodes of {ranks_per_node} ranks, dashed: between nodes" if ranks_per_node else ""
    figure.text(0.02, 0.93, f"Mesh of {len(places)} ranks{nodes}", color=INK, fontsize="large")
    return figure


def _colors(sizes: Mapping[str, int]) -> dict[str, str]:
    """The color of each axis, innermost first."""
    taken = [NAMED[axis] for axis in sizes if axis in NAMED]
    free = cycle(color for color in AXES if color not in taken)
    return {axis: NAMED.get(axis) or next(free) for axis in reversed(list(sizes))}


def _places(sizes: Mapping[str, int]) -> list[Place]:
    """Lay out the innermost axis to the right, outer axes right or down, in a wide figure."""
    step, extent = {}, [1.0, 1.0]
    for depth, axis in enumerate(reversed(list(sizes))):
        along = 0 if not depth or extent[0] < 1.6 * extent[1] else 1
        step[axis] = (along, extent[along])
        extent[along] = extent[along] * sizes[axis] + (GAP if depth else 0.0)
    places = []
    for rank in range(prod(sizes.values())):
        place = [0.0, 0.0]
        for axis, index in coordinates(sizes, rank).items():
            along, length = step[axis]
            place[along] += index * length
        places.append((place[0], place[1]))
    return places


def _links(
    sizes: Mapping[str, int], axis: str, places: list[Place], node_of: list[int]
) -> tuple[list[np.ndarray], list[Any]]:
    """Lines between neighbors along `axis`, curved slightly around any ranks in between."""
    segments, styles = [], []
    t = np.linspace(0, 1, 13)[:, None]  # along a quadratic Bézier curve
    for rank, neighbor in (pair for line in lines(sizes, axis) for pair in pairwise(line)):
        begin, end = np.array(places[rank]), np.array(places[neighbor])
        bend = 0.84 if abs(end - begin).max() > 1.5 else 0.0
        corner = (begin + end) / 2 + bend * (begin == end) * [1, -1]
        segments.append((1 - t) ** 2 * begin + 2 * t * (1 - t) * corner + t**2 * end)
        styles.append("-" if node_of[rank] == node_of[neighbor] else (0, (3, 1.5)))
    return segments, styles


def _boxes(places: list[Place], node_of: list[int]) -> Iterator[FancyBboxPatch]:
    style = f"round,pad={RADIUS + 0.09},rounding_size=0.15"
    for node in sorted(set(node_of)):
        xs, ys = zip(*(place for place, of in zip(places, node_of) if of == node))
        size = (max(xs) - min(xs), max(ys) - min(ys))
        yield FancyBboxPatch((min(xs), min(ys)), *size, boxstyle=style)
