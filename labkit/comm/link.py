"""A modelled wire: real bytes, delivered no sooner than a wire of this speed would have.

On a laptop the ranks share the cores that also carry the messages, so a slow network and the
overlap that hides it cannot be seen. A `Link` makes them visible: each rank gets one outgoing
wire, a message occupies it for bytes / bandwidth and arrives one latency later.
Every picture made this way is labelled "paced".
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
