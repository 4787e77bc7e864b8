"""Lab 03's rings: an all-reduce through the ranks in any order, and the wires of a DGX-1."""

from collections.abc import Mapping, Sequence

import torch

from labkit.comm import Comm
from labkit.events import CommEvent

Wires = Mapping[tuple[int, int], int]  # (one GPU, another) -> NVLinks from the first to the second

NVLINK_GBYTES = 25.0  # GB/s of one NVLink 2, in each direction
PCIE_GBYTES = 8 * 16 * 128 / 130 / 8  # PCIe 3: 8 GT/s, 16 lanes, 128 of 130 bits are data

# One row for each pair of a DGX-1 with V100s, 6 NVLinks for each GPU. Source: NVIDIA, "NVIDIA DGX-1
# With Tesla V100 System Architecture", 2017, and `nvidia-smi topo -m` on such a machine.
_PAIRS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
DGX1: dict[tuple[int, int], int] = _PAIRS | {(b, a): count for (a, b), count in _PAIRS.items()}


def ring_in_order(comm: Comm, x: torch.Tensor, order: Sequence[int]) -> None:
    """Sum `x` over all ranks, in place, by lab 02's ring in this order. n divides `x.numel()`."""
    n, place = comm.size, order.index(comm.rank)
    after, before = order[(place + 1) % n], order[place - 1]
    chunks = x.view(n, -1)
    arrived = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        sending = comm.isend(chunks[(place - step) % n], after)
        mine = chunks[(place - step - 1) % n]
        comm.recv(arrived, before)
        if step < n - 1:
            mine += arrived  # the first time round, sums grow ...
        else:
            mine.copy_(arrived)  # ... and the second time, they are passed on
        sending.wait()


def bytes_by_pair(events_of_ranks: Sequence[Sequence[CommEvent]]) -> torch.Tensor:
    """[from, to]: the bytes that each rank sends to each other rank, from each rank's events."""
    n = len(events_of_ranks)
    sent_bytes = torch.zeros(n, n, dtype=torch.int64)
    for rank, events in enumerate(events_of_ranks):
        for event in events:
            if event.op == "send":
                assert event.peer is not None
                sent_bytes[rank, event.peer] += event.payload_bytes
    return sent_bytes


def rings_us(rings: Sequence[Sequence[int]], wires: Wires, nbytes: float = 1e9) -> float:
    """Microseconds of an all-reduce of `nbytes` if each ring carries an equal share.

    Every hop of a ring carries 2(n-1)/n of its share, and rings with the same hop share its
    NVLinks. The busiest hop decides. A hop without NVLink uses PCIe."""
    load_bytes: dict[tuple[int, int], float] = {}
    for ring in rings:
        n = len(ring)
        for i, gpu in enumerate(ring):
            hop = (gpu, ring[(i + 1) % n])
            load_bytes[hop] = load_bytes.get(hop, 0) + 2 * (n - 1) / n * nbytes / len(rings)
    return max(1e-3 * its / speed_of(hop, wires) for hop, its in load_bytes.items())


def speed_of(hop: tuple[int, int], wires: Wires) -> float:
    """GB/s from one GPU to the other."""
    return wires[hop] * NVLINK_GBYTES if hop in wires else PCIE_GBYTES


def best_us(wires: Wires, ranks: int = 8, nbytes: float = 1e9) -> float:
    """The lower bound for any rings: all NVLinks out of a GPU are busy."""
    links = sum(count for (gpu, _), count in wires.items() if gpu == 0)
    return 1e-3 * 2 * (ranks - 1) / ranks * nbytes / (links * NVLINK_GBYTES)
