"""A step of labkit's DDP against torch's, and against no communication at all.

The three train the same GPT in the same processes, in turns of a few steps, so that a machine
that slows down slows all of them; the ratio is taken turn by turn.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from rich.table import Table
from torch import nn

from labkit.data import Batch, loss
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.world import World, attach, progress

ROWS, LENGTH = 4, 64  # a rank's batch
STEPS = 5  # in a turn


@dataclass(frozen=True)
class DdpTimes:
    """Seconds of a step, median over the turns, and the ratios of the same turns."""

    ranks: int
    model: str
    ours_s: float
    torch_s: float
    floor_s: float
    ratio: float
    low: float  # quartiles of the ratio
    high: float


def stepper(
    wrap: Callable[[nn.Module], nn.Module],
    model: str,
    rows: int = ROWS,
    dtype: torch.dtype = torch.float32,
    **changes: int,
) -> Callable[[], None]:
    """A model, wrapped, with its optimizer: a function that does one step."""
    torch.manual_seed(0)
    wrapped = wrap(GPT.preset(model, vocab=1024, context=LENGTH, **changes).to(dtype))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1024, (rows, LENGTH + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * LENGTH)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(batch.x), batch).backward()
        optimizer.step()

    return step


def _turns(model: str, turns: int) -> dict[str, list[float]]:
    """On each rank: seconds of a step, one entry a turn, for each of the three."""
    comm = attach().comm
    steppers = {
        "ours": stepper(DDP, model),
        "torch": stepper(nn.parallel.DistributedDataParallel, model),
        "floor": stepper(lambda module: module, model),
    }
    for step in steppers.values():  # torch rebuilds its buckets after the first step
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in progress(range(turns), f"{model} on {comm.size} ranks"):
        names = list(steppers)
        for name in names[turn % 3 :] + names[: turn % 3]:
            comm.barrier()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                steppers[name]()
            comm.barrier()
            seconds[name].append((time.perf_counter() - began_s) / STEPS)
    return seconds


def _summary(ranks: int, model: str, seconds: dict[str, list[float]]) -> DdpTimes:
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"])]
    low, middle, high = quantiles(ratios, n=4)
    ours_s, torch_s, floor_s = (median(seconds[name]) for name in ("ours", "torch", "floor"))
    return DdpTimes(ranks, model, ours_s, torch_s, floor_s, middle, low, high)


def bench_ddp(
    ranks: tuple[int, ...] = (2, 4),
    models: tuple[str, ...] = ("1M", "3.4M"),
    turns: int = 40,
    transport: str | None = None,
) -> list[DdpTimes]:
    """Time them for each number of ranks and each model; torch's goes over gloo, ours over
    `transport`, as a `World` has it here when None."""
    found = []
    for size in ranks:
        with World(size, check=False, transport=transport) as world:
            for model in models:
                found.append(_summary(size, model, world.run(_turns, model, turns)[0]))
    return found


def table(found: list[DdpTimes]) -> Table:
    """What `bench_ddp` found, with the ratios."""
    shown = Table(
        title=f"A DDP step (torch over gloo), {ROWS} x {LENGTH} tokens a rank (aim: at most 1.0)",
        title_justify="left",
    )
    for name in ("model", "ranks", "labkit, ms", "torch, ms", "no communication, ms"):
        shown.add_column(name, justify="right")
    shown.add_column("labkit / torch", justify="right")
    shown.add_column("quartiles", justify="right")
    for one in found:
        times = [f"{s * 1e3:.1f}" for s in (one.ours_s, one.torch_s, one.floor_s)]
        quartiles = f"{one.low:.2f} to {one.high:.2f}"
        shown.add_row(one.model, str(one.ranks), *times, f"{one.ratio:.2f}", quartiles)
    return shown
