"""Few constants from many rows: robust least squares of log(predicted / measured).

    error of row i          r_i = log(predicted_i / measured_i)
    shift of a constant     log(constant / assumed), with a small penalty

    minimise  sum of h(r_i) + PULL² x sum of squared shifts      over all constants, within bounds

h is Huber's: quadratic up to 5 %, linear from there, so that an outlier weighs no more than another
row. PULL keeps a constant that no row depends on at its assumed value. In logs, twice and half are
equally far, and a constant stays above 0.

Each round steps along the slopes of all rows (Gauss-Newton), shortened until the cost falls
(Levenberg-Marquardt). Source: Huber, "Robust Estimation of a Location Parameter", 1964; Moré,
"The Levenberg-Marquardt Algorithm", 1978.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from labkit.replaying.planning.published import Array

Predict = Callable[[Array], Array]  # constants -> seconds of each row

LINEAR = 0.05  # Huber's: beyond it a row counts by its distance, not by its square
PULL = 0.1  # a constant 1.6 times its assumed value costs as much as a row that is 5 % off
STEP = 1e-3  # of a logarithm, for slopes
CONVERGED = 1e-4  # a round that improves the cost by a smaller part is the last
ROUNDS = 20


@dataclass(frozen=True)
class Bounds:
    """The assumed value of each constant, and its limits."""

    assumed: Array
    least: Array
    most: Array


@dataclass(frozen=True)
class Fit:
    """`constants` [c]; `errors` [n], logarithms; `slopes` [n, c], of an error by the logarithm of a
    constant."""

    constants: Array
    errors: Array
    slopes: Array
    bounds: Bounds


def fit(
    predict: Predict, measured: Array, bounds: Bounds, start: Array | None = None,
    rounds: int = ROUNDS,
) -> Fit:  # fmt: skip
    """The constants by which `predict` comes closest to the `measured` seconds."""
    limits = np.log(bounds.least), np.log(bounds.most)
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
            trial = np.clip(_gauss_newton(logs, errors, slopes, bounds, damping), *limits)
            trial_errors = errors_at(trial)
            if (now := _cost(trial, trial_errors, bounds)) < before:
                break
            damping *= 8
        else:
            break
        logs, errors, damping = trial, trial_errors, damping / 8
        slopes = slopes_at(logs, errors)
        if before - now < CONVERGED * before:
            break
    return Fit(np.exp(logs), errors, slopes, bounds)


def refit(fitted: Fit, counts: Array, rounds: int = 5) -> Array:
    """The constants if each row occurred `counts` times (0: left out), by the slopes of `fitted`:
    no row is predicted again."""
    start = logs = np.log(fitted.constants)
    for _ in range(rounds):  # weights follow the errors
        errors = fitted.errors + fitted.slopes @ (logs - start)
        logs = _gauss_newton(logs, errors, fitted.slopes, fitted.bounds, 0.0, counts)
        logs = np.clip(logs, np.log(fitted.bounds.least), np.log(fitted.bounds.most))
    return np.exp(logs)


def _gauss_newton(
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
    off = np.abs(errors)
    rows = np.where(off < LINEAR, off**2 / 2, LINEAR * (off - LINEAR / 2)).sum()
    return float(rows + PULL**2 * ((logs - np.log(bounds.assumed)) ** 2).sum() / 2)
