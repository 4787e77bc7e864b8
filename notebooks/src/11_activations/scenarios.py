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
    """Returns the next x, and adds to a second stream. It saves much more than its inputs."""

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


def some_input() -> Tensor:
    """[rows, width], the same on every call."""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def one_step(comm: Any, call: Callable[..., Any]) -> dict[str, Any]:
    """Loss, gradients, bytes held between forward and backward, and the next random number."""
    model, x = layers(), some_input()
    torch.manual_seed(2)
    with PeakMemory() as memory:
        y, stream = x, x + 1
        for layer in model:
            y, stream = call(layer, y, stream)
        held_bytes = memory.held_bytes
        value = y.square().mean() + stream.square().mean()
        torch.rand(1)  # other code also draws random numbers between forward and backward
        value.backward()
    return {
        "value": value.item(),
        "x": x.grad,
        "gradients": [p.grad for p in model.parameters()],
        "held_bytes": held_bytes,
        "drawn": torch.rand(1).item(),
    }


def through(function: Any) -> Callable[..., Any]:
    """Layers called through the student's autograd function."""
    return lambda layer, *inputs: function.apply(layer, *inputs)


# ---- Away: a host to put memory on


class Host:
    """Memory elsewhere. `put` copies a storage's bytes there and returns a key; `get` makes a new
    storage from them. `put_bytes` counts the bytes put so far."""

    def __init__(self) -> None:
        self._there: dict[int, np.ndarray[Any, Any]] = {}  # numpy: PeakMemory does not count it
        self.put_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> int:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._there[len(self._there)] = flat.numpy().copy()
        self.put_bytes += storage.nbytes()
        return len(self._there) - 1

    def get(self, number: int) -> torch.UntypedStorage:
        there = torch.from_numpy(self._there[number])
        return torch.empty_like(there).copy_(there).untyped_storage()


def sharing() -> nn.Module:
    """Three blocks, each with three layers of one input, like q, k and v."""
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


def in_backward(comm: Any, make: Callable[..., Any] | None) -> dict[str, Any]:
    """Gradients, and bytes held and put between forward and backward."""
    model, x, host = sharing(), some_input(), Host()
    away = make(host, list(model.parameters())) if make else None
    pack = away.pack if away else torch.Tensor.detach
    unpack = away.unpack if away else (lambda kept: kept)
    with PeakMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            value = model(x).square().mean()
        held_bytes, put_bytes = memory.held_bytes, host.put_bytes
        value.backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return {"gradients": gradients, "held_bytes": held_bytes, "put_bytes": put_bytes}


# ---- attend: one row of tiles

QUERIES, TILE, HEAD = 16, 32, 8


def tiles(count: int, large: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values, made on demand; the largest scores come last."""
    for i in range(count):
        torch.manual_seed(10 + i)
        yield large * (i + 1) / count * torch.randn(TILE, HEAD), torch.randn(TILE, HEAD)


def queries() -> Tensor:
    """[queries, head width], the same on every call."""
    torch.manual_seed(9)
    return torch.randn(QUERIES, HEAD)


def attended(comm: Any, attend: Student, count: int, large: float) -> tuple[Any, int]:
    """The student's attention over the tiles, and its peak memory in bytes."""
    q = queries()
    with PeakMemory() as memory:
        out = attend(q, tiles(count, large))
    return out, memory.peak_bytes


def right_attention(count: int, large: float) -> Tensor:
    """The same from all keys at once, with torch's softmax."""
    keys, values = zip(*tiles(count, large))
    k, v = torch.cat(keys), torch.cat(values)
    return torch.softmax(queries() @ k.T / HEAD**0.5, dim=-1) @ v


# ---- choose: a model whose layers differ

BUDGETS_BYTES = (6_000_000_000, 4_000_000_000, 2_600_000_000)
SEQUENCES = (4096, 4096, 2048, 2048, 1024, 1024, 512, 1024, 1024, 2048, 2048, 4096, 4096)
MODEL_WIDTH, HEADS = 1024, 16


@cache
def u_shaped() -> Costs:
    """A model whose sequences shrink and grow again, with costs by the formulas; a layer's working
    memory is 1.5 times what it keeps without recompute."""
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
def best(budget_bytes: int) -> Plan:
    """The plan with the least recompute within the budget."""
    return least_recompute(u_shaped(), budget_bytes)


def the_same_for_all(budget_bytes: int) -> Plan:
    """The plan with the least recompute that treats all layers alike."""
    plans = [plan_of(u_shaped(), [name] * len(SEQUENCES)) for name in ("none", "selective", "full")]
    return next(plan for plan in plans if plan.peak_bytes <= budget_bytes)
