"""Single-process training, the reference: every strategy must end with the same weights.
The process holds P bytes of parameters, P of gradients and 2P of Adam state, and sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.comm import Comm
from labkit.holdings import Footprint, adam_bytes, parameter_bytes


class Single(nn.Module):
    """Trains `module` on the whole batch. Raises ValueError if `comm` has more than one rank,
    since each rank would train an independent copy."""

    def __init__(self, module: nn.Module, comm: Comm | None = None):
        super().__init__()
        if comm is not None and (size := Comm.of(comm).size) != 1:
            raise ValueError(
                f"Single trains in one process, but the world has {size} ranks; use DDP or World(1)"
            )
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: there is no communication to skip."""
        yield

    @staticmethod
    def predict(module: nn.Module, size: int = 1) -> Footprint:
        grads = parameter_bytes(module, trainable_only=True)
        return Footprint(parameter_bytes(module), grads, adam_bytes(module), 0)
