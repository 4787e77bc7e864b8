"""The table that nccl-tests prints, for labkit's collectives and the backend's own side by side.

Within one size, all algorithms and the backend's own take turns of a few calls each, so that a
machine that slows down slows all of them. A call lasts as long as it does on its slowest rank, and
of all calls the tenth percentile is reported: what other programs add to a call has no upper end,
and would say more of them than of the algorithm.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, quantiles
from typing import Any

import psutil
import torch
from rich.box import SIMPLE
from rich.table import Table

from labkit.bench.calls import REDUCTIONS, Buffers, Own, call, expected
from labkit.bench.fits import Fit
from labkit.bench.sweep import (
    BUS_FACTORS,
    REDUCING,
    Point,
    Sweep,
    count_of,
    sizes_between,
)
from labkit.comm import listen
from labkit.comm.algorithms import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.comm.chooser import table_note
from labkit.world import World, attach, progress

DEFAULT = "default"  # what runs when no algorithm is asked for
OPS, RANKS = ("all_reduce", "reduce_scatter", "all_gather"), (2, 4)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
TURN_S, MOST_CALLS = 0.01, 100  # a turn of small calls is about so long, or so many
BUFFERS = 5  # of the operation's size, that a rank holds while it checks


@dataclass(frozen=True)
class Case:
    """What the ranks are asked to time."""

    op: str
    count: int
    dtype: str
    redop: str
    algorithms: tuple[str, ...]
    turns: int
    check: bool


@dataclass(frozen=True)
class Timed:
    """What one rank found for one algorithm: seconds of each call."""

    chosen: str
    seconds: list[float]
    wrong: int | None


def _turns(case: Case) -> dict[str, Timed]:
    """On each rank: all algorithms of `case` and, as "", the backend's own."""
    me = attach()
    comm, dtype = me.comm, getattr(torch, case.dtype)
    buffers = Buffers(case.op, comm.rank, comm.size, case.count, dtype, me.device)
    calls: dict[str, Callable[[], None]] = {
        name: partial(call, comm, buffers, case.redop, "" if name == DEFAULT else name)
        for name in case.algorithms
    }
    calls[""] = partial(call, Own(comm.group), buffers, case.redop, "")
    right = expected(buffers, case.redop) if case.check else None
    found: dict[str, Timed] = {}
    for name, once in calls.items():
        buffers.fill()
        with listen() as events:
            once()
        found[name] = Timed(
            events[-1].algorithm if events else me.backend, [],
            None if right is None else buffers.wrong(right),
        )  # fmt: skip
    del right
    buffers.zero()
    repeats = {name: _agreed_repeats(comm, once) for name, once in calls.items()}
    for turn in range(case.turns):
        names = list(calls)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].seconds.extend(_seconds(comm, calls[name], repeats[name]))
    return found


def _seconds(comm: Any, once: Callable[[], None], repeats: int) -> list[float]:
    """Of so many calls in a row."""
    seconds = []
    comm.barrier()
    for _ in range(repeats):
        began_s = time.perf_counter()
        once()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def _agreed_repeats(comm: Any, once: Callable[[], None]) -> int:
    """How many calls make a turn: rank 0 decides for all."""
    once_s = min(_seconds(comm, once, 3))
    repeats = torch.tensor([max(1, min(MOST_CALLS, int(TURN_S / once_s)))])
    comm.broadcast(repeats)
    return int(repeats)


def bench_collectives(
    sizes_bytes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    ranks: Sequence[int] = RANKS,
    algorithms: Sequence[str] | None = None,
    dtype: str = "float32",
    redop: str = "sum",
    turns: int = 9,
    check: bool = True,
) -> Sweep:
    """Time collectives over sizes, on worlds of their own.

    Args:
        sizes_bytes: of the whole operation; 4 KiB to 64 MiB by fours when None.
        algorithms: names as in `comm.all_reduce(x, algorithm="ring")`, or "default", what runs
            when none is named; None: all that can serve. The backend's own is always there.
        redop: "sum", "min", "max" or "product".
        turns: how often each is timed, in turns with the others.
        check: count wrong elements, against what each rank has worked out by itself.

    Raises ValueError for what does not exist or does not fit.
    """
    sizes = list(sizes_between(1 << 12, 1 << 26, 4) if sizes_bytes is None else sizes_bytes)
    _check_input(sizes, ops, ranks, algorithms, dtype, redop, turns)
    item_bytes = getattr(torch, dtype).itemsize
    points: list[Point] = []
    backend = ""
    for n in dict.fromkeys(ranks):
        todo = [(op, size) for op in dict.fromkeys(ops) for size in sizes]
        counts = {(op, size): count_of(op, n, size, item_bytes) for op, size in todo}
        with World(n, check=False, timeout_s=120) as world:
            backend = world.backend
            for op, size in progress(todo, f"collectives on {n} ranks"):
                count, nbytes = counts[op, size]
                names = _serving(op, n, algorithms) if backend != "nccl" else [DEFAULT]
                op_redop = redop if op in REDUCING else ""
                case = Case(op, count, dtype, op_redop, tuple(names), turns, check)
                points += _points(case, n, nbytes, backend, world.run(_turns, case))
    return Sweep(points, _about(backend, turns))


