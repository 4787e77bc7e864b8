"""The interface of all transports."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from labkit.comm.collectives.steps import Chunks
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.wire import Work


class Kind(NamedTuple):
    """Dtype and reduction ("" for none); not every algorithm supports every combination."""

    dtype: torch.dtype
    op: str


class Call(NamedTuple):
    """One call of an operation: its message tag, whether it is asynchronous, its algorithm."""

    tag: int
    asynchronous: bool
    algorithm: str


Chosen = tuple["Transport", str]  # a transport and the algorithm's name


class Transport(Protocol):
    """Runs the operations of one group. Tensors are flat and contiguous, roots are ranks in the
    group, and `chunks` contains n tensors, chunk i for rank i."""

    name: str = ""  # for `CommEvent.transport`
    forced: Mapping[str, str] = {}  # collective -> algorithm from LABKIT_ALGO

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        """The algorithm for an operation of `nbytes` in total, and the reason."""

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        """The operation's transport and algorithm. Raises ValueError if `asked` cannot be used."""

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
    """`x`, or a copy if `x` may overlap with any of `others`."""
    return x.clone() if share_memory(x, *others) else x


def share_memory(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether `x` shares its storage with any of `others`, and so may overlap with it."""
    storage = x.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == storage for other in others)
