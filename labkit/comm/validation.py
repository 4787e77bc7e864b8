"""Argument validation before communication, in which mistakes would look like failed peers."""

from collections.abc import Sequence
from functools import cache

import torch

from labkit.runtime.process_context import here
from labkit.runtime.transports.send_receive import REDUCTIONS

Tensors = Sequence[torch.Tensor]
COLLECTIVE_TAGS = 1 << 20  # point-to-point tags are smaller


def check_member(rank: int, size: int) -> None:
    """Raises ValueError for a rank outside a group of `size`."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in this group of {size}; choose 0 to {size - 1}")


def check_peer(peer: int, tag: int, rank: int, size: int) -> None:
    """Raises ValueError if `rank` cannot exchange messages with `peer` under `tag`."""
    check_member(peer, size)
    if peer == rank:
        raise ValueError(f"rank {peer} cannot send to or receive from itself; copy the tensor")
    if not 0 <= tag < COLLECTIVE_TAGS:
        raise ValueError(f"tag {tag} is out of range; choose 0 to {COLLECTIVE_TAGS - 1}")


def check_tensor(x: object) -> None:
    """Raises TypeError for a non-tensor."""
    if not isinstance(x, torch.Tensor):
        how = "torch.tensor([value])" if isinstance(x, (int, float)) else "torch.as_tensor(value)"
        raise TypeError(f"only tensors can be sent, not {type(x).__name__}; wrap it: {how}")


def describe(x: torch.Tensor) -> str:
    """Dtype and shape, for example: float32 [4, 8]."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_list(
    op: str, name: str, tensors: Tensors, rank: int, size: int, own: torch.Tensor | None = None
) -> None:
    """Raises an error unless there is one tensor per rank, dtypes match, and sizes fit `own`."""
    for x in (*tensors, *([] if own is None else [own])):
        check_tensor(x)
    if len(tensors) != size:
        raise ValueError(
            f"{op}: {name} has length {len(tensors)}; pass {size} tensors, one per rank"
        )
    if own is not None and own.numel() != tensors[rank].numel():
        raise ValueError(
            f"{op}: this rank's tensor has {own.numel()} elements, but {name}[{rank}] has "
            f"{tensors[rank].numel()}; make them equal"
        )
    if any(x.dtype != tensors[0].dtype for x in (*tensors, tensors[0] if own is None else own)):
        raise ValueError(f"{op}: the tensors have different dtypes; convert them to one dtype")


def check_rooted(
    op: str, name: str, tensors: Tensors | None, own: torch.Tensor, root: int, rank: int, size: int
) -> Tensors | None:
    """Validate the `tensors` that only rank `root` passes; other ranks pass None."""
    check_member(root, size)
    if rank != root:
        if tensors is not None:
            raise ValueError(f"{op}: only rank {root} passes {name}; pass None on the others")
        return None
    if tensors is None:
        raise ValueError(f"{op}: rank {root} must pass {name}, one tensor for each rank")
    check_list(op, name, tensors, rank, size, own)
    return tensors


def equal_parts(op: str, whole: torch.Tensor, n: int) -> Sequence[torch.Tensor]:
    """Split `whole` into n equal flat views. Raises ValueError if `whole` cannot be split."""
    if whole.numel() % n or not whole.is_contiguous():
        is_even = whole.numel() % n == 0
        advice = "pad it, or use the variant that takes a list of tensors"
        problem = f"cannot be split into {n} equal parts; {advice}"
        if is_even:
            problem = "is not contiguous; pass a contiguous tensor"
        raise ValueError(f"{op}: a tensor of shape {list(whole.shape)} {problem}")
    return whole.detach().view(n, whole.numel() // n).unbind()


def check_op(op: str, x: torch.Tensor) -> None:
    """Raises TypeError for a non-tensor, ValueError if `op` cannot reduce the dtype."""
    check_tensor(x)
    if problem := _refusal(op, x.dtype, x.is_cuda):
        raise ValueError(problem)


@cache
def _refusal(op: str, dtype: torch.dtype, on_gpu: bool) -> str:
    """Why `op` cannot reduce `dtype`; empty if it can."""
    if op not in REDUCTIONS:
        return f"op={op!r} is not a reduction; choose one of {', '.join(REDUCTIONS)}"
    if op in ("min", "max") and dtype.is_complex:
        return f"{dtype} has no order, so {op} is undefined; reduce its real and imaginary parts"
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean of {dtype} may not be exact; sum and divide, or convert the tensor"
    try:
        with here.carrying():  # one element: torch accepts every dtype for an empty tensor
            on_gpu or REDUCTIONS[op](torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype))
            on_gpu or op != "mean" or torch.empty(1, dtype=dtype).div_(1)
    except RuntimeError:
        return f"torch has no {op} of {dtype}; convert it first, for example to torch.float32"
    return ""