def _points(
    case: Case, n: int, nbytes: int, backend: str, found: list[dict[str, Timed]]
) -> list[Point]:
    """The lines of the table, from what each rank found."""
    seconds = {name: _typical([rank[name].seconds for rank in found]) for name in found[0]}
    points = []
    for name, time_s in seconds.items():
        wrongs = [rank[name].wrong for rank in found]
        points.append(Point(
            op=case.op, ranks=n, size_bytes=nbytes, count=case.count, dtype=case.dtype,
            redop=case.redop, algorithm=name or backend, chosen=found[0][name].chosen,
            own=not name, time_s=time_s, ratio=time_s / seconds[""],
            wrong=sum(one for one in wrongs if one is not None) if case.check else None,
        ))  # fmt: skip
    return points


def _typical(of_ranks: list[list[float]]) -> float:
    """The tenth percentile of the calls; each is as long as on its slowest rank."""
    calls = [max(call) for call in zip(*of_ranks)]
    return quantiles(calls, n=10, method="inclusive")[0] if len(calls) > 1 else calls[0]


def _serving(op: str, n: int, algorithms: Sequence[str] | None) -> list[str]:
    """The algorithms to time: those asked for, or all, that this number of ranks allows. On one
    machine a hierarchical all-reduce is the ring inside it: timed only where it is asked for."""
    asked = [DEFAULT, *ALGORITHMS[op]] if algorithms is None else dict.fromkeys(algorithms)
    return [
        name
        for name in asked
        if (name == DEFAULT or name in ALGORITHMS[op])
        and ((op, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0)
        and (name != "hierarchical" or algorithms is not None)
    ]


def _check_input(
    sizes: list[int], ops: Sequence[str], ranks: Sequence[int], algorithms: Sequence[str] | None,
    dtype: str, redop: str, turns: int,
) -> None:  # fmt: skip
    for what, given, known in [
        ("operation", ops, list(BUS_FACTORS)),
        ("dtype", [dtype], DTYPES),
        ("reduction", [redop], list(REDUCTIONS)),
        ("algorithm of these operations", algorithms or [],
         list(dict.fromkeys([DEFAULT, *(name for op in ops for name in ALGORITHMS.get(op, ()))]))),
    ]:  # fmt: skip
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{unknown[0]!r} is no {what}; choose from {', '.join(known)}")
    for what, named in [
        ("operation", ops),
        ("number of ranks", ranks),
        ("size", sizes),
        ("algorithm", [DEFAULT] if algorithms is None else algorithms),
    ]:
        if not named:
            raise ValueError(f"nothing to measure: name at least one {what}")
    if wrong := [n for n in ranks if n < 2]:
        raise ValueError(f"on {wrong[0]} ranks nothing travels; measure on 2 or more")
    if turns < 1:
        raise ValueError(f"{turns} turns: 1 or more are needed, and 9 for times to trust")
    need, free = BUFFERS * max(sizes) * max(ranks), psutil.virtual_memory().available
    if need > free:
        raise ValueError(
            f"{max(sizes)} bytes on {max(ranks)} ranks need {need / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free; end at a smaller size"
        )


def _about(backend: str, turns: int) -> dict[str, Any]:
    return {
        "backend": backend,
        "host": platform.node(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "turns": turns,
        "table": table_note(),
    }


def tables(sweep: Sweep) -> list[Table]:
    """What nccl-tests prints, one table for each operation and number of ranks."""
    backend = sweep.about.get("backend", "backend")
    shown = []
    for op, n, points in sweep.tables():
        table = Table(
            title=f"{op} on {n} ranks, GB/s: busbw = {BUS_FACTORS[op](n):.3g} algbw",
            caption=_summary(points, backend), box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0),
            title_justify="left", caption_justify="left", show_edge=False,
        )  # fmt: skip
        for name in ("size, B", "count", "type", "redop", "root", "algorithm"):
            table.add_column(name, justify="right" if name in ("size, B", "count") else "left")
        for name in ("time, us", "algbw", "busbw", "#wrong", f"/ {backend}"):
            table.add_column(name, justify="right")
        for point, after in zip(points, [*points[1:], points[-1]]):
            table.add_row(
                *_cells(point), end_section=point.size_bytes != after.size_bytes,
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
        "" if point.own else f"{point.ratio:.2f}",
    ]  # fmt: skip


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
    for one in fits:
        table.add_row(
            one.op, str(one.ranks), one.algorithm, f"{one.alpha_s * 1e6:.1f}",
            f"{one.beta_s_per_byte * 1e9:.3f}", f"{one.error:.0%}",
        )  # fmt: skip
    return table
