"""Inputs for lab 11's exercises: layers with dropout, a host, tiles, a U-shaped model."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.course.exercise import Student
from labkit.memory.chooser import Cost, Costs, Plan, least_recompute, plan_of
from labkit.memory.peak import PeakMemory
from labkit.models.attention import Dropout
from labkit.predict import activation_bytes, layer_forward_flops

ROWS, WIDTH = 64, 128


# ---- Again and Away: a model of three layers with dropout


class TwoStreams(nn.Module):
    """Returns the next x and adds to a second stream; autograd saves far more than the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), Dropout(0.3),
            nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        y = self.mlp(x)
        return y, stream + y * stream.tanh()


def layers(count: int = 3) -> nn.ModuleList:
    """Layers with the same weights on every call."""
    torch.manual_seed(0)
    return nn.ModuleList(TwoStreams() for _ in range(count))


def example_input() -> Tensor:
    """[rows, width], the same on every call."""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def run_step(comm: Any, call: Callable[..., Any]) -> dict[str, Any]:
    """Loss, gradients, bytes held between forward and backward, and the next random number."""
    model, x = layers(), example_input()
    torch.manual_seed(2)
    with PeakMemory() as memory:
        y, stream = x, x + 1
        for layer in model:
            y, stream = call(layer, y, stream)
        held_bytes = memory.held_bytes
        loss = y.square().mean() + stream.square().mean()
        torch.rand(1)  # other code also draws random numbers between forward and backward
        loss.backward()
    return {
        "loss": loss.item(),
        "x": x.grad,
        "gradients": [p.grad for p in model.parameters()],
        "held_bytes": held_bytes,
        "drawn": torch.rand(1).item(),
    }


def applied(function: Any) -> Callable[..., Any]:
    """Calls layers through the student's autograd function."""
    return lambda layer, *inputs: function.apply(layer, *inputs)


# ---- Away: a host to offload storages to


class Host:
    """Host memory. `put` copies a storage's bytes to the host and returns a key; `get` makes a
    new storage from the copy. `put_bytes` counts the bytes copied so far."""

    def __init__(self) -> None:
        self._copies: dict[int, np.ndarray[Any, Any]] = {}  # PeakMemory ignores numpy arrays
        self.put_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> int:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._copies[len(self._copies)] = flat.numpy().copy()
        self.put_bytes += storage.nbytes()
        return len(self._copies) - 1

    def get(self, key: int) -> torch.UntypedStorage:
        copy = torch.from_numpy(self._copies[key])
        return torch.empty_like(copy).copy_(copy).untyped_storage()


def shared_inputs() -> nn.Module:
    """Three blocks, each with three layers that share one input, like q, k and v."""
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x).tanh()
            y = (self.q(y) * self.k(y)).sigmoid() + self.v(y)
            return x + y.view(ROWS // 2, 2, WIDTH).transpose(0, 1).tanh().reshape(ROWS, WIDTH)

    return nn.Sequential(Shared(), Shared(), Shared())


def run_offloaded(comm: Any, make: Callable[..., Any] | None) -> dict[str, Any]:
    """Gradients, bytes held between forward and backward, and bytes offloaded in forward."""
    model, x, host = shared_inputs(), example_input(), Host()
    away = make(host, list(model.parameters())) if make else None
    pack = away.pack if away else torch.Tensor.detach
    unpack = away.unpack if away else (lambda kept: kept)
    with PeakMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x).square().mean()
        held_bytes, put_bytes = memory.held_bytes, host.put_bytes
        loss.backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return {"gradients": gradients, "held_bytes": held_bytes, "put_bytes": put_bytes}


# ---- attend: a row of tiles

QUERIES, TILE, HEAD = 16, 32, 8


def tiles(count: int, large: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values, generated on demand; the last tile has the largest scores."""
    for i in range(count):
        torch.manual_seed(10 + i)
        yield large * (i + 1) / count * torch.randn(TILE, HEAD), torch.randn(TILE, HEAD)


def queries() -> Tensor:
    """[queries, head width], the same on every call."""
    torch.manual_seed(9)
    return torch.randn(QUERIES, HEAD)


def run_attend(comm: Any, attend: Student, count: int, large: float) -> tuple[Any, int]:
    """The student's attention over the tiles, and its peak memory in bytes."""
    q = queries()
    with PeakMemory() as memory:
        out = attend(q, tiles(count, large))
    return out, memory.peak_bytes


def right_attention(count: int, large: float) -> Tensor:
    """The same attention over all keys at once, with torch's softmax."""
    keys, values = zip(*tiles(count, large))
    k, v = torch.cat(keys), torch.cat(values)
    return torch.softmax(queries() @ k.T / HEAD**0.5, dim=-1) @ v


# ---- choose: a model whose layers differ

BUDGETS_BYTES = (6_000_000_000, 4_000_000_000, 2_600_000_000)
SEQUENCES = (4096, 4096, 2048, 2048, 1024, 1024, 512, 1024, 1024, 2048, 2048, 4096, 4096)
MODEL_WIDTH, HEADS = 1024, 16


@cache
def u_shaped_costs() -> Costs:
    """Costs, by formula, of a model whose sequences shrink and grow again. A layer's working memory
    is 1.5 times the activations that it keeps without recompute."""
    blocks = []
    for sequence in SEQUENCES:
        kept = {
            how: int(activation_bytes(sequence, 1, MODEL_WIDTH, HEADS, recompute=how))
            for how in ("none", "selective", "full")
        }
        core = 4 * sequence**2 * MODEL_WIDTH
        layer = layer_forward_flops(MODEL_WIDTH, HEADS, 1, sequence)
        again = {"none": 0, "selective": core, "full": layer}
        need = kept["none"] * 3 // 2
        blocks.append({how: Cost(kept[how], need + kept[how] * (how != "none"), again[how])
                       for how in kept})  # fmt: skip
    flops = 3 * sum(layer_forward_flops(MODEL_WIDTH, HEADS, 1, s) for s in SEQUENCES)
    return Costs(blocks, step_flops=flops)


@cache
def best_plan(budget_bytes: int) -> Plan:
    """The plan with the least recompute within the budget."""
    return least_recompute(u_shaped_costs(), budget_bytes)


def best_uniform(budget_bytes: int) -> Plan:
    """The plan with the least recompute within the budget, if all layers share one choice."""
    costs = u_shaped_costs()
    plans = [plan_of(costs, [name] * len(SEQUENCES)) for name in ("none", "selective", "full")]
    return next(plan for plan in plans if plan.peak_bytes <= budget_bytes)
