"""Lab 03's rings: the NVLinks of a DGX-1, the time of rings, a ring in any order of ranks."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from labkit import Comm, World, listen
from labkit.labs.lab_03 import checks as check
from labkit.labs.lab_03.scenarios import (
    DGX1,
    PCIE_GBYTES,
    best_us,
    bytes_by_pair,
    ring_in_order,
    rings_us,
)

DOUBLE, SINGLE = [0, 3, 2, 1, 5, 6, 7, 4], [0, 1, 3, 7, 5, 4, 6, 2]
HALF = [DOUBLE, DOUBLE, SINGLE]  # the other half runs in the opposite direction


def test_a_dgx_1_has_six_nvlinks_out_of_each_gpu_and_as_many_in() -> None:
    for gpu in range(8):
        assert sum(count for (a, _), count in DGX1.items() if a == gpu) == 6
    assert all(DGX1[b, a] == count for (a, b), count in DGX1.items())


def test_the_slowest_hop_determines_the_time() -> None:
    each = 2 * 7 / 8 * 1e9  # bytes over a hop of a single ring
    assert rings_us([DOUBLE], DGX1) == pytest.approx(each / 50e9 * 1e6)
    assert rings_us([SINGLE], DGX1) == pytest.approx(each / 25e9 * 1e6)
    assert rings_us([list(range(8))], DGX1) == pytest.approx(each / (PCIE_GBYTES * 1e9) * 1e6)


def test_only_rings_over_the_same_hops_share_their_nvlinks() -> None:
    alone = rings_us([DOUBLE], DGX1)
    assert rings_us([DOUBLE, DOUBLE], DGX1) == pytest.approx(alone)
    assert rings_us([DOUBLE, DOUBLE[::-1]], DGX1) == pytest.approx(alone / 2)


def test_six_rings_saturate_all_links_and_the_check_calls_them_optimal() -> None:
    best = HALF + [ring[::-1] for ring in HALF]
    assert rings_us(best, DGX1) == pytest.approx(best_us(DGX1))
    assert "optimal: all 6 NVLinks" in repr(check.rings(lambda links: best))
    assert "optimal: all 6 NVLinks" not in repr(check.rings(lambda links: HALF))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_a_ring_in_any_order_sums_and_sends_along_its_hops(
    worlds: Callable[..., World], order: list[int]
) -> None:
    def play() -> tuple[torch.Tensor, list[object]]:
        comm = Comm()
        x = torch.arange(8.0) * (comm.rank + 1)
        with listen() as events:
            ring_in_order(comm, x, order)
        return x, events

    results = worlds(4, backend="gloo", device="cpu").run(play)
    assert all(torch.equal(x, 10 * torch.arange(8.0)) for x, _ in results)
    sent_bytes = bytes_by_pair([events for _, events in results])
    hops = set(zip(order, order[1:] + order[:1]))
    for pair in product(range(4), repeat=2):
        assert sent_bytes[pair] == (2 * 3 * 32 // 4 if pair in hops else 0)
