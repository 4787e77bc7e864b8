"""A flat partition: tensors one after the other in one buffer, cut into n equal shares.

    tensors   | a a a a a a a a | b b | c c c c c c c c c c c | pad |
    shares    |     rank 0      |     rank 1      |     rank 2      |

Tensors differ in size, shares do not, and so every rank holds and updates as much as the others:
a tensor may be cut anywhere, also in the middle of a row. That is right for whatever treats each
element by itself, as SGD and Adam do. What of a tensor lies in one share is a `Piece`.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1; DeepSpeed's flat fp16 groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Piece:
    """`numel` elements of tensor `index`, from its element `start` on (it lies flat), which stand
    in a share from that share's element `at` on."""

    index: int
    start: int
    at: int
    numel: int


class FlatPartition:
    """Tensors of these shapes in `ranks` equal shares; the last ones end with padding.

    numel   elements of all tensors         share    elements of a share
    starts  where each tensor begins        padded   share * ranks, elements of the buffer
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int):
        self.shapes = list(shapes)
        self.ranks = ranks
        self.numels = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.numels)
        self.starts = [0, *accumulate(self.numels)][:-1]
        self.share = -(-self.numel // ranks)
        self.padded = self.share * ranks

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What the share of `rank` has of each tensor, in order; of most tensors, nothing."""
        begin, end = rank * self.share, (rank + 1) * self.share
        for index, (start, numel) in enumerate(zip(self.starts, self.numels)):
            first, last = max(start, begin), min(start + numel, end)
            if first < last:
                yield Piece(index, first - start, first - begin, last - first)

    def share_of(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        """The share of `rank`, a view of the buffer [padded] -> [share]."""
        return buffer[rank * self.share : (rank + 1) * self.share]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor in its shape, views of the buffer [padded]."""
        return [
            buffer[start : start + numel].view(shape)
            for start, numel, shape in zip(self.starts, self.numels, self.shapes)
        ]
