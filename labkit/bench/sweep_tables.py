"""A sweep as tables for the terminal: the columns of nccl-tests, and the ratios."""

from statistics import geometric_mean

from rich.box import SIMPLE
from rich.table import Table

from labkit.foreign import markup
from labkit.sweeps.alpha_beta import Fit
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, Point, Sweep

TRUSTED_ERROR = 0.25  # of a fit; beyond it alpha and beta say little


def tables(sweep: Sweep) -> list[Table]:
    """As nccl-tests prints it, one table for each operation and number of ranks, and two columns
    more: time over that of the backend's own, busbw over the rate at which memory is copied."""
    backend = markup(sweep.about.get("backend", "backend"))
    shown = []
    for op, n, points in sweep.tables():
        table = Table(
            title=f"{op} on {n} ranks, GB/s: busbw = {BUS_FACTORS[op](n):.3g} algbw",
            caption=markup(_caption(points, sweep)), box=SIMPLE, pad_edge=False, show_edge=False,
            padding=(0, 1, 0, 0), title_justify="left", caption_justify="left",
        )  # fmt: skip
        for name in ("size, B", "count", "type", "redop", "root", "algorithm"):
            table.add_column(
                name, justify="right" if name in ("size, B", "count") else "left", no_wrap=True
            )
        for name in ("time, us", "algbw", "busbw", "#wrong", f"/ {backend}", "of copy"):
            table.add_column(name, justify="right")
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


def _caption(points: list[Point], sweep: Sweep) -> str:
    """Which statistic a time is, and a summary."""
    statistic = f"time: {sweep.about['time']}" if "time" in sweep.about else ""
    summary = _summary(points, sweep.about.get("backend", "backend"))
    return "\n".join(filter(None, (statistic, summary)))


def _summary(points: list[Point], backend: str) -> str:
    """The default against the backend's own, over all sizes."""
    ratios = {point.size_bytes: point.ratio for point in points if point.algorithm == DEFAULT}
    if not ratios:
        return ""
    worst = max(ratios, key=ratios.__getitem__)
    return (
        f"→ the default, over {backend}'s own: geometric mean "
        f"{geometric_mean(ratios.values()):.2f}, highest {ratios[worst]:.2f} at {worst} bytes"
    )


def fit_table(fits: list[Fit]) -> Table:
    """alpha and beta of each algorithm, and how far the line is off."""
    table = Table(
        title="time = steps x alpha + bytes x beta",
        box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", show_edge=False,
    )  # fmt: skip
    for name in ("operation", "ranks", "algorithm", "alpha, us", "beta, ns/byte", "error"):
        table.add_column(name, justify="left" if name in ("operation", "algorithm") else "right")
    for fit in fits:
        table.add_row(
            fit.op, str(fit.ranks), fit.algorithm, f"{fit.alpha_s * 1e6:.1f}",
            f"{fit.beta_s_per_byte * 1e9:.3f}", f"{fit.error:.0%}",
        )  # fmt: skip
    return table


def doubts(fits: list[Fit]) -> str:
    """A warning where a line fits so poorly that alpha and beta say little; else nothing."""
    poor = [fit for fit in fits if fit.error > TRUSTED_ERROR]
    if not poor:
        return ""
    worst = max(poor, key=lambda fit: fit.error)
    return (
        f"{len(poor)} of {len(fits)} lines are off by more than {TRUSTED_ERROR:.0%}, most of all "
        f"{worst.op} by {worst.algorithm} on {worst.ranks} ranks, by {worst.error:.0%}. Do not "
        "trust their alpha and beta: the machine was busy, or the model does not fit this link. "
        "Close other programs and measure with more --turns."
    )
