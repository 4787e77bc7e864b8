"""Support for `what_if`'s sliders: a modified cluster, and a timeline redrawn for each replay."""

from dataclasses import replace
from typing import Any

from labkit.clusters import Cluster, Level
from labkit.plot.choice import choose_step
from labkit.plot.figure import png
from labkit.plot.timelines import TimelineView
from labkit.replaying.replays import replay
from labkit.trace import Split, Trace, split_of
from labkit.trace.measures import main_dtype

ROOM = 1.5  # length of a new time axis, as a multiple of the step time
MIN_FRACTION = 0.25  # shorten the axis if a step fills a smaller fraction


def changed(
    cluster: Cluster,
    ranks: int,
    inside_bytes_per_s: float | None = None,
    between_bytes_per_s: float | None = None,
    inside_latency_s: float | None = None,
    between_latency_s: float | None = None,
    devices_per_node: int | None = None,
) -> Cluster:
    """The cluster with the given values and just enough nodes for `ranks`. A level with one port
    per device keeps one port per device. If an inter-node level is needed but missing, it is a copy
    of the intra-node level with the given values. Raises ValueError unless every bandwidth is
    positive, every latency at least 0, and `ranks` and `devices_per_node` at least 1."""
    inside = {"bytes_per_s": inside_bytes_per_s, "latency_s": inside_latency_s}
    between = {"bytes_per_s": between_bytes_per_s, "latency_s": between_latency_s}
    for where, given in (("inside", inside), ("between", between)):
        speed, latency_s = given.values()
        if speed is not None and not speed > 0:
            raise ValueError(f"{where}_bytes_per_s={speed}: choose more than 0")
        if latency_s is not None and not latency_s >= 0:
            raise ValueError(f"{where}_latency_s={latency_s}: choose 0 or more")
    per_node = cluster.devices_per_node if devices_per_node is None else devices_per_node
    for name, count in (("ranks", ranks), ("devices_per_node", per_node)):
        if count < 1:
            raise ValueError(f"{name}={count}: choose at least 1")
    nodes = -(-ranks // per_node)

    def level(old: Level, values: dict[str, float | None]) -> Level:
        ports = per_node if old.ports == cluster.devices_per_node else old.ports
        given: dict[str, Any] = {name: x for name, x in values.items() if x is not None}
        sources = {**old.sources, **dict.fromkeys(given, "what if")}
        return replace(old, ports=ports, sources=sources, **given)

    links = cluster.between
    if links is None and (nodes > 1 or set(between.values()) != {None}):
        links = replace(cluster.inside, name=f"{cluster.inside.name}, between nodes")
    new = replace(
        cluster, nodes=nodes, devices_per_node=per_node, inside=level(cluster.inside, inside),
        between=None if links is None else level(links, between),
    )  # fmt: skip
    if replace(new, nodes=cluster.nodes) == cluster:
        return new  # only the node count changed
    return replace(new, title=f"{cluster.title}, changed")


class Redrawing:
    """Draws up to `most_ranks` ranks; keeps the axis while steps fill 25 to 100 % of its length."""

    def __init__(self, most_ranks: int = 8):
        self.most_ranks = most_ranks
        self.axis_s = 0.0
        self.view: TimelineView | None = None

    def draw(self, recorded: Trace, cluster: Cluster) -> tuple[bytes, Split]:
        """The timeline of the replay as a PNG, and the split of its step time."""
        # Memory points make up most of a trace, and the timeline does not show them.
        ranks = {number: replace(rank, memory=[]) for number, rank in recorded.ranks.items()}
        replayed = replay(replace(recorded, ranks=ranks), cluster)
        step = choose_step(replayed)
        split = split_of(replayed, step)
        self.axis_s = next_axis_s(self.axis_s, split.step_s)
        shown = replayed.expanded([*replayed.record_of][: self.most_ranks])
        if self.view is None:
            self.view = TimelineView(shown, step)
        self.view.show(shown, step, until_s=self.axis_s)
        self.view.axes.set_xlabel(f"ms  ·  {links_in_words(cluster)}", labelpad=2)
        return png(self.view.figure), split


def next_axis_s(axis_s: float, step_s: float) -> float:
    """Length of the time axis in seconds: unchanged while the step fills enough of the axis."""
    return axis_s if MIN_FRACTION * axis_s <= step_s <= axis_s else ROOM * step_s


def links_in_words(cluster: Cluster) -> str:
    """The links as text, e.g. "NVLink 3 300 GB/s, 3.4 µs", which changes with every slider."""
    levels = [cluster.inside, *([cluster.between] if cluster.between and cluster.nodes > 1 else [])]
    return "  ·  ".join(
        f"{x.name} {x.bytes_per_s / 1e9:.3g} GB/s, {x.latency_s * 1e6:.3g} µs" for x in levels
    )


def in_words(split: Split, recorded: Trace, cluster: Cluster) -> str:
    """The split and MFU, e.g. "12.30 ms: ...; MFU 20.1% of ...", for the dtype with most FLOPs."""
    dtype = main_dtype(recorded)
    if split.flops is None or dtype is None:
        return str(split)
    mfu = split.mfu(cluster.device.peak_flops_of(dtype))
    return f"{split}; MFU {mfu:.1%} of the {dtype} peak of {cluster.device.name}"
