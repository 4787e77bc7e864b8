"""What of a model's parameters this rank owns: the one description that a checkpoint needs.

Replicated, each rank owns every parameter whole. Under ZeRO it owns a piece of some: `numel`
elements, from `start` on, of the parameter lying flat. Piece and optimizer state lie alike, so a
checkpoint written from pieces can be read into any others. Under tensor parallelism what is cut
into pieces is itself a part, rows or columns, of a whole parameter.

Whoever steps on pieces says so by two methods: `OwnsPieces`.
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
        """This rank's pieces, in the order of the module's parameters. Pass the model to an
        optimizer, the optimizer to a wrapped model."""

    def after_load(self) -> None:
        """The pieces were written to: bring what depends on them in step."""


Kind = TypeVar("Kind")


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
