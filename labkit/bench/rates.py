"""The rates of a cluster, fitted to measurements of the machine.

    matmul             seconds = 2 m k n / (peak x product of d / (d + tile) over the sides m, k, n)
    all-reduce         seconds = start + 2(n-1) latency + 2(n-1)/n S / bandwidth

The fits minimize |log(predicted / measured)|, so that microseconds count as much as seconds: the
root mean square for all-reduces, as in labkit/sweeps/alpha_beta.py, and the mean for matmuls, so
that outliers count less. (On a CPU, the first bfloat16 matmul takes much longer.) An error of 0.1
means that predictions are typically 10% off.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from labkit.comm.collectives.costs import Cost
from labkit.sweeps.alpha_beta import fit_line, least

SEARCH = {"tried": 11, "zooms": 6}
LEAST_PART = 1e-4  # fraction of the peak rate that every matmul exceeds


class Case(NamedTuple):
    """An operation to time: "tiny", "copy", "matmul" or "all-reduce". `size`: elements of a tiny
    operation, bytes copied or reduced, or side of square matrices. `ranks`: the group's size."""

    kind: str
    size: int
    dtype: str = "float32"
    ranks: int = 1


Times = Mapping[Case, float]  # seconds


class MatmulFit(NamedTuple):
    """`peak_flops` by dtype, and the `tile` that makes small matmuls slower."""

    peak_flops: dict[str, float]
    tile: float
    error: float


class LinkFit(NamedTuple):
    """The rates of a `Level`."""

    bytes_per_s: float
    latency_s: float
    start_s: float
    error: float


def fit_matmuls(matmuls: Times) -> MatmulFit:
    """Fit one common tile and a peak per dtype. Raises ValueError if no dtype has two sizes."""
    dtypes = list(dict.fromkeys(case.dtype for case in matmuls))
    of_dtype = [[(c.size, s) for c, s in matmuls.items() if c.dtype == dtype] for dtype in dtypes]
    if all(len(own) < 2 for own in of_dtype):
        raise ValueError("too few matmuls; measure at least two matrix sizes of one dtype")
    smallest = min(case.size for case in matmuls)

    def fit(part: float) -> MatmulFit:
        """The fit for the tile at which the smallest side has side / (side + tile) = `part`."""
        tile = smallest * (1 / part - 1)
        # log of the peak that each matmul implies, by dtype
        logs = [np.log([2 * (side + tile) ** 3 / s for side, s in own]) for own in of_dtype]
        off = np.concatenate([x - np.median(x) for x in logs])
        peaks = {dtype: float(np.exp(np.median(x))) for dtype, x in zip(dtypes, logs)}
        return MatmulFit(peaks, tile, float(abs(off).mean()))

    return fit(least(lambda part: fit(part).error, LEAST_PART, 1.0, **SEARCH))


def fit_link(reduced: Times) -> LinkFit:
    """Fit bandwidth, latency and start. If all groups have the same size, start and latency cannot
    be separated, and their sum counts as latency.

    Raises ValueError for fewer than two sizes, one rank, or times that do not grow with size."""
    if len({case.size for case in reduced}) < 2 or min(case.ranks for case in reduced) < 2:
        raise ValueError("too few all-reduces; measure two sizes or more, on two ranks or more")

    def line(part: float) -> tuple[float, float, float]:
        """alpha, beta and error if a fraction `part` of alpha is start, the rest latency."""
        costs = [
            Cost(part + (1 - part) * 2 * (n - 1), 2 * (n - 1) / n * size)
            for _, size, _, n in reduced
        ]
        return fit_line(costs, list(reduced.values()))

    ranks_differ = len({case.ranks for case in reduced}) > 1
    part = least(lambda part: line(part)[2], 0.0, 1.0, **SEARCH) if ranks_differ else 0.0
    alpha_s, beta_s_per_byte, error = line(part)
    if beta_s_per_byte == 0:
        raise ValueError("a large all-reduce took no longer than a small one; measure again")
    return LinkFit(1 / beta_s_per_byte, (1 - part) * alpha_s, part * alpha_s, error)
