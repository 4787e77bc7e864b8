"""Symmetric memory: a tensor on each rank of a group, in memory that all ranks can access.

All ranks create it together, with parts of equal size. Its all-reduce sends nothing through
slots: once all ranks are FILLED, rank r alone uses slice r of every part until it has written the
result to every part. One line per stage; x012 is the reduction of x0, x1 and x2:

                rank 0's part           rank 1's part           rank 2's part
    FILLED      x0[0] x0[1] x0[2]       x1[0] x1[1] x1[2]       x2[0] x2[1] x2[2]
    REDUCED     x012[0]  ..             the same                the same           by rank 0
                ..  x012[1]  ..                                                    by rank 1

Without copies in and out, a rank moves (n-1)/n S bytes instead of (2n-1)/n S, and waits twice. GPUs
do the same with torch's symmetric memory and NCCL's registered buffers.
"""

import shutil
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from labkit.runtime.transports.shm.region import ALIGNED, Region
from labkit.runtime.transports.shm.slots import NOTHING, Slots, copy

MAX_FREE_FRACTION = 0.5  # largest share of the free shared memory for one tensor
RESERVE_BYTES = 48 << 20  # of shared memory, left free for the slots of later groups
PLACE_BITS = 40  # low bits of a place: the byte offset; high bits: the memory's number


class Symmetric:
    """The parts of `size` ranks, `nbytes` each, in one region, numbered within the group."""

    def __init__(self, number: int, path: Path, rank: int, size: int, nbytes: int):
        self.number, self._rank, self._size = number, rank, size
        self._stride = -(-nbytes // ALIGNED) * ALIGNED
        free_bytes = shutil.disk_usage(path.parent).free
        most_bytes = min(MAX_FREE_FRACTION * free_bytes, free_bytes - RESERVE_BYTES)
        if not path.exists() and size * self._stride > most_bytes:
            raise RuntimeError("too little shared memory is free")
        self._region = Region(path, rank, size, 0, size * self._stride)

    def place(self, begin: int) -> int:
        """A nonzero number, equal on all ranks for the same memory and byte."""
        return (self.number << PLACE_BITS) | begin

    def part(self, rank: int, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of the part of `rank`, from byte `begin` on."""
        return self._region.tensor(rank * self._stride + begin, numel, dtype)

    def write(self, x: torch.Tensor, rank: int, begin: int) -> int:
        """Copy `x` into the part of `rank`, from byte `begin` on; return the bytes copied."""
        return copy(self._region.address(rank * self._stride + begin), x.data_ptr(), x.nbytes)


class SymmetricTensors:
    """This rank's symmetric tensors, by the address of this rank's part."""

    def __init__(self) -> None:
        self._made = 0
        self._by_address: dict[int, Symmetric] = {}

    def make(self, slots: Slots, path: Path, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """This rank's part of a new tensor; None on all ranks if any lacks room or sizes differ."""
        self._made += 1
        path = path.with_name(f"{path.name}-symmetric-{self._made}")
        shared, nbytes = None, numel * dtype.itemsize
        with suppress(RuntimeError):
            shared = Symmetric(self._made, path, slots.rank, slots.size, nbytes)
        sizes = slots.exchange(NOTHING if shared is None else nbytes)
        if shared is None or sizes != [nbytes] * slots.size:
            path.unlink(missing_ok=True)
            return None
        own = shared.part(slots.rank, 0, numel, dtype)
        self._by_address[own.data_ptr()] = shared
        forget = weakref.finalize(own.untyped_storage(), self._by_address.pop, own.data_ptr(), None)
        forget.atexit = False
        return own

    def find(self, x: torch.Tensor) -> tuple[Symmetric, int] | None:
        """The symmetric memory that contains `x`, and the byte offset of `x` there; else None."""
        if not self._by_address:
            return None
        start = x.untyped_storage().data_ptr()
        shared = self._by_address.get(start)
        return None if shared is None else (shared, x.data_ptr() - start)
