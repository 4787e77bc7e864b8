"""The mark of a sharded parameter: which part of the whole is on this rank.

    whole [5, 3], rows over 2 ranks          rank 0           rank 1
                                             | 0 1 2 |        | 9 a b |      rows 3:5, and a row
    Shard(comm, dim=0, 0, 3, whole=5)  ->    | 3 4 5 |        | c d e |      of padding: all
    Shard(comm, dim=0, 3, 5, whole=5)  ->    | 6 7 8 |        | . . . |      ranks have 3

A parameter without that mark is replicated: the tensor-parallel ranks have the same numbers.

    clipping      a replicated parameter counts once in the norm, shards are summed over `comm`
    checkpoints   write the whole under the plain name, and read any part of it; padding never
    DDP and ZeRO  average over ranks that have the same part, never over `comm`

Marks are attributes of the parameter. They stay through `module.to(...)`, `p.data = ...`,
`copy.deepcopy`, pickle (then `comm` is a `DetachedComm`) and every strategy around the module. A
parameter made anew (`to_empty` from the meta device) has none.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import ref

import torch
from torch import nn

from labkit.comm import CollectiveMismatch, Comm
from labkit.parallel.common.ownership import Mark, marks_of

Marked = TypeVar("Marked", bound=torch.Tensor)


class CopiedMark(Mark):
    """A mark that deep copies and pickles of its parameter have, too."""

    name: ClassVar[str]  # of the attribute

    def attach_to(self, parameter: torch.Tensor) -> None:
        """nn.Parameter's own `__deepcopy__` drops attributes, and a subclass would lose the fast
        optimizers; but `copy` and `pickle` ask the object itself."""
        weak: Any = ref(parameter)
        setattr(parameter, self.name, self)
        parameter.__deepcopy__ = partial(_deepcopied, weak)  # type: ignore[method-assign]
        parameter.__reduce_ex__ = partial(_reduced, weak)  # type: ignore[method-assign]


def marked_as(parameter: torch.Tensor, x: Marked) -> Marked:
    """`x`, a piece or a copy of `parameter`, with the marks that it has."""
    for mark in marks_of(parameter):
        mark.attach_to(x)
    return x


def _deepcopied(weak: Callable[[], Any], memo: dict[int, Any]) -> torch.Tensor:
    x = weak()
    return marked_as(x, type(x).__deepcopy__(x, memo))


def _reduced(weak: Callable[[], Any], protocol: int) -> Any:
    x = weak()
    if type(x) not in (torch.Tensor, nn.Parameter):
        return type(x).__reduce_ex__(x, protocol)  # type: ignore[call-arg]
    return _unpickled, (type(x) is nn.Parameter, x.requires_grad, x.detach(), marks_of(x))


def _unpickled(
    is_parameter: bool, requires_grad: bool, x: torch.Tensor, marks: list[Mark]
) -> torch.Tensor:
    x = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    for mark in marks:
        mark.attach_to(x)
    return x


@dataclass(frozen=True)
class Shard(CopiedMark):
    """This rank has `start:stop` along `dim` (counted from 0) of a parameter that is `whole` long
    there; the parts of the ranks of `comm` make up the whole. A local tensor that is longer than
    `stop - start` ends with padding, whose gradients are zero."""

    comm: Comm
    dim: int
    start: int
    stop: int
    whole: int

    name = "_labkit_shard"

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.whole or self.dim < 0:
            raise ValueError(
                f"{self}: a shard has start:stop of 0:whole, along a dim counted from 0"
            )

    def __str__(self) -> str:
        return f"{self.start}:{self.stop} of {self.whole} along dim {self.dim}"

    def whole_shape(self, local: torch.Size) -> torch.Size:
        """The shape of the whole parameter, without padding, from that of the part here."""
        return torch.Size([*local[: self.dim], self.whole, *local[self.dim + 1 :]])

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        if len({*self.comm.ranks} & {*comm.ranks}) > 1:
            raise ValueError(
                f"{name} is cut over ranks {list(self.comm.ranks)}, so ranks {list(comm.ranks)} "
                "are not replicas of each other; give the strategy the data-parallel axis of a "
                "mesh: Mesh(dp=..., tp=...), DDP(model, mesh.dp)"
            )


def mark_shard(parameter: torch.Tensor, shard: Shard) -> None:
    """Mark `parameter`, whose size along `shard.dim` is stop - start, or more: padding. Raises
    ValueError where it is smaller, or has no such dim."""
    if parameter.ndim <= shard.dim or parameter.shape[shard.dim] < shard.stop - shard.start:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} cannot be {shard}; mark it with the "
            "part that it has"
        )
    shard.attach_to(parameter)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Which part of a whole `parameter` is; None for a replicated one."""
    return getattr(parameter, Shard.name, None)


def check_same(
    comm: Comm, what: str, tensors: Callable[[], Iterable[torch.Tensor]], advice: str
) -> None:
    """Raises ValueError where calls are compared (`World(check=True)`) and the bytes, shapes or
    dtypes of `tensors()`, of which ranks compute together, differ between them."""

    def checksum() -> str:
        crc = 0
        for x in tensors():
            flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
            crc = zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), crc)
            crc = zlib.crc32(flat.numpy().tobytes(), crc)
        return f"{crc:08x}"

    if comm.size == 1:
        return
    try:
        comm.compare(what, checksum)
    except CollectiveMismatch as error:
        each = "\n".join(str(error).splitlines()[1:-1])  # without the general advice
        raise ValueError(
            f"the {what} differs between the ranks of a tensor-parallel group, which compute "
            f"one model together; {advice}\n{each}"
        ) from None
