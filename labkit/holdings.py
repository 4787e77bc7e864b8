"""The share of a model held by one rank: bytes (`Footprint`, predicted by each strategy and counted
by parallel/common/held.py) and parameter slices (`OwnedPiece`)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Footprint:
    """Bytes held on one rank, and `bus_bytes` sent per rank in one step (mean over ranks)."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    bus_bytes: float


def parameter_bytes(module: nn.Module, trainable_only: bool = False) -> int:
    """Bytes of the parameters; a tied parameter counts once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trainable_only)


def adam_bytes(module: nn.Module) -> int:
    """Bytes of Adam's state for the trainable parameters: two moments and a step count each."""
    tensors = sum(p.requires_grad for p in module.parameters())
    return 2 * parameter_bytes(module, trainable_only=True) + 4 * tensors


def replicated(module: nn.Module, size: int) -> Footprint:
    """Footprint of a full replica per rank; each rank sends 2(n-1)/n of the gradient bytes."""
    grads = parameter_bytes(module, trainable_only=True)
    bus_bytes = 2 * (size - 1) / size * grads
    return Footprint(parameter_bytes(module), grads, adam_bytes(module), bus_bytes)


@dataclass(frozen=True)
class OwnedPiece:
    """A slice of parameter `name` (`shape` on this rank), from element `start` of the flattened
    parameter on. Optimizer state is sliced the same way, so that a checkpoint can be resharded.

    tensor      the tensor to optimize: a flat slice [numel], the whole parameter or a master copy
    optimizer   the torch optimizer with this slice's `state[tensor]`; None if frozen
    shard       how tensor-parallel ranks shard the parameter (parallel/common/shards.py), or None
    """

    name: str
    shape: torch.Size
    start: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None
    shard: Any = None

    @property
    def whole_shape(self) -> Any:
        return self.shape if self.shard is None else self.shard.whole_shape(self.shape)
