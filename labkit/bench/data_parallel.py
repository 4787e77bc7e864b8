"""A step of labkit's data-parallel strategies against torch's, and against no communication at all.

All train the same GPT in the same processes, in turns of a few steps, so that a machine that slows
down slows all of them; a ratio is taken turn by turn.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from rich.table import Table
from torch import nn

from labkit.bench import peers
from labkit.data import Batch, loss
from labkit.events import ranks_in_words
from labkit.models import GPT
from labkit.parallel import DDP, ZeRO3, ZeroOptimizer
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World

ROWS, LENGTH = 4, 64  # a rank's batch
STEPS = 5  # in a turn
LR = 1e-3

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _itself(module: nn.Module) -> nn.Module:
    return module


def _zero(stage: int) -> MakeOptimizer:
    return partial(ZeroOptimizer, optimizer_cls=torch.optim.AdamW, stage=stage, lr=LR)


_adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=LR)
FLOOR = "no communication"
STRATEGIES: dict[str, tuple[Wrap, MakeOptimizer]] = {
    FLOOR: (_itself, _adamw),
    "ddp": (DDP, _adamw),
    "zero-1": (_itself, _zero(1)),
    "zero-2": (_itself, _zero(2)),
    "zero-3": (ZeRO3, _adamw),
    "torch DDP": (peers.DDP, _adamw),
    "torch ZeRO-1": (peers.DDP, partial(peers.zero_1, lr=LR)),
    "FSDP2": (peers.fsdp2, _adamw),
}


@dataclass(frozen=True)
class Contest:
    """The time of a step of `ours` is to be at most `aim` times that of `theirs`."""

    ours: str
    theirs: str
    aim: float


CONTESTS = [
    Contest("ddp", "torch DDP", 0.92),
    Contest("zero-1", "torch ZeRO-1", 0.85),
    Contest("zero-2", "ddp", 1.1),
    Contest("zero-3", "FSDP2", 0.6),
]


@dataclass(frozen=True)
class Steps:
    """Seconds of a step of each strategy, one entry a turn."""

    ranks: int
    model: str
    seconds: dict[str, list[float]]

    def ms(self, name: str) -> float:
        """Milliseconds of a step, median over the turns."""
        return median(self.seconds[name]) * 1e3

    def ratio(self, contest: Contest) -> tuple[float, float, float]:
        """Ours to theirs in the same turn: lower quartile, median, upper quartile."""
        pairs = zip(self.seconds[contest.ours], self.seconds[contest.theirs], strict=True)
        low, middle, high = quantiles([ours / theirs for ours, theirs in pairs], n=4)
        return low, middle, high


def stepper(
    wrap: Wrap,
    model: str,
    rows: int = ROWS,
    dtype: torch.dtype = torch.float32,
    optimizer: MakeOptimizer = _adamw,
    **changes: int,
) -> Callable[[], None]:
    """A model, wrapped, with its optimizer: a function that does one step."""
    torch.manual_seed(0)
    wrapped = wrap(GPT.preset(model, vocab=1024, context=LENGTH, **changes).to(dtype))
    stepping = optimizer(wrapped.parameters())
    tokens = torch.randint(0, 1024, (rows, LENGTH + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * LENGTH)

    def step() -> None:
        stepping.zero_grad()
        loss(wrapped(batch.x), batch).backward()
        stepping.step()

    return step


def _turns(model: str, names: Sequence[str], turns: int) -> dict[str, list[float]]:
    """On each rank: seconds of a step, one entry a turn, for each of these strategies."""
    comm = attach().comm
    steppers = {}
    for name in names:
        wrap, optimizer = STRATEGIES[name]
        steppers[name] = stepper(wrap, model, optimizer=optimizer)
        for _ in range(3):  # DDP makes its buckets anew after the first step
            steppers[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in progress(range(turns), f"{model} on {ranks_in_words(comm.size)}"):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            comm.barrier()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                steppers[name]()
            comm.barrier()
            seconds[name].append((time.perf_counter() - began_s) / STEPS)
    return seconds


def bench_data_parallel(
    only: Sequence[str] = (),
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    turns: int = 20,
    transport: str | None = None,
) -> list[Steps]:
    """Time them for each number of ranks and each model; torch's go over gloo, ours over
    `transport`, as a `World` has it here when None.

    Raises ValueError for a name in `only` that is none of labkit's strategies.
    """
    names: dict[str, Any] = {FLOOR: None}
    for contest in contests(only):
        names |= {contest.ours: None, contest.theirs: None}
    found = []
    for size in ranks:
        with World(size, check=False, transport=transport) as world:
            for model in models:
                found.append(Steps(size, model, world.run(_turns, model, list(names), turns)[0]))
    return found


def contests(only: Sequence[str]) -> list[Contest]:
    """Those of these strategies of labkit's; all if none is named."""
    known = [contest.ours for contest in CONTESTS]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"no strategy {unknown[0]!r} is timed; choose of {', '.join(known)}")
    return [contest for contest in CONTESTS if not only or contest.ours in only]


def table(found: Sequence[Steps]) -> Table:
    """What `bench_data_parallel` found: a row for each contest, with its ratio and its aim."""
    shown = Table(
        title=f"A step of data parallelism, {ROWS} x {LENGTH} tokens a rank, in ms",
        caption="torch ZeRO-1 is ZeroRedundancyOptimizer under torch's DDP, FSDP2 is fully_shard; "
        "both over gloo. Alone: without communication. Ratio: median and quartiles of the turns.",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for name in ("model", "ranks", "alone", "labkit", "ms", "peer", "ms", "ratio", "", "aim"):
        words = name in ("labkit", "peer")
        shown.add_column(name, justify="left" if words else "right", no_wrap=True)
    for one in found:
        for contest in CONTESTS:
            if contest.ours not in one.seconds or contest.theirs not in one.seconds:
                continue
            low, middle, high = one.ratio(contest)
            shown.add_row(
                one.model, str(one.ranks), f"{one.ms(FLOOR):.1f}",
                contest.ours, f"{one.ms(contest.ours):.1f}",
                contest.theirs, f"{one.ms(contest.theirs):.1f}",
                f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{contest.aim:.2f}",
            )  # fmt: skip
        shown.add_section()
    return shown
