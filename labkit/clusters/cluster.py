"""Cluster rates and sizes. Ranks are numbered node by node: with 8 devices per node, ranks 0 to 7
are on node 0. `reached` and `..._reached`: the fraction of the hardware rate that programs reach.
For what-if analysis, replace fields: `dataclasses.replace(cluster, nodes=4)`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A device. Matmuls run in tiles, so each side d multiplies the rate by d / (d + tile)."""

    name: str
    peak_flops: Mapping[str, float]  # matmul peak by dtype ("bfloat16"); a multiply-add is 2 FLOPs
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float  # the minimum time of an operation
    matmul_reached: float = 1.0  # for very large matmuls
    memory_reached: float = 1.0
    tile: float = 0.0
    host_s: float = 0.0  # host time per launch (planning); matters if slower than the device
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)  # by field name

    def peak_flops_of(self, dtype: str) -> float:
        """Peak FLOP/s. Raises ValueError for a dtype without a rate."""
        if dtype not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no rate for {dtype}; choose one of {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]

    def matmul_flops_per_s(self, dtype: str, sides: Iterable[int]) -> float:
        """FLOP/s of a matmul [m, k] x [k, n] with `sides` (m, n, k)."""
        reached = self.matmul_reached
        for side in sides:
            reached *= side / (side + self.tile)
        return self.peak_flops_of(dtype) * reached


@dataclass(frozen=True)
class Level:
    """The links inside nodes, or the links between nodes."""

    name: str
    bytes_per_s: float  # per port and direction
    latency_s: float  # per message, or per step of a collective
    ports: int  # per node
    reached: float = 1.0
    start_s: float = 0.0  # delay before a collective's first byte leaves
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `devices_per_node` devices, linked `inside` and `between` nodes."""

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
                raise ValueError(f"{self.name}: {what}={getattr(self, what)}; choose at least 1")
        if self.nodes > 1 and self.between is None:
            raise ValueError(
                f"{self.name} has {self.nodes} nodes, but no level between nodes; add a level "
                "(in a file, a second `levels` table), or set nodes=1"
            )

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node of `rank`. Raises ValueError for a rank without a device."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{self.name} has no rank {rank}: its {self.size} devices ({self.nodes} nodes of "
                f"{self.devices_per_node}) have ranks 0 to {self.size - 1}"
            )
        return rank // self.devices_per_node

    def level_of(self, ranks: Iterable[int]) -> Level:
        """The level that links these ranks: `inside` if they share a node, else `between`."""
        if len({self.node_of(rank) for rank in ranks}) < 2:
            return self.inside
        assert self.between is not None
        return self.between

    def share_bytes_per_s(self, level: Level) -> float:
        """A device's bandwidth while all devices of its node send separately. (A ring over all
        devices leaves each node once, at the combined rate of the node's ports.)"""
        return level.bytes_per_s * min(1.0, level.ports / self.devices_per_node)
