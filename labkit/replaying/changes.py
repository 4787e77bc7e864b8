"""A cluster with other wires or other nodes, as the sliders of `what_if` ask for."""

from dataclasses import replace
from typing import Any

from labkit.clusters import Cluster, Level


def changed(
    cluster: Cluster,
    ranks: int,
    inside_bytes_per_s: float | None = None,
    between_bytes_per_s: float | None = None,
    inside_latency_s: float | None = None,
    between_latency_s: float | None = None,
    devices_per_node: int | None = None,
) -> Cluster:
    """The cluster with just enough nodes for `ranks`, and the given values in place of its own.
    Where each device of a node has its own port, it keeps one in larger and smaller nodes. Wires
    between nodes that the cluster lacks are like those inside, but for the given values. Raises
    ValueError for a bandwidth that is not above 0, a latency below it, or no ranks."""
    inside = {"bytes_per_s": inside_bytes_per_s, "latency_s": inside_latency_s}
    between = {"bytes_per_s": between_bytes_per_s, "latency_s": between_latency_s}
    for where, given in (("inside", inside), ("between", between)):
        speed, latency_s = given.values()
        if speed is not None and not speed > 0:
            raise ValueError(f"{where}_bytes_per_s={speed}; it must be more than 0")
        if latency_s is not None and not latency_s >= 0:
            raise ValueError(f"{where}_latency_s={latency_s}; it must be 0 or more")
    per_node = cluster.devices_per_node if devices_per_node is None else devices_per_node
    for name, count in (("ranks", ranks), ("devices_per_node", per_node)):
        if count < 1:
            raise ValueError(f"{name}={count}; at least 1 is needed")
    nodes = -(-ranks // per_node)

    def level(wires: Level, values: dict[str, float | None]) -> Level:
        ports = per_node if wires.ports == cluster.devices_per_node else wires.ports
        given: dict[str, Any] = {name: x for name, x in values.items() if x is not None}
        sources = {**wires.sources, **dict.fromkeys(given, "what if")}
        return replace(wires, ports=ports, sources=sources, **given)

    wires = cluster.between
    if wires is None and (nodes > 1 or set(between.values()) != {None}):
        wires = replace(cluster.inside, name=f"{cluster.inside.name}, between nodes")
    new = replace(
        cluster, nodes=nodes, devices_per_node=per_node, inside=level(cluster.inside, inside),
        between=None if wires is None else level(wires, between),
    )  # fmt: skip
    if replace(new, nodes=cluster.nodes) == cluster:
        return new  # more or fewer nodes of the same kind
    return replace(new, title=f"{cluster.title}, changed")
