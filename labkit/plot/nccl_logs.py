"""Diagrams of an NCCL log: rings and trees, with connections colored by transport."""

from itertools import cycle
from math import ceil, cos, hypot, radians, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Wedge

from labkit.foreign import literal
from labkit.plot.figure import constrained, label, legend_row, styled
from labkit.plot.style import BLUE, GREEN, IDLE, INK, MUTED, ORANGE, SKY, SMALL_PT, VERMILION
from labkit.trace.nccl_log import Communicator, Connection, NcclLog, TreeNode
from labkit.trace.nccl_log.log import alike

TINTS = ["#DCEBF5", "#FBEFD5", "#DDF1EA", "#F6E6EF"]  # one per host, reused in order
COLORS = {
    "P2P": GREEN,
    "SHM": ORANGE,
    "network, GPUDirect": BLUE,
    "network": SKY,
    "TCP sockets": VERMILION,
    "not in the log": IDLE,
}
MOST_RANKS, MOST_OF_A_KIND, MOST_COLUMNS = 64, 4, 4
PANEL_IN, AROUND_IN = 2.6, 0.75

Place = tuple[float, float]


@styled
def nccl(
    log: NcclLog, communicator: Communicator | None = None, figure: Figure | None = None
) -> Figure:
    """Rings (circles with arrows) and trees, with connections colored by transport. Channels with
    equal graphs share a picture (at most 4 rings and 4 trees); ranks on one host share a tint.

    Args:
        log: from `read_nccl_log`.
        communicator: one of `log.communicators`; None: the largest.

    Raises ValueError if the log has neither rings nor trees, or for more than 64 ranks.
    """
    group = communicator or log.main
    trees = {channel: tuple(sorted(tree.items())) for channel, tree in group.trees.items()}
    panels = [
        (kind, draw, channels)
        for kind, draw, graphs in (("ring", _ring, group.rings), ("tree", _tree, trees))
        for channels in alike(graphs)[:MOST_OF_A_KIND]
    ]
    if not panels:
        raise ValueError(
            "this log has no rings and no trees; record the output of all ranks with "
            "NCCL_DEBUG=INFO and without NCCL_DEBUG_SUBSYS"
        )
    if group.size > MOST_RANKS:
        raise ValueError(
            f"a communicator of {group.size} ranks is too large to draw; choose a smaller "
            f"communicator (at most {MOST_RANKS} ranks) from log.communicators"
        )
    columns = min(MOST_COLUMNS, len(panels))
    rows = ceil(len(panels) / columns)
    figure = constrained(figure, rows * PANEL_IN + AROUND_IN)
    used: set[str] = set()
    for i, (kind, draw, channels) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, i, aspect="equal")
        axes.axis("off")
        used |= draw(axes, group, channels[0])
        numbers = ", ".join(map(str, channels[:6])) + " ..." * (len(channels) > 6)
        title = f"{kind} of channel{'s' * (len(channels) > 1)} {numbers}"
        axes.set_title(title, loc="center", fontsize=SMALL_PT + 1, pad=3)
    nodes = len(group.hosts())
    words = [f"NCCL {log.version}", f"{group.size} ranks", f"{nodes} node{'s' * (nodes != 1)}"]
    words += [f"{group.channels} channels"] if group.channels else []
    figure.suptitle("  ·  ".join(words), x=0.02, ha="left", fontsize="large")
    shown = [name for name in COLORS if name in used]
    handles = [Line2D([], [], color=COLORS[name], lw=2.5, label=name) for name in shown]
    legend_row(figure, handles)
    return figure


def over(connection: Connection | None) -> str:
    """The transport's name in the legend."""
    if connection is None:
        return "not in the log"
    if not connection.kind.startswith("NET"):
        return connection.kind if connection.kind in COLORS else "P2P"
    if connection.kind == "NET/Socket":
        return "TCP sockets"
    return "network, GPUDirect" if connection.gpu_direct else "network"


