"""Runs lab 08's answers on ranks, shards a model's units, and computes the expected results."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.comm import Comm, listen
from labkit.course.exercise import Student
from labkit.memory.peak import PeakMemory
from labkit.parallel.common.flat import FlatPartition

SHAPES = [torch.Size(shape) for shape in ((7, 5), (7,), (3, 11), (1,))]  # 76 elements: 3 ranks pad
LAYERS = [torch.Size(shape) for shape in ((32, 12), (20, 32), (9, 20))]  # weights [out, in]
UNITS = (50, 64, 37, 90, 21, 70)  # elements per share


# ---- gather_unit(comm, share, shapes)


def unit_parameters() -> list[Tensor]:
    """The unit's parameters, which a gather must return."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def share_of(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    """This rank's share [share] of the tensors, flattened, concatenated and padded."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    partition = FlatPartition([x.shape for x in tensors], ranks)
    return partition.share_of(
        torch.cat([flat, flat.new_zeros(partition.padded - partition.numel)]), rank
    ).clone()


def run_gather(comm: Comm, student: Student) -> tuple[Any, int]:
    """The result of the student's gather, and its peak memory in bytes."""
    share = share_of(unit_parameters(), comm.rank, comm.size)
    with PeakMemory() as memory:
        returned = student(comm, share, list(SHAPES))
    return returned, memory.peak_bytes


# ---- GatheredLinear


def weights() -> list[Tensor]:
    """The unsharded weights of three layers, the same on all ranks."""
    generator = torch.Generator().manual_seed(80)
    return [0.3 * torch.randn(shape, generator=generator) for shape in LAYERS]


def rows_of(rank: int) -> Tensor:
    """This rank's input of 6 rows."""
    return torch.randn(6, LAYERS[0][1], generator=torch.Generator().manual_seed(800 + rank))


def single_process(size: int) -> list[Tensor]:
    """The gradient of each weight, for the mean of the ranks' losses."""
    parameters = [w.requires_grad_() for w in weights()]
    losses = [_loss(rows_of(rank), [partial(_linear, weight=w) for w in parameters])
              for rank in range(size)]  # fmt: skip
    torch.stack(losses).mean().backward()
    return [w.grad for w in parameters if w.grad is not None]


def unsharded(rank: int, size: int) -> dict[str, Any]:
    """A forward and a backward with whole weights in plain torch: loss, gradient of x, bytes held
    between the passes, and peak bytes plus the largest weight, its gradient and all shares'
    gradients."""
    whole, x = weights(), rows_of(rank).requires_grad_()
    with PeakMemory() as memory:
        value = _loss(x, [partial(_linear, weight=w) for w in whole])
        held_bytes = memory.held_bytes
        value.backward()
    padded = [4 * FlatPartition([w.shape], size).padded for w in whole]
    peak_bytes = memory.peak_bytes + 2 * max(padded) + sum(padded) // size
    return {
        "value": value.item(), "x": x.grad, "held_bytes": held_bytes, "peak_bytes": peak_bytes,
    }  # fmt: skip


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _loss(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The sum of the squares of `x` after the layers, each followed by tanh."""
    for layer in layers:
        x = layer(x).tanh()
    return x.square().sum()


def run_layers(comm: Comm, layer: Any) -> dict[str, Any]:
    """A forward and a backward through three of the student's layers: loss, gradients of x and of
    the shares, bytes held between the passes, and peak bytes."""
    shares = [share_of([w], comm.rank, comm.size).requires_grad_() for w in weights()]
    x = rows_of(comm.rank).requires_grad_()
    with PeakMemory() as memory:
        layers = [
            lambda x, share=share, shape=shape: layer.apply(x, share, comm, shape)
            for share, shape in zip(shares, LAYERS)
        ]
        value = _loss(x, layers)
        held_bytes = memory.held_bytes
        value.backward()
    return {
        "value": value.item(),
        "x": x.grad,
        "gradients": [share.grad for share in shares],
        "held_bytes": held_bytes,
        "peak_bytes": memory.peak_bytes,
    }


# ---- forward_with_prefetch(comm, shares, layer, x, ahead)


def unit_flat(i: int, size: int) -> Tensor:
    """The unsharded unit i, from the shares of all ranks."""
    return torch.arange(1.0, UNITS[i] * size + 1) / (i + 1)


class LayerRecorder:
    """The `layer` for the student's forward; records gathers and live units at each call."""

    def __init__(self, events: list[Any]):
        self.events = events
        self.calls: list[dict[str, Any]] = []
        self._seen: list[tuple[int, weakref.ref[Any]]] = []

    def __call__(self, i: int, flat: Tensor, x: Tensor) -> Tensor:
        gathers = [event for event in self.events if event.op == "all_gather"]
        alive = sorted({unit for unit, ref in self._seen if ref() is not None and unit != i})
        self.calls.append(
            {
                "unit": i,
                "flat": flat.clone() if isinstance(flat, Tensor) else flat,
                "started": len(gathers),
                "waited": sum(bool(e.blocking or e.wait_ended_s) for e in gathers),
                "alive": alive,
            }
        )
        if isinstance(flat, Tensor):
            self._seen.append((i, weakref.ref(flat.untyped_storage())))
        return 0.5 * x + flat.sum()


def run_forward(comm: Comm, student: Student, ahead: int) -> tuple[Any, list[dict[str, Any]]]:
    """The result of the student's forward, and the record of each `layer` call."""
    whole = [unit_flat(i, comm.size) for i in range(len(UNITS))]
    shares = [x.tensor_split(comm.size)[comm.rank].clone() for x in whole]
    with listen() as events:
        recorder = LayerRecorder(events)
        y = student(comm, shares, recorder, torch.ones(3), ahead)
    return y, recorder.calls


def expected_output(size: int) -> Tensor:
    """The output after all units in sequence, for an x of ones."""
    x = torch.ones(3)
    for i in range(len(UNITS)):
        x = 0.5 * x + unit_flat(i, size).sum()
    return x
