"""A collective, one picture per step. Columns are ranks, rows are chunks. A cell has a stripe per
rank, colored if the cell includes the rank's input. Arrows lead from sent chunks to receivers."""

from collections.abc import Iterable
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

from labkit.plot import style
from labkit.plot.figure import Picture, label, styled
from labkit.plot.style import FAINT, INK, MUTED, PAPER, SMALL_PT, TITLE_PT, VERMILION, WIDTH_IN
from labkit.trace.movement import Content, Message, Movement

RANKS = [  # no vermilion, which marks errors
    style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.BROWN, style.YELLOW,
    style.GRAY,
]  # fmt: skip

# Sizes in inches, which is the unit of the axes.
CELL, HIGH, COLUMN, ROW = 0.37, 0.24, 0.5, 0.36  # cell size, and distance between cells
SIDE, TOP, HEAD, BETWEEN = 0.27, 0.62, 0.48, 0.14
BOW = 0.16  # how far an arrow curves around intermediate ranks
LARGEST = 1.8  # the maximum scale, used if there are few steps


@styled
def movement(
    shown: Movement, steps: Iterable[int] | None = None, figure: Figure | None = None
) -> Figure:
    """Draw the steps of a recorded collective, and its final state.

    Args:
        shown: from `labkit.watch_collective`.
        steps: steps to draw, counted from 1; the number of steps plus 1 is the final state.

    Raises ValueError for a step that does not exist.
    """
    last = len(shown.frames) + 1
    chosen = list(range(1, last + 1) if steps is None else steps)
    if not chosen or any(not 1 <= step <= last for step in chosen):
        raise ValueError(f"steps={chosen}: choose 1 to {last - 1}, or {last} for the final state")
    wide = SIDE + shown.size * COLUMN + BETWEEN
    high = HEAD + shown.size * ROW + BETWEEN
    across = min(len(chosen), int(WIDTH_IN / wide))
    down = -(-len(chosen) // across)
    height = TOP + down * high
    scale = min(LARGEST, WIDTH_IN / (across * wide)) if down == 1 else 1.0
    width = WIDTH_IN / scale
    figure = figure or Picture(height * scale)
    axes = figure.add_axes((0, 0, 1, 1), aspect="equal", anchor="NW")
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    stripes: list[tuple[Rectangle, str]] = []
    for k, step in enumerate(chosen):
        left, top = k % across * wide + SIDE, TOP + k // across * high + HEAD
        stripes += _panel(axes, shown, step, left, top)
    places, colors = zip(*stripes)
    axes.add_collection(PatchCollection(places, facecolors=colors, edgecolors=PAPER, lw=0.4))
    title = f"{shown.name}  ·  {shown.size} ranks  ·  {len(shown.frames)} steps"
    axes.text(0.06, 0.2, title, fontsize=TITLE_PT + 1, va="center")
    patches = [Patch(color=RANKS[rank], label=f"from {rank}") for rank in range(shown.size)]
    legend = axes.legend(
        handles=patches, loc="center left", ncols=shown.size, bbox_to_anchor=(0.04, 0.45),
        bbox_transform=axes.transData, borderaxespad=0.0, borderpad=0.0, handlelength=1.0,
        columnspacing=1.2, fontsize=SMALL_PT, handletextpad=0.4,
    )  # fmt: skip
    legend.set_zorder(8)
    label(axes, (width - 0.1, 0.2), "column: rank, row: chunk", ha="right", color=MUTED)
    return figure


def _panel(
    axes: Axes, shown: Movement, step: int, left: float, top: float
) -> list[tuple[Rectangle, str]]:
    """Draw a step, and return its stripes, which the caller draws as one collection, for speed."""
    is_end = step > len(shown.frames)
    held = shown.first if step == 1 else shown.frames[step - 2].held
    middle = (left + (shown.size * COLUMN - COLUMN + CELL) / 2, top - 0.31)
    title = "at the end" if is_end else f"step {step}"
    label(axes, middle, title, va="baseline", fontsize=TITLE_PT)
    stripes = []
    for rank, row in enumerate(held):
        x, middle = left + rank * COLUMN, (left - 0.05, top + rank * ROW + HIGH / 2)
        label(axes, (x + CELL / 2, top - 0.08), str(rank), va="baseline", color=MUTED)
        label(axes, middle, f"c{rank}", ha="right", fontsize=SMALL_PT - 1, color=MUTED)
        for chunk, content in enumerate(row):
            y = top + chunk * ROW
            for k, count in enumerate(content.counts or (0,) * shown.size):
                stripe = Rectangle((x + k * CELL / shown.size, y), CELL / shown.size, HIGH)
                stripes.append((stripe, RANKS[k] if count else FAINT))
            if not content.is_right_in(chunk):
                axes.add_patch(
                    Rectangle((x, y), CELL, HIGH, fill=False, ec=VERMILION, lw=1.8, zorder=4)
                )
                label(axes, (x + CELL / 2, y + HIGH / 2), _wrong(content, chunk), weight="bold",
                      zorder=6, color=INK,
                      bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    if not is_end:
        for message in shown.frames[step - 1].messages:
            _message(axes, message, left, top, shown.size)
    return stripes


def _wrong(content: Content, chunk: int) -> str:
    """A short label for the error in a chunk."""
    if not content.counts:
        return "?"  # not a sum of the ranks' inputs
    if content.chunk != chunk:
        return "mix" if content.chunk is None else f"c{content.chunk}"
    return f"{max(content.counts)}×"  # an input was added more than once


def _message(axes: Axes, message: Message, left: float, top: float, size: int) -> None:
    """Frame each run of consecutive sent chunks, and draw an arrow from each to the target."""
    forward = message.target > message.source
    x, target_x = (left + rank * COLUMN for rank in (message.source, message.target))
    begin, end = (x + CELL, target_x) if forward else (x, target_x + CELL)
    far = abs(message.target - message.source) > 1
    bend = -2 * BOW / abs(end - begin) if far else 0.0  # up if the arrow points right
    numbered = enumerate(sorted(set(message.chunks)))
    for _, neighbors in groupby(numbered, lambda pair: pair[1] - pair[0]):
        run = [chunk for _, chunk in neighbors]
        y, high = top + run[0] * ROW, (len(run) - 1) * ROW + HIGH
        place = (x - 0.02, y - 0.02)
        axes.add_patch(
            Rectangle(place, CELL + 0.04, high + 0.04, fill=False, ec=INK, lw=1.2, zorder=5)
        )
        share = (message.source + 0.5) / size if len(run) > 1 else 0.33 if forward else 0.67
        level = y + high * share
        arrow = FancyArrowPatch(
            (begin, level), (end, level), connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>", mutation_scale=8, lw=1.3, color=INK, shrinkA=0, shrinkB=0,
            zorder=7, path_effects=[withStroke(linewidth=2.8, foreground=PAPER)],
        )  # fmt: skip
        axes.add_patch(arrow)
