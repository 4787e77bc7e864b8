"""The table of nccl-tests for collectives of labkit and of the backend, which alternate in turns
of a few calls. As in nccl-tests, the time per call is a turn's time, from a barrier to the end of
the last call on the slowest rank, divided by the number of calls. Ranks may run ahead, so the time
of a single call means little. The median over turns is reported.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from labkit.bench.calls import REDUCTIONS, Buffers, NativeCalls, call_of, expected
from labkit.bench.harness import calls_in_a_turn, check_names, seconds_of, sync_of, take_turns
from labkit.comm import listen
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.runtime.attach import attach
from labkit.runtime.pick import available_bytes, pick
from labkit.runtime.progress import progress
from labkit.runtime.transports.chooser import table_note
from labkit.runtime.world import World
from labkit.sweeps import sweep
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, Point, Sweep

COPY = "copy"
OPS, RANKS = ("all_reduce", "reduce_scatter", "all_gather"), (2, 4)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
STATISTIC = "mean call of a turn on the slowest rank; median of the turns"
TURN_S, MOST_CALLS = 0.01, 100  # usual length of a turn; maximum calls per turn
BUFFERS, CHECKING_BYTES = 2, 12  # per rank: input and output; 3 int32 per element


@dataclass(frozen=True)
class Case:
    """An operation for the ranks to time."""

    op: str
    count: int
    dtype: str
    redop: str
    algorithms: tuple[str, ...]
    turns: int
    check: bool


class Timed(NamedTuple):
    """One rank's measurement of an algorithm: seconds per call, one entry per turn."""

    chosen: str
    seconds: list[float]
    wrong: int | None


def _on_rank(case: Case) -> dict[str, Timed]:
    """Time all algorithms of `case`, the backend's algorithm (named ""), and a memory copy of equal
    size on all ranks at once (named COPY)."""
    me = attach()
    comm, dtype = me.comm, getattr(torch, case.dtype)
    buffers = Buffers(case.op, comm.rank, comm.size, case.count, dtype, me.device)
    calls: dict[str, Callable[[], object]] = {
        name: call_of(comm, buffers, case.redop, "" if name == DEFAULT else name)
        for name in case.algorithms
    }
    calls[""] = call_of(NativeCalls(comm.group, me.backend), buffers, case.redop, "")
    right = expected(buffers, case.redop) if case.check else None
    chosen = {COPY: ""}
    wrong: dict[str, int | None] = {COPY: None}
    for name, collective in calls.items():
        buffers.fill()
        with listen() as events:
            collective()
        chosen[name] = events[-1].algorithm if events else me.backend
        wrong[name] = None if right is None else buffers.wrong(right)
    del right
    buffers.zero()
    calls[COPY] = lambda: buffers.output.copy_(buffers.input)
    sync, turns = sync_of(me.device), {}
    for name, collective in calls.items():
        blocking = partial(_blocking, collective, sync)
        repeats = calls_in_a_turn(me, blocking, TURN_S, MOST_CALLS)
        turns[name] = partial(seconds_of, blocking, repeats, comm.barrier)
    seconds = take_turns(turns, case.turns, shuffled=True)
    return {name: Timed(chosen[name], seconds[name], wrong[name]) for name in calls}


def _blocking(collective: Callable[[], object], sync: Callable[[], object]) -> None:
    collective()
    sync()


