"""A modeled link: real bytes, delivered no sooner than a link of this speed would deliver them.

Ranks on a laptop share the cores that also carry their messages, so a slow network and its overlap
with computation are invisible. A `Link` makes both visible: each rank has one outgoing link; a
message occupies the link for bytes / bandwidth and arrives one latency later. Only sends are
limited: a real network card would also limit bytes arriving from many ranks at once. `TwoLevel`
models a cluster: fast links inside nodes, slow links between them. Plots label such runs "paced".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """An outgoing link per rank: `gbps` gigabits (1e9 bits) per second, `latency_us` microseconds.

    >>> Link(gbps=8).seconds(1_000_000_000)
    1.0
    """

    gbps: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.gbps > 0:
            raise ValueError(
                f"Link(gbps={self.gbps}): choose a bandwidth above 0 gigabits per second"
            )
        if not self.latency_us >= 0:
            raise ValueError(f"Link(latency_us={self.latency_us}): choose a latency of 0 or more")

    def seconds(self, nbytes: int) -> float:
        """Seconds for which a message of `nbytes` occupies the link, excluding the latency."""
        return nbytes * 8 / (self.gbps * 1e9)

    def joining(self, one: int, other: int) -> "Link":
        """The link from global rank `one` to `other`: here the same for every pair."""
        return self

    def level(self, one: int, other: int) -> str:
        """The level of the link between two ranks: here unnamed, because there is one level."""
        return ""


@dataclass(frozen=True)
class TwoLevel:
    """The links of a cluster: `inside` each node of `ranks_per_node` adjacent global ranks,
    `between` nodes. Each rank has an independent outgoing link per level, like each GPU of a DGX.

    >>> TwoLevel(inside=Link(gbps=100), between=Link(gbps=10), ranks_per_node=2).joining(1, 2)
    Link(gbps=10, latency_us=0.0)
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(
                f"TwoLevel(ranks_per_node={self.ranks_per_node}): a node needs at least 1 rank"
            )

    def joining(self, one: int, other: int) -> Link:
        """The link from global rank `one` to `other`."""
        return self.inside if self.level(one, other) == "inside" else self.between

    def level(self, one: int, other: int) -> str:
        """The level of the link between two ranks, "inside" or "between" nodes."""
        same = one // self.ranks_per_node == other // self.ranks_per_node
        return "inside" if same else "between"
