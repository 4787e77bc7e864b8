"""This machine as a cluster of devices, one per rank of a World. All ranks are measured at once, so
a device is a rank's share of cores, memory, GPU and links. Per turn, a case is called several times
after a barrier; the slowest rank's time is divided by the number of calls. The lower quartile of
the turns is used: other programs only slow a turn down. rates.py fits the cluster to these times.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from math import inf
from typing import Any

import numpy as np
import psutil
import torch

from labkit.bench.harness import calls_in_a_turn, seconds_of, sync_of
from labkit.bench.rates import Case, Times, fit_link, fit_matmuls
from labkit.clusters import Cluster, Device, Level
from labkit.comm import Comm
from labkit.runtime.attach import Rank, attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World

NAME = "here"
LINKS = {"shm": "shared memory", "gloo": "gloo", "nccl": "NCCL"}
DTYPES = ("float32", "float64", "bfloat16")
SIDES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}  # larger than caches
REDUCED_BYTES = tuple(1 << shift for shift in range(10, 25, 2))
ROUNDS, TURNS, TURN_S, MOST_CALLS = 3, 3, 0.02, 10_000
LONGEST_S = 0.15  # per call; longer matmuls are skipped
REACHED = "by definition: the rate was achieved"
ENOUGH_S = 7.0  # after this, only unmeasured cases run


def measure_machine(ranks: int = 4) -> Cluster:
    """Measure this machine, in about ten seconds, as a cluster of one node with `ranks` devices.

    >>> measure_machine().device.peak_flops["float32"]  # one rank's share

    Close other programs first. With one rank, nothing is sent: the link has the memory's rate.
    Raises ValueError if this machine cannot start `ranks` ranks."""
    with World(ranks, timeout_s=120) as world:
        began_s = time.monotonic()
        turns: dict[Case, list[float]] = {}
        for case in progress(list(_cases(world)) * ROUNDS, "measuring"):
            late = case in turns and time.monotonic() - began_s > ENOUGH_S
            if not late and not _too_long(case, turns, SIDES[world.device]):
                of_ranks = world.run(_turns, case)
                turns.setdefault(case, []).extend(max(turn) for turn in zip(*of_ranks))
        typical = {case: float(np.quantile(seconds, 0.25)) for case, seconds in turns.items()}
        return _described(world, typical)


def _cases(world: World) -> Iterator[Case]:
    yield Case("tiny", 1)
    yield Case("copy", min(COPIED_BYTES[world.device], _memory_bytes(world) // 16), "uint8")
    for dtype in DTYPES:
        for side in SIDES[world.device]:
            yield Case("matmul", side, dtype)
    for ranks in sorted({2, world.size}) if world.size > 1 else ():
        for nbytes in REDUCED_BYTES:
            yield Case("all-reduce", nbytes, ranks=ranks)


def _too_long(case: Case, turns: dict[Case, list[float]], sides: Sequence[int]) -> bool:
    """Whether a matmul would exceed LONGEST_S, estimated as 8 times the matmul of half the side
    (infinite if skipped). The two smallest sides per dtype always run."""
    if case.kind != "matmul" or case.size in sides[:2]:
        return False
    return 8 * min(turns.get(case._replace(size=case.size // 2), [inf])) > LONGEST_S


def _turns(case: Case) -> list[float]:
    """Seconds per call in each turn; all ranks measure at once."""
    me = attach()
    once = _call(case, me)
    once()  # warms the caches
    calls = calls_in_a_turn(me, once, TURN_S, MOST_CALLS)
    sync = sync_of(me.device)
    return [seconds_of(once, calls, me.comm.barrier, sync) for _ in range(TURNS)]


def _call(case: Case, me: Rank) -> Callable[[], Any]:
    dtype, size = getattr(torch, case.dtype), case.size
    if case.kind == "all-reduce":
        group = _group(me, case.ranks)
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=me.device)
        return partial(group.all_reduce, x) if group else lambda: None
    if case.kind == "matmul":
        a, b = (torch.randn(size, size, device=me.device).to(dtype) for _ in range(2))
        return partial(torch.mm, a, b, out=torch.empty_like(a))
    source = torch.ones(size, dtype=dtype, device=me.device)
    target = torch.ones_like(source)
    return partial(target.add_ if case.kind == "tiny" else target.copy_, source)


def _group(me: Rank, size: int) -> Comm | None:
    """This rank's group of `size` consecutive ranks, created once; None for a leftover rank."""
    groups: dict[int, Comm | None] = vars(me.state).setdefault("groups", {me.size: me.comm})
    if size not in groups:
        firsts = range(0, me.size - size + 1, size)
        subgroups = [me.comm.subgroup(range(first, first + size)) for first in firsts]
        groups[size] = next((group for group in subgroups if group is not None), None)
    return groups[size]


