"""The interface of all transports."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from labkit.comm.collectives.steps import Chunks
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.wire import Work


class Kind(NamedTuple):
    """Dtype and reduction ("" for none): not every algorithm serves all of them."""

    dtype: torch.dtype
    op: str


class Call(NamedTuple):
    """One call of an operation: its message tag, whether it is asynchronous, its algorithm."""

    tag: int
    asynchronous: bool
    algorithm: str


Chosen = tuple["Transport", str]  # and the name of its algorithm


class Transport(Protocol):
    """Runs the operations of one group. Tensors are flat and contiguous, roots are ranks inside the
    group, `chunks` are n tensors, chunk i belonging to rank i."""

    name: str = ""  # as `CommEvent.transport` has it
    forced: Mapping[str, str] = {}  # collective -> algorithm that LABKIT_ALGO asks for

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        """The algorithm for an operation of `nbytes` in all, and why."""

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        """The transport to run it, and the algorithm. Raises ValueError if `asked` cannot serve."""

    def symmetric_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat CPU tensor, in memory that all ranks share if possible."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work: ...
    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work: ...
    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work: ...
    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work: ...
    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work: ...
    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work: ...
    def barrier(self, note: torch.Tensor, call: Call) -> Work: ...
    def ring_exchange(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> Work: ...
    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...
    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...


def private(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy if it may overlap with one of the others."""
    return x.clone() if share_memory(x, *others) else x


def share_memory(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether `x` has the storage of one of the others, and so may overlap with it."""
    storage = x.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == storage for other in others)
