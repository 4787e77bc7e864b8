"""Few constants from many rows: robust least squares of log(predicted / measured).

    row i is off by       r_i = log(predicted_i / measured_i)
    a constant is off by  log(constant / assumed), and pays a little for it

    least     sum of h(r_i) + PULL² x sum of its own squares      over all constants, within bounds

h is Huber's: a square up to 5 %, and from there a straight line, so that a row that went wrong has
no more say than another. A constant of which no row tells keeps what was assumed (PULL). In logs a
factor of two is as far up as down, and a constant stays above 0.

Each round goes along the slopes of all rows (Gauss, Newton), shortened until it is better
(Levenberg, Marquardt). Source: Huber, "Robust Estimation of a Location Parameter", 1964; Moré,
"The Levenberg-Marquardt Algorithm", 1978.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Predict = Callable[[Array], Array]  # constants -> seconds of each row

LINEAR = 0.05  # Huber's: rows further off count by their distance, not by its square
PULL = 0.1  # a constant 1.6 times what was assumed costs as a row that is 5 % off
STEP = 1e-3  # of a logarithm, for slopes
NO_BETTER = 1e-4  # of the cost: where it ends
ROUNDS = 20


@dataclass(frozen=True)
class Bounds:
    """Of each constant: what is assumed before, and within what it must stay."""

    assumed: Array
    least: Array
    most: Array


@dataclass(frozen=True)
class Fit:
    """`constants` [c]; `errors` [n], the logarithms; `slopes` [n, c], of an error by the logarithm
    of a constant."""

    constants: Array
    errors: Array
    slopes: Array
    bounds: Bounds


def fit(
    predict: Predict, measured: Array, bounds: Bounds, start: Array | None = None,
    rounds: int = ROUNDS,
) -> Fit:  # fmt: skip
    """The constants by which `predict` comes closest to what was `measured`, in seconds."""
    inside = np.log(bounds.least), np.log(bounds.most)
    logs = np.log(bounds.assumed if start is None else start)

    def errors_at(logs: Array) -> Array:
        return np.log(predict(np.exp(logs)) / measured)

    def slopes_at(logs: Array, errors: Array) -> Array:
        moved = [errors_at(logs - STEP * unit) for unit in np.eye(len(logs))]
        return (errors - np.array(moved)).T / STEP

    errors, damping = errors_at(logs), 1e-3
    slopes = slopes_at(logs, errors)
    for _ in range(rounds):
        before = _cost(logs, errors, bounds)
        for _ in range(8):
            trial = np.clip(_better(logs, errors, slopes, bounds, damping), *inside)
            errors_there = errors_at(trial)
            if (now := _cost(trial, errors_there, bounds)) < before:
                break
            damping *= 8
        else:
            break
        logs, errors, damping = trial, errors_there, damping / 8
        slopes = slopes_at(logs, errors)
        if before - now < NO_BETTER * before:
            break
    return Fit(np.exp(logs), errors, slopes, bounds)


def fit_again(found: Fit, counts: Array, rounds: int = 5) -> Array:
    """The constants, had each row been there `counts` times (0: left out), by the slopes of
    `found`: no row is predicted anew."""
    start = logs = np.log(found.constants)
    for _ in range(rounds):  # weights follow the errors
        errors = found.errors + found.slopes @ (logs - start)
        logs = _better(logs, errors, found.slopes, found.bounds, 0.0, counts)
        logs = np.clip(logs, np.log(found.bounds.least), np.log(found.bounds.most))
    return np.exp(logs)


def _better(
    logs: Array, errors: Array, slopes: Array, bounds: Bounds, damping: float,
    counts: Array | float = 1.0,
) -> Array:  # fmt: skip
    weights = counts * np.minimum(1.0, LINEAR / np.maximum(np.abs(errors), 1e-12))
    curvature = slopes.T @ (weights[:, None] * slopes)
    pull = PULL**2 * np.eye(len(logs))
    downhill = slopes.T @ (weights * errors) + PULL**2 * (logs - np.log(bounds.assumed))
    damped = curvature + pull + damping * np.diag(np.diag(curvature))
    return logs - np.clip(np.linalg.solve(damped, downhill), -0.7, 0.7)


def _cost(logs: Array, errors: Array, bounds: Bounds) -> float:
    far = np.abs(errors)
    rows = np.where(far < LINEAR, far**2 / 2, LINEAR * (far - LINEAR / 2)).sum()
    return float(rows + PULL**2 * ((logs - np.log(bounds.assumed)) ** 2).sum() / 2)
