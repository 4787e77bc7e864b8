"""Measures the bytes that a strategy holds on a rank, for comparison with `predict`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from labkit.holdings import Footprint


def held(module: nn.Module, optimizer: torch.optim.Optimizer, bus_bytes: float = 0) -> Footprint:
    """Bytes held on this rank by `module` and `optimizer`; shared storage counts once."""
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


def _memory_bytes(values: Iterable[Any]) -> int:
    """Bytes covered by the tensors in `values`; overlaps count once."""
    total, end = 0, (0, 0)  # (storage, first byte not yet counted)
    for storage, begin, nbytes in sorted(
        (x.untyped_storage().data_ptr(), int(x.storage_offset()) * x.element_size(), x.nbytes)
        for x in values
        if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes()
    ):
        counted = max(begin, end[1]) if storage == end[0] else begin
        total += max(0, begin + nbytes - counted)
        end = (storage, max(counted, begin + nbytes))
    return total
