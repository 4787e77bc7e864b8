"""The parameter slices this rank owns: the one description that a checkpoint needs.

Replicated, each rank owns every parameter whole; under ZeRO, `numel` elements of a flat parameter,
from `start` on. Slice and optimizer state lie alike, so a checkpoint written from some slices can
be read into any others. Under tensor parallelism the parameter is itself part of a whole one.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeGuard, TypeVar

import torch


@dataclass(frozen=True)
class OwnedPiece:
    """A piece of parameter `name`, which has `shape` on this rank.

    tensor      what the optimizer steps on: the piece, [numel] flat, or the whole parameter; the
                fp32 master copy where there is one
    optimizer   the torch optimizer whose `state[tensor]` is the piece's state; None if frozen
    shard       where the parameter is cut, the Shard that it is (labkit/parallel/common/shards.py);
                checkpoints enter it
    """

    name: str
    shape: torch.Size
    start: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None
    shard: Any = None

    @property
    def whole_shape(self) -> torch.Size:
        """Of the parameter on all ranks together."""
        whole: torch.Size = self.shape if self.shard is None else self.shard.whole_shape(self.shape)
        return whole


class OwnsPieces(Protocol):
    """An optimizer (MasterWeights, ZeroOptimizer) or a wrapped model (ZeRO3)."""

    def owned(self, other: Any) -> list[OwnedPiece]:
        """This rank's slices, in the order of the module's parameters. `other`: of an optimizer the
        model, of a wrapped model the optimizer."""

    def after_load(self) -> None:
        """The pieces were written to: bring what depends on them in step."""


Kind = TypeVar("Kind")


def fulfils(x: Any, protocol: type[Kind]) -> TypeGuard[Kind]:
    """Whether `x` has all members of `protocol`. From Python 3.12 on, `isinstance` does not see
    what a wrapper such as that of `torch.compile` passes on."""
    asked: Any = protocol
    return all(hasattr(x, name) for name in _members(asked))


@cache
def _members(protocol: Any) -> set[str]:
    mro = protocol.__mro__
    every = [(*vars(base), *vars(base).get("__annotations__", ())) for base in mro]
    return {name for names in every for name in names if not name.startswith("_")}
