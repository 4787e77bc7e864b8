"""Step times with labkit's tensor parallelism, torch's DTensor, and no communication.

    tensor                each rank computes the loss from its slice of the logits
    DTensor               torch's `parallelize_module` of the same model, with its `loss_parallel`
    ..., all logits       every rank gathers all logits and computes the whole loss
    no communication      every rank computes its share, and each all-reduce returns at once: the
                          results are wrong, and the time is a lower bound

All cases train the same GPT from the same weights, on the same tokens, in the same processes, in
alternating turns of a few steps. AdamW's step is slow with DTensor: see the ratios without AdamW.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from labkit.bench import harness, peers
from labkit.bench.data_parallel import LR
from labkit.bench.harness import Contest, StepTimes, mean_loss
from labkit.comm import Comm
from labkit.models import GPT
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.runtime.attach import attach

ROWS, LENGTH, VOCAB = 8, 64, 1024  # the batch, shared by all ranks
STEPS = 5  # per turn
FLOOR = "no communication"
WITHOUT_ADAMW = "forward_backward_s"


class Silent(Comm):
    """A communicator whose all-reduces return at once: each rank keeps its own values."""

    def all_reduce(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Case:
    """`parallelize(model)` splits the model over all ranks, `loss(logits, targets)` returns a
    scalar; forward, loss and backward run inside `context()`."""

    parallelize: Callable[[nn.Module], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def _sliced_logits(comm_class: Callable[[], Comm]) -> Case:
    return Case(
        lambda model: tensor_parallel(model, comm_class(), gather_logits=False),
        lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, comm_class()),
    )


CASES = {
    FLOOR: _sliced_logits(Silent),
    "tensor": _sliced_logits(Comm),
    "DTensor": Case(lambda model: peers.dtensor(model, False), mean_loss, peers.loss_parallel),
    "tensor, all logits": Case(lambda model: tensor_parallel(model, Comm()), mean_loss),
    "DTensor, all logits": Case(lambda model: peers.dtensor(model, True), mean_loss),
}
CONTESTS = [
    Contest("tensor", "DTensor", 0.7),
    Contest("tensor, all logits", "DTensor, all logits", 0.7),
]


def stepper(case: Case, model: str, rows: int = ROWS) -> Callable[[], tuple[float, float]]:
    """A function that runs one step and returns the end time of backward, and the loss."""
    torch.manual_seed(0)
    parallel = case.parallelize(GPT.preset(model, vocab=VOCAB, context=LENGTH))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LR)
    batch = harness.random_batch(VOCAB, rows, LENGTH)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        with case.context():
            loss = case.loss(parallel(batch.x), batch.y)
            loss.backward()
        backward_ended_s = time.perf_counter()
        optimizer.step()
        return backward_ended_s, loss.detach().item()

    return step


def _turn(comm: Comm, step: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Mean seconds of a step, and of its forward and backward alone."""
    step_s = forward_backward_s = 0.0
    for _ in range(STEPS):
        comm.barrier()
        began_s = time.perf_counter()
        backward_ended_s, _ = step()
        forward_backward_s += backward_ended_s - began_s
        comm.barrier()
        step_s += time.perf_counter() - began_s
    return step_s / STEPS, forward_backward_s / STEPS


def _on_rank(model: str, turns: int) -> StepTimes:
    comm, turn_of = attach().comm, {}
    for name, case in CASES.items():
        step = stepper(case, model)
        for _ in range(2):
            step()
        turn_of[name] = partial(_turn, comm, step)
    samples = harness.take_turns(turn_of, turns, f"{model} on {comm.size} ranks")
    whole, without = ({name: [x[i] for x in samples[name]] for name in CASES} for i in (0, 1))
    about = {"ranks": comm.size, "model": model, "rows": ROWS, "length": LENGTH}
    return StepTimes(about, whole, CONTESTS, {WITHOUT_ADAMW: without})


def bench_tensor_parallel(
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    turns: int = 20,
    transport: str | None = None,
) -> list[StepTimes]:
    """Time all cases for each number of ranks and each model (a labkit preset)."""
    return harness.on_worlds(_on_rank, ranks, models, transport, turns)


def table(measured: Sequence[StepTimes]) -> Table:
    """One row per contest, with its ratio and aim, and the ratio without AdamW."""
    return harness.contest_table(
        measured,
        f"Tensor-parallel step, {ROWS} x {LENGTH} tokens for all ranks, in ms",
        "DTensor: torch's parallelize_module, over gloo. Alone: each rank's share, without "
        "communication. Ratio: median and quartiles of the turns. Without AdamW: the median "
        "ratio of forward and backward.",
        ("alone", lambda times, contest: f"{times.ms(FLOOR):.1f}"),
        (
            "without AdamW",
            lambda times, x: f"{times.ratio(x.ours, x.theirs, WITHOUT_ADAMW)[1]:.2f}",
        ),
    )
