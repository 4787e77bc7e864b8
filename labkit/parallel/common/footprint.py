"""What a strategy costs a rank, predicted, in bytes.

Each strategy has a `predict(module, size, ...) -> Footprint`, its formula; `held` (held.py) counts
what is really there. Tests and tables hold one against the other, to the byte.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Footprint:
    """Bytes held on one rank, and `bus_bytes` sent by one rank in one step (mean over ranks)."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    bus_bytes: float


def parameter_bytes(module: nn.Module, trainable_only: bool = False) -> int:
    """Bytes of the parameters; a tied one counts once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trainable_only)


def adam_bytes(module: nn.Module) -> int:
    """Two moments for each trainable element, and a step count of 4 bytes for each tensor."""
    tensors = sum(p.requires_grad for p in module.parameters())
    return 2 * parameter_bytes(module, trainable_only=True) + 4 * tensors


def replicated(module: nn.Module, size: int) -> Footprint:
    """Everything whole on every rank; 2(n-1)/n of the gradients sent."""
    grads = parameter_bytes(module, trainable_only=True)
    bus_bytes = 2 * (size - 1) / size * grads
    return Footprint(parameter_bytes(module), grads, adam_bytes(module), bus_bytes)
