"""Single-process training: the first strategy, and the oracle of all others, which must end with
the same weights. It holds parameters P, gradients P, Adam 2P; nothing travels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.comm import Comm
from labkit.holdings import Footprint, adam_bytes, parameter_bytes


class Single(nn.Module):
    """Train `module` here, on the whole batch.

    Raises ValueError in a world of more than one rank, where it would train n unrelated copies.
    """

    def __init__(self, module: nn.Module, comm: Comm | None = None):
        super().__init__()
        if comm is not None and (size := Comm.of(comm).size) != 1:
            raise ValueError(
                f"Single trains in one process, this world has {size} ranks; use DDP, or World(1)"
            )
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: here there is nothing to hold back."""
        yield

    @staticmethod
    def predict(module: nn.Module, size: int = 1) -> Footprint:
        """P of parameters, P of gradients, 2P of Adam, nothing sent."""
        grads = parameter_bytes(module, trainable_only=True)
        return Footprint(parameter_bytes(module), grads, adam_bytes(module), 0)
