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

    Where each device of a node has its own port, it keeps one when nodes become larger or smaller;
    otherwise a node keeps its number of ports.

    A cluster of a single node has no wires between nodes. Where it needs some, or is given their
    speed, they are like those inside but for the given values, as if one switch joined all nodes.

    Raises ValueError for a bandwidth that is not above 0, a latency below it, or no ranks.
    """
    for name, value in (("inside", inside_bytes_per_s), ("between", between_bytes_per_s)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}_bytes_per_s={value}; it must be more than 0")
    for name, value in (("inside", inside_latency_s), ("between", between_latency_s)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name}_latency_s={value}; it must be 0 or more")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}; at least 1 is needed")
    per_node = cluster.devices_per_node if devices_per_node is None else devices_per_node
    if per_node < 1:
        raise ValueError(f"devices_per_node={per_node}; at least 1 is needed")
    nodes = -(-ranks // per_node)
    given = (between_bytes_per_s, between_latency_s) != (None, None)
    between = cluster.between
    if between is None and (nodes > 1 or given):
        between = replace(cluster.inside, name=f"{cluster.inside.name}, between nodes")
    if between is not None:
        between = _with(between, cluster, per_node, between_bytes_per_s, between_latency_s)
    inside = _with(cluster.inside, cluster, per_node, inside_bytes_per_s, inside_latency_s)
    new = replace(cluster, nodes=nodes, devices_per_node=per_node, inside=inside, between=between)
    if replace(new, nodes=cluster.nodes) == cluster:
        return new  # more or fewer nodes of the same kind
    return replace(new, title=f"{cluster.title}, changed")


def _with(
    level: Level,
    cluster: Cluster,
    per_node: int,
    bytes_per_s: float | None,
    latency_s: float | None,
) -> Level:
    """This level with the given values, in nodes of `per_node` devices."""
    changes: dict[str, Any] = {}
    if level.ports == cluster.devices_per_node:
        changes["ports"] = per_node
    for name, value in (("bytes_per_s", bytes_per_s), ("latency_s", latency_s)):
        if value is not None:
            changes[name] = value
            changes["sources"] = {**changes.get("sources", level.sources), name: "what if"}
    return replace(level, **changes)
