"""The alpha-beta model, fitted to measured times.

    seconds(S) = steps(S) x alpha + bytes(S) x beta

labkit/comm/collectives/costs.py defines steps and bytes. alpha is seconds per step, beta seconds
per byte (reduction included); neither is negative. The fit minimizes the sum of squares of
log(predicted / measured): with absolute errors, 4 KiB would hardly count next to 64 MiB.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.comm.collectives.costs import COSTS, Cost, cost
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, Point, Sweep

FINE = 2000  # number of sizes at which crossovers compare fits
FAR = 14.0  # log of a factor of a million, beyond which alpha or beta is practically 0


@dataclass(frozen=True)
class Fit:
    """The cost of one algorithm for an operation on `ranks` ranks. `error` is the root mean square
    of log(predicted / measured): 0.1 means typically 10% off."""

    op: str
    ranks: int
    algorithm: str
    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size_bytes: float) -> float:
        c = cost_of(self.op, self.algorithm, self.ranks, size_bytes)
        return c.seconds(self.alpha_s, self.beta_s_per_byte)

    def busbw_bytes_per_s(self, size_bytes: float) -> float:
        return BUS_FACTORS[self.op](self.ranks) * size_bytes / self.seconds(size_bytes)


def cost_of(op: str, algorithm: str, ranks: int, size_bytes: float) -> Cost:
    """Cost by the algorithm's formula; without a formula (a backend's choice), one step that sends
    the bus bytes. gloo's own all-reduce is a ring; its segments are not counted as steps."""
    bus_bytes = BUS_FACTORS[op](ranks) * size_bytes
    if (op, algorithm) == ("all_reduce", "gloo"):
        return Cost(2 * (ranks - 1), bus_bytes)
    if algorithm in COSTS.get(op, {}):
        return cost(op, algorithm, ranks, size_bytes)
    return Cost(1, bus_bytes)


def fit(points: Sequence[Point]) -> Fit:
    """Fit alpha and beta. Raises ValueError for several algorithms or fewer than two sizes."""
    kinds = {(point.op, point.ranks, point.algorithm) for point in points}
    sizes = {point.size_bytes for point in points}
    if len(kinds) != 1 or len(sizes) < 2:
        raise ValueError(
            f"fit: got {len(kinds)} algorithms at {len(sizes)} sizes; pass the points of one "
            "algorithm at two sizes or more"
        )
    op, ranks, algorithm = kinds.pop()
    costs = [cost_of(op, algorithm, ranks, point.size_bytes) for point in points]
    alpha_s, beta_s_per_byte, error = fit_line(costs, [point.time_s for point in points])
    return Fit(op, ranks, algorithm, alpha_s, beta_s_per_byte, error)


def fit_line(costs: Sequence[Cost], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return alpha, beta and the error that they minimize: the root mean square of log(predicted /
    measured). Only the ratio beta / alpha is searched: a common factor makes the mean logarithm 0,
    so that the spread is the error. The best ratio has the least spread; alpha or beta may be 0."""
    steps = np.array([c.steps for c in costs], dtype=float)
    sent = np.array([c.sent_bytes for c in costs], dtype=float)

    def logs(alpha: float, beta: float) -> np.ndarray:
        return np.log(np.array(seconds) / (alpha * steps + beta * sent))

    def spread(line: tuple[float, float]) -> float:
        return float(logs(*line).std())

    low, high = np.log((steps / sent).min()) - FAR, np.log((steps / sent).max()) + FAR
    log_ratio = least(lambda x: spread((1.0, np.exp(x))), low, high, tried=41, zooms=14)
    line = min((0.0, 1.0), (1.0, 0.0), (1.0, float(np.exp(log_ratio))), key=spread)
    factor = float(np.exp(logs(*line).mean()))
    return line[0] * factor, line[1] * factor, spread(line)


def least(
    function: Callable[[float], float], low: float, high: float, tried: int, zooms: int
) -> float:
    """The minimizer of a unimodal function on [low, high]: the best of `tried` points, then of as
    many points between the best point's neighbors, `zooms` rounds in total."""
    for _ in range(zooms):
        points = np.linspace(low, high, tried).tolist()  # includes the best point so far
        best = int(np.argmin([function(x) for x in points]))
        low, high = points[max(best - 1, 0)], points[min(best + 1, tried - 1)]
    return float(points[best])


def fit_sweep(sweep: Sweep) -> list[Fit]:
    """A fit per operation, number of ranks and algorithm measured at several sizes. "default" is
    not fitted, because labkit's choice of algorithm changes with the size."""
    names = dict.fromkeys((p.op, p.ranks, p.algorithm) for p in sweep.points)
    lines = [sweep.of(*name) for name in names if name[-1] != DEFAULT]
    return [fit(line) for line in lines if len({point.size_bytes for point in line}) > 1]


def crossovers(
    fits: Sequence[Fit], from_bytes: float, to_bytes: float
) -> list[tuple[float, str, str]]:
    """Sizes at which the fastest fit changes: (bytes, algorithm below, algorithm from there on)."""
    sizes = np.geomspace(from_bytes, to_bytes, FINE)
    best = [min(fits, key=lambda line: line.seconds(size)).algorithm for size in sizes]
    changes = zip(sizes[1:], best, best[1:])
    return [(float(size), before, after) for size, before, after in changes if before != after]
