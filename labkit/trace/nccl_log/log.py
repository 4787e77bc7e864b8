"""The contents of an NCCL log. A *channel* is a ring and a tree that carry a share of the bytes:
NCCL runs several channels concurrently, each on some GPU threads, to saturate all links."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class NcclRank:
    """One rank of a communicator: a GPU used by a process on a host."""

    rank: int
    host: str
    pid: int
    device: int  # CUDA device index in the process
    bus_id: str = ""  # PCI bus id of the GPU, in hexadecimal: "1d000"
    ready: bool = False  # logged "Init COMPLETE"


@dataclass(frozen=True, slots=True)
class Connection:
    """`source` sends to `target`. `transport` is NCCL's text, such as "NET/IB/0/GDRDMA". Both ends
    log a network connection, so it may appear twice, as "send" and as "receive"."""

    channel: int
    source: int
    target: int
    transport: str
    end: str = ""  # "send" or "receive" over a network, else ""

    @property
    def kind(self) -> str:
        """The transport without details: "P2P", "SHM", "NET/IB", "NET/Socket"."""
        parts = self.transport.split("/")
        return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]

    @property
    def gpu_direct(self) -> bool:
        """Whether the network card accesses GPU memory directly (GPUDirect RDMA)."""
        return "GDRDMA" in self.transport


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A rank's position in the tree of one channel."""

    parent: int | None
    children: tuple[int, ...]


@dataclass
class Communicator:
    """A group of ranks. `id` is NCCL's commId; for a split without a commId, the parent's id, split
    number and color; "" if the log shows neither."""

    id: str = ""
    size: int = 0
    ranks: dict[int, NcclRank] = field(default_factory=dict)
    channels: int = 0  # number of channels; the log may show fewer rings
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[int, dict[int, TreeNode]] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    thresholds: str = ""  # NCCL's threadThresholds, verbatim

    @property
    def ready(self) -> bool:
        """Whether every rank logged "Init COMPLETE"; if not, a rank may hang."""
        return 0 < self.size == sum(rank.ready for rank in self.ranks.values())

    def hosts(self) -> dict[str, list[int]]:
        """host -> ranks, in ascending order."""
        hosts: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            hosts.setdefault(self.ranks[rank].host, []).append(rank)
        return hosts

    def same_node(self, first: int, second: int) -> bool:
        """Whether both ranks are on the same host; False if either host is unknown."""
        both = first in self.ranks and second in self.ranks
        return both and self.ranks[first].host == self.ranks[second].host

    def over(self, source: int, target: int, channel: int | None = None) -> Connection | None:
        """The connection from `source` to `target` on `channel` (None: any), or None if missing."""
        for link in self.connections:
            if (link.source, link.target) == (source, target) and channel in (None, link.channel):
                return link
        return None

    def hops(self, channel: int) -> Iterator[tuple[int, int]]:
        """(source, target) of every hop along a channel's ring."""
        ring = self.rings[channel]
        return zip(ring, ring[1:] + ring[:1])


def alike(graphs: Mapping[int, Hashable]) -> list[list[int]]:
    """Group channels with equal rings or trees."""
    channels: dict[Hashable, list[int]] = {}
    for channel, graph in sorted(graphs.items()):
        channels.setdefault(graph, []).append(channel)
    return list(channels.values())


@dataclass
class NcclLog:
    """The contents of a log. `lines` counts NCCL's lines, `understood` the parsed lines."""

    versions: list[str] = field(default_factory=list)  # several if ranks differ
    networks: list[str] = field(default_factory=list)  # in use: "IB", "Socket" or a plugin
    cards: dict[str, list[str]] = field(default_factory=dict)  # host -> "mlx5_0:1/IB" or "eth0"
    settings: dict[str, str] = field(default_factory=dict)  # NCCL_... variable -> value
    warnings: list[str] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)  # largest first
    lines: int = 0
    understood: int = 0

    @property
    def version(self) -> str:
        """NCCL's version; every version if ranks differ; "" if the log shows none."""
        return ", ".join(self.versions)

    @property
    def main(self) -> Communicator:
        """The largest communicator. Raises ValueError if the log has no communicator."""
        if not self.communicators:
            raise ValueError(
                "this log has no communicator; run with NCCL_DEBUG=INFO, and keep all lines "
                "from the first collective on"
            )
        return self.communicators[0]
