"""Two marks of a parameter: which part of a whole is here, and who has the rest of its gradient.

    whole [5, 3], rows over 2 ranks          rank 0           rank 1
                                             | 0 1 2 |        | 9 a b |      rows 3:5, and a row
    Shard(comm, dim=0, 0, 3, whole=5)  ->    | 3 4 5 |        | c d e |      of padding: all
    Shard(comm, dim=0, 3, 5, whole=5)  ->    | 6 7 8 |        | . . . |      ranks have 3

A parameter without that mark is replicated: the tensor-parallel ranks have the same numbers.

    clipping      a replicated parameter counts once in the norm, shards are summed over `comm`
    checkpoints   write the whole under the plain name, and read any part of it; padding never
    DDP and ZeRO  average over ranks that have the same part, never over `comm`

Context-parallel ranks have the same numbers, too, and each the gradient of its own tokens, which
are averaged over all ranks of the second mark, `mark_sequence(parameter, comm)`:

    ranks of Mesh(dp=2, cp=2)     averaged over mesh.dp      0, 2 │ 1, 3     0 and 1 come apart
                                  over mesh["dp", "cp"]      0, 1, 2, 3      right

Marks are attributes of the parameter. They stay through `module.to(...)`, `p.data = ...`,
`copy.deepcopy`, pickle (then `comm` is a `DetachedComm`) and every strategy around the module. A
parameter made anew (`to_empty` from the meta device) has none.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import ref

import torch
from torch import nn

from labkit.comm import CollectiveMismatch, Comm
from labkit.parallel.common.agreement import marks_of

Marked = TypeVar("Marked", bound=torch.Tensor)


class Mark:
    """Stays on a parameter and its copies. A strategy that averages gradients calls `check`."""

    name: ClassVar[str]  # of the attribute

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        """Raises ValueError where the ranks of `comm` do not have the same part of parameter
        `name`; with `averaged` also where its gradients must not be averaged over `comm` alone."""
        raise NotImplementedError

    def attach_to(self, parameter: torch.Tensor) -> None:
        """nn.Parameter's own `__deepcopy__` drops attributes, and a subclass would lose the fast
        optimizers; but `copy` and `pickle` ask the object itself."""
        weak = ref(parameter)

        def deepcopy(memo: dict[int, Any]) -> torch.Tensor:
            me = weak()
            assert me is not None
            return marked_as(me, type(me).__deepcopy__(me, memo))

        def reduce_ex(protocol: int) -> Any:
            me = weak()
            assert me is not None
            if type(me) is torch.Tensor or type(me) is nn.Parameter:
                kind = type(me) is nn.Parameter
                return _unpickled, (kind, me.requires_grad, me.detach(), marks_of(me))
            return type(me).__reduce_ex__(me, protocol)

        setattr(parameter, self.name, self)
        parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
        parameter.__reduce_ex__ = reduce_ex  # type: ignore[method-assign]


def marked_as(parameter: torch.Tensor, x: Marked) -> Marked:
    """`x`, a piece or a copy of `parameter`, with the marks that it has."""
    for mark in marks_of(parameter):
        mark.attach_to(x)
    return x


def _unpickled(
    is_parameter: bool, requires_grad: bool, x: torch.Tensor, marks: list[Mark]
) -> torch.Tensor:
    """The tensor and its marks, and no other attribute."""
    new = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    for mark in marks:
        mark.attach_to(new)
    return new


@dataclass(frozen=True)
class Shard(Mark):
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


@dataclass(frozen=True)
class SequenceParts(Mark):
    """Each rank of `comm` has the parameter whole and uses it on its own part of the sequences."""

    comm: Comm

    name = "_labkit_sequence"

    def __str__(self) -> str:
        return ""  # the parameter itself is the same on all

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        if averaged and not {*self.comm.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"{name} is used by ranks {list(self.comm.ranks)} on parts of the same sequences "
                f"(context_parallel), and ranks {list(comm.ranks)} are not all of them: its "
                "replicas would come apart; give the strategy the data-parallel and the "
                "context-parallel ranks together: Mesh(dp=..., cp=..., tp=...), DDP(model, mesh["
                '"dp", "cp"])'
            )


def mark_shard(parameter: torch.Tensor, shard: Shard) -> None:
    if parameter.ndim <= shard.dim or parameter.shape[shard.dim] < shard.stop - shard.start:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} cannot be {shard}; mark it with the "
            "part that it has"
        )
    shard.attach_to(parameter)


def mark_sequence(parameter: torch.Tensor, comm: Comm) -> None:
    """The ranks of `comm` use `parameter` on parts of the same sequences."""
    SequenceParts(comm).attach_to(parameter)


def sequence_comm_of(parameter: torch.Tensor) -> Comm | None:
    """The ranks that share each sequence, where they do."""
    mark = getattr(parameter, SequenceParts.name, None)
    return None if mark is None else mark.comm


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Which part of a whole `parameter` is; None for a replicated one."""
    return getattr(parameter, Shard.name, None)


def comms_of(parameters: Iterable[torch.Tensor]) -> list[Comm]:
    """The groups over which some of these are cut, in the order of the parameters."""
    comms = [shard.comm for p in parameters if (shard := shard_of(p)) is not None]
    return list({comm.ranks: comm for comm in comms}.values())


# ---- what the ranks of a group compute together, they compute of the same tensors


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
    crc = 0
    for x in tensors:
        flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
        crc = zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), crc)
        crc = zlib.crc32(flat.numpy().tobytes(), crc)
    return crc
