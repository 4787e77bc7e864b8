"""What the data-parallel strategies owe the rest of labkit, which never asks for their class.

    who asks                    for what
    clipping, loss scaling      gradient_pieces(): averaged gradients, each element on one rank
    checkpoints                 owned(...): pieces of parameters and their optimizer state, and
                                after_load(), when they were written to
    recording, memory counts    gradient_pieces()
    a pipeline                  no_sync(), sends_once, shards_parameters, gradient_of_copy(p)

A `DataParallel` averages gradients: DDP, NaiveDDP, ZeroOptimizer, ZeRO3. A `Sharder` also keeps a
part of the gradients or parameters on each rank: ZeroOptimizer, ZeRO3. A new sharded stage is a
Sharder when it has these members.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from labkit.comm import Comm
from labkit.precision.pieces import OwnsPieces, fulfils


class DataParallel(Protocol):
    """Averages gradients over replicas, except in `no_sync()`. torch's own DDP and FSDP do, too."""

    def no_sync(self) -> AbstractContextManager[None]: ...


class OwnsGradientPieces(Protocol):
    """Has a part of the averaged gradients on each rank."""

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        """Returns (pieces, comm): this rank's averaged gradients, of any shape, to be scaled in
        place; over the ranks of `comm`, each element is in exactly one piece."""


class TiedGradient(Protocol):
    """The gradient of a parameter of which other stages of a pipeline have copies."""

    def put_aside(self) -> None:
        """Before a step: what earlier steps have left is summed over the copies already."""

    def sum_copies(self, copies: Any) -> None:
        """After the last backward: all-reduce it over the ranks `copies`."""


class Sharder(DataParallel, OwnsPieces, OwnsGradientPieces, Protocol):
    """Owns a part of the gradients on each rank of `comm`; maybe of the parameters, too.

    sends_once          whole gradients stay on a rank between backwards, so that a pipeline may let
                        them leave after the last one of a step
    shards_parameters   parameters are whole only while their layers compute
    """

    comm: Comm
    shards_parameters: bool

    @property
    def sends_once(self) -> bool: ...

    def gradient_of_copy(self, p: nn.Parameter) -> TiedGradient:
        """That of a parameter which is tied over the stages of a pipeline: all its owners must
        have the same elements of it. Raises ValueError where they do not."""


class LossScaler(Protocol):
    """Multiplies a loss by the same factor on all ranks of `comm`: labkit.GradScaler."""

    comm: Comm | None

    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...


def shards_parameters(strategy: Any) -> bool:
    """Whether `strategy` keeps only parts of the parameters on a rank, as ZeRO3 does."""
    return fulfils(strategy, Sharder) and strategy.shards_parameters


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module: what a strategy such as DDP has inside, or `module` itself."""
    wrapped: Any = module
    return wrapped.module if fulfils(module, DataParallel) else module
