"""This machine as a cluster: fits recover given constants; measured numbers have their sources."""

from collections import Counter
from contextlib import nullcontext
from itertools import product
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit import World, measure_machine, read_clusters, write_clusters
from labkit.bench import harness, machine
from labkit.bench.machine import Case
from labkit.bench.rates import fit_link, fit_matmuls
from labkit.clusters import Cluster, Device
from tables import cases, raises

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def matmuls(peaks: dict[str, float], tile: float, sides: tuple[int, ...]) -> dict[Case, float]:
    """By the formula of `Device`."""
    rate = Device("x", peaks, 1, 1, 0, tile=tile).matmul_flops_per_s
    return {
        Case("matmul", side, dtype): 2 * side**3 / rate(dtype, [side] * 3)
        for dtype, side in product(peaks, sides)
    }


def reduced(seconds: dict[tuple[int, int], float]) -> dict[Case, float]:
    """(ranks, bytes) -> seconds of an all-reduce."""
    return {Case("all-reduce", size, ranks=n): s for (n, size), s in seconds.items()}


@pytest.mark.parametrize("tile", [0, 3, 100, 4000])
def test_peaks_and_tile_are_found_again(tile: float) -> None:
    peaks = {"float32": 5e10, "bfloat16": 9e14}
    fit = fit_matmuls(matmuls(peaks, tile, (64, 128, 256, 1024)))
    assert fit.tile == pytest.approx(tile, rel=1e-2, abs=1e-3)
    assert fit.peak_flops == pytest.approx(peaks, rel=1e-2)
    assert fit.error < 1e-3


def test_one_odd_product_has_no_say() -> None:
    known = matmuls({"float32": 5e10, "float64": 3e10}, 10, (64, 128, 256, 512, 1024))
    first = next(iter(known))
    fit = fit_matmuls({**known, first: 5 * known[first]})
    assert fit.tile == pytest.approx(10, rel=1e-2)
    assert fit.peak_flops["float32"] == pytest.approx(5e10, rel=1e-2)
    assert fit.error == pytest.approx(log(5) / 10, rel=1e-2)


def all_reduce_s(ranks: int, nbytes: int, rate: float, latency_s: float, start_s: float) -> float:
    return start_s + 2 * (ranks - 1) * latency_s + 2 * (ranks - 1) / ranks * nbytes / rate


@cases(
    ((2, 4), 7e-6, 40e-6), ((2, 4), 0.0, 40e-6), ((2, 4), 7e-6, 0.0), ((2, 3), 1e-4, 1e-6)
)  # fmt: skip
def test_a_wire_is_found_again(ranks: tuple[int, ...], latency_s: float, start_s: float) -> None:
    wire = 3e9, latency_s, start_s
    fit = fit_link(reduced({(n, S): all_reduce_s(n, S, *wire) for n in ranks for S in SIZES}))
    assert fit.bytes_per_s == pytest.approx(3e9, rel=1e-3)
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
    assert fit.start_s == pytest.approx(start_s, rel=1e-2, abs=1e-8)
    assert fit.error < 1e-4


def test_on_one_number_of_ranks_the_start_is_in_the_latency() -> None:
    off = (1.1, 0.93, 1.04, 0.97)
    odd = fit_link(reduced({(3, S): by * (4e-5 + S / 3e9) for S, by in zip(SIZES, off)}))
    assert odd.start_s == 0 < odd.latency_s
    fit = fit_link(reduced({(2, S): 40e-6 + 2 * 7e-6 + S / 3e9 for S in SIZES}))
    assert (fit.start_s, fit.latency_s) == (0, pytest.approx(27e-6))
    assert fit.bytes_per_s == pytest.approx(3e9)


def test_what_says_too_little_is_refused() -> None:
    raises("at least 1 rank", measure_machine, 0)
    one_side_each = {Case("matmul", 64): 1.0, Case("matmul", 128, "float64"): 1.0}
    for known in ({}, one_side_each):
        raises("at least two matrix sizes of one dtype", fit_matmuls, known)
    for seconds, says in (
        ({(2, 64): 1.0, (4, 64): 1.0}, "two sizes or more, on two ranks"),
        ({(1, 64): 1.0, (1, 128): 1.0}, "two sizes or more, on two ranks"),
        ({(2, 64): 1.0, (2, 6400): 1.0}, "no longer than a small one"),
    ):
        raises(says, fit_link, reduced(seconds))