def _described(world: World, seconds: dict[Case, float]) -> Cluster:
    """The cluster, from the typical seconds per call for each case."""
    n, kind = world.size, _kind(world)
    where = (
        f"; measured on this machine: {kind}, torch {torch.__version__.split('+')[0]}, "
        f"{n} rank{'s at once' if n > 1 else ''}, {date.today().isoformat()}"
    )
    matmuls, reduced, tiny, copied = (
        {case: s for case, s in seconds.items() if case.kind == name}
        for name in ("matmul", "all-reduce", "tiny", "copy")
    )
    (tiny_s,), ((copy, copy_s),) = tiny.values(), copied.items()
    fit = fit_matmuls(matmuls)
    sources = {
        "memory_bytes": "total memory divided by the ranks that share it",
        "memory_bytes_per_s": f"a copy of {copy.size >> 20} MiB, read and written",
        "launch_s": "an addition of one element",
        "matmul_reached": REACHED,
        "memory_reached": REACHED,
        "tile": f"matmuls of all dtypes, typically {fit.error:.0%} off",
    }
    for dtype in fit.peak_flops:
        sides = [case.size for case in matmuls if case.dtype == dtype]
        sources[f"peak_flops.{dtype}"] = f"matmuls of sides {min(sides)} to {max(sides)}"
    device = Device(
        name=f"one of {n} ranks on {kind}" if n > 1 else f"a rank on {kind}",
        peak_flops={dtype: _rounded(rate) for dtype, rate in fit.peak_flops.items()},
        memory_bytes=float(_memory_bytes(world)),
        memory_bytes_per_s=_rounded(2 * copy.size / copy_s),
        launch_s=_rounded(tiny_s),
        tile=_rounded(fit.tile),
        sources={name: source + where for name, source in sources.items()},
    )
    title = f"this machine: {n} rank{'s' * (n > 1)} on {kind}"
    return Cluster(NAME, title, device, 1, n, _link(world, device, reduced, where))


def _link(world: World, device: Device, reduced: Times, where: str) -> Level:
    if not reduced:
        own, nothing = f"one rank: its own memory{where}", f"one rank: nothing is sent{where}"
        sources = {"bytes_per_s": own, "latency_s": nothing, "reached": own, "start_s": nothing}
        return Level("none", device.memory_bytes_per_s, 0.0, 1, sources=sources)
    fit = fit_link(reduced)
    groups = " and ".join(str(size) for size in sorted({x.ranks for x in reduced}))
    how = (
        f"all-reduces of {REDUCED_BYTES[0] >> 10} KiB to {REDUCED_BYTES[-1] >> 20} MiB on {groups} "
        f"ranks, typically {fit.error:.0%} off{where}"
    )
    start = how if world.size > 2 else f"on 2 ranks, included in the latency{where}"
    return Level(
        LINKS[world.transport],
        _rounded(fit.bytes_per_s), _rounded(fit.latency_s), world.size,
        start_s=_rounded(fit.start_s),
        sources={
            "bytes_per_s": how, "latency_s": how, "start_s": start, "reached": REACHED + where,
        },
    )  # fmt: skip


def _kind(world: World) -> str:
    """The hardware that the ranks share, without the host name."""
    if world.device == "cuda":
        used = min(torch.cuda.device_count(), world.size)
        return f"{used} {torch.cuda.get_device_name(0)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} core{'s' * (cores != 1)}"


def _memory_bytes(world: World) -> int:
    """Memory of one rank: its share of a GPU or of the machine."""
    if world.device == "cuda":
        on_each = -(-world.size // torch.cuda.device_count())
        return torch.cuda.get_device_properties(0).total_memory // on_each
    return psutil.virtual_memory().total // world.size


def _rounded(number: float) -> float:
    """Round to four digits: no measurement is more precise."""
    return float(f"{number:.4g}")
