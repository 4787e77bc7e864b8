"""Times on a cluster: roofline model for operations, alpha-beta model for communication.

    operation     the maximum of   FLOPs / matmul rate for these m, n, k
                                   bytes read and written / memory bandwidth
                                   kernel launch time
    collective    start-up time + steps x latency + bytes sent per rank / bandwidth
    message       bytes / link bandwidth + latency

Steps and bytes (labkit.comm.collectives.costs) assume a tensor pipelined in very small chunks, so
each step adds one latency. As in NCCL, the fastest algorithm is chosen. A ring leaves each node
once, with the combined port shares of its ranks on that node; the node with the fewest ranks is the
bottleneck. A rank that sends directly to all other ranks gets one device's share of the ports. The
latencies are those of NCCL's Simple protocol, so the times of short tensors are overestimated.

Sources: Williams et al., "Roofline", CACM 52(4), 2009; Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005; NCCL, src/graph/tuning.cc, for intra-node and
inter-node steps.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from labkit.clusters import Cluster
from labkit.comm.collectives.costs import cost, rounds
from labkit.events import CommEvent
from labkit.trace import Operation

ALGORITHMS = {  # per collective; the fastest is chosen
    "all_reduce": ("ring", "double_tree"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("chain",),
    "reduce": ("chain",),
    "gather": ("flat",),
    "scatter": ("flat",),
    "all_to_all": ("pairwise",),
    "ring_exchange": ("next",),
    "barrier": ("dissemination",),
}
TREES = ("double_tree", "tree", "dissemination")  # log2(n) steps, log2(nodes) of them between nodes
DIRECT = ("flat", "pairwise")  # every rank sends directly to its targets
VERY_LONG_BYTES = 1 << 50
T = TypeVar("T")


class Sending(NamedTuple):
    """Transfer time: `seconds` during which `port` is busy, then `latency_s` until arrival."""

    seconds: float
    latency_s: float
    port: str
    algorithm: str

    @property
    def total_s(self) -> float:
        return self.seconds + self.latency_s


class Costs:
    """Times of operations, collectives and messages on a cluster."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._cache: dict[Hashable, Any] = {}

    def cached(self, compute: Callable[..., T], *args: Hashable) -> T:
        """Return `compute(self, *args)`, memoized."""
        key = compute, args
        if key not in self._cache:
            self._cache[key] = compute(self, *args)
        return self._cache[key]

    def compute_s(self, operation: Operation) -> float:
        """Roofline time of an operation. Raises ValueError for a matmul dtype without a rate."""
        device = self.cluster.device
        seconds = operation.moved_bytes / (device.memory_bytes_per_s * device.memory_reached)
        if operation.flops:
            rate = device.matmul_flops_per_s(operation.dtype, operation.sides)
            seconds = max(seconds, operation.flops / rate)
        return max(seconds, device.launch_s)

    def sending(self, event: CommEvent) -> Sending:
        """Time of a collective or message. Raises ValueError for an unknown op or rank."""
        if event.op in ("send", "recv"):
            assert event.peer is not None
            ends = event.ranks[event.rank], event.ranks[event.peer]
            level = self.cluster.level_of(ends)
            bytes_per_s = self.cluster.share_bytes_per_s(level) * level.reached
            return Sending(event.payload_bytes / bytes_per_s, level.latency_s, level.name, "")
        return self.collective(event.op, event.payload_bytes, event.ranks)

    def collective(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> Sending:
        """Time of the fastest algorithm for a tensor of `nbytes` (S in the cost formulas)."""
        if op not in ALGORITHMS:
            raise ValueError(f"no collective {op!r}; choose one of {', '.join(ALGORITHMS)}")
        return self.cached(Costs._fastest, op, nbytes, ranks)

    def _fastest(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> Sending:
        if len(ranks) == 1:
            return Sending(0.0, 0.0, self.cluster.inside.name, "")
        placement = _Placement(ranks, self.cluster)
        seconds, name = min((placement.seconds(op, name, nbytes), name) for name in ALGORITHMS[op])
        return Sending(seconds, 0.0, placement.level.name, name)


class _Placement:
    """How a group's ranks are distributed over nodes."""

    def __init__(self, ranks: tuple[int, ...], cluster: Cluster):
        per_node = Counter(cluster.node_of(rank) for rank in ranks)
        self.cluster, self.n, self.nodes = cluster, len(ranks), len(per_node)
        self.most, self.fewest = max(per_node.values()), min(per_node.values())
        self.level = cluster.level_of(ranks)

    def seconds(self, op: str, algorithm: str, nbytes: int) -> float:
        """The sum of start-up time, bytes / bandwidth, and one latency per step."""
        steps = 1 if algorithm in DIRECT else cost(op, algorithm, self.n, 0).steps
        sent_bytes = nbytes * _sent_per_byte(op, algorithm, self.n)
        seconds = sent_bytes / self._bytes_per_s(algorithm) + self.level.start_s
        between = self._steps_between(algorithm, steps)
        if self.cluster.between is not None:
            seconds += between * self.cluster.between.latency_s
        return seconds + (steps - between) * self.cluster.inside.latency_s

    def _steps_between(self, algorithm: str, steps: float) -> float:
        """The number of sequential steps that cross nodes."""
        if self.nodes == 1:
            return 0.0
        if algorithm in TREES:
            return steps * min(1.0, rounds(self.nodes) / rounds(self.n))
        return steps if algorithm in DIRECT else steps * self.nodes / self.n

    def _bytes_per_s(self, algorithm: str) -> float:
        inside, between = self.cluster.inside, self.cluster.between
        inside_rate = inside.reached * self.cluster.share_bytes_per_s(inside)
        if self.nodes == 1 or between is None:
            return inside_rate
        port_rate = between.reached * self.cluster.share_bytes_per_s(between)
        if algorithm in DIRECT:  # bottleneck: the fullest node inside, the emptiest between nodes
            share_inside = (self.most - 1) / (self.n - 1)
            share_between = (self.n - self.fewest) / (self.n - 1)
            return 1 / max(share_inside / inside_rate, share_between / port_rate)
        return port_rate if self.most == 1 else min(port_rate * self.fewest, inside_rate)


@cache
def _sent_per_byte(op: str, algorithm: str, n: int) -> float:
    """Bytes that the busiest rank sends per byte of a very long tensor."""
    return cost(op, algorithm, n, VERY_LONG_BYTES).sent_bytes / VERY_LONG_BYTES
