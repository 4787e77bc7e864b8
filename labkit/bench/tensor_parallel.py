"""A step of labkit's tensor parallelism against torch's DTensor, and against no communication.

    tensor                the loss from each rank's part of the logits
    DTensor               torch's `parallelize_module` of the same model, with its `loss_parallel`
    ..., all logits       every rank gathers all logits, and computes the whole loss
    no communication      every rank computes its part, and each all-reduce returns at once: its
                          numbers are wrong, its time is the least there can be

All train the same GPT, from the same weights, on the same tokens, in the same processes, in turns
of a few steps; a ratio is taken turn by turn. Each is told with and without AdamW's step, in which
DTensor takes long by itself.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from labkit.bench import peers
from labkit.bench.data_parallel import LR, Contest, Steps
from labkit.comm import Comm
from labkit.foreign import write_json
from labkit.models import GPT
from labkit.models.gpt import PRESETS
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.parallel.tensor.vocab import vocab_parallel_cross_entropy
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World

ROWS, LENGTH, VOCAB = 8, 64, 1024  # the batch, which all ranks share
STEPS = 5  # in a turn
FLOOR = "no communication"


class Silent(Comm):
    """A door through which no sum comes: all ranks keep what they have."""

    def all_reduce(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Side:
    """`cut(model)` is the model over all ranks, `loss(logits, targets)` a scalar; both and
    backward run inside of `within()`."""

    cut: Callable[[nn.Module], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def _whole(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _of_parts(comm_of: Callable[[], Comm]) -> Side:
    return Side(
        lambda model: tensor_parallel(model, comm_of(), gather_logits=False),
        lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, comm_of()),
    )


SIDES = {
    FLOOR: _of_parts(Silent),
    "tensor": _of_parts(Comm),
    "DTensor": Side(lambda model: peers.dtensor(model, False), _whole, peers.loss_parallel),
    "tensor, all logits": Side(lambda model: tensor_parallel(model, Comm()), _whole),
    "DTensor, all logits": Side(lambda model: peers.dtensor(model, True), _whole),
}
CONTESTS = {
    "parts": Contest("tensor", "DTensor", 0.7),
    "all": Contest("tensor, all logits", "DTensor, all logits", 0.7),
}


@dataclass(frozen=True)
class Found:
    """Times of one model on a number of ranks."""

    whole: Steps
    without_adamw: Steps  # forward and backward


def stepper(side: Side, model: str, rows: int = ROWS) -> Callable[[], tuple[float, float]]:
    """A function that does one step and says when backward was over, and what the loss was."""
    torch.manual_seed(0)
    cut = side.cut(GPT.preset(model, vocab=VOCAB, context=LENGTH))
    optimizer = torch.optim.AdamW(cut.parameters(), lr=LR)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        with side.within():
            loss = side.loss(cut(x), y)
            loss.backward()
        backward_ended_s = time.perf_counter()
        optimizer.step()
        return backward_ended_s, loss.detach().item()

    return step


def _turns(model: str, turns: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """On each rank: seconds of a step, and of one without AdamW, one entry a turn."""
    comm = attach().comm
    steppers = {name: stepper(side, model) for name, side in SIDES.items()}
    for step in steppers.values():
        for _ in range(2):
            step()
    whole: dict[str, list[float]] = {name: [] for name in SIDES}
    without: dict[str, list[float]] = {name: [] for name in SIDES}
    names = list(SIDES)
    for turn in progress(range(turns), f"{model} on {comm.size} ranks"):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            step_s, forward_backward_s = 0.0, 0.0
            for _ in range(STEPS):
                comm.barrier()
                began_s = time.perf_counter()
                backward_ended_s, _ = steppers[name]()
                forward_backward_s += backward_ended_s - began_s
                comm.barrier()
                step_s += time.perf_counter() - began_s
            whole[name].append(step_s / STEPS)
            without[name].append(forward_backward_s / STEPS)
    return whole, without


def bench_tensor_parallel(
    ranks: Sequence[int] = (2, 4),
    models: Sequence[str] = ("1M", "3.4M"),
    turns: int = 20,
    transport: str | None = None,
) -> list[Found]:
    """Time them for each number of ranks and each model; torch's go over gloo, ours over
    `transport`, as a `World` has it here when None.

    Raises ValueError for a model that is none of labkit's presets.
    """
    if unknown := [model for model in models if model not in PRESETS]:
        raise ValueError(f"no model {unknown[0]!r}; choose of {', '.join(PRESETS)}")
    found = []
    for size in ranks:
        with World(size, check=False, transport=transport) as world:
            for model in models:
                times = world.run(_turns, model, turns)[0]
                found.append(Found(*(Steps(size, model, seconds) for seconds in times)))
    return found


def table(found: Sequence[Found]) -> Table:
    """What `bench_tensor_parallel` found: a row for each contest, with its ratio and its aim."""
    shown = Table(
        title=f"A step of tensor parallelism, {ROWS} x {LENGTH} tokens for all ranks, in ms",
        caption="DTensor: torch's parallelize_module, over gloo. Alone: each rank's part, without "
        "communication. Ratio: labkit to DTensor, median and quartiles of the turns; and its "
        "median for forward and backward alone.",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    heads = ("model", "ranks", "logits", "alone", "labkit", "DTensor", "ratio", "", "aim")
    for name in (*heads, "without AdamW"):
        justify: Literal["left", "right"] = "left" if name in ("model", "logits") else "right"
        shown.add_column(name, justify=justify, no_wrap=True)
    for one in found:
        for logits, contest in CONTESTS.items():
            low, middle, high = one.whole.ratio(contest)
            shown.add_row(
                one.whole.model, str(one.whole.ranks), logits, f"{one.whole.ms(FLOOR):.1f}",
                f"{one.whole.ms(contest.ours):.1f}", f"{one.whole.ms(contest.theirs):.1f}",
                f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{contest.aim:.2f}",
                f"{one.without_adamw.ratio(contest)[1]:.2f}",
            )  # fmt: skip
        shown.add_section()
    return shown


def save(found: Sequence[Found], path: str | Path) -> Path:
    """Write all that was measured as JSON."""
    steps = [
        {
            "ranks": one.whole.ranks,
            "model": one.whole.model,
            "step_s": one.whole.seconds,
            "forward_backward_s": one.without_adamw.seconds,
            "ratios": {
                f"{contest.ours} / {contest.theirs}": {
                    "quartiles": one.whole.ratio(contest),
                    "aim": contest.aim,
                    "without_adamw": one.without_adamw.ratio(contest),
                }
                for contest in CONTESTS.values()
            },
        }
        for one in found
    ]
    about = {"torch": torch.__version__, "cores": os.cpu_count(), "rows": ROWS, "length": LENGTH}
    return write_json(path, {"about": about, "steps": steps})
