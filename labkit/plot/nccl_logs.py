"""A log of NCCL as a picture: rings and trees, each connection in its transport's colour."""

from collections.abc import Hashable, Mapping
from math import ceil, cos, hypot, radians, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Wedge

from labkit.foreign import literal
from labkit.plot.figure import Picture, size_in, styled
from labkit.plot.style import BLUE, GREEN, IDLE, INK, MUTED, ORANGE, SKY, SMALL_PT, VERMILION
from labkit.trace.nccl_log import Communicator, Connection, NcclLog, TreeNode

TINTS = ["#DCEBF5", "#FBEFD5", "#DDF1EA", "#F6E6EF"]  # of hosts, in turn
COLOURS = {
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
    """The connections and their transports: each different ring as a circle with arrows, then each
    different tree; channels with the same one share its picture. Ranks of a host share a tint.

    Args:
        log: what `read_nccl_log` returns.
        communicator: one of `log.communicators`; the largest if None.

    Raises ValueError for a log without rings and trees, and for more than 64 ranks.
    """
    group = communicator or log.main
    trees = {channel: tuple(sorted(tree.items())) for channel, tree in group.trees.items()}
    panels = [
        (kind, draw, channels)
        for kind, draw, graphs in (("ring", _ring, group.rings), ("tree", _tree, trees))
        for channels in _alike(graphs)[:MOST_OF_A_KIND]
    ]
    if not panels:
        raise ValueError(
            "this log shows no ring and no tree; take the output of all ranks, with "
            "NCCL_DEBUG=INFO and without NCCL_DEBUG_SUBSYS"
        )
    if group.size > MOST_RANKS:
        raise ValueError(
            f"{group.size} ranks cannot be read as a picture; draw a log of at most {MOST_RANKS}, "
            "or another one of log.communicators"
        )
    columns = min(MOST_COLUMNS, len(panels))
    rows = ceil(len(panels) / columns)
    if figure is None:
        figure = Picture(rows * PANEL_IN + AROUND_IN)
    height_in = size_in(figure)[1]
    grid = figure.add_gridspec(
        rows, columns, left=0.01, right=0.99, wspace=0.05, hspace=0.2,
        top=1 - 0.62 / height_in, bottom=0.4 / height_in,
    )  # fmt: skip
    used: set[str] = set()
    for i, (kind, draw, channels) in enumerate(panels):
        axes = figure.add_subplot(grid[i])
        axes.set_aspect("equal")
        axes.axis("off")
        used |= draw(axes, group, channels[0])
        numbers = ", ".join(map(str, channels[:6])) + (" ..." if len(channels) > 6 else "")
        axes.set_title(f"{kind} of channel {numbers}", fontsize=SMALL_PT + 1, pad=3)
    nodes = len(group.hosts())
    words = [f"NCCL {log.version}", f"{group.size} ranks", f"{nodes} node{'s' * (nodes != 1)}"]
    words += [f"{group.channels} channels"] if group.channels else []
    title_y = 1 - 0.22 / height_in
    figure.text(0.02, title_y, "  ·  ".join(words), fontsize="large", va="center")
    shown = [name for name in COLOURS if name in used]
    handles = [Line2D([], [], color=COLOURS[name], lw=2.5, label=name) for name in shown]
    figure.legend(handles=handles, loc="lower center", ncols=len(shown), borderaxespad=0.3)
    return figure


def over(connection: Connection | None) -> str:
    """The transport in the words of the legend."""
    if connection is None:
        return "not in the log"
    if not connection.kind.startswith("NET"):
        return connection.kind if connection.kind in COLOURS else "P2P"
    if connection.kind == "NET/Socket":
        return "TCP sockets"
    return "network, GPUDirect" if connection.gpu_direct else "network"


def _alike(graphs: Mapping[int, Hashable]) -> list[list[int]]:
    """The channels, grouped by equal rings or trees."""
    channels: dict[Hashable, list[int]] = {}
    for channel, graph in sorted(graphs.items()):
        channels.setdefault(graph, []).append(channel)
    return list(channels.values())


def _ring(axes: Axes, group: Communicator, channel: int) -> set[str]:
    """The ranks on a circle by host and number, an arrow from each to the next."""
    order = [rank for ranks in group.hosts().values() for rank in ranks]
    order += [rank for rank in group.rings[channel] if rank not in order]
    step = 360 / max(2, len(order))  # degrees
    angle = {rank: 90 - (i + 0.5) * step for i, rank in enumerate(order)}
    place = {rank: _on_circle(1.0, degrees) for rank, degrees in angle.items()}
    radius = min(0.19, 0.38 * radians(step))
    for i, (host, ranks) in enumerate(group.hosts().items()):
        first, last = angle[ranks[-1]], angle[ranks[0]]
        width = 0.56 if len(order) > 2 else 0.8
        tint = TINTS[i % len(TINTS)]
        edges = (first - 0.45 * step, last + 0.45 * step)
        axes.add_patch(Wedge((0, 0), 1.28, *edges, width=width, fc=tint, ec="none"))
        middle = (first + last) / 2
        name = literal(host if len(host) <= 16 else host[:15] + "…")
        axes.text(
            *_on_circle(1.4, middle), name, ha="center", va="center", fontsize=SMALL_PT - 0.5,
            color=MUTED, rotation=_upright(middle - 90),
        )  # fmt: skip
    used = set()
    for rank, following in group.hops(channel):
        link = group.over(rank, following, channel)
        used.add(_arrow(axes, place[rank], place[following], radius, link))
    _dots(axes, group, place, radius)
    axes.set(xlim=(-1.62, 1.62), ylim=(-1.5, 1.5))
    return used


def _on_circle(radius: float, degrees: float) -> Place:
    return radius * cos(radians(degrees)), radius * sin(radians(degrees))


def _tree(axes: Axes, group: Communicator, channel: int) -> set[str]:
    """The root on top, children below; arrows point up, as the reduction does."""
    tree = group.trees[channel]
    place: dict[int, Place] = {}
    leaves = 0

    def put(rank: int, depth: int) -> None:
        nonlocal leaves
        place[rank] = (0.0, 0.0)  # marks it as visited: a damaged tree may have cycles
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
    radius = min(0.19, 0.9 / depth, 0.42 * scale)
    used = set()
    for rank in place:
        parent = tree[rank].parent if rank in tree else None
        if parent in place:
            link = group.over(rank, parent, channel) or group.over(parent, rank, channel)
            used.add(_arrow(axes, place[rank], place[parent], radius, link))
    _dots(axes, group, place, radius)
    left, right = (end(x for x, _ in place.values()) for end in (min, max))
    half = max(1.6, (right - left) / 2 + 0.3)
    middle = (left + right) / 2
    axes.set(xlim=(middle - half, middle + half), ylim=(-2.65, 0.3))
    return used


def _arrow(axes: Axes, begin: Place, end: Place, radius: float, link: Connection | None) -> str:
    """From the edge of one dot to that of the other; returns the name in the legend."""
    (x, y), (u, v) = begin, end
    cut = radius / max(1e-9, hypot(u - x, v - y))
    dx, dy = cut * (u - x), cut * (v - y)
    ends = (x + dx, y + dy), (u - dx, v - dy)
    name = over(link)
    arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0)
    arrow.set(linewidth=1.8, color=COLOURS[name], zorder=3)
    axes.add_patch(arrow)
    return name


def _dots(axes: Axes, group: Communicator, place: dict[int, Place], radius: float) -> None:
    hosts = list(group.hosts())
    points = SMALL_PT if len(place) <= 16 else SMALL_PT - 2 if len(place) <= 32 else SMALL_PT - 4
    for rank, (x, y) in place.items():
        known = rank in group.ranks
        tint = TINTS[hosts.index(group.ranks[rank].host) % len(TINTS)] if known else "white"
        axes.add_patch(Circle((x, y), radius, fc=tint, ec=INK, lw=0.9, zorder=4))
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=points, zorder=5)


def _upright(degrees: float) -> float:
    """The angle of a text along the circle, never upside down."""
    degrees = (degrees + 180) % 360 - 180
    return degrees if abs(degrees) <= 90 else degrees - 180
