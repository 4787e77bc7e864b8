"""The mark of a parameter that is cut over tensor-parallel ranks: which part of the whole is here.

    whole [5, 3], rows over 2 ranks          rank 0           rank 1
                                             | 0 1 2 |        | 9 a b |      rows 3:5, and a row
    Shard(comm, dim=0, 0, 3, whole=5)  ->    | 3 4 5 |        | c d e |      of padding: all
    Shard(comm, dim=0, 3, 5, whole=5)  ->    | 6 7 8 |        | . . . |      ranks have 3

A parameter without a mark is replicated: the tensor-parallel ranks have the same numbers. Who asks:

    clipping      a replicated parameter counts once in the norm, shards are summed over `comm`
    checkpoints   write the whole under the plain name, and read any part of it; padding never
    DDP and ZeRO  average over ranks that have the same part, never over `comm`

The mark is an attribute of the parameter. It stays through `module.to(...)`, `p.data = ...`,
`copy.deepcopy` and every strategy around the module; ZeRO-3's pieces, flat, have that of the
parameter that they are of. A parameter made anew (`to_empty` from the meta device) has none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch

from labkit.comm import Comm

Marked = TypeVar("Marked", bound=torch.Tensor)


@dataclass(frozen=True)
class Shard:
    """This rank has `start:stop` along `dim` of a parameter that is `whole` long there.

    comm    the ranks whose parts make up the whole, each element on one of them
    dim     counted from 0

    A local tensor that is longer than `stop - start` ends with padding, whose gradients are zero.
    """

    comm: Comm
    dim: int
    start: int
    stop: int
    whole: int

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


def mark_shard(parameter: torch.Tensor, shard: Shard) -> None:
    """Say that `parameter` is this part of a whole. Raises ValueError where it is too small."""
    if parameter.ndim <= shard.dim or parameter.shape[shard.dim] < shard.stop - shard.start:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} cannot be {shard}; mark it with the "
            "part that it has"
        )
    _attach(parameter, shard)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Which part of a whole `parameter` is; None for a replicated one."""
    return getattr(parameter, "_labkit_shard", None)


def marked_as(parameter: torch.Tensor, x: Marked) -> Marked:
    """`x`, a flat piece of `parameter` or its gradient, with the same mark, where it has one."""
    if (shard := shard_of(parameter)) is not None:
        _attach(x, shard)
    return x


def comms_of(parameters: Iterable[torch.Tensor]) -> list[Comm]:
    """The groups over which some of these are cut, in the order of the parameters."""
    found: dict[tuple[int, ...], Comm] = {}
    for p in parameters:
        if (shard := shard_of(p)) is not None:
            found.setdefault(shard.comm.ranks, shard.comm)
    return list(found.values())


def check_replicas(named: Iterable[tuple[str, torch.Tensor]], comm: Comm) -> None:
    """Raises ValueError where ranks of `comm` have different parts of a parameter: to average
    those would mix them."""
    for name, x in named:
        shard = shard_of(x)
        if shard is not None and len({*shard.comm.ranks} & {*comm.ranks}) > 1:
            raise ValueError(
                f"{name} is cut over ranks {list(shard.comm.ranks)}, so ranks {list(comm.ranks)} "
                "are not replicas of each other; give the strategy the data-parallel axis of a "
                "mesh: Mesh(dp=..., tp=...), DDP(model, mesh.dp)"
            )


def _attach(parameter: torch.Tensor, shard: Shard) -> None:
    """nn.Parameter's own `__deepcopy__` drops attributes, and a subclass would lose the fast
    optimizers; but `copy` asks the object itself. The weak reference makes no cycle."""
    weak = ref(parameter)

    def deepcopy(memo: dict[int, Any]) -> torch.Tensor:
        me = weak()
        assert me is not None
        new = type(me).__deepcopy__(me, memo)
        _attach(new, shard)
        return new

    parameter._labkit_shard = shard  # type: ignore[attr-defined]
    parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
