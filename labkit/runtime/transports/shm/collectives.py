"""Collectives through the slots. Each function takes flat tensors and returns the bytes that it
copied into this rank's slot and out of all slots. Notation: rank r of n ranks, S bytes in total.

An all-reduce of one piece on 3 ranks, one line per stage; x012 is the reduction of x0, x1 and x2:

                rank 0's slot           rank 1's slot           rank 2's slot
    FILLED      .     x0[1]  x0[2]      x1[0]  .     x1[2]      x2[0]  x2[1]  .
    REDUCED     x012[0]  ..             ..  x012[1]  ..         ..     x012[2]
    then each rank copies the three slices of the result out of the three slots.

One rank reduces each slice, in rank order, so that the result is bitwise equal on all ranks and in
all runs.
"""

from collections.abc import Callable, Iterable

import torch

from labkit.comm.collectives.steps import Chunks
from labkit.dispatch import no_modes
from labkit.runtime.transports.shm.slots import (
    DONE,
    FILLED,
    NOTHING,
    REDUCED,
    Slots,
    agreed_pieces,
    part_bytes,
    pieces,
    slices,
)
from labkit.runtime.transports.shm.symmetric import Symmetric
from labkit.runtime.transports.transport import private, share_memory

# Functions that reduce two tensors into `out`, which may be either input.
PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,  # followed by a division
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
AT_ONCE_BYTES = 1 << 15  # up to this size, every rank reduces the whole tensor, to save a wait
GRAIN_BYTES = 1 << 18  # of symmetric memory to reduce at once: fits in the cache


def reduce(slots: Slots, x: torch.Tensor, root: int, op: str) -> int:
    """Reduce `x` on the root only: an all-reduce in which only the root copies the result."""
    return all_reduce(slots, x, op, root)


