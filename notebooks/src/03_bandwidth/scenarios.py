"""Lab 03's rings: an all-reduce along a ring in any order, and the NVLinks of a DGX-1."""

from collections.abc import Mapping, Sequence

import torch

from labkit.comm import Comm
from labkit.events import CommEvent

Links = Mapping[tuple[int, int], int]  # (source GPU, target GPU) -> number of NVLinks

NVLINK_GBYTES = 25.0  # GB/s of one NVLink 2, per direction
PCIE_GBYTES = 8 * 16 * 128 / 130 / 8  # PCIe 3: 8 GT/s, 16 lanes, 128 of 130 bits are data

# NVLinks per pair of GPUs in a DGX-1 with V100s, 6 per GPU. Source: NVIDIA, "NVIDIA DGX-1
# With Tesla V100 System Architecture", 2017, and `nvidia-smi topo -m` on such a machine.
_PAIRS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
DGX1: dict[tuple[int, int], int] = _PAIRS | {(b, a): count for (a, b), count in _PAIRS.items()}


def ring_in_order(comm: Comm, x: torch.Tensor, order: Sequence[int]) -> None:
    """All-reduce `x` in place with lab 02's ring, in this order of ranks. `x.numel()` must be
    divisible by comm.size."""
    n, position = comm.size, order.index(comm.rank)
    after, before = order[(position + 1) % n], order[position - 1]
    chunks = x.view(n, -1)
    received = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        handle = comm.isend(chunks[(position - step) % n], after)
        chunk = chunks[(position - step - 1) % n]
        comm.recv(received, before)
        if step < n - 1:
            chunk += received  # the reduce-scatter
        else:
            chunk.copy_(received)  # the all-gather
        handle.wait()


def bytes_by_pair(events_of_ranks: Sequence[Sequence[CommEvent]]) -> torch.Tensor:
    """[source, target]: bytes sent between each pair of ranks, from every rank's events."""
    n = len(events_of_ranks)
    sent_bytes = torch.zeros(n, n, dtype=torch.int64)
    for rank, events in enumerate(events_of_ranks):
        for event in events:
            if event.op == "send":
                assert event.peer is not None
                sent_bytes[rank, event.peer] += event.payload_bytes
    return sent_bytes


def rings_us(rings: Sequence[Sequence[int]], links: Links, nbytes: float = 1e9) -> float:
    """Microseconds of an all-reduce of `nbytes` if each ring carries an equal share.

    Every hop carries 2(n-1)/n of its ring's share, and rings that use the same hop share the
    hop's NVLinks. The slowest hop determines the time. A hop without NVLink uses PCIe."""
    load_bytes: dict[tuple[int, int], float] = {}
    for ring in rings:
        n = len(ring)
        for i, gpu in enumerate(ring):
            hop = (gpu, ring[(i + 1) % n])
            load_bytes[hop] = load_bytes.get(hop, 0) + 2 * (n - 1) / n * nbytes / len(rings)
    return max(1e-3 * load / speed_of(hop, links) for hop, load in load_bytes.items())


def speed_of(hop: tuple[int, int], links: Links) -> float:
    """GB/s of a hop, from its source to its target."""
    return links[hop] * NVLINK_GBYTES if hop in links else PCIE_GBYTES


def best_us(links: Links, ranks: int = 8, nbytes: float = 1e9) -> float:
    """A lower bound in microseconds for any choice of rings: all NVLinks of a GPU are saturated."""
    link_count = sum(count for (gpu, _), count in links.items() if gpu == 0)
    return 1e-3 * 2 * (ranks - 1) / ranks * nbytes / (link_count * NVLINK_GBYTES)
