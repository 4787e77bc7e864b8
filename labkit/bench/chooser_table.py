"""A table for the algorithm chooser (LABKIT_TABLE), from measurements on this machine. At the
smallest size, the table selects the algorithm with the fewest steps among those within 10% of the
fastest. At a larger size, the table switches if a different algorithm is 10% faster, because
smaller differences are noise. Unmeasured operations keep the rows of labkit's own table.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import typer

from labkit.comm.collectives import ALGORITHMS, EQUAL_SIZES_ONLY, POWERS_OF_TWO_ONLY
from labkit.foreign import write_json
from labkit.runtime.transports.chooser import names, stored_table
from labkit.sweeps.alpha_beta import cost_of, fit_sweep
from labkit.sweeps.sweep import Point, Sweep

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")  # several algorithms
RANKS = (2, 3, 4)
BETTER = 0.9  # switch below this fraction of the current algorithm's time


def table_of(sweep: Sweep) -> dict[str, Any]:
    """The table, in the format of `labkit.runtime.transports.chooser.read_table`. Raises ValueError
    for a sweep over NCCL or shared memory, or without any of `OPS`."""
    if sweep.about.get("backend") != "gloo":
        raise ValueError("NCCL chooses its algorithms itself, without a table; measure over gloo")
    if sweep.about.get("transport") == "shm":
        raise ValueError(
            "these times are from ranks that share memory and use no table; measure with "
            'transport="gloo", as labkit bench collectives --fit does'
        )
    fitted: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for op, n, points in sweep.tables():
        if op in OPS:
            fitted.setdefault(op, {})[str(n)] = _rows(op, n, points)
    if not fitted:
        raise ValueError(f"no measured operation has a table; measure one of {', '.join(OPS)}")
    fits = [asdict(fit) for fit in fit_sweep(sweep) if fit.op in OPS]
    own = {collective: stored_table()[collective] for collective in ALGORITHMS}
    about, sizes = sweep.about, [point.size_bytes for point in sweep.points]
    ranks = ", ".join(map(str, sorted({point.ranks for point in sweep.points})))
    source = (
        f"labkit bench collectives --fit on {date.today()}: {about['backend']} on {about['host']}, "
        f"{about['cores']} cores, torch {about['torch']}; {', '.join(fitted)} on {ranks} ranks, "
        f"{min(sizes)} to {max(sizes)} bytes; {about['turns']} turns, "
        f"{about.get('time', 'unknown statistic')}; the others as in labkit's own table"
    )
    return {"source": source, **own, **fitted, "fits": fits}


def write_table(sweep: Sweep, path: str | Path) -> Path:
    """Write the table of `sweep` atomically: a reader sees the old table or the new table."""
    path = Path(path)
    return write_json(path.with_name(path.name + ".new"), table_of(sweep)).replace(path)


def user_table() -> Path:
    """The default path of a table, in the user's settings folder."""
    return Path(typer.get_app_dir("labkit")) / "table.json"


def _rows(op: str, ranks: int, points: Sequence[Point]) -> list[dict[str, Any]]:
    """The algorithm to use from each size on, among those that the chooser may select."""
    times: dict[int, dict[str, float]] = {}  # bytes -> algorithm -> seconds
    for point in points:
        if point.algorithm in names(op) and (op, point.algorithm) not in EQUAL_SIZES_ONLY:
            times.setdefault(point.size_bytes, {})[point.algorithm] = point.time_s
    rows: list[tuple[int, str]] = []
    for nbytes, seconds in sorted(times.items()):
        fastest = min(seconds, key=seconds.__getitem__)
        if not rows:
            close = [name for name in seconds if seconds[name] * BETTER <= seconds[fastest]]
            rows = [(0, min(close, key=lambda name: cost_of(op, name, ranks, nbytes).steps))]
        elif seconds[fastest] < BETTER * seconds[rows[-1][1]]:
            rows.append((nbytes, fastest))
    limits = [from_bytes for from_bytes, _ in rows[1:]] + [max(times) + 1]
    table: list[dict[str, Any]] = []
    for (from_bytes, name), limit in zip(rows, limits):
        table.append({"from_bytes": from_bytes, "algorithm": name})
        if not _supports_all(op, name):
            within = [times[nbytes] for nbytes in times if from_bytes <= nbytes < limit]
            table[-1]["otherwise"] = _fastest_fallback(op, within)
    return table


def _supports_all(op: str, name: str) -> bool:
    return name in ALGORITHMS[op] and (op, name) not in POWERS_OF_TWO_ONLY


def _fastest_fallback(op: str, seconds: Sequence[dict[str, float]]) -> str:
    """The algorithm with the lowest mean time relative to the fastest, among those for any call."""
    measured = [name for name in seconds[0] if _supports_all(op, name)]
    if not measured:
        raise ValueError(
            f"{op}: no measured algorithm supports every call; also measure one of "
            f"{', '.join(name for name in ALGORITHMS[op] if _supports_all(op, name))}"
        )
    return min(measured, key=lambda name: sum(of[name] / min(of.values()) for of in seconds))
