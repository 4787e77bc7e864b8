"""Two marks of a parameter: which part of a whole is here, and who has the rest of its gradient.

    whole [5, 3], rows over 2 ranks          rank 0           rank 1
                                             | 0 1 2 |        | 9 a b |      rows 3:5, and a row
    Shard(comm, dim=0, 0, 3, whole=5)  ->    | 3 4 5 |        | c d e |      of padding: all
    Shard(comm, dim=0, 3, 5, whole=5)  ->    | 6 7 8 |        | . . . |      ranks have 3

A parameter without that mark is replicated: the tensor-parallel ranks have the same numbers. Who
asks:

    clipping      a replicated parameter counts once in the norm, shards are summed over `comm`
    checkpoints   write the whole under the plain name, and read any part of it; padding never
    DDP and ZeRO  average over ranks that have the same part, never over `comm`

Context-parallel ranks have the same numbers, too, and each the gradient of its own tokens. The
second mark, `mark_sequence(parameter, comm)`, has those ranks: who averages gradients must do so
over all of them, or the replicas come apart.

    ranks of Mesh(dp=2, cp=2)     averaged over mesh.dp      0, 2 │ 1, 3     0 and 1 come apart
                                  over mesh["dp", "cp"]      0, 1, 2, 3      right

Marks are attributes of the parameter. They stay through `module.to(...)`, `p.data = ...`,
`copy.deepcopy` and every strategy around the module; ZeRO-3's pieces, flat, have those of the
parameter that they are of. A parameter made anew (`to_empty` from the meta device) has none.
A pickled one (`torch.save(model)`, a model returned by `world.run`) has marks that say the same of
ranks that are far away: their `comm` is a `DetachedComm`, over which nothing travels.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn

from labkit.comm import CollectiveMismatch, Comm

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
    _attach(parameter, _SHARD, shard)


def mark_sequence(parameter: torch.Tensor, comm: Comm) -> None:
    """Say that each rank of `comm` has `parameter` whole and uses it on its own part of the
    sequences, so that its gradient is to be averaged over all of them."""
    _attach(parameter, _SEQUENCE, comm)


def sequence_comm_of(parameter: torch.Tensor) -> Comm | None:
    """The ranks that share each sequence, where they do."""
    return getattr(parameter, _SEQUENCE, None)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Which part of a whole `parameter` is; None for a replicated one."""
    return getattr(parameter, _SHARD, None)


def marked_as(parameter: torch.Tensor, x: Marked) -> Marked:
    """`x`, a piece or a copy of `parameter`, or its gradient, with the marks that it has."""
    for name, mark in _marks_of(parameter).items():
        _attach(x, name, mark)
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


def check_whole_sequences(named: Iterable[tuple[str, torch.Tensor]], comm: Comm) -> None:
    """Raises ValueError where some ranks that share a sequence are not in `comm`: averaged over
    `comm` alone, their replicas of a parameter would come apart."""
    for name, x in named:
        sharing = sequence_comm_of(x)
        if sharing is not None and not {*sharing.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"{name} is used by ranks {list(sharing.ranks)} on parts of the same sequences "
                f"(context_parallel), and ranks {list(comm.ranks)} are not all of them: its "
                "replicas would come apart; give the strategy the data-parallel and the "
                "context-parallel ranks together: Mesh(dp=..., cp=..., tp=...), DDP(model, mesh["
                '"dp", "cp"])'
            )


# ---- ranks with shards of one model compute on the same input


def check_same(comm: Comm, what: str, number: Callable[[], int], advice: str) -> None:
    """Raises ValueError where calls are compared (`World(check=True)`) and `number()` differs."""
    if comm.size == 1:
        return
    try:
        comm.compare(what, lambda: f"{number():08x}")
    except CollectiveMismatch as error:
        each = "\n".join(str(error).splitlines()[1:-1])  # without the general advice
        raise ValueError(
            f"the {what} differs between the ranks of a tensor-parallel group, which compute "
            f"one model together; {advice}\n{each}"
        ) from None


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number that other bytes, or another shape or dtype, would most likely change."""
    number = 0
    for x in tensors:
        flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
        number = zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), number)
        number = zlib.crc32(flat.numpy().tobytes(), number)
    return number


# ---- how marks stay

_SHARD, _SEQUENCE = "_labkit_shard", "_labkit_sequence"


def _marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    return {name: vars(parameter)[name] for name in (_SHARD, _SEQUENCE) if name in vars(parameter)}


def _attach(parameter: torch.Tensor, name: str, mark: Any) -> None:
    """nn.Parameter's own `__deepcopy__` drops attributes, and a subclass would lose the fast
    optimizers; but `copy` and `pickle` ask the object itself. The weak reference makes no cycle."""
    weak = ref(parameter)

    def deepcopy(memo: dict[int, Any]) -> torch.Tensor:
        me = weak()
        assert me is not None
        return marked_as(me, type(me).__deepcopy__(me, memo))

    def reduce_ex(protocol: int) -> Any:
        me = weak()
        assert me is not None
        if type(me) is torch.Tensor or type(me) is nn.Parameter:
            return _again, (type(me) is nn.Parameter, me.requires_grad, me.detach(), _marks_of(me))
        return type(me).__reduce_ex__(me, protocol)

    setattr(parameter, name, mark)
    parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    parameter.__reduce_ex__ = reduce_ex  # type: ignore[method-assign]


def _again(
    is_parameter: bool, requires_grad: bool, x: torch.Tensor, marks: dict[str, Any]
) -> torch.Tensor:
    """Out of a pickle: the tensor and its marks, and no other attribute."""
    new = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    for name, mark in marks.items():
        _attach(new, name, mark)
    return new
