"""What of a model's parameters this rank owns: the one description that a checkpoint needs.

Replicated, each rank owns every parameter whole. Under ZeRO it owns a piece of some: `numel`
elements, from `start` on, of the parameter lying flat. Piece and optimizer state lie alike, so a
checkpoint written from pieces can be read into any others.

A strategy that owns pieces has two methods:

    owned(...) -> list[OwnedPiece]    in the order of the module's parameters
    after_load()                      the pieces were written to: bring what depends on them in step
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OwnedPiece:
    """A piece of parameter `name`, whose whole shape is `shape`.

    tensor      what the optimizer steps on: the piece, [numel] flat, or the whole parameter; the
                fp32 master copy where there is one
    optimizer   the torch optimizer whose `state[tensor]` is the piece's state; None if frozen
    """

    name: str
    shape: torch.Size
    start: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None