def _ring(axes: Axes, group: Communicator, channel: int) -> set[str]:
    """Draw ranks on a circle, ordered by host and rank, with an arrow for each hop of the ring."""
    order = [rank for ranks in group.hosts().values() for rank in ranks]
    order += [rank for rank in group.rings[channel] if rank not in order]
    step = 360 / max(2, len(order))  # degrees
    angle = {rank: 90 - (i + 0.5) * step for i, rank in enumerate(order)}
    place = {rank: _on_circle(1.0, degrees) for rank, degrees in angle.items()}
    width = 0.56 if len(order) > 2 else 0.8
    for (host, ranks), tint in zip(group.hosts().items(), cycle(TINTS)):
        first, last = angle[ranks[-1]], angle[ranks[0]]
        edges = (first - 0.45 * step, last + 0.45 * step)
        axes.add_patch(Wedge((0, 0), 1.28, *edges, width=width, fc=tint, ec="none"))
        middle = (first + last) / 2
        name = literal(host if len(host) <= 16 else host[:15] + "…")
        along = (middle + 90) % 360 - 180  # tangent of the circle, in degrees
        upright = along if abs(along) <= 90 else along - 180
        label(axes, _on_circle(1.4, middle), name, fontsize=SMALL_PT - 0.5, color=MUTED,
              rotation=upright)  # fmt: skip
    axes.set(xlim=(-1.62, 1.62), ylim=(-1.5, 1.5))
    links = [(x, y, group.over(x, y, channel)) for x, y in group.hops(channel)]
    return _connect(axes, group, place, min(0.19, 0.38 * radians(step)), links)


def _on_circle(radius: float, degrees: float) -> Place:
    return radius * cos(radians(degrees)), radius * sin(radians(degrees))


def _tree(axes: Axes, group: Communicator, channel: int) -> set[str]:
    """Draw the tree with the root on top; arrows point up, in the direction of the reduction."""
    tree = group.trees[channel]
    place: dict[int, Place] = {}
    leaves = 0

    def put(rank: int, depth: int) -> None:
        nonlocal leaves
        place[rank] = (0.0, 0.0)  # marks the rank as visited: a damaged tree may have cycles
        children = [x for x in tree.get(rank, TreeNode(None, ())).children if x not in place]
        for child in children:
            put(child, depth + 1)
        leaves += not children
        across = [place[child][0] for child in children] or [float(leaves)]
        place[rank] = (sum(across) / len(across), -float(depth))

    for rank, node in sorted(tree.items()):
        if node.parent is None:
            put(rank, 0)
    if not place:  # a damaged tree without a root
        put(min(tree), 0)
    depth = max(1.0, *(-y for _, y in place.values()))
    scale = max(2.6 / max(1.0, leaves), 0.4)
    place = {rank: (x * scale, y * 2.4 / depth) for rank, (x, y) in place.items()}
    across = [x for x, _ in place.values()]
    half = max(1.6, (max(across) - min(across)) / 2 + 0.3)
    middle = (min(across) + max(across)) / 2
    axes.set(xlim=(middle - half, middle + half), ylim=(-2.65, 0.3))
    parents = [(rank, tree[rank].parent) for rank in place if rank in tree]
    links = [
        (rank, parent, group.over(rank, parent, channel) or group.over(parent, rank, channel))
        for rank, parent in parents
        if parent in place
    ]
    return _connect(axes, group, place, min(0.19, 0.9 / depth, 0.42 * scale), links)


def _connect(
    axes: Axes, group: Communicator, place: dict[int, Place], radius: float,
    links: list[tuple[int, int, Connection | None]],
) -> set[str]:  # fmt: skip
    """Draw a dot per rank and an arrow per link; return the transports for the legend."""
    for source, target, link in links:
        (x, y), (u, v) = place[source], place[target]
        cut = radius / max(1e-9, hypot(u - x, v - y))
        dx, dy = cut * (u - x), cut * (v - y)
        ends = (x + dx, y + dy), (u - dx, v - dy)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0)
        arrow.set(linewidth=1.8, color=COLORS[over(link)], zorder=3)
        axes.add_patch(arrow)
    tints = dict(zip(group.hosts(), cycle(TINTS)))
    points = SMALL_PT if len(place) <= 16 else SMALL_PT - 2 if len(place) <= 32 else SMALL_PT - 4
    for rank, middle in place.items():
        tint = tints[group.ranks[rank].host] if rank in group.ranks else "white"
        axes.add_patch(Circle(middle, radius, fc=tint, ec=INK, lw=0.9, zorder=4))
        label(axes, middle, str(rank), fontsize=points, zorder=5)
    return {over(link) for _, _, link in links}
