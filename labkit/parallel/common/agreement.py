"""What the ranks of a strategy agree on: they have the same parameters in the same order, equal to
rank 0's."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from labkit.comm import Comm


def marks_of(x: Tensor) -> list[Any]:
    """Each a `Mark` (shards.py): other ranks have other parts of `x`, or of its gradient."""
    return [vars(x)[name] for name in ("_labkit_shard", "_labkit_sequence") if name in vars(x)]


def check_same_on_all_ranks(
    named: Sequence[tuple[str, Tensor]], comm: Comm, averaged: bool = True
) -> None:
    """Raises ValueError on every rank when names, shapes, dtypes, order or frozen ones differ, or
    where a mark forbids `comm`; `averaged`: to average gradients over it."""
    for name, x in named:
        for mark in marks_of(x):
            mark.check(name, comm, averaged)
    mine = [_described(name, x) for name, x in named]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    every = comm.all_gather_object(mine)
    rank = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    both = zip_longest(every[0], every[rank], fillvalue="missing")
    for position, (here, there) in enumerate(both):
        if here != there:
            raise ValueError(
                f"the ranks have different models: parameter {position} is {here} on rank 0 and "
                f"{there} on rank {rank}; build the same model, in the same order, on every rank"
            )


def _described(name: str, x: Tensor) -> str:
    frozen = "" if x.requires_grad else ", frozen"
    part = "".join(f", {text}" for mark in marks_of(x) if (text := str(mark)))
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{frozen}{part}"


def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, src: int = 0) -> None:
    """Make all ranks' tensors equal to rank `src`'s."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x.detach())
    for group in kinds.values():
        comm.broadcast(flat := _flatten_dense_tensors(group), src)
        for x, part in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            x.copy_(part)
