"""What recording adds to a training step: the same DDP steps, recorded and not, in turns."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from labkit.bench.ddp import LENGTH, ROWS, stepper
from labkit.parallel import DDP
from labkit.recording import record
from labkit.world import World, attach, progress

STEPS = 5  # in a turn


@dataclass(frozen=True)
class RecordingTimes:
    """Seconds of a step, median over turns, and the ratios of neighbouring turns."""

    model: str
    ranks: int
    plain_s: float
    recorded_s: float
    ratio: float
    low: float  # quartiles of the ratio
    high: float


def _turns(model: str, turns: int) -> tuple[list[float], list[float]]:
    """On each rank: seconds of a step, plain and recorded, one of each a turn."""
    comm = attach().comm
    step = stepper(DDP, model)
    for _ in range(3):
        step()

    def timed(block: Callable[[], Any]) -> float:
        with block():
            step()  # when a recording begins, Python's caches are cold: no part of a step's cost
            comm.barrier()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            comm.barrier()
            return (time.perf_counter() - began_s) / STEPS

    plain: list[float] = []
    recorded: list[float] = []
    for turn in progress(range(turns), f"{model} on {comm.size} ranks"):
        kinds: list[tuple[list[float], Callable[[], Any]]]
        kinds = [(plain, nullcontext), (recorded, record)]
        for seconds, block in kinds if turn % 2 else kinds[::-1]:
            seconds.append(timed(block))
    return plain, recorded


def bench_recording(
    ranks: tuple[int, ...] = (1, 2), models: tuple[str, ...] = ("1M", "3.4M"), turns: int = 40
) -> list[RecordingTimes]:
    """Time it for each number of ranks and each model."""
    found = []
    for size in ranks:
        with World(size, check=False) as world:
            for model in models:
                plain, recorded = world.run(_turns, model, turns)[0]
                ratios = [with_it / without for without, with_it in zip(plain, recorded)]
                low, middle, high = quantiles(ratios, n=4)
                times = RecordingTimes(
                    model, size, median(plain), median(recorded), middle, low, high
                )
                found.append(times)
    return found


def table(found: list[RecordingTimes]) -> Table:
    """What `bench_recording` found, with the ratios."""
    shown = Table(
        title=f"A DDP step recorded, {ROWS} x {LENGTH} tokens a rank (aim: below 1.02)",
        title_justify="left",
    )
    for name in ("model", "ranks", "plain, ms", "recorded, ms", "recorded / plain", "quartiles"):
        shown.add_column(name, justify="right")
    for one in found:
        times = [f"{s * 1e3:.2f}" for s in (one.plain_s, one.recorded_s)]
        quartiles = f"{one.low:.3f} to {one.high:.3f}"
        shown.add_row(one.model, str(one.ranks), *times, f"{one.ratio:.3f}", quartiles)
    return shown
