"""A modelled wire: real bytes, delivered no sooner than a wire of this speed would have.

On a laptop the ranks share the cores that also carry the messages, so a slow network and the
overlap that hides it cannot be seen. A `Link` makes them visible: each rank gets one outgoing
wire, a message occupies it for bytes / bandwidth and arrives one latency later.
Only sending is limited: many ranks that send to one at once each get their wire's full speed, where
a real network card would also limit what comes in.
Every picture made this way is labelled "paced". `TwoLevel` makes a cluster of it: fast wires inside
each node, slow ones between nodes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A wire out of each rank: `gbps` gigabits (1e9 bits) per second, `latency_us` microseconds.

    >>> Link(gbps=8).seconds(1_000_000_000)
    1.0
    """

    gbps: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.gbps > 0:
            raise ValueError(
                f"Link(gbps={self.gbps}): a wire needs a bandwidth above 0 gigabits per second"
            )
        if not self.latency_us >= 0:
            raise ValueError(f"Link(latency_us={self.latency_us}): latency cannot be negative")

    def seconds(self, nbytes: int) -> float:
        """How long a message of `nbytes` occupies the wire, without the latency."""
        return nbytes * 8 / (self.gbps * 1e9)

    def joining(self, one: int, other: int) -> "Link":
        """The wire from global rank `one` to `other`: here all are alike."""
        return self

    def level(self, one: int, other: int) -> str:
        """The name of the wire's level: here there is one."""
        return ""


@dataclass(frozen=True)
class TwoLevel:
    """The wires of a cluster: `inside` each node of `ranks_per_node` neighbouring global ranks,
    and `between` nodes. Each rank has one outgoing wire of either kind (a network card of its own,
    as each GPU of a DGX has), and they do not slow each other down.

    >>> TwoLevel(inside=Link(gbps=100), between=Link(gbps=10), ranks_per_node=2).joining(1, 2)
    Link(gbps=10, latency_us=0.0)
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(
                f"TwoLevel(ranks_per_node={self.ranks_per_node}): a node has at least 1 rank"
            )

    def joining(self, one: int, other: int) -> Link:
        """The wire from global rank `one` to `other`."""
        return self.inside if self.level(one, other) == "inside" else self.between

    def level(self, one: int, other: int) -> str:
        """The name of its level, "inside" or "between"."""
        same = one // self.ranks_per_node == other // self.ranks_per_node
        return "inside" if same else "between"