def complete(one: Cluster, ranks: int) -> None:
    """All numbers are there, are no nonsense, and have their source."""
    assert (one.name, one.nodes, one.devices_per_node, one.size) == ("here", 1, ranks, ranks)
    rates = {f"peak_flops.{dtype}" for dtype in ("float32", "float64", "bfloat16")}
    assert one.device.sources.keys() == rates | {
        "memory_bytes", "memory_bytes_per_s", "launch_s", "matmul_reached", "memory_reached",
        "tile",
    }  # fmt: skip
    assert one.inside.sources.keys() == {"bytes_per_s", "latency_s", "reached", "start_s"}
    for source in (*one.device.sources.values(), *one.inside.sources.values()):
        assert f"torch {torch.__version__.split('+')[0]}, {ranks} rank" in source
    device, wire = one.device, one.inside
    assert min(device.memory_bytes, device.memory_bytes_per_s, device.launch_s) > 0
    assert min(device.peak_flops.values()) > 0 and device.tile >= 0
    assert (device.matmul_reached, device.memory_reached, wire.reached) == (1, 1, 1)
    assert wire.ports == ranks
    assert one.share_bytes_per_s(wire) == wire.bytes_per_s > 0
    assert min(wire.latency_s, wire.start_s) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_are_measured(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROUNDS", 1)
    monkeypatch.setattr(machine, "SIDES", {"cpu": (16, 32, 64), "cuda": (64, 128, 256)})
    monkeypatch.setattr(machine, "COPIED_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    monkeypatch.setattr(machine, "REDUCED_BYTES", (1 << 10, 1 << 22))
    here = measure_machine(ranks)
    complete(here, ranks)
    if ranks == 1:
        assert here.inside.bytes_per_s == here.device.memory_bytes_per_s
        assert here.inside.latency_s == here.inside.start_s == 0
        assert here.inside.sources["latency_s"].startswith("one rank: nothing is sent")
    if ranks == 2:
        assert here.inside.start_s == 0
    write_clusters(tmp_path / "here.toml", {"here": here})
    assert read_clusters(tmp_path / "here.toml") == {"here": here}


@pytest.mark.slow
def test_four_ranks_are_measured_in_full() -> None:
    complete(measure_machine(4), 4)


def test_neighbours_make_groups_and_the_last_may_be_left_over(world3: World) -> None:
    def of_two() -> list[tuple[int, float]]:
        me = machine.attach()
        own = machine._group(me, 2)
        if own is None:
            return []
        x = torch.tensor([float(me.rank)])
        own.all_reduce(x)
        assert machine._group(me, 2) is own and machine._group(me, 3).size == 3
        return [(own.size, x.item())]

    assert world3.run(of_two) == [[(2, 1.0)], [(2, 1.0)], []]


@pytest.mark.parametrize(("enough_s", "rounds"), [(600, machine.ROUNDS), (-1, 1)])
def test_a_turn_is_as_long_as_on_its_slowest_rank_and_the_quick_turns_count(
    enough_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given what each rank says of its turns, the whole way to the numbers is exact."""
    runs: Counter[Case] = Counter()
    peaks, tile = dict.fromkeys(("float32", "float64", "bfloat16"), 4e10), 8.0
    wire = (2e9, 5e-6, 30e-6)

    def run(function: object, case: Case) -> list[list[float]]:
        runs[case] += 1
        if case.kind == "matmul":
            s = matmuls(peaks, tile, (case.size,))[case]
        elif case.kind == "all-reduce":
            s = all_reduce_s(case.ranks, case.size, *wire)
        else:
            s = 1e-6 if case.kind == "tiny" else 2 * case.size / 1e10
        return [[s, s / 2, s, s, 9 * s], [s / 3, s, s / 2, s, s]]

    ranks = SimpleNamespace(size=4, device="cpu", backend="gloo", transport="shm", run=run)
    monkeypatch.setattr(machine, "ENOUGH_S", enough_s)
    monkeypatch.setattr(machine, "World", lambda *_, **__: nullcontext(ranks))
    here = measure_machine(4)
    assert set(runs.values()) == {rounds}
    complete(here, 4)
    assert here.device.peak_flops == pytest.approx(peaks, rel=1e-2)
    assert here.device.tile == pytest.approx(tile, rel=1e-2)
    assert here.device.memory_bytes_per_s == pytest.approx(1e10)
    assert here.device.launch_s == pytest.approx(1e-6)
    level = here.inside
    assert (level.bytes_per_s, level.latency_s, level.start_s) == pytest.approx(wire, rel=1e-2)


def test_a_turn_has_calls_that_fill_it_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, calls = 0.0, 0

    def once() -> None:
        nonlocal now_s, calls
        now_s, calls = now_s + 0.003, calls + 1

    def slower_elsewhere(x: torch.Tensor, op: str) -> None:
        assert op == "max"
        x.mul_(2)

    comm = SimpleNamespace(barrier=lambda: None, all_reduce=slower_elsewhere)
    me = SimpleNamespace(comm=comm, device=torch.device("cpu"))
    monkeypatch.setattr(machine, "attach", lambda: me)
    monkeypatch.setattr(machine, "_call", lambda case, me: once)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert machine._turns(Case("tiny", 1)) == pytest.approx([0.003] * machine.TURNS)
    assert calls == 3 + 3 * machine.TURNS  # 0.02 s are three calls of 0.006 s


def test_products_that_would_take_too_long_are_left_out() -> None:
    sides = (64, 128, 256, 512)
    first, second, third = (Case("matmul", side) for side in sides[:3])
    turns = {first: [1.0]}
    assert not machine._too_long(second, turns, sides)  # two are always there
    assert machine._too_long(third, turns, sides)  # the second was not measured
    quick, slow = machine.LONGEST_S / 9, machine.LONGEST_S / 7
    turns[second] = [slow, quick]
    assert not machine._too_long(third, turns, sides)
    turns[second] = [slow]
    assert machine._too_long(third, turns, sides)
    assert not machine._too_long(Case("copy", 1 << 26, "uint8"), turns, sides)
