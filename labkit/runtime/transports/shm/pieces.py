"""How a tensor is cut: into pieces that fit a slot, one after the other, and a piece into slices,
one for each rank."""

from collections.abc import Iterator

import torch

from labkit.runtime.transports.shm.region import ALIGNED
from labkit.runtime.transports.shm.slots import DONE, FILLED, Slots


def slices(piece: torch.Tensor, n: int) -> list[tuple[torch.Tensor, int]]:
    """`piece` cut into n slices that begin with a line of the cache, each with its first byte."""
    line = ALIGNED // piece.element_size()
    step = -(-piece.numel() // (n * line)) * line
    begins = [min(i * step, piece.numel()) for i in range(n)]
    return [(piece[begin : begin + step], begin * piece.element_size()) for begin in begins]


def pieces(longest_bytes: int, room_bytes: int, x: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(begin, end) in elements of `x`'s dtype of the pieces of the longest tensor; a shorter one's
    last are empty."""
    step = room_bytes // x.element_size()
    for begin in range(0, longest_bytes // x.element_size(), step):
        yield begin, begin + step


def agreed_pieces(
    slots: Slots, own_bytes: int, room_bytes: int, x: torch.Tensor
) -> Iterator[tuple[int, int]]:
    """As `pieces`, where no rank knows the longest tensor: at least one piece, with which each
    tells how long its own is."""
    step, begin, numel = room_bytes // x.element_size(), 0, 1
    while begin < numel:
        slots.begin()
        slots.tell_length(own_bytes)
        yield begin, begin + step
        if begin == 0:
            slots.wait(slots.others, FILLED)
            numel = slots.longest() // x.element_size()
        slots.announce(DONE)
        begin += step


def part_bytes(slots: Slots) -> int:
    """The room in a slot for each rank."""
    return slots.slot_bytes // slots.size // ALIGNED * ALIGNED
