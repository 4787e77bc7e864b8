"""A flat range of a tensor as boxes: a checkpoint's format has only boxes, ZeRO owns flat ranges.

    elements 2 to 13 of a [4, 4]      . . a a     a   the rest of the first row
                                      b b b b     b   the full rows, one box
                                      b b b b
                                      c c . .     c   the beginning of the last row

In more dimensions a row is itself a tensor, and its range is cut likewise: 2d - 1 boxes at most,
one after the other as the elements lie.

A tensor-parallel rank has rows or columns of the whole parameter, perhaps with padding behind them.
A box of these has another place in the whole, and no padding:

    here [4, 2]      a a      whole [4, 5]     . . . a .      columns 3:5 of 5 would be all of it;
                     a a                       . . . a .      of 3:4 the last is padding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from labkit.holdings import OwnedPiece
from labkit.parallel.common.shards import Shard


@dataclass(frozen=True)
class Box:
    """The elements `offsets[d] <= i_d < offsets[d] + sizes[d]` of a tensor; here, one after the
    other, so that a box too is a flat range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, numel: int) -> Iterator[Box]:
    """Elements `start` to `start + numel` of a tensor of this shape, in order."""
    if numel and not shape:
        yield Box((), ())
    if not (numel and shape):
        return
    row = prod(shape[1:])
    first, last = start // row, (start + numel - 1) // row
    head = min(-start % row, numel)  # what is left of a row that begins before `start`
    tail = (start + numel) % row if first < last or not head else 0

    def in_row(index: int, start: int, numel: int) -> Iterator[Box]:
        for box in boxes_of(shape[1:], start, numel):
            yield Box((index, *box.offsets), (1, *box.sizes))

    yield from in_row(first, start % row, head)
    if full := (numel - head - tail) // row:
        yield Box((first + bool(head), *(0 for _ in shape[1:])), (full, *shape[1:]))
    yield from in_row(last, 0, tail)


def small_boxes(shape: Sequence[int], start: int, numel: int, most: int) -> Iterator[Box]:
    """As `boxes_of`, in boxes of about `most` elements: of as many full rows as that allows, so
    that one row alone may be larger. A tensor without elements is one box."""
    if prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape))
        return
    row = prod(shape[1:])
    step = max(most // row, 1) * row
    for begin in range(start - start % step, start + numel, step):
        first, end = max(begin, start), min(begin + step, start + numel)
        yield from boxes_of(shape, first, end - first)


def in_whole(box: Box, shard: Shard | None) -> Box | None:
    """Where in the whole parameter a box of this rank's part lies; None where it is padding. It
    has the box's sizes less the padding, which is last along the dim that is cut."""
    if shard is None:
        return box
    offsets, sizes, dim = list(box.offsets), list(box.sizes), shard.dim
    sizes[dim] = min(offsets[dim] + sizes[dim], shard.stop - shard.start) - offsets[dim]
    offsets[dim] += shard.start
    return Box(tuple(offsets), tuple(sizes)) if min(sizes) > 0 else None


def view_of(tensor: torch.Tensor, shape: torch.Size, start: int, box: Box) -> torch.Tensor:
    """The part in `box` of a whole tensor of `shape`; `tensor` is that, or, flat, its elements from
    `start` on."""
    if tensor.shape == shape:
        slices = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes))
        return tensor[tuple(slices)]
    strides = torch.empty(shape, device="meta").stride()
    at = sum(offset * stride for offset, stride in zip(box.offsets, strides)) - start
    return tensor[at : at + box.numel].view(box.sizes)


def placed_boxes(
    piece: OwnedPiece, tensor: torch.Tensor, most: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a piece, of about `most` elements each: where in the whole parameter, without
    padding, and the view of `tensor`, which has an element for each of the piece's."""
    for here in small_boxes(piece.shape, piece.start, tensor.numel(), most):
        if (box := in_whole(here, piece.shard)) is not None:
            view = view_of(tensor, piece.shape, piece.start, here)
            yield box, view[tuple(slice(size) for size in box.sizes)]
