"""The alpha-beta model, fitted to what was measured.

    seconds(S) = steps(S) x alpha + bytes(S) x beta

steps and bytes are those of labkit/comm/algorithms/costs.py. alpha is the seconds of a message
however small, beta the seconds per byte; what it takes to reduce a byte is inside beta here, since
it grows as the bytes do. What has no formula (what a backend chooses by itself) counts as one step
that sends its bus bytes: a straight line over size.

The fit is least squares of the relative errors: absolute ones would leave 4 KiB, of microseconds,
no say beside 64 MiB. Neither alpha nor beta can be negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.bench.sweep import BUS_FACTORS, DEFAULT, Point, Sweep
from labkit.comm.algorithms.costs import COSTS, Cost, cost

FINE = 2000  # sizes at which lines are compared to find where they cross


@dataclass(frozen=True)
class Fit:
    """What one algorithm of an operation costs on so many ranks.

    `error` is the root mean square of the relative errors at the measured sizes: 0.1 means that
    the line is typically a tenth off.
    """

    op: str
    ranks: int
    algorithm: str
    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size_bytes: float) -> float:
        """What an operation of this size takes by the fit."""
        c = cost_of(self.op, self.algorithm, self.ranks, size_bytes)
        return c.seconds(self.alpha_s, self.beta_s_per_byte)

    def busbw_bytes_per_s(self, size_bytes: float) -> float:
        return BUS_FACTORS[self.op](self.ranks) * size_bytes / self.seconds(size_bytes)


def cost_of(op: str, algorithm: str, ranks: int, size_bytes: float) -> Cost:
    """By the formula of the algorithm, or the straight line of one that has none. gloo's own
    all-reduce is a ring whose pieces are not counted as steps."""
    bus_bytes = BUS_FACTORS[op](ranks) * size_bytes
    if (op, algorithm) == ("all_reduce", "gloo"):
        return Cost(2 * (ranks - 1), bus_bytes)
    if algorithm in COSTS.get(op, {}):
        return cost(op, algorithm, ranks, size_bytes)
    return Cost(1, bus_bytes)


def fit(points: Sequence[Point]) -> Fit:
    """alpha and beta of one algorithm, from its points at two or more sizes.

    Raises ValueError for fewer sizes, or points of more than one algorithm."""
    kinds = {(point.op, point.ranks, point.algorithm) for point in points}
    sizes = {point.size_bytes for point in points}
    if len(kinds) != 1 or len(sizes) < 2:
        raise ValueError(
            f"fit: {len(kinds)} algorithms at {len(sizes)} sizes were given; give the points of "
            "one, at two sizes or more"
        )
    op, ranks, algorithm = kinds.pop()
    costs = [cost_of(op, algorithm, ranks, point.size_bytes) for point in points]
    alpha_s, beta_s_per_byte, error = fit_line(costs, [point.time_s for point in points])
    return Fit(op, ranks, algorithm, alpha_s, beta_s_per_byte, error)


def fit_line(costs: Sequence[Cost], seconds: Sequence[float]) -> tuple[float, float, float]:
    """alpha, beta and the root mean square of (predicted / measured - 1), which they minimise."""
    measured_s = np.array(seconds)
    steps = np.array([c.steps for c in costs]) / measured_s  # each row then asks for 1
    sent = np.array([c.sent_bytes for c in costs]) / measured_s
    alpha, beta = np.linalg.lstsq(np.stack([steps, sent], axis=1), np.ones(len(costs)))[0]
    if alpha < 0:  # then the best that is not negative has none
        alpha, beta = 0.0, sent.sum() / (sent @ sent)
    elif beta < 0:
        alpha, beta = steps.sum() / (steps @ steps), 0.0
    errors = alpha * steps + beta * sent - 1
    return float(alpha), float(beta), float(np.sqrt(np.mean(errors**2)))


def fit_sweep(sweep: Sweep) -> list[Fit]:
    """A fit for each operation, number of ranks and algorithm that has two sizes or more. The
    default has none: it is another algorithm at another size."""
    fits = []
    for op, ranks, points in sweep.tables():
        for name in dict.fromkeys(point.algorithm for point in points):
            own = sweep.of(op, ranks, name)
            if name != DEFAULT and len({point.size_bytes for point in own}) > 1:
                fits.append(fit(own))
    return fits


def crossovers(
    fits: Sequence[Fit], from_bytes: float, to_bytes: float
) -> list[tuple[float, str, str]]:
    """Where another algorithm becomes the fastest by the fits: (bytes, before, from there on)."""
    sizes = np.geomspace(from_bytes, to_bytes, FINE)
    best = [min(fits, key=lambda one: one.seconds(size)).algorithm for size in sizes]
    return [
        (float(size), before, after)
        for size, before, after in zip(sizes[1:], best, best[1:])
        if before != after
    ]
