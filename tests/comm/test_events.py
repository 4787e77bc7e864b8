"""The formulas of the bytes, without ranks and without torch."""

import csv
from collections.abc import Callable
from fractions import Fraction

import pytest

from command import python
from labkit.events import (
    CommEvent,
    all_gather_bus_bytes,
    all_reduce_bus_bytes,
    chunk_sizes,
    reduce_scatter_bus_bytes,
)
from places import PUBLISHED
from tables import raises

# Bus bandwidth over algorithm bandwidth on n ranks (nccl-tests, doc/PERFORMANCE.md; the rows of
# tests/data/published/bus_bandwidth_factors.csv). For all-gather and reduce-scatter, S is the total
# size.
FACTORS: dict[str, Callable[[int], Fraction]] = {
    "AllReduce": lambda n: Fraction(2 * (n - 1), n),
    "ReduceScatter": lambda n: Fraction(n - 1, n),
    "AllGather": lambda n: Fraction(n - 1, n),
}
FORMULAS: dict[str, Callable[[list[int], int], int]] = {
    "AllReduce": all_reduce_bus_bytes,
    "ReduceScatter": reduce_scatter_bus_bytes,
    "AllGather": all_gather_bus_bytes,
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


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("n", RANKS)
def test_bus_bytes_are_the_factor_times_the_payload_where_it_divides(name: str, n: int) -> None:
    for chunk in (0, 1, 3, 4096):
        chunk_bytes = [chunk * 4] * n
        for rank in range(n):
            expected = FACTORS[name](n) * sum(chunk_bytes)
            assert FORMULAS[name](chunk_bytes, rank) == expected


@pytest.mark.parametrize("n", RANKS)
def test_bus_bytes_of_all_ranks_are_exact_for_sizes_that_do_not_divide(n: int) -> None:
    for numel in ODD:
        chunk_bytes = [8 * size for size in chunk_sizes(numel, n)]
        total = {
            name: sum(formula(chunk_bytes, rank) for rank in range(n))
            for name, formula in FORMULAS.items()
        }
        assert total["AllReduce"] == 2 * (n - 1) * 8 * numel
        assert total["ReduceScatter"] == total["AllGather"] == (n - 1) * 8 * numel


def test_a_rank_sends_the_chunks_that_a_ring_makes_it_send() -> None:
    """The ring, step by step: with what each rank passes on, its bytes are those of the formula."""
    for n in (1, 2, 3, 4, 7):
        for chunk_bytes in (chunk_sizes(1001, n), [13 * r % 5 for r in range(n)]):
            for rank in range(n):
                inwards = [chunk_bytes[(rank - step) % n] for step in range(1, n)]
                outwards = [chunk_bytes[(rank - step) % n] for step in range(n - 1)]
                both = sum(inwards) + sum(outwards)
                assert reduce_scatter_bus_bytes(chunk_bytes, rank) == sum(inwards)
                assert all_gather_bus_bytes(chunk_bytes, rank) == sum(outwards)
                assert all_reduce_bus_bytes(chunk_bytes, rank) == both


def test_the_factors_are_those_published() -> None:
    with open(PUBLISHED / "bus_bandwidth_factors.csv") as file:
        rows = {row["collective"]: row["busbw_over_algbw"] for row in csv.DictReader(file)}
    for name, factor in FACTORS.items():
        formula = rows[name].replace("2(", "2*(")
        for n in RANKS:
            assert factor(n) == eval(formula.replace("n", f"Fraction({n})"), {"Fraction": Fraction})


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
