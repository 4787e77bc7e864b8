"""The cost of one operation, computed from its tensors: FLOPs, bytes moved, and matmul sides. A
replay converts the cost to time on a device."""

from collections.abc import Sequence
from typing import Any

import torch

from labkit.memory.conditions import tensors_in
from labkit.memory.flops import flops_of
from labkit.trace import Operation

aten = torch.ops.aten
ALLOCATE = {  # operations that read and write no data
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten._local_scalar_dense,  # a view; .item()
}  # fmt: skip
OVERWRITE = {aten.zero_, aten.fill_, aten.copy_, aten.normal_, aten.bernoulli_, aten.uniform_}
LOOK_UP = {aten.embedding, aten.index_select, aten.gather, aten.index}  # read selected rows
ADD_ROWS = {aten.index_add_, aten.scatter_add_, aten.index_put_}  # update selected rows
ATTENTION = [
    getattr(aten, f"_scaled_dot_product_{core}{way}")
    for core in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                 "cudnn_attention")
    for way in ("", "_backward")
]  # fmt: skip

Tensors = Sequence[torch.Tensor]


def moved_bytes_of(func: Any, ins: Tensors, outs: Tensors) -> int:
    """Bytes read and written: 0 for views; look-ups and row updates count only selected rows."""
    kind = func._overloadpacket
    in_bytes, out_bytes = (sum(x.nbytes for x in some) for some in (ins, outs))
    if kind in ALLOCATE or func.is_view:
        return 0
    if kind in OVERWRITE:
        return in_bytes  # copy_: source read, destination written
    if kind in LOOK_UP:
        return 2 * out_bytes + sum(x.nbytes for x in ins[1:])
    if kind in ADD_ROWS:
        return sum(x.nbytes for x in ins[1:]) + 2 * ins[-1].nbytes
    return in_bytes + out_bytes


def sides_of(func: Any, args: Any) -> tuple[int, ...]:
    """m, n and k of a matmul [m, k] x [k, n], or of q kᵀ in attention; else ()."""
    kind = func._overloadpacket
    if kind not in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, *ATTENTION):
        return ()
    second = kind in (aten.addmm, aten.baddbmm) or "backward" in kind.__name__
    left, right = args[1:3] if second else args[:2]
    n = right.shape[-2 if kind in ATTENTION else -1]
    return left.shape[-2], n, left.shape[-1]


def operation_of(
    func: Any, args: Any, kwargs: Any, out: Any, when_s: float, step: int
) -> Operation | None:
    """The operation as a trace record; None if it has no cost."""
    ins = tensors_in((args, {name: x for name, x in kwargs.items() if name != "out"}))
    outs = tensors_in(out) or written_by(func, args, kwargs)
    flops, moved_bytes = flops_of(func, args, kwargs, out), moved_bytes_of(func, ins, outs)
    if not flops and not moved_bytes:
        return None
    dtype = next((x.dtype for x in (*outs, *ins) if x.is_floating_point()), torch.int64)
    name = func._overloadpacket.__name__
    sides = sides_of(func, args) if flops else ()
    return Operation(when_s, step, name, str(dtype)[6:], flops, moved_bytes, sides)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments written by an operation without a return value, such as `_foreach_add_`."""
    arguments = func._schema.arguments
    given = dict(zip((x.name for x in arguments), args)) | kwargs
    return tensors_in([given.get(x.name) for x in arguments if x.is_write])
