"""Sweeps over sizes: bandwidths, files, the fit of alpha and beta, and the picture of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from labkit import plot
from labkit.comm.collectives import ALGORITHMS
from labkit.comm.collectives.costs import Cost
from labkit.sweeps import alpha_beta, sweep
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, PARTED, Sweep, read_sweep
from sweep_cases import ABOUT, OPS, SIZES, modelled, points_of
from tables import cases, raises
from test_plot import assert_readable, words


@pytest.mark.parametrize("n", [2, 3, 4, 8, 1000])
def test_bus_bandwidth_has_the_published_factors(n: int) -> None:
    """Those of nccl-tests: doc/PERFORMANCE.md; gather, scatter and sendrecv from src/*.cu."""
    others = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    published = {"all_reduce": 2 * (n - 1) / n, **dict.fromkeys(others, (n - 1) / n)}
    published |= dict.fromkeys(("broadcast", "reduce", "ring_exchange", "there_and_back"), 1)
    for op, factor in published.items():
        (point,) = points_of(op, n, "x", {10_000_000: 0.01})
        assert point.algbw_bytes_per_s == 1e9
        assert point.busbw_bytes_per_s == pytest.approx(factor * 1e9)
        copied = replace(point, copy_s=0.002)  # 5 GB/s
        assert copied.of_copy_rate == pytest.approx(factor / 5)
    assert published.keys() == BUS_FACTORS.keys()
    assert published.keys() - {"there_and_back"} == ALGORITHMS.keys() - {"barrier"}


def test_sizes_are_read_counted_and_refused() -> None:
    texts = ("12", "4K", "4k", "2MiB", "1 G", "3MB")
    assert [*map(sweep.parse_bytes, texts)] == [12, 4096, 4096, 2 << 20, 1 << 30, 3 << 20]
    for text in ("", "x", "4T", "0", "-4", "1.5K"):
        raises("is not a size; write bytes as 4096, 4K", sweep.parse_bytes, text)
    assert sweep.sizes_between(4096, 1 << 18, 4) == [4096, 16384, 65536, 262144]
    assert sweep.sizes_between(4096, 70000, 4) == [4096, 16384, 65536]
    for op in OPS:  # as nccl-tests: rounded down, and counted for one rank where there are parts
        assert sweep.count_of(op, 3, 4099, 4) == ((341, 4092) if op in PARTED else (1024, 4096))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"what": "sweep of collectives", "format": 99, "points": []}',
             '{"what": "sweep of collectives", "format": 1, "points": [{"op": 1}], "about": {}}'],
)  # fmt: skip
def test_an_invalid_sweep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    raises("is not a sweep that this labkit can read", read_sweep, tmp_path / "x.json")


@pytest.mark.parametrize(
    ("op", "algorithm"), [(op, name) for op in OPS for name in [*ALGORITHMS.get(op, ()), "unknown"]]
)
def test_exact_times_give_their_alpha_and_beta_back(op: str, algorithm: str) -> None:
    for n in (2, 3, 4):
        points = modelled(op, n, algorithm, 50e-6, 0.8e-9)
        fitted = alpha_beta.fit(points)
        assert (fitted.op, fitted.ranks, fitted.algorithm) == (op, n, algorithm)
        assert fitted.alpha_s == pytest.approx(50e-6)
        assert fitted.beta_s_per_byte == pytest.approx(0.8e-9)
        assert fitted.error < 1e-9
        for point in points:
            assert fitted.seconds(point.size_bytes) == pytest.approx(point.time_s)
            busbw = fitted.busbw_bytes_per_s(point.size_bytes)
            assert busbw == pytest.approx(point.busbw_bytes_per_s)


@cases(
    ("uniform", 0.9, 1.1, 5, 0.03, 0.08),  # a uniform tenth has a root mean square of 0.058
    # A third off, up or down alike: least squares of predicted / measured would be a quarter low.
    ("lognormal", 0, 0.4, 400, 0.95 * 0.4, 1.05 * 0.4),
)
def test_noise_moves_the_fit_by_no_more_than_itself_and_is_reported(
    noise: str, low: float, high: float, times: int, least: float, most: float
) -> None:
    draw = getattr(np.random.default_rng(0), noise)
    exact = modelled("all_reduce", 4, "ring", 50e-6, 0.8e-9)
    noisy = [replace(p, time_s=p.time_s * draw(low, high)) for p in exact * times]
    fitted = alpha_beta.fit(noisy)
    assert fitted.alpha_s == pytest.approx(50e-6, rel=0.05)
    assert fitted.beta_s_per_byte == pytest.approx(0.8e-9, rel=0.05)
    assert least < fitted.error < most


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """Absolute least squares would give all to the largest, which is half too slow here."""
    *exact, largest = modelled("broadcast", 2, "tree", 100e-6, 1e-9)
    fitted = alpha_beta.fit([*exact, replace(largest, time_s=1.5 * largest.time_s)])
    assert fitted.alpha_s == pytest.approx(100e-6, rel=0.1)


def test_neither_alpha_nor_beta_is_negative_and_then_the_other_is_the_best() -> None:
    line = [Cost(1, 100.0), Cost(1, 1000.0)]
    alpha, beta, error = alpha_beta.fit_line(line, [1.0, 20.0])  # would begin below 0
    assert alpha == 0 and beta == pytest.approx(np.sqrt(0.01 * 0.02))
    assert error == pytest.approx(np.log(2) / 2)  # a factor of the root of 2 above, and below
    alpha, beta, _ = alpha_beta.fit_line(line, [2.0, 1.0])
    assert beta == 0 and alpha == pytest.approx(np.sqrt(2.0 * 1.0))


def test_gloos_own_all_reduce_is_a_ring_and_what_is_unknown_a_straight_line() -> None:
    assert alpha_beta.cost_of("all_reduce", "gloo", 4, 1 << 26) == Cost(6, 1.5 * (1 << 26))
    assert alpha_beta.cost_of("all_gather", "gloo", 4, 1000) == Cost(1, 750)
    assert alpha_beta.cost_of("all_reduce", "tree", 4, 1000).steps == 4


def test_a_fit_needs_two_sizes_of_one_algorithm() -> None:
    ring = modelled("all_reduce", 4, "ring", 1e-5, 1e-9)
    for points in ([], ring[:1], ring + modelled("all_reduce", 4, "tree", 1e-5, 1e-9)):
        raises("pass the points of one algorithm at two sizes or more", alpha_beta.fit, points)
    default = [replace(point, algorithm=DEFAULT) for point in ring]
    single = modelled("all_gather", 4, "ring", 1e-5, 1e-9)[:1]
    (fitted,) = alpha_beta.fit_sweep(Sweep(default + ring + single))
    assert fitted.algorithm == "ring"


def test_lines_cross_where_their_times_are_equal() -> None:
    """Recursive doubling: 2 alpha + 2 S beta; halving and doubling: 4 alpha + 1.5 S beta. Equal
    at S = 4 alpha / beta."""
    alpha_s, beta = 50e-6, 1e-9
    names = ("halving_doubling", "recursive_doubling")
    both = [alpha_beta.fit(modelled("all_reduce", 4, name, alpha_s, beta)) for name in names]
    ((size, before, after),) = alpha_beta.crossovers(both, SIZES[0], SIZES[-1])
    assert (before, after) == ("recursive_doubling", "halving_doubling")
    assert size == pytest.approx(4 * alpha_s / beta, rel=0.01)
    assert alpha_beta.crossovers(both, SIZES[0], SIZES[2]) == []


def pictured() -> Sweep:
    points = []
    for name, alpha_s, beta in [
        ("recursive_doubling", 50e-6, 1e-9), ("halving_doubling", 50e-6, 1e-9),
        ("ring", 60e-6, 0.9e-9), ("gloo", 15e-6, 1.5e-9),  # gloo's: ahead at first, not ours
    ]:  # fmt: skip
        points += modelled("all_reduce", 4, name, alpha_s, beta, own=name == "gloo")
    points += [replace(point, algorithm=DEFAULT) for point in points if point.algorithm == "ring"]
    return Sweep(points + modelled("all_gather", 2, "ring", 50e-6, 1e-9), ABOUT)


def test_the_lines_are_the_bandwidths_and_the_dashes_the_fit(tmp_path: Path) -> None:
    made_up = pictured()
    figure = plot.bandwidth(made_up.save(tmp_path / "sweep.json"))
    axes = figure.axes[0]
    measured = [line for line in axes.lines if len(line.get_xdata()) == len(SIZES)]
    solid = {line.get_label().split(":")[0]: line for line in measured}
    names = {"ring", "recursive_doubling", "halving_doubling", "gloo's own", DEFAULT}
    assert solid.keys() == names
    for point in made_up.of("all_reduce", 4):
        line = solid["gloo's own" if point.own else point.algorithm]
        at = list(line.get_xdata()).index(point.size_bytes)
        assert line.get_ydata()[at] == pytest.approx(point.busbw_bytes_per_s / 1e9)
    dashed = {line.get_color(): line for line in axes.lines if line.get_linestyle() == "--"}
    assert len(dashed) == 4 and solid[DEFAULT].get_color() not in dashed
    for name in solid.keys() - {DEFAULT}:  # exact times: the fit goes through the points
        line, fitted = solid[name], dashed[solid[name].get_color()]
        for end in (0, -1):
            assert fitted.get_ydata()[end] == pytest.approx(line.get_ydata()[end])
    assert axes.get_xscale() == "log"
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    ours = [fit for fit in alpha_beta.fit_sweep(made_up) if fit.op == "all_reduce"][:3]
    assert marks == [x for x, _, _ in alpha_beta.crossovers(ours, SIZES[0], SIZES[-1])] and marks
    assert_readable(figure)
    assert "all_gather on 2 ranks: busbw = 0.5 algbw" in words(figure)
    assert figure._repr_png_()


def test_a_part_of_a_sweep_is_drawn_and_what_is_not_there_refused() -> None:
    assert len(plot.bandwidth(pictured(), op="all_gather").axes) == 2  # the lines, the legend
    words = "it has all_reduce on 4 ranks, all_gather on 2 ranks"
    raises(words, plot.bandwidth, pictured(), "all_reduce", ranks=2)
    raises("it has nothing", plot.bandwidth, Sweep([]))
