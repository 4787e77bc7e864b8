"""What a cluster's description says of a machine, fitted to what was measured on it.

    matrix product     seconds = 2 m k n / (peak x product of d / (d + tile) over the sides m, k, n)
    all-reduce         seconds = start + 2(n-1) latency + 2(n-1)/n S / bandwidth

Pure functions: numbers in, numbers out. What is made least is log(predicted / measured), so that a
microsecond counts beside a second: of all-reduces its root mean square, as in labkit/bench/fits.py,
and of products the mean of its amount, where one odd product among many has no say. (bfloat16 on a
CPU has a much longer way to its first multiplication.) 0.1 means: typically a tenth off.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from labkit.bench.fits import fit_line
from labkit.comm.collectives.costs import Cost

TRIED, ZOOMS = 11, 6  # each zoom has a fifth of the one before
LEAST_PART = 1e-4  # of its peak that the smallest product may have reached


class Product(NamedTuple):
    """A product of two square matrices of this side took so long."""

    dtype: str
    side: int
    seconds: float


class Reduced(NamedTuple):
    """An all-reduce of so many bytes on so many ranks took so long."""

    ranks: int
    size_bytes: int
    seconds: float


class ProductFit(NamedTuple):
    """`peak_flops` by dtype, and the side at which a product has half of what it could have."""

    peak_flops: dict[str, float]
    tile: float
    error: float


class WireFit(NamedTuple):
    """A `Level` by its numbers."""

    bytes_per_s: float
    latency_s: float
    start_s: float
    error: float


def fit_products(products: Sequence[Product]) -> ProductFit:
    """One tile for all dtypes, and the peak of each.

    Raises ValueError where no dtype has products of two sides."""
    dtypes = list(dict.fromkeys(one.dtype for one in products))
    if max((len({p.side for p in products if p.dtype == name}) for name in dtypes), default=0) < 2:
        raise ValueError("products of one side only; two sides of a dtype are needed")
    smallest = min(one.side for one in products)

    def tile_of(part: float) -> float:
        """With which the smallest product has this part of its peak, by each of its sides."""
        return smallest * (1 / part - 1)

    def logs(part: float) -> dict[str, np.ndarray]:
        """Of each peak, by each product of its dtype."""
        tile = tile_of(part)
        found: dict[str, list[float]] = {name: [] for name in dtypes}
        for dtype, side, seconds in products:
            found[dtype].append(2 * (side + tile) ** 3 / seconds)
        return {name: np.log(peaks) for name, peaks in found.items()}

    def error(part: float) -> float:
        off = np.concatenate([one - np.median(one) for one in logs(part).values()])
        return float(abs(off).mean())

    part = _least(error, LEAST_PART, 1.0)
    peaks = {name: float(np.exp(np.median(one))) for name, one in logs(part).items()}
    return ProductFit(peaks, tile_of(part), error(part))


def fit_wire(reduced: Sequence[Reduced]) -> WireFit:
    """The numbers of a wire. Where all were on as many ranks, start and latency are one: all of it
    is the latency then.

    Raises ValueError for fewer than two sizes, one rank, or times that do not grow with the size.
    """
    if len({one.size_bytes for one in reduced}) < 2 or min(one.ranks for one in reduced) < 2:
        raise ValueError("all-reduces of two sizes or more, on two ranks or more, are needed")

    def line(part: float) -> tuple[float, float, float]:
        """alpha, beta and error, if this part of alpha is the start, and the rest the latency."""
        costs = [
            Cost(part + (1 - part) * 2 * (n - 1), 2 * (n - 1) / n * size) for n, size, _ in reduced
        ]
        return fit_line(costs, [one.seconds for one in reduced])

    sizes_differ = len({one.ranks for one in reduced}) > 1
    part = _least(lambda part: line(part)[2], 0.0, 1.0) if sizes_differ else 0.0
    alpha_s, beta_s_per_byte, error = line(part)
    if beta_s_per_byte == 0:
        raise ValueError("a large all-reduce took no longer than a small one; measure again")
    return WireFit(1 / beta_s_per_byte, (1 - part) * alpha_s, part * alpha_s, error)


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least, ends included."""
    best = low
    for _ in range(ZOOMS):
        tried = np.linspace(low, high, TRIED)  # the best one so far is among them
        place = int(np.argmin([function(float(one)) for one in tried]))
        best = float(tried[place])
        low, high = tried[max(place - 1, 0)], tried[min(place + 1, TRIED - 1)]
    return best