def all_reduce(slots: Slots, x: torch.Tensor, op: str, root: int | None = None) -> int:
    """Reduce `x` on all ranks; with a `root`, on that rank only. Copies: (n-1)/n S in, S out; for a
    small `x`, S in only, because every rank reduces the whole tensor."""
    wanted = root is None or root == slots.rank
    if x.nbytes <= min(AT_ONCE_BYTES, slots.slot_bytes):
        return _reduce_at_once(slots, x, op, wanted)
    copied_bytes = 0
    for piece in x.split(slots.slot_bytes // x.element_size()):
        cut = slices(piece, slots.size)
        slots.begin()
        for rank in slots.others:
            copied_bytes += slots.fill(*cut[rank])
        slots.announce(FILLED)
        slots.wait(slots.others, FILLED)
        if not slots.agree():  # another rank's tensor is in symmetric memory: see below
            slots.announce(DONE)
            return copied_bytes + all_reduce(slots, x, op, root)
        own, begin = cut[slots.rank]
        _reduce(slots, slots.view(slots.rank, begin, own.numel(), own.dtype), own, begin, op)
        slots.announce(REDUCED)
        if wanted:
            for rank in (slots.rank, *slots.others):
                slots.wait((rank,), REDUCED)
                part, begin = cut[rank]
                copied_bytes += slots.take(part, rank, begin)
        slots.announce(DONE)
    return copied_bytes


def all_reduce_symmetric(
    slots: Slots, x: torch.Tensor, shared: Symmetric, begin: int, op: str
) -> int:
    """Reduce `x`, which begins at byte `begin` of this rank's part of `shared`. Copies: (n-1)/n S
    out (see symmetric.py). If a rank's tensor begins elsewhere, all ranks fall back to slots."""
    own, offset = slices(x, slots.size)[slots.rank]
    slots.begin(shared.place(begin))
    slots.announce(FILLED)
    slots.wait(slots.others, FILLED)
    if not slots.agree():
        slots.announce(DONE)
        return all_reduce(slots, x, op)
    copied_bytes = 0
    with no_modes():  # recordings do not count other ranks' parts
        parts = [
            own if rank == slots.rank
            else shared.part(rank, begin + offset, own.numel(), own.dtype)
            for rank in range(slots.size)
        ]  # fmt: skip
        step = min(GRAIN_BYTES, slots.slot_bytes) // own.element_size()
        for first in range(0, own.numel(), step):
            grain = [part[first : first + step] for part in parts]
            total = slots.view(slots.rank, 0, grain[0].numel(), own.dtype)
            _reduce_parts(total, grain, op)
            for rank in range(slots.size):
                place = begin + offset + first * own.element_size()
                copied_bytes += shared.write(total, rank, place)
    slots.announce(REDUCED)
    slots.wait(slots.others, REDUCED)
    slots.announce(DONE)
    return copied_bytes - own.nbytes  # bytes that stay on this rank do not count


def _reduce_at_once(slots: Slots, x: torch.Tensor, op: str, wanted: bool) -> int:
    slots.begin()
    copied_bytes = slots.fill(x)
    slots.announce(FILLED)
    if wanted:
        slots.wait(slots.others, FILLED)
        _reduce(slots, x, slots.view(slots.rank, 0, x.numel(), x.dtype), 0, op)
    slots.announce(DONE)
    return copied_bytes


def reduce_scatter(slots: Slots, out: torch.Tensor, chunks: Chunks, op: str) -> int:
    """`out` becomes the reduction of all ranks' chunk r. Copies: (n-1)/n S in."""
    own = chunks[slots.rank]
    target = torch.empty_like(out) if share_memory(out, *chunks) else out
    copied_bytes = 0
    room_bytes = part_bytes(slots)
    for begin, end in pieces(slots, max(chunk.nbytes for chunk in chunks), room_bytes, out):
        for rank in slots.others:
            copied_bytes += slots.fill(chunks[rank][begin:end], rank * room_bytes)
        slots.announce(FILLED)
        slots.wait(slots.others, FILLED)
        _reduce(slots, target[begin:end], own[begin:end], slots.rank * room_bytes, op)
    if target is not out:
        out.copy_(target)
    return copied_bytes


def all_gather(slots: Slots, chunks: Chunks, x: torch.Tensor) -> int:
    """chunks[i] becomes rank i's `x`. Copies: S/n in, (n-1)/n S out."""
    own = chunks[slots.rank]
    if own.data_ptr() != x.data_ptr():
        x = private(x, *chunks)
        own.copy_(x)
    longest_bytes = max(chunk.nbytes for chunk in chunks)
    arriving = [(chunks[rank], rank, 0) for rank in slots.others]
    return _move(slots, pieces(slots, longest_bytes, slots.slot_bytes, x), [(x, 0)], arriving)


def broadcast(slots: Slots, x: torch.Tensor, root: int) -> int:
    """`x` becomes the root's `x`. Copies: S in on the root, S out on the other ranks."""
    at_root = slots.rank == root
    leaving, arriving = ([(x, 0)], []) if at_root else ([], [(x, root, 0)])
    return _move(slots, pieces(slots, x.nbytes, slots.slot_bytes, x), leaving, arriving)


def gather(slots: Slots, x: torch.Tensor, chunks: Chunks | None, root: int) -> int:
    """chunks[i] on the root becomes rank i's `x`. Copies: S/n in; on the root, (n-1)/n S out."""
    leaving, arriving = [(x, 0)], []
    if chunks is not None:
        chunks[root].copy_(x)
        leaving, arriving = [], [(chunks[rank], rank, 0) for rank in slots.others]
    return _move(slots, agreed_pieces(slots, x.nbytes, slots.slot_bytes, x), leaving, arriving)


def scatter(slots: Slots, x: torch.Tensor, chunks: Chunks | None, root: int) -> int:
    """`x` becomes the root's chunk r. Copies: S/n out; on the root, (n-1)/n S in."""
    room_bytes = part_bytes(slots)
    leaving, arriving, longest_bytes = [], [(x, root, slots.rank * room_bytes)], 0
    if chunks is not None:
        leaving, arriving = [(chunks[rank], rank * room_bytes) for rank in slots.others], []
        longest_bytes = max(chunk.nbytes for chunk in chunks)
    copied_bytes = _move(
        slots, agreed_pieces(slots, longest_bytes, room_bytes, x), leaving, arriving
    )
    if chunks is not None:
        x.copy_(chunks[root])
    return copied_bytes


def all_to_all(slots: Slots, outs: Chunks, ins: Chunks) -> int:
    """outs[i] becomes rank i's ins[r]. Copies, in and out: every chunk except this rank's own."""
    ins = [private(x, *outs) for x in ins]
    outs[slots.rank].copy_(ins[slots.rank])
    room_bytes = part_bytes(slots)
    leaving = [(ins[rank], rank * room_bytes) for rank in slots.others]
    arriving = [(outs[rank], rank, slots.rank * room_bytes) for rank in slots.others]
    longest_bytes = max(x.nbytes for x in ins)
    return _move(slots, agreed_pieces(slots, longest_bytes, room_bytes, ins[0]), leaving, arriving)


def barrier(slots: Slots, _: torch.Tensor) -> int:
    """Wait for all ranks: they exchange an empty piece."""
    slots.exchange(NOTHING)
    return 0


def ring_exchange(slots: Slots, out: torch.Tensor, x: torch.Tensor) -> int:
    """`out` becomes the previous rank's `x`. Copies: S in, S out."""
    leaving, arriving = [(private(x, out), 0)], [(out, (slots.rank - 1) % slots.size, 0)]
    return _move(slots, pieces(slots, x.nbytes, slots.slot_bytes, x), leaving, arriving)


def _move(
    slots: Slots,
    bounds: Iterable[tuple[int, int]],
    leaving: list[tuple[torch.Tensor, int]],
    arriving: list[tuple[torch.Tensor, int, int]],
) -> int:
    """For each piece, fill this rank's slot from `leaving` (tensor, first byte in the slot), then
    read into `arriving` (tensor, rank of the slot, first byte in that slot)."""
    copied_bytes = 0
    for begin, end in bounds:
        for x, place in leaving:
            copied_bytes += slots.fill(x[begin:end], place)
        slots.announce(FILLED)
        for x, rank, place in arriving:
            slots.wait((rank,), FILLED)
            copied_bytes += slots.take(x[begin:end], rank, place)
    return copied_bytes


def _reduce(slots: Slots, out: torch.Tensor, own: torch.Tensor, begin: int, op: str) -> None:
    """`out` becomes the reduction of `own` and of the data at `begin` in the other ranks' slots."""
    parts = [
        own if rank == slots.rank else slots.view(rank, begin, out.numel(), out.dtype)
        for rank in range(slots.size)
    ]
    _reduce_parts(out, parts, op)


def _reduce_parts(out: torch.Tensor, parts: list[torch.Tensor], op: str) -> None:
    """Reduce in rank order; `out` may alias the first two parts only."""
    total, *rest = parts
    for x in rest:
        total = PAIRWISE[op](total, x, out=out)
    if total is not out:  # a group of one rank
        out.copy_(total)
    if op == "mean":
        out.div_(len(parts))
