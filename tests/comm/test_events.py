"""The formulas of the bytes, without ranks and without torch."""

import csv
from collections.abc import Callable
from fractions import Fraction

import pytest

from command import python
from labkit import events
from labkit.events import CommEvent, chunk_sizes
from places import PUBLISHED
from tables import raises

# The formula of a collective, and how often a rank sends n - 1 of n parts of the payload, which is
# the total size for all-gather and reduce-scatter (nccl-tests, doc/PERFORMANCE.md;
# tests/data/published/bus_bandwidth_factors.csv).
FORMULAS: dict[str, tuple[Callable[[list[int], int], int], int]] = {
    "AllReduce": (events.all_reduce_bus_bytes, 2),
    "ReduceScatter": (events.reduce_scatter_bus_bytes, 1),
    "AllGather": (events.all_gather_bus_bytes, 1),
}
RANKS = (1, 2, 3, 4, 5, 7, 8, 16, 1024)
ODD = (0, 1, 2, 3, 5, 7, 11, 1000, 1001, 65_537)


@pytest.mark.parametrize("n", RANKS)
def test_chunks_add_up_and_differ_by_one_at_most_the_larger_first(n: int) -> None:
    for numel in ODD:
        sizes = chunk_sizes(numel, n)
        assert len(sizes) == n and sum(sizes) == numel
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("n", RANKS)
def test_bus_bytes_are_the_published_factor_times_the_payload(name: str, n: int) -> None:
    with open(PUBLISHED / "bus_bandwidth_factors.csv") as file:
        published = {row["collective"]: row["busbw_over_algbw"] for row in csv.DictReader(file)}
    written = published[name].replace("2(", "2*(").replace("n", f"Fraction({n})")
    factor = eval(written, {"Fraction": Fraction})
    formula, times = FORMULAS[name]
    assert factor == Fraction(times * (n - 1), n)
    for chunk in (0, 1, 3, 4096):  # where it divides
        for rank in range(n):
            assert formula([chunk * 4] * n, rank) == factor * chunk * 4 * n
    for numel in ODD:  # where it does not: of all ranks
        chunk_bytes = [8 * size for size in chunk_sizes(numel, n)]
        total = sum(formula(chunk_bytes, rank) for rank in range(n))
        assert total == times * (n - 1) * 8 * numel


def test_a_rank_sends_the_chunks_that_a_ring_makes_it_send() -> None:
    """The ring, step by step: with what each rank passes on, its bytes are those of the formula."""
    for n in (1, 2, 3, 4, 7):
        for chunk_bytes in (chunk_sizes(1001, n), [13 * r % 5 for r in range(n)]):
            for rank in range(n):
                inwards = [chunk_bytes[(rank - step) % n] for step in range(1, n)]
                outwards = [chunk_bytes[(rank - step) % n] for step in range(n - 1)]
                both = sum(inwards) + sum(outwards)
                assert events.reduce_scatter_bus_bytes(chunk_bytes, rank) == sum(inwards)
                assert events.all_gather_bus_bytes(chunk_bytes, rank) == sum(outwards)
                assert events.all_reduce_bus_bytes(chunk_bytes, rank) == both


def test_events_are_plain_data_that_need_no_torch() -> None:
    code = """
import sys
from labkit.events import CommEvent, chunk_sizes
assert chunk_sizes(10, 4) == [3, 3, 2, 2] and "torch" not in sys.modules
"""
    python("-c", code)
    event = CommEvent("all_reduce", "default", (0, 1), 0, 1, "float32", (4,), 16, 16, True)
    assert (event.wire_bytes, event.peer, event.source) == (0, None, "")
    # A misspelt count must not pass silently.
    raises("", setattr, event, "bytes", 3, error=AttributeError)
