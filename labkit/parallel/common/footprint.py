"""What a strategy costs a rank, counted or predicted, in bytes.

Each strategy has a `predict(module, size, ...) -> Footprint`, its formula; `held` counts what is
really there. Tests and tables hold one against the other, to the byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Footprint:
    """Bytes held on one rank, and `bus_bytes` sent by one rank in one step (mean over ranks)."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    bus_bytes: float


def held(module: nn.Module, optimizer: torch.optim.Optimizer, bus_bytes: float = 0) -> Footprint:
    """What this rank holds now: memory that two tensors share counts once. A sharded optimizer
    has gradients and what it steps on elsewhere than in the module."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    if hasattr(optimizer, "gradient_pieces"):
        gradients += optimizer.gradient_pieces()[0]
    states = [value for state in optimizer.state.values() for value in state.values()]
    places = {p.untyped_storage().data_ptr() for p in parameters}
    copies = [x for x in optimizer.state if x.untyped_storage().data_ptr() not in places]
    return Footprint(
        parameter_bytes=_memory_bytes(parameters),
        gradient_bytes=_memory_bytes(gradients),
        optimizer_bytes=_memory_bytes([*states, *copies]),
        bus_bytes=bus_bytes,
    )


def parameter_bytes(module: nn.Module, trainable_only: bool = False) -> int:
    """Bytes of the parameters; a tied one counts once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trainable_only)


def adam_bytes(module: nn.Module) -> int:
    """Two moments for each trainable element, and a step count of 4 bytes for each tensor."""
    tensors = sum(p.requires_grad for p in module.parameters())
    return 2 * parameter_bytes(module, trainable_only=True) + 4 * tensors


def _memory_bytes(things: Iterable[Any]) -> int:
    """Bytes that these tensors see, each place in memory once."""
    total, end = 0, (0, 0)  # (storage, the first byte after what has been counted)
    for storage, begin, nbytes in sorted(
        (x.untyped_storage().data_ptr(), int(x.storage_offset()) * x.element_size(), x.nbytes)
        for x in things
        if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes()
    ):
        counted = max(begin, end[1]) if storage == end[0] else begin
        total += max(0, begin + nbytes - counted)
        end = (storage, max(counted, begin + nbytes))
    return total
