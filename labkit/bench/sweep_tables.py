"""A sweep as tables for the terminal: the columns of nccl-tests, and ratios."""

from statistics import geometric_mean

from rich.table import Table

from labkit.bench.harness import titled
from labkit.foreign import markup
from labkit.sweeps.alpha_beta import Fit
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, Point, Sweep

TRUSTED_ERROR = 0.25  # of a fit; above this, alpha and beta are unreliable


def tables(sweep: Sweep) -> list[Table]:
    """One table per operation and number of ranks, as nccl-tests prints it, with two more columns:
    time divided by the backend's time, and busbw divided by the rate of a memory copy."""
    backend, shown = sweep.about.get("backend", "backend"), []
    statistic = f"time: {sweep.about['time']}" if "time" in sweep.about else ""
    words = ("type", "redop", "root", "algorithm")
    times = ("time, us", "algbw", "busbw", "#wrong", f"/ {markup(backend)}", "of copy")
    for op, n, points in sweep.tables():
        title = f"{op} on {n} ranks, GB/s: busbw = {BUS_FACTORS[op](n):.3g} algbw"
        caption = markup("\n".join(filter(None, (statistic, _summary(points, backend)))))
        table = titled(title, caption, ("size, B", "count", *words, *times), words)
        for point, after in zip(points, [*points[1:], points[-1]]):
            table.add_row(
                *map(markup, _cells(point)), end_section=point.size_bytes != after.size_bytes,
                style="bold" if point.algorithm == DEFAULT else None,
            )  # fmt: skip
        shown.append(table)
    return shown


def _cells(point: Point) -> list[str]:
    name = f"{point.algorithm}'s own" if point.own else point.algorithm
    if point.algorithm == DEFAULT:
        name = f"→ {point.chosen}"
    return [
        str(point.size_bytes), str(point.count), point.dtype, point.redop or "none",
        "-1" if point.root is None else str(point.root), name,
        f"{point.time_s * 1e6:.1f}", f"{point.algbw_bytes_per_s / 1e9:.3f}",
        f"{point.busbw_bytes_per_s / 1e9:.3f}",
        "N/A" if point.wrong is None else str(point.wrong),
        "" if point.own else f"{point.ratio:.2f}", f"{point.of_copy_rate:.2f}",
    ]  # fmt: skip


def _summary(points: list[Point], backend: str) -> str:
    """labkit's default compared with the backend's algorithm, over all sizes."""
    ratios = {point.size_bytes: point.ratio for point in points if point.algorithm == DEFAULT}
    if not ratios:
        return ""
    worst = max(ratios, key=ratios.__getitem__)
    return (
        f"→ the default, over {backend}'s own: geometric mean "
        f"{geometric_mean(ratios.values()):.2f}, highest {ratios[worst]:.2f} at {worst} bytes"
    )


def fit_table(fits: list[Fit]) -> Table:
    """alpha, beta and the fit's error for each algorithm."""
    names = ("operation", "ranks", "algorithm", "alpha, us", "beta, ns/byte", "error")
    rows = [
        (fit.op, str(fit.ranks), fit.algorithm, f"{fit.alpha_s * 1e6:.1f}",
         f"{fit.beta_s_per_byte * 1e9:.3f}", f"{fit.error:.0%}")
        for fit in fits
    ]  # fmt: skip
    return titled(
        "time = steps x alpha + bytes x beta", "", names, ("operation", "algorithm"), rows
    )


def doubts(fits: list[Fit]) -> str:
    """A warning if a fit is too poor for a reliable alpha and beta, else an empty string."""
    poor = [fit for fit in fits if fit.error > TRUSTED_ERROR]
    if not poor:
        return ""
    worst = max(poor, key=lambda fit: fit.error)
    return (
        f"{len(poor)} of {len(fits)} fits have errors above {TRUSTED_ERROR:.0%}; the worst is "
        f"{worst.op} by {worst.algorithm} on {worst.ranks} ranks: {worst.error:.0%}. Do not "
        "trust their alpha and beta: the machine was busy, or the model does not fit this link. "
        "Close other programs and measure with more --turns."
    )
