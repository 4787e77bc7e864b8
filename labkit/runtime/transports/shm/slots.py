"""The slots of a group: where each rank lays out a piece of its tensor for the others.

    | words: stage of each rank, note of each slot | rank 0: slot, slot | rank 1: slot, slot | ...

A collective is cut into pieces that fit a slot. Pieces are numbered through the life of the group,
equally on all ranks; piece p lies in slot p modulo 2. Each rank goes through every piece in the
same three stages and announces each in its word as 3 p + stage:

    FILLED    what others are to read of me is in my slot
    REDUCED   so is my slice of the result
    DONE      I need no other slot any more

Two slots let a rank fill the next piece while another still reads this one: a slot is written
again when all ranks are DONE with the piece that was in it, which is almost always so.
"""

import ctypes
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from labkit.runtime.transports.shm.region import ALIGNED, Region

FILLED, REDUCED, DONE = 1, 2, 3
BUFFERS = 2
SLOT_BYTES = 1 << 20
MOST_BYTES = 32 << 20  # of all slots of a group: many ranks have smaller ones
NOTHING = 0  # a slot's note: neither the length of a tensor nor its place in symmetric memory
MOST_VIEWS = 512  # that are kept for the next time


class Slots:
    """Rank `rank`'s view of the slots of `size` ranks, which meet in the file `path`. Waiting for
    longer than `timeout_s`, or for a rank that gave up, raises RuntimeError."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.others = [r for r in range(size) if r != rank]
        self.slot_bytes = min(SLOT_BYTES, MOST_BYTES // (BUFFERS * size)) // ALIGNED * ALIGNED
        words = size + BUFFERS * size  # stages; notes, for each slot one
        self._region = Region(path, rank, size, words, size * BUFFERS * self.slot_bytes)
        self._piece = 0
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def give_up(self) -> None:
        """This rank takes no further part: the others must not wait for it."""
        self._region.give_up()

    def begin(self, note: int = NOTHING) -> None:
        """Go on to the next piece, once its slot is free; with a note for the others."""
        self._piece += 1
        self._wait(self.others, DONE, self._piece - BUFFERS)
        self._region.write(self._note(self.rank), note)

    def announce(self, stage: int) -> None:
        self._region.announce(self.rank, 3 * self._piece + stage)

    def wait(self, ranks: Iterable[int], stage: int) -> None:
        """Wait until `ranks` have announced `stage` of this piece."""
        self._wait(ranks, stage, self._piece)

    def fill(self, x: torch.Tensor, begin: int = 0) -> int:
        """Copy `x` into this rank's slot, from its byte `begin` on; the bytes copied."""
        return copy(self._address(self.rank, begin), x.data_ptr(), x.nbytes)

    def take(self, x: torch.Tensor, rank: int, begin: int = 0) -> int:
        """Fill `x` from the slot of `rank`, from its byte `begin` on; the bytes copied."""
        return copy(x.data_ptr(), self._address(rank, begin), x.nbytes)

    def view(self, rank: int, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements in the slot of `rank`, from its byte `begin` on, as a tensor."""
        start = self._start(rank) + begin
        key = (start, numel, dtype)
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._region.tensor(start, numel, dtype)
        return self._views[key]

    def notes(self) -> list[int]:
        """The ranks' notes with this piece, once all are FILLED."""
        return [self._region[self._note(rank)] for rank in range(self.size)]

    def agree(self) -> bool:
        """Whether the notes of all ranks are equal, once all are FILLED."""
        return len({*self.notes()}) == 1

    def exchange(self, note: int) -> list[int]:
        """The `note` of each rank: a piece of its own."""
        self.begin(note)
        self.announce(FILLED)
        self.wait(self.others, FILLED)
        notes = self.notes()
        self.announce(DONE)
        return notes

    def _slot(self, rank: int) -> int:
        """The number of the slot of `rank` for this piece."""
        return rank * BUFFERS + self._piece % BUFFERS

    def _note(self, rank: int) -> int:
        return self.size + self._slot(rank)

    def _start(self, rank: int) -> int:
        """Where the slot of `rank` begins for this piece, in the data of the region."""
        return self._slot(rank) * self.slot_bytes

    def _address(self, rank: int, begin: int) -> int:
        return self._region.address(self._start(rank) + begin)

    def _wait(self, ranks: Iterable[int], stage: int, piece: int) -> None:
        region, value = self._region, 3 * piece + stage
        until_s = 0.0
        for rank in ranks:
            arrived = region[rank] >= value
            if not arrived:
                until_s = until_s or time.monotonic() + self.timeout_s
                arrived = region.wait(rank, value, until_s, (rank,))
            if region.gave_up(rank):  # also of what it had announced: no result of half the ranks
                raise RuntimeError(f"rank {rank} of the group gave up after an error")
            if not arrived:
                raise RuntimeError(
                    f"Timed out waiting {self.timeout_s:g} s for rank {rank} of the group"
                )


def copy(target: int, source: int, nbytes: int) -> int:
    """Between two addresses; returns the bytes copied. (Python's lock is free meanwhile.)"""
    if nbytes:
        ctypes.memmove(target, source, nbytes)
    return nbytes


def slices(piece: torch.Tensor, n: int) -> list[tuple[torch.Tensor, int]]:
    """`piece` cut into n slices, one for each rank, that begin with a line of the cache; each with
    its first byte."""
    line = ALIGNED // piece.element_size()
    step = -(-piece.numel() // (n * line)) * line
    begins = [min(i * step, piece.numel()) for i in range(n)]
    return [(piece[begin : begin + step], begin * piece.element_size()) for begin in begins]


def pieces(
    slots: Slots, longest_bytes: int, room_bytes: int, x: torch.Tensor
) -> Iterator[tuple[int, int]]:
    """Go through the pieces of the longest tensor: (begin, end) in elements of `x`'s dtype; a
    shorter one's last are empty."""
    step = room_bytes // x.element_size()
    for begin in range(0, longest_bytes // x.element_size(), step):
        slots.begin()
        yield begin, begin + step
        slots.announce(DONE)


def agreed_pieces(
    slots: Slots, own_bytes: int, room_bytes: int, x: torch.Tensor
) -> Iterator[tuple[int, int]]:
    """As `pieces`, where no rank knows the longest tensor: each notes how long its own is."""
    step, begin, numel = room_bytes // x.element_size(), 0, 1
    while begin < numel:
        slots.begin(own_bytes)
        yield begin, begin + step
        if begin == 0:
            slots.wait(slots.others, FILLED)
            numel = max(slots.notes()) // x.element_size()
        slots.announce(DONE)
        begin += step


def part_bytes(slots: Slots) -> int:
    """The room in a slot for each rank."""
    return slots.slot_bytes // slots.size // ALIGNED * ALIGNED
