"""Step times of labkit's and torch's data-parallel strategies, and of steps without communication.

All cases train the same GPT in the same processes, in alternating turns of a few steps.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from rich.table import Table
from torch import nn

from labkit.bench import harness, peers
from labkit.bench.harness import Contest, StepTimes
from labkit.data import loss
from labkit.events import ranks_in_words
from labkit.models import GPT
from labkit.parallel import DDP, ZeRO3, ZeroOptimizer
from labkit.runtime.attach import attach

ROWS, LENGTH = 4, 64  # a rank's batch
STEPS = 5  # per turn
LR = 1e-3
FLOOR = "no communication"

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _unwrapped(module: nn.Module) -> nn.Module:
    return module


_adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=LR)
_zero = partial(ZeroOptimizer, optimizer_cls=torch.optim.AdamW, lr=LR)
STRATEGIES: dict[str, tuple[Wrap, MakeOptimizer]] = {
    FLOOR: (_unwrapped, _adamw),
    "ddp": (DDP, _adamw),
    "zero-1": (_unwrapped, partial(_zero, stage=1)),
    "zero-2": (_unwrapped, partial(_zero, stage=2)),
    "zero-3": (ZeRO3, _adamw),
    "torch DDP": (peers.DDP, _adamw),
    "torch ZeRO-1": (peers.DDP, partial(peers.zero_1, lr=LR)),
    "FSDP2": (peers.fsdp2, _adamw),
}
CONTESTS = [
    Contest("ddp", "torch DDP", 0.92),
    Contest("zero-1", "torch ZeRO-1", 0.85),
    Contest("zero-2", "ddp", 1.1),
    Contest("zero-3", "FSDP2", 0.6),
]


def stepper(
    wrap: Wrap,
    model: str,
    rows: int = ROWS,
    dtype: torch.dtype = torch.float32,
    make_optimizer: MakeOptimizer = _adamw,
    **changes: int,
) -> Callable[[], None]:
    """A function that runs one training step of a wrapped model."""
    torch.manual_seed(0)
    device = attach().device
    wrapped = wrap(GPT.preset(model, vocab=1024, context=LENGTH, **changes).to(device, dtype))
    optimizer = make_optimizer(wrapped.parameters())
    batch = harness.random_batch(1024, rows, LENGTH, device)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(batch.x), batch).backward()
        optimizer.step()

    return step


def _on_rank(model: str, contests: list[Contest], turns: int) -> StepTimes:
    me, cases = attach(), {}
    comm, sync = me.comm, harness.sync_of(me.device)

    def finish() -> None:
        sync()
        comm.barrier()

    for name in dict.fromkeys([FLOOR, *(name for x in contests for name in (x.ours, x.theirs))]):
        wrap, make_optimizer = STRATEGIES[name]
        step = stepper(wrap, model, make_optimizer=make_optimizer)
        for _ in range(3):  # DDP rebuilds its buckets after the first step
            step()
        cases[name] = partial(harness.seconds_of, step, STEPS, comm.barrier, finish)
    seconds = harness.take_turns(cases, turns, f"{model} on {ranks_in_words(comm.size)}")
    about = {"ranks": comm.size, "model": model, "device": harness.device_name(me.device)}
    return StepTimes(about, seconds, contests)


def bench_data_parallel(
    only: Sequence[str] = (),
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    turns: int = 20,
    transport: str | None = None,
) -> list[StepTimes]:
    """Time the strategies in `only` (all if empty) against their peers, per rank count and model.

    Raises ValueError for an unknown strategy in `only`."""
    known = [contest.ours for contest in CONTESTS]
    harness.check_names(only, known, "no benchmark of strategy {!r}")
    contests = [contest for contest in CONTESTS if not only or contest.ours in only]
    return harness.on_worlds(_on_rank, ranks, models, transport, contests, turns)


def table(measured: Sequence[StepTimes]) -> Table:
    """One row per contest, with its ratio and aim."""
    return harness.contest_table(
        measured,
        f"Data-parallel step, {ROWS} x {LENGTH} tokens per rank, in ms",
        "torch ZeRO-1 is ZeroRedundancyOptimizer with torch's DDP, FSDP2 is fully_shard; torch "
        "uses gloo, or NCCL if labkit does. Alone: without communication. Ratio: median and "
        "quartiles of the turns.",
        ("alone", lambda times, contest: f"{times.ms(FLOOR):.1f}"),
    )