def bench_collectives(
    sizes_bytes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    ranks: Sequence[int] = RANKS,
    algorithms: Sequence[str] | None = None,
    dtype: str = "float32",
    redop: str = "sum",
    turns: int = 9,
    check: bool = True,
    transport: str | None = None,
) -> Sweep:
    """Time collectives for a range of sizes, in new worlds.

    Args:
        sizes_bytes: total sizes of the operation; None: 4 KiB to 64 MiB by factors of 4.
        algorithms: names as in `comm.all_reduce(x, algorithm="ring")`, or "default" for labkit's
            choice; None: all but "hierarchical". Ignored with NCCL. The backend is always timed.
        redop: "sum", "min", "max" or "product".
        turns: how many times each algorithm is timed, alternating with the others.
        check: count the elements that differ from the result computed without communication.
        transport: "shm" or "gloo"; None: `World`'s choice. With one GPU per rank, always NCCL.

    Raises ValueError for unknown names, and for sizes that do not fit in memory."""
    sizes = list(sweep.sizes_between(1 << 12, 1 << 26, 4) if sizes_bytes is None else sizes_bytes)
    _check_input(sizes, ops, ranks, algorithms, dtype, redop, turns)
    item_bytes = getattr(torch, dtype).itemsize
    todo = [(op, size) for op in dict.fromkeys(ops) for size in sizes]
    points: list[Point] = []
    for n in dict.fromkeys(ranks):
        counts = {case: sweep.count_of(case[0], n, case[1], item_bytes) for case in todo}
        on_gpus = pick(n, None, None).backend == "nccl"  # gloo would go through CPU memory
        with World(
            n, device=None if on_gpus else "cpu", transport=None if on_gpus else transport,
            check=False, timeout_s=120,
        ) as world:  # fmt: skip
            for op, size in progress(todo, f"collectives on {n} ranks"):
                count, nbytes = counts[op, size]
                names = [DEFAULT] if on_gpus else _supported(op, n, algorithms)
                op_redop = redop if op in sweep.REDUCING else ""
                case = Case(op, count, dtype, op_redop, tuple(names), turns, check)
                points += _points(case, n, nbytes, world.backend, world.run(_on_rank, case))
    about = {
        "backend": world.backend,
        "transport": world.transport,
        "host": platform.node(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "turns": turns,
        "time": STATISTIC,
        "table": table_note(),
    }
    return Sweep(points, about)


def _points(
    case: Case, n: int, nbytes: int, backend: str, of_ranks: list[dict[str, Timed]]
) -> list[Point]:
    """The table's rows, from the measurements of all ranks."""
    seconds = {name: _typical([timed[name].seconds for timed in of_ranks]) for name in of_ranks[0]}
    points = []
    copy_s = seconds.pop(COPY)
    for name, time_s in seconds.items():
        wrongs = [timed[name].wrong for timed in of_ranks]
        points.append(Point(
            op=case.op, ranks=n, size_bytes=nbytes, count=case.count, dtype=case.dtype,
            redop=case.redop, algorithm=name or backend, chosen=of_ranks[0][name].chosen,
            own=not name, time_s=time_s, ratio=time_s / seconds[""], copy_s=copy_s,
            wrong=sum(count or 0 for count in wrongs) if case.check else None,
        ))  # fmt: skip
    return points


def _typical(of_ranks: list[list[float]]) -> float:
    """The median over turns of the slowest rank's time."""
    return median(max(turn) for turn in zip(*of_ranks))


def _supported(op: str, n: int, algorithms: Sequence[str] | None) -> list[str]:
    """The algorithms to time: those in `algorithms` (None: all) that support `n` ranks. On one
    machine, a hierarchical all-reduce equals its inner ring, so it is timed only if named."""
    asked = [DEFAULT, *ALGORITHMS.get(op, ())] if algorithms is None else dict.fromkeys(algorithms)
    return [
        name
        for name in asked
        if (name == DEFAULT or name in ALGORITHMS.get(op, ()))
        and ((op, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0)
        and (name != "hierarchical" or algorithms is not None)
    ]


def _check_input(
    sizes: list[int], ops: Sequence[str], ranks: Sequence[int], algorithms: Sequence[str] | None,
    dtype: str, redop: str, turns: int,
) -> None:  # fmt: skip
    of_ops = [DEFAULT, *(name for op in ops for name in ALGORITHMS.get(op, ()))]
    known_algorithms = dict.fromkeys(of_ops)
    check_names(ops, BUS_FACTORS, "no operation {!r}")
    check_names([dtype], DTYPES, "no dtype {!r}")
    check_names([redop], REDUCTIONS, "no reduction {!r}")
    check_names(algorithms or [], known_algorithms, "no algorithm {!r} of these operations")
    asked = {"operation": ops, "number of ranks": ranks, "size": sizes, "algorithm": algorithms}
    for what, named in asked.items():
        if named is not None and not named:
            raise ValueError(f"nothing to measure: name at least one {what}")
    if wrong := [n for n in ranks if n < 2]:
        raise ValueError(f"ranks={wrong[0]}: nothing is sent; measure on 2 ranks or more")
    if turns < 1:
        raise ValueError(f"turns={turns}: choose at least 1, or 9 for reliable times")
    copies = BUFFERS + CHECKING_BYTES / getattr(torch, dtype).itemsize
    need, free = copies * max(sizes) * max(ranks), available_bytes()
    if need > free:
        raise ValueError(
            f"{max(sizes)} bytes on {max(ranks)} ranks need {need / 1e9:.1f} GB, but "
            f"{free / 1e9:.1f} GB are free; end at a smaller size"
        )
