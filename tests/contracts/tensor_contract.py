"""What tensor parallelism must do: the weights of one process, and exactly the formula's bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import GPT, Comm, Recompute, Text, World, listen, loss
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor.layers import ColumnParallelLinear
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from shard_cases import joined
from small_models import difference
from vocab_checks import padded_vocab

AGREE = 1e-10
STEPS, ROWS, LENGTH, WIDTH, DEPTH, VOCAB = 3, 2, 12, 24, 2, 256
Edit = Callable[[nn.Module, Comm], nn.Module]


@dataclass
class Run:
    losses: list[float]
    weights: dict[str, torch.Tensor]  # whole
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)  # (op, bus bytes), of a step
    logits: torch.Tensor | None = None


def model_of(seed: int = 0, **changes: Any) -> GPT:
    """Numbers large enough to tell a fault from rounding, and no bias 0 or norm 1."""
    torch.manual_seed(seed)
    sizes = {"vocab": VOCAB, "width": WIDTH, "depth": DEPTH, "heads": 12, "context": 16}
    model = GPT(**{**sizes, **changes}).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.ndim == 1 else p.mul_(4)
    return model


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return joined(parameter, shard_of(parameter))


def trained(edit: Edit | None, recompute: Any = None, rows: int = ROWS, **changes: Any) -> Run:
    comm = Comm()
    model: nn.Module = model_of(**changes)
    if edit is not None:
        model = edit(model, comm)
    if recompute is not None:
        Recompute(model, what=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    text, losses = Text(), []
    for step in range(STEPS):
        batch = text.batch(step, rows, LENGTH)
        optimizer.zero_grad()
        with listen() as events:
            logits = model(batch.x)
            value = loss(logits, batch)
            value.backward()
        optimizer.step()
        losses.append(value.item())
    sent = Counter((event.op, event.bus_bytes) for event in events)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return Run(losses, weights, sent, logits.detach())


@cache
def oracle(**changes: Any) -> Run:
    with World(1) as one:
        return one.run(trained, None, **changes)[0]


def check_equal_to_single(
    world: World, edit: Edit = tensor_parallel, recompute: Any = None, **changes: Any
) -> list[Run]:
    expected, runs = oracle(**changes), world.run(trained, edit, recompute, **changes)
    check_runs(runs, expected)
    return runs


def check_with_bytes(
    world: World, edit: Edit, sequence: bool, recompute: Any = None, **changes: Any
) -> None:
    right = predicted(world.size, sequence, recompute == "full")
    for run in check_equal_to_single(world, edit, recompute, **changes):
        assert run.sent == right, f"sent {run.sent}, not {right}"


def check_runs(runs: list[Run], expected: Run) -> None:
    for rank, run in enumerate(runs):
        off = difference(run.weights, expected.weights)
        assert off <= AGREE, f"weights of rank {rank} are off by {off:.1e}"
        for step, (found_loss, right_loss) in enumerate(zip(run.losses, expected.losses)):
            off = abs(found_loss - right_loss)
            assert off <= AGREE, f"loss of step {step}, rank {rank}, is off by {off:.1e}"
        off = float((run.logits - expected.logits).abs().max())
        assert off <= AGREE, f"logits of rank {rank} are off by {off:.1e}"


def with_sequence(model: nn.Module, comm: Comm) -> nn.Module:
    return tensor_parallel(model, comm, sequence=True)


def predicted(size: int, sequence: bool, recompute: bool = False, dropout: bool = False) -> Any:
    """(op, bus bytes) of each collective of a step, by count."""
    element = 8
    part = ROWS * LENGTH * WIDTH * element * (size - 1) // size  # (t-1)/t b s w
    logits = ROWS * LENGTH * padded_vocab(VOCAB, size) * element * (size - 1) // size

    def summed(numbers: int) -> tuple[str, int]:  # even where it divides over the ranks
        return "all_reduce", 2 * numbers * element * (size - 1) // size

    if size == 1:
        return Counter()
    # Recompute stops at the last tensor that backward needs: without dropout behind it, the last
    # product's, and its collective is not sent again.
    again = (2 if dropout else 1) * recompute
    expected = Counter({("all_gather", logits): 1})
    if not sequence:  # and two: of the embedding, of the head's input
        return expected + Counter({("all_reduce", 2 * part): DEPTH * (4 + again) + 2})
    # Forward, backward, and again of what was kept as a part; two as above, and the head's again.
    expected[("all_gather", part)] += DEPTH * (2 + 2 + 2 + 2 * recompute) + 3
    expected[("reduce_scatter", part)] += DEPTH * (2 + 2 + again) + 2
    expected[summed(2 * WIDTH)] += 2 * DEPTH + 1  # a norm's weight and bias
    expected[summed(WIDTH)] += 2 * DEPTH  # biases of out and down
    expected[summed(16 * WIDTH)] += 1  # the table of positions
    return expected


def check_overlap(
    pair: World, sequence: bool, layer_cls: type[ColumnParallelLinear] = ColumnParallelLinear
) -> None:
    """The input's gradient travels while the weight's is computed: by the order of events."""

    def run() -> list[str]:
        happened: list[str] = []
        comm = Comm()

        class Products(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                y = func(*args, **(kwargs or {}))
                if "mm" in str(func):
                    kind = "weight" if tuple(y.shape) == (6, 8) else "input"
                    happened.append(f"{kind} gradient")
                return y

        def watched(name: str) -> None:
            real = getattr(comm, name)

            def call(*args: Any, **how: Any) -> Any:
                happened.append(f"{name} begins")
                handle = real(*args, **how)
                if handle is None:
                    happened.append(f"{name} is waited for")
                else:
                    wait = handle.wait
                    handle.wait = lambda: (happened.append(f"{name} is waited for"), wait())
                return handle

            setattr(comm, name, call)

        layer = layer_cls(8, 12, comm, sequence=sequence)
        y = layer(torch.randn(2, 2, 8, requires_grad=True))
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            watched(name)
        with Products():
            y.sum().backward()
        return happened

    expected = [
        "input gradient", "all_reduce begins", "weight gradient", "all_reduce is waited for",
    ]  # fmt: skip
    if sequence:
        expected = [
            "all_gather begins", "input gradient", "reduce_scatter begins",
            "all_gather is waited for", "weight gradient", "reduce_scatter is waited for",
        ]  # fmt: skip
    happened = pair.run(run)
    assert happened == [expected] * 2, f"in backward came {happened[0]}, not {expected}"
