"""What the data-parallel strategies owe the rest of labkit, which never asks for their class.

    clipping, recording         gradient_pieces(): averaged gradients, each element on one rank
    checkpoints                 owned(...): pieces of parameters and their optimizer state, and
                                after_load(), when they were written to
    a pipeline                  no_sync(), sends_once, shards_parameters, gradient_of_copy(p)

A `DataParallel` averages gradients: DDP, NaiveDDP, ZeroOptimizer, ZeRO3. A `Sharder` also keeps a
part of the gradients or parameters on each rank: ZeroOptimizer, ZeRO3, a new sharded stage.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.holdings import OwnedPiece
from labkit.parallel.common.shards import Shard, shard_of

Kind = TypeVar("Kind")


class DataParallel(Protocol):
    """Averages gradients over replicas, except in `no_sync()`. torch's own DDP and FSDP do, too."""

    def no_sync(self) -> AbstractContextManager[None]: ...


class OwnsPieces(Protocol):
    """An optimizer (MasterWeights, ZeroOptimizer) or a wrapped model (ZeRO3)."""

    def owned(self, other: Any) -> list[OwnedPiece]:
        """This rank's pieces, in the order of the module's parameters. `other` is the model for an
        optimizer, the optimizer for a wrapped model."""

    def after_load(self) -> None:
        """The pieces were written to: bring what depends on them in step."""


class OwnsGradientPieces(Protocol):
    """Has a part of the averaged gradients on each rank."""

    def gradient_pieces(self) -> tuple[list[Tensor], Comm]:
        """Returns (pieces, comm): this rank's averaged gradients, of any shape, to be scaled in
        place; over the ranks of `comm`, each element is in exactly one piece. The attribute
        `piece_of` of a piece is its parameter."""


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


@runtime_checkable
class InStages(Protocol):
    """Has a model in stages, one or more on each rank of `comm`: a Pipeline. Parameters of its
    stages have it as a weak attribute (ownership.py): without it they are like others."""

    comm: Comm
    module: nn.Module  # what is here, under the names of the whole model
    further_names: dict[str, str]  # of what is tied, in any stages: a further name -> the first

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of `comm` that have it: several, where it is tied over stages."""

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank is the first that has it. A tied parameter has the same gradient, the
        sum, on all its owners: only the first one's counts in a norm."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """That of all stages."""

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        """The stages of this rank, in DDP or ZeRO3 where they are; each with what its names begin
        with in the whole model."""


class LossScaler(Protocol):
    """Multiplies a loss by the same factor on all ranks of `comm`: labkit.GradScaler."""

    comm: Comm | None

    def scale(self, outputs: Tensor) -> Tensor: ...


def fulfils(x: Any, protocol: type[Kind]) -> TypeGuard[Kind]:
    """Whether `x` has all that `protocol` asks for. From Python 3.12 on, `isinstance` does not see
    what a wrapper passes on from inside, as that of `torch.compile` does."""
    asked: Any = protocol
    return all(hasattr(x, name) for name in _members(asked))


@cache
def _members(protocol: Any) -> set[str]:
    mro = protocol.__mro__
    every = [(*vars(base), *vars(base).get("__annotations__", ())) for base in mro]
    return {name for names in every for name in names if not name.startswith("_")}


def shards_parameters(strategy: Any) -> bool:
    """Whether `strategy` keeps only parts of the parameters on a rank, as ZeRO3 does."""
    return fulfils(strategy, Sharder) and strategy.shards_parameters


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module: what a strategy such as DDP has inside, or `module` itself."""
    wrapped: Any = module
    return wrapped.module if fulfils(module, DataParallel) else module


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`state_dict()` as of the plain model: every cut parameter is whole, and the same on all
    ranks, which call it together. `model`: edited by `tensor_parallel`, or a strategy around one;
    of a Pipeline, that of all stages, on the CPU. After steps of a ZeroOptimizer that gathers in
    forward (`gather_in`), call its `wait()` first.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if isinstance(model, InStages):
        return model.full_state_dict()
    if any(shards_parameters(part) for part in model.modules() if part is not model):
        raise ValueError("full_state_dict: this model has a ZeRO3 inside of it; give that one")
    parts = plain_module(model).state_dict(keep_vars=True)
    # ZeRO3's are whole over its own ranks, and may be cut over others.
    sharded: Any = model
    found = sharded.full_state_dict() if shards_parameters(model) else dict(parts)
    whole: dict[int, Tensor] = {}
    for name, x in found.items():
        if isinstance(x, Tensor) and id(x) not in whole:
            shard = shard_of(parts[name])
            whole[id(x)] = x.detach() if shard is None else _joined(x.detach(), shard)
    return {name: whole.get(id(x), x) for name, x in found.items()}


def plain_module(model: nn.Module) -> nn.Module:
    """The module whose names count: without the strategy around it, which has nothing but it. Of a
    Pipeline, what it has on this rank."""
    if isinstance(model, InStages):
        return model.module
    inside = getattr(model, "module", None)
    if isinstance(inside, nn.Module) and (
        fulfils(model, Sharder)
        or (list(model.children()) == [inside] and not model._parameters and not model._buffers)
    ):
        return plain_module(inside)
    return model


def _joined(x: Tensor, shard: Shard) -> Tensor:
    """All ranks' parts beside each other, without the padding at the end."""
    own = x.to(shard.comm.own_device())
    parts = list(own.new_empty([shard.comm.size, *own.shape]))
    shard.comm.all_gather(parts, own)
    return torch.cat(parts, shard.dim).narrow(shard.dim, 0, shard.whole).to(x.device)
