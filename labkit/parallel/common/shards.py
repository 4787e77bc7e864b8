"""Marks on sharded parameters: which part of the whole tensor this rank holds.

    whole [5, 3], rows split over 2 ranks    rank 0           rank 1
                                             | 0 1 2 |        | 9 a b |      rows 3:5, padded
    rank 0: Shard(comm, 0, 0, 3, whole=5)    | 3 4 5 |        | c d e |      to 3 rows, as on
    rank 1: Shard(comm, 0, 3, 5, whole=5)    | 6 7 8 |        | . . . |      rank 0

A parameter without a mark is replicated: equal on all tensor-parallel ranks.

    clipping      counts replicated parameters once in the norm and sums shards over `comm`
    checkpoints   write the whole tensor under its plain name, without padding, and read any slice
    DDP and ZeRO  average over ranks that hold the same part, never over `comm`

Marks are attributes of the parameter. They survive `module.to(...)`, `p.data = ...`,
`copy.deepcopy`, pickle (`comm` becomes a `DetachedComm`) and wrapping in a strategy, but not
`to_empty` from the meta device, which creates a new parameter.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from labkit.comm import CollectiveMismatch, Comm
from labkit.parallel.common.ownership import Mark, marks_of


class CopiedMark(Mark):
    """A mark that is kept when its parameter is deep-copied or pickled."""

    name: ClassVar[str]  # the attribute's name

    def attach_to(self, parameter: Tensor) -> None:
        """Overrides copy and pickle on the instance: nn.Parameter's `__deepcopy__` drops
        attributes, and a subclass would lose torch's fast optimizer paths."""
        weak: Any = ref(parameter)
        setattr(parameter, self.name, self)
        parameter.__deepcopy__ = partial(_deepcopied, weak)  # type: ignore[method-assign]
        parameter.__reduce_ex__ = partial(_reduced, weak)  # type: ignore[method-assign]


def marked_as(parameter: Tensor, x: Any) -> Any:
    """Attaches the marks of `parameter` to its slice or copy `x`; returns `x`."""
    for mark in marks_of(parameter):
        mark.attach_to(x)
    return x


def _deepcopied(weak: Callable[[], Any], memo: dict[int, Any]) -> Tensor:
    x = weak()
    return marked_as(x, type(x).__deepcopy__(x, memo))


def _reduced(weak: Callable[[], Any], protocol: int) -> Any:
    x = weak()
    if type(x) not in (Tensor, nn.Parameter):
        return type(x).__reduce_ex__(x, protocol)  # type: ignore[call-arg]
    return _unpickled, (type(x) is nn.Parameter, x.requires_grad, x.detach(), marks_of(x))


def _unpickled(is_parameter: bool, requires_grad: bool, x: Tensor, marks: list[Mark]) -> Tensor:
    x = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    for mark in marks:
        mark.attach_to(x)
    return x


@dataclass(frozen=True)
class Shard(CopiedMark):
    """This rank holds `start:stop` along `dim` (>= 0) of a parameter with size `whole` along `dim`;
    the ranks of `comm` together hold the whole parameter. A local tensor longer than
    `stop - start` ends with padding, which has zero gradients."""

    comm: Comm
    dim: int
    start: int
    stop: int
    whole: int

    name = "_labkit_shard"

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.whole or self.dim < 0:
            raise ValueError(f"{self}: a shard needs 0 <= start <= stop <= whole and dim >= 0")

    def __str__(self) -> str:
        return f"{self.start}:{self.stop} of {self.whole} along dim {self.dim}"

    def whole_shape(self, local: torch.Size) -> torch.Size:
        """Shape of the local part -> shape of the whole parameter, without padding."""
        return torch.Size([*local[: self.dim], self.whole, *local[self.dim + 1 :]])

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        if len({*self.comm.ranks} & {*comm.ranks}) > 1:
            raise ValueError(
                f"{name} is sharded over ranks {list(self.comm.ranks)}, so ranks "
                f"{list(comm.ranks)} are not replicas of each other; pass the data-parallel "
                "axis of a mesh to the strategy: Mesh(dp=..., tp=...), DDP(model, mesh.dp)"
            )


def mark_shard(parameter: Tensor, shard: Shard) -> None:
    """Attaches `shard` to `parameter`, which may be padded along `shard.dim`. Raises ValueError if
    the parameter lacks that dimension or is smaller than stop - start along it."""
    if parameter.ndim <= shard.dim or parameter.shape[shard.dim] < shard.stop - shard.start:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} cannot hold slice {shard}; mark it "
            "with the slice that it holds"
        )
    shard.attach_to(parameter)


def shard_of(parameter: Tensor) -> Shard | None:
    """The `Shard` of `parameter`; None if the parameter is replicated."""
    return getattr(parameter, Shard.name, None)


def check_same(comm: Comm, what: str, tensors: Callable[[], Iterable[Tensor]], advice: str) -> None:
    """With `World(check=True)`, raises ValueError if bytes, shapes or dtypes of `tensors()` differ
    between the ranks of `comm`, which must hold equal tensors."""

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
