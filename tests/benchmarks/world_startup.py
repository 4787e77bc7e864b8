"""How long until four ranks have done their first all-reduce: a `World` beside
`torch.multiprocessing.spawn`, cold (nothing started yet) and warm.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from timeit import repeat

import torch
from rich.table import Table

from labkit.bench.harness import titled
from labkit.cli.terminal import print_table
from labkit.comm import Comm
from labkit.runtime.world import World

SIZE = 4
COLD = """
import time
from labkit import Comm, World
import torch
began_s = time.perf_counter()
with World({size}) as world:
    world.run(lambda: Comm().all_reduce(torch.ones(1)))
    print(time.perf_counter() - began_s)
"""
SPAWN = """
import sys, time
import torch, torch.distributed as dist

def rank(rank, path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, {size}), rank=rank, world_size={size})
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

if __name__ == "__main__":
    began_s = time.perf_counter()
    torch.multiprocessing.spawn(rank, (sys.argv[1],), nprocs={size})
    print(time.perf_counter() - began_s)
"""


@dataclass(frozen=True)
class StartupTimes:
    """Seconds, medians of a few tries."""

    cold_s: float
    warm_s: float
    spawn_s: float
    empty_run_s: float


def measure(tries: int = 3) -> StartupTimes:
    """The three ways to start take turns; then the run of an empty function."""
    cold, spawn, warm = [], [], []
    World(SIZE).close()  # this process's server is warm from here on
    for _ in range(tries):
        cold.append(_run_script(COLD))
        with tempfile.TemporaryDirectory() as folder:
            spawn.append(_run_script(SPAWN, f"{folder}/store"))
        began_s = time.perf_counter()
        with World(SIZE) as world:
            world.run(lambda: Comm().all_reduce(torch.ones(1)))
            warm.append(time.perf_counter() - began_s)
    with World(SIZE) as world:
        world.run(lambda: None)
        empty = repeat(lambda: world.run(lambda: None), number=1, repeat=50)
    return StartupTimes(median(cold), median(warm), median(spawn), median(empty))


def _run_script(program: str, *args: str) -> float:
    """Run `program` in a new Python; returns the number it prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program.format(size=SIZE))
        file.flush()
        command = [sys.executable, file.name, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def table(times: StartupTimes) -> Table:
    """A row for each way, and how much slower `spawn` is."""
    cold, warm = times.spawn_s / times.cold_s, times.spawn_s / times.warm_s
    rows = [
        ("World, cold", f"{times.cold_s:.2f}", "1.5", f"{cold:.1f}"),
        ("World, warm", f"{times.warm_s:.3f}", "0.2", f"{warm:.1f} (aim: 20)"),
        ("torch.multiprocessing.spawn", f"{times.spawn_s:.2f}", "", "1"),
        ("run of an empty function", f"{times.empty_run_s:.5f}", "0.01", ""),
    ]
    names = ("", "seconds", "aim", "mp.spawn is slower by")
    return titled(f"{SIZE} ranks ready for their first all-reduce", "", names, ("",), rows)


if __name__ == "__main__":
    print_table(table(measure()))
