"""What a transport behind the door must be able to do, whoever carries the bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from labkit.comm.collectives import Chunks
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.wire import Work


class Kind(NamedTuple):
    """What an algorithm may not serve: the elements, and their reduction ("" for none)."""

    dtype: torch.dtype
    op: str


class Call(NamedTuple):
    """One call of an operation: its tag, whether the caller goes on before it is done, and the
    name of the algorithm."""

    tag: int
    asynchronous: bool
    algorithm: str


class Transport(ABC):
    """Carries the operations of one group; tensors are flat and contiguous, roots are ranks
    inside the group, `chunks` are n tensors, chunk i belonging to rank i."""

    name = ""  # the name that its events carry
    forced: Mapping[str, str] = {}  # algorithms that the environment asks for

    @abstractmethod
    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        """The algorithm for an operation of `nbytes` in all, and why."""

    @abstractmethod
    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> str:
        """Its name. Raises ValueError where `asked`, if not empty, cannot serve."""

    def serving(self, algorithm: str) -> "Transport":
        """The transport that has this algorithm: itself, or another whom it passes the call to."""
        return self

    def symmetric_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor for operations of this group, which all ranks make at once: where they
        can reach each other's memory, there."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work: ...
    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work: ...
    @abstractmethod
    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work: ...
    @abstractmethod
    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work: ...
    @abstractmethod
    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work: ...
    @abstractmethod
    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    @abstractmethod
    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    @abstractmethod
    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work: ...
    @abstractmethod
    def barrier(self, note: torch.Tensor, call: Call) -> Work: ...
    @abstractmethod
    def ring_exchange(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> Work: ...
    @abstractmethod
    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...
    @abstractmethod
    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...


def share_memory(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether `x` is in the same storage as one of the others (and so may overlap with it)."""
    storage = x.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == storage for other in others)
