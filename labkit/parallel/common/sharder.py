"""Protocols through which labkit uses data-parallel strategies without importing their classes.

    clipping, recording         gradient_pieces(): averaged gradients, each element on one rank
    checkpoints                 owned(...): pieces of parameters and their optimizer state;
                                after_load(), called after each load
    a pipeline                  no_sync(), sends_once, shards_parameters, gradient_of_copy(p)

A `DataParallel` averages gradients: DDP, NaiveDDP, ZeroOptimizer, ZeRO3. A `Sharder` also shards
gradients or parameters: ZeroOptimizer, ZeRO3.
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
    """Averages gradients over replicas, except in `no_sync()`, as torch's DDP and FSDP do."""

    def no_sync(self) -> AbstractContextManager[None]: ...


class OwnsPieces(Protocol):
    """Holds pieces of parameters: an optimizer (MasterWeights, ZeroOptimizer) or a ZeRO3."""

    def owned(self, other: Any) -> list[OwnedPiece]:
        """This rank's pieces, in the module's parameter order. `other`: the model if `self` is an
        optimizer, the optimizer if `self` is a wrapped model."""

    def after_load(self) -> None:
        """Updates tensors derived from the pieces; called after a load."""


class OwnsGradientPieces(Protocol):
    """Shards the averaged gradients over ranks."""

    def gradient_pieces(self) -> tuple[list[Tensor], Comm]:
        """Returns this rank's pieces of averaged gradients (any shape, writable in place) and the
        comm over which their norm is computed. `piece.piece_of` is the parameter."""


class TiedGradient(Protocol):
    """The gradient of a parameter tied across pipeline stages."""

    def set_aside(self) -> None:
        """Called before a step: sets aside gradients of earlier steps, which are already summed."""

    def sum_copies(self, copies: Any) -> None:
        """Called after the last backward: all-reduces the gradient over the ranks of `copies`."""


class Sharder(DataParallel, OwnsPieces, OwnsGradientPieces, Protocol):
    """Shards gradients, and possibly parameters, over the ranks of `comm`.

    sends_once          keeps unsharded gradients between backwards, so that a pipeline can reduce
                        them once per step
    shards_parameters   gathers parameters only while their layers compute"""

    comm: Comm
    shards_parameters: bool

    @property
    def sends_once(self) -> bool: ...

    def gradient_of_copy(self, p: nn.Parameter) -> TiedGradient:
        """The gradient of a parameter tied across pipeline stages. Raises ValueError if
        the pipeline ranks that hold `p` might shard `p` differently."""


@runtime_checkable
class InStages(Protocol):
    """A model split into stages, at least one per rank of `comm` (a Pipeline). Stage parameters
    hold a weak reference to the pipeline (ownership.py)."""

    comm: Comm
    module: nn.Module  # this rank's stages, named as in the whole model
    aliases: dict[str, str]  # tied parameters of all stages: {alias: first name}

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of `comm` that hold `parameter`: more than one if tied across stages."""

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank is the first with `parameter`: norms count a tied gradient once."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of all stages."""

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        """Returns (name prefix in the whole model, stage or its wrapper) for each local stage."""


class LossScaler(Protocol):
    """Multiplies a loss by the same factor on all ranks of `comm`: labkit.GradScaler."""

    comm: Comm | None

    def scale(self, outputs: Tensor) -> Tensor: ...


def implements(x: Any, protocol: type[Kind]) -> TypeGuard[Kind]:
    """Whether `x` has every member of `protocol`, including attributes forwarded by a wrapper
    such as `torch.compile`'s (`isinstance` ignores forwarded attributes since Python 3.12)."""
    hashable: Any = protocol  # for mypy
    return all(hasattr(x, name) for name in _members(hashable))


@cache
def _members(protocol: Any) -> set[str]:
    mro = protocol.__mro__
    declared = [(*vars(base), *vars(base).get("__annotations__", ())) for base in mro]
    return {name for names in declared for name in names if not name.startswith("_")}


def shards_parameters(strategy: Any) -> bool:
    """Whether `strategy` shards parameters, as ZeRO3 does."""
    return implements(strategy, Sharder) and strategy.shards_parameters


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a strategy such as DDP, or `module` itself."""
    wrapped: Any = module
    return wrapped.module if implements(module, DataParallel) else module


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict()` of the unsharded model, equal on all ranks. Collective.
    `model` may be edited by `tensor_parallel`, be wrapped in a strategy, or be a Pipeline (then all
    stages are returned, on the CPU). With `ZeroOptimizer(gather_in=...)`, call its `wait()` first.
    Raises ValueError if a ZeRO3 is nested inside `model`."""
    model = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
    if isinstance(model, InStages):
        return model.full_state_dict()
    if any(shards_parameters(part) for part in model.modules() if part is not model):
        raise ValueError("full_state_dict: this model contains a ZeRO3; pass that module")
    parts = plain_module(model).state_dict(keep_vars=True)
    # ZeRO3 gathers only over its ranks; the loop below joins tensor-parallel shards.
    sharded: Any = model
    state = sharded.full_state_dict() if shards_parameters(model) else dict(parts)
    whole: dict[int, Tensor] = {}
    for name, x in state.items():
        if isinstance(x, Tensor) and id(x) not in whole:
            shard = shard_of(parts[name])
            whole[id(x)] = x.detach() if shard is None else _joined(x.detach(), shard)
    return {name: whole.get(id(x), x) for name, x in state.items()}


def plain_module(model: nn.Module) -> nn.Module:
    """The module inside wrappers that add no parameters; for a Pipeline, this rank's stages."""
    if isinstance(model, InStages):
        return model.module
    inside = getattr(model, "module", None)
    if isinstance(inside, nn.Module) and (
        implements(model, Sharder)
        or (list(model.children()) == [inside] and not model._parameters and not model._buffers)
    ):
        return plain_module(inside)
    return model


def _joined(x: Tensor, shard: Shard) -> Tensor:
    """All ranks' parts, concatenated, without padding."""
    own = x.to(shard.comm.own_device())
    parts = list(own.new_empty([shard.comm.size, *own.shape]))
    shard.comm.all_gather(parts, own)
    return torch.cat(parts, shard.dim).narrow(shard.dim, 0, shard.whole).to(x.device)
