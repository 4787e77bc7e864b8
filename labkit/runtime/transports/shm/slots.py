"""The slots of a group, where each rank puts a piece of its tensor for other ranks to read.

    | words: a stage per rank, a note per slot | rank 0: slot, slot | rank 1: slot, slot | ...

A collective is split into pieces that fit a slot. Pieces are numbered over the group's lifetime,
identically on all ranks; piece p uses slot p modulo 2. For every piece, each rank announces three
stages in its word, as 3 p + stage:

    FILLED    this rank's data for other ranks is in its slot
    REDUCED   this rank's slice of the result is in its slot
    DONE      this rank no longer needs other ranks' slots

Two slots let a rank fill the next piece while other ranks still read the current piece: a slot is
rewritten only after all ranks are DONE with its piece.
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
MAX_BYTES = 32 << 20  # for all slots of a group, so that slots are smaller with many ranks
NOTHING = 0  # a slot's note: neither the length of a tensor nor its place in symmetric memory
MAX_VIEWS = 512  # cached tensors


class Slots:
    """Rank `rank`'s view of the slots of `size` ranks, in the file `path`. Raises RuntimeError
    if a wait exceeds `timeout_s` or another rank gives up."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.others = [r for r in range(size) if r != rank]
        self.slot_bytes = min(SLOT_BYTES, MAX_BYTES // (BUFFERS * size)) // ALIGNED * ALIGNED
        words = size + BUFFERS * size  # stages, then one note for each slot
        self._region = Region(path, rank, size, words, size * BUFFERS * self.slot_bytes)
        self._piece = 0
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def give_up(self) -> None:
        self._region.give_up()

    def begin(self, note: int = NOTHING) -> None:
        """Begin the next piece once its slot is free, with a note for the other ranks."""
        self._piece += 1
        self._wait(self.others, DONE, self._piece - BUFFERS)
        self._region.write(self._note(self.rank), note)

    def announce(self, stage: int) -> None:
        self._region.announce(self.rank, 3 * self._piece + stage)

    def wait(self, ranks: Iterable[int], stage: int) -> None:
        """Wait until `ranks` have announced `stage` of this piece."""
        self._wait(ranks, stage, self._piece)

    def fill(self, x: torch.Tensor, begin: int = 0) -> int:
        """Copy `x` into this rank's slot from byte `begin` on; return the bytes copied."""
        return copy(self._address(self.rank, begin), x.data_ptr(), x.nbytes)

    def take(self, x: torch.Tensor, rank: int, begin: int = 0) -> int:
        """Fill `x` from the slot of `rank`, from byte `begin` on; return the bytes copied."""
        return copy(x.data_ptr(), self._address(rank, begin), x.nbytes)

    def view(self, rank: int, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements in the slot of `rank`, from byte `begin` on, as a tensor."""
        start = self._start(rank) + begin
        key = (start, numel, dtype)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = self._region.tensor(start, numel, dtype)
        return self._views[key]

    def notes(self) -> list[int]:
        """All ranks' notes on this piece, valid once all ranks have FILLED their slots."""
        return [self._region[self._note(rank)] for rank in range(self.size)]

    def agree(self) -> bool:
        """Whether all ranks' notes are equal, valid once all ranks have FILLED their slots."""
        return len({*self.notes()}) == 1

    def exchange(self, note: int) -> list[int]:
        """All ranks' `note`s, exchanged with an empty piece."""
        self.begin(note)
        self.announce(FILLED)
        self.wait(self.others, FILLED)
        notes = self.notes()
        self.announce(DONE)
        return notes

    def _slot(self, rank: int) -> int:
        return rank * BUFFERS + self._piece % BUFFERS

    def _note(self, rank: int) -> int:
        return self.size + self._slot(rank)

    def _start(self, rank: int) -> int:
        """The byte offset in the region's data at which `rank`'s slot for this piece begins."""
        return self._slot(rank) * self.slot_bytes

    def _address(self, rank: int, begin: int) -> int:
        return self._region.address(self._start(rank) + begin)

    def _wait(self, ranks: Iterable[int], stage: int, piece: int) -> None:
        region, value = self._region, 3 * piece + stage
        deadline_s = 0.0
        for rank in ranks:
            arrived = region[rank] >= value
            if not arrived:
                deadline_s = deadline_s or time.monotonic() + self.timeout_s
                arrived = region.wait(rank, value, deadline_s, (rank,))
            if region.gave_up(rank):  # even after announcing: no partial results
                raise RuntimeError(f"rank {rank} of the group gave up after an error")
            if not arrived:
                raise RuntimeError(
                    f"Timed out waiting {self.timeout_s:g} s for rank {rank} of the group"
                )


def copy(target: int, source: int, nbytes: int) -> int:
    """Copy between addresses without holding the GIL; return the bytes copied."""
    if nbytes:
        ctypes.memmove(target, source, nbytes)
    return nbytes


def slices(piece: torch.Tensor, n: int) -> list[tuple[torch.Tensor, int]]:
    """`piece` split into n slices, aligned to cache lines, each with its byte offset."""
    line = ALIGNED // piece.element_size()
    step = -(-piece.numel() // (n * line)) * line
    begins = [min(i * step, piece.numel()) for i in range(n)]
    return [(piece[begin : begin + step], begin * piece.element_size()) for begin in begins]


def pieces(
    slots: Slots, longest_bytes: int, room_bytes: int, x: torch.Tensor
) -> Iterator[tuple[int, int]]:
    """(begin, end) per piece of the longest tensor, in elements; shorter tensors end earlier."""
    step = room_bytes // x.element_size()
    for begin in range(0, longest_bytes // x.element_size(), step):
        slots.begin()
        yield begin, begin + step
        slots.announce(DONE)


def agreed_pieces(
    slots: Slots, own_bytes: int, room_bytes: int, x: torch.Tensor
) -> Iterator[tuple[int, int]]:
    """Like `pieces`, if no rank knows the longest tensor: each note is a tensor's size."""
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
    """Bytes per rank in a slot."""
    return slots.slot_bytes // slots.size // ALIGNED * ALIGNED
