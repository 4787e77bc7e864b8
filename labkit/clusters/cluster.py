"""What is known of a cluster. Ranks are counted node by node: with 8 devices a node, ranks 0 to 7
are on the first. Rates are what the hardware is built for; `..._reached` is the part of it that
programs reach, 0 to 1. To ask what if, replace numbers: `dataclasses.replace(cluster, nodes=4)`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """`peak_flops`: of matrix products by dtype, "bfloat16", a multiplication and an addition being
    two. `launch_s`: what each operation takes at least. `host_s`: what the host takes to launch
    one; it runs ahead, and counts only where it is the slower of the two (see
    labkit.replaying.planning.stages). `sources`: of each number, by its name.

    A matrix product is cut into tiles, and a side d reaches d / (d + tile) of `matmul_reached`,
    which large products have (see `matmul_flops_per_s`)."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    matmul_reached: float = 1.0
    memory_reached: float = 1.0
    tile: float = 0.0
    host_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def peak_flops_of(self, dtype: str) -> float:
        """Raises ValueError for a dtype it has no rate for."""
        if dtype not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no rate for {dtype}; it has {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]

    def matmul_flops_per_s(self, dtype: str, sides: Iterable[int]) -> float:
        """What a product [m, k] x [k, n] of `sides` (m, n, k) runs at."""
        part = self.matmul_reached
        for side in sides:
            part *= side / (side + self.tile)
        return self.peak_flops_of(dtype) * part


@dataclass(frozen=True)
class Level:
    """`ports` wires for the devices of each node; each carries `bytes_per_s` one way and as much
    the other. `latency_s` is that of one message: of one step of a ring. `start_s`: what a
    collective takes before its first byte leaves."""

    name: str
    bytes_per_s: float
    latency_s: float
    ports: int
    reached: float = 1.0
    start_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `devices_per_node`, with wires `inside` each and, if there are several,
    `between` them."""

    name: str
    title: str
    device: Device
    nodes: int
    devices_per_node: int
    inside: Level
    between: Level | None = None

    def __post_init__(self) -> None:
        for what in ("nodes", "devices_per_node"):
            if getattr(self, what) < 1:
                raise ValueError(f"{self.name}: {what}={getattr(self, what)}; at least 1 is needed")
        if self.nodes > 1 and self.between is None:
            raise ValueError(
                f"{self.name} has {self.nodes} nodes, and no level between them; describe one (in "
                "a file: a second table of levels), or nodes=1"
            )

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """Raises ValueError for a rank it has no device for."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{self.name} has {self.size} devices ({self.nodes} nodes of "
                f"{self.devices_per_node}), and none for rank {rank}"
            )
        return rank // self.devices_per_node

    def level_of(self, ranks: Iterable[int]) -> Level:
        """The slowest level that joins these ranks."""
        if len({self.node_of(rank) for rank in ranks}) < 2:
            return self.inside
        assert self.between is not None
        return self.between

    def share_bytes_per_s(self, level: Level) -> float:
        """What one device has of a level while all devices of its node send, each its own. (A ring
        over all of them leaves each node once: it has the whole port.)"""
        return level.bytes_per_s * min(1.0, level.ports / self.devices_per_node)
