"""Converts flat ranges to boxes: ZeRO's slices are flat ranges, but the format stores boxes.

    elements 2-13 of a [4, 4] tensor  . . a a     a   the rest of the first row
                                      b b b b     b   the full rows, one box
                                      b b b b
                                      c c . .     c   the start of the last row

With d dimensions, partial rows are split in the same way, into at most 2d - 1 boxes in total.

A tensor-parallel rank holds rows or columns of the whole parameter, possibly padded. A box is
shifted to its position in the whole parameter and loses the padding:

    here [2, 2]      a a      whole [2, 5]     . . . . a      this rank has columns 4:5;
                     a a                       . . . . a      its second column is padding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from labkit.holdings import OwnedPiece
from labkit.parallel.common.shards import Shard


@dataclass(frozen=True)
class Box:
    """Elements `offsets[d] <= i_d < offsets[d] + sizes[d]` of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, numel: int) -> Iterator[Box]:
    """Contiguous boxes, in order, that cover elements `start` to `start + numel - 1` of `shape`."""
    if numel and not shape:
        yield Box((), ())
    if not (numel and shape):
        return
    row = prod(shape[1:])
    first, last = start // row, (start + numel - 1) // row
    head = min(-start % row, numel)  # the rest of a row that begins before `start`
    tail = (start + numel) % row if first < last or not head else 0

    def in_row(index: int, start: int, numel: int) -> Iterator[Box]:
        for box in boxes_of(shape[1:], start, numel):
            yield Box((index, *box.offsets), (1, *box.sizes))

    yield from in_row(first, start % row, head)
    if full := (numel - head - tail) // row:
        yield Box((first + bool(head), *(0 for _ in shape[1:])), (full, *shape[1:]))
    yield from in_row(last, 0, tail)


def small_boxes(shape: Sequence[int], start: int, numel: int, most: int) -> Iterator[Box]:
    """Like `boxes_of`, but at most `most` elements or one row per box; an empty tensor has one."""
    if prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape))
        return
    row = prod(shape[1:])
    step = max(most // row, 1) * row
    for begin in range(start - start % step, start + numel, step):
        first, end = max(begin, start), min(begin + step, start + numel)
        yield from boxes_of(shape, first, end - first)


def in_whole(box: Box, shard: Shard | None) -> Box | None:
    """The box in the whole parameter, without padding at the end of the sharded dim, or None."""
    if shard is None:
        return box
    offsets, sizes, dim = list(box.offsets), list(box.sizes), shard.dim
    sizes[dim] = min(offsets[dim] + sizes[dim], shard.stop - shard.start) - offsets[dim]
    offsets[dim] += shard.start
    return Box(tuple(offsets), tuple(sizes)) if min(sizes) > 0 else None


def view_of(tensor: torch.Tensor, shape: torch.Size, start: int, box: Box) -> torch.Tensor:
    """The view of `box` in `tensor`, which has `shape` or is its flat slice from `start` on."""
    if tensor.shape == shape:
        slices = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes))
        return tensor[tuple(slices)]
    strides = torch.empty(shape, device="meta").stride()
    at = sum(offset * stride for offset, stride in zip(box.offsets, strides)) - start
    return tensor[at : at + box.numel].view(box.sizes)


def placed_boxes(
    piece: OwnedPiece, tensor: torch.Tensor, most: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of slice `piece`, placed in the whole parameter without padding, and the view
    of each box in `tensor`, which has the slice's numel. `most`: as in `small_boxes`."""
    for local in small_boxes(piece.shape, piece.start, tensor.numel(), most):
        if (box := in_whole(local, piece.shard)) is not None:
            view = view_of(tensor, piece.shape, piece.start, local)
            yield box, view[tuple(slice(size) for size in box.sizes)]
