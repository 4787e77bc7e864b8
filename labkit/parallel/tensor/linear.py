"""Tensor-parallel linear layers: a matrix is cut by columns or by rows, one shard on each rank.

    y = x A, rank r of t has          A = [A₁ | A₂]  columns          A = [A₁]  rows
                                                                          [A₂]
    its input                         x, whole                        xᵣ, its features
    it computes                       yᵣ = x Aᵣ, its features         a summand xᵣ Aᵣ of y
    forward sends                     -                               all-reduce of y
    backward sends                    all-reduce of dx                -

torch stores A transposed, weight [out, in]: its columns are the rows of `weight`. A column-parallel
layer's output is a row-parallel one's input, so the pair sends one all-reduce forward and one
backward, which hides behind dA = xᵀ dy.

With `sequence=True` x is cut along the sequence outside of the two, [b, s/t, in]: the first gathers
it, the second reduce-scatters y, together as many bytes as the all-reduce. The shard of x is saved
for backward, and gathered again there, behind dx = dy Aᵀ.

Legend: b rows, s positions, in and out features, t ranks.
Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; Korthikanti et al., arXiv
2205.05198, section 4.2.2; Narayanan et al., arXiv 2104.04473, for the overlap.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.comm import Comm
from labkit.dispatch import low_type_around
from labkit.parallel.common.conjugate import (
    copy_to_ranks,
    gathered,
    reduce_from_ranks,
    reduce_scatter_sequence,
    sum_scattered,
)
from labkit.parallel.common.shards import Shard, mark_shard, marked_as


class ShardedLinear(nn.Module):
    """A linear layer of which each rank has a shard: made by `from_linear`, or from sizes of the
    nn.Linear that all ranks, with one seed, would make."""

    def __init__(
        self, in_features: int, out_features: int, comm: Comm, *, bias: bool = True,
        sequence: bool = False, **of_linear: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._shard(nn.Linear(in_features, out_features, bias, **of_linear), comm, sequence)

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Comm, *, sequence: bool = False) -> Self:
        """This rank's shard of `linear`, which is the same on all ranks, and stays as it is."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._shard(linear, comm, sequence)
        return layer

    def _shard(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        self.train(linear.training)
        self.comm, self.sequence = Comm.of(comm), sequence
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = self._shard_of(linear.weight)
        self.bias = None if linear.bias is None else self._shard_of(linear.bias)

    def _shard_of(self, parameter: Tensor) -> nn.Parameter:
        raise NotImplementedError

    def extra_repr(self) -> str:
        shape, bias = tuple(self.weight.shape), self.bias is not None
        return f"weight {shape} of {(self.out_features, self.in_features)}, {bias=}"


class ColumnParallelLinear(ShardedLinear):
    """x [..., in], the same on all ranks -> this rank's features of the output, [..., out/t]; with
    `sequence` a shard of the sequence, [b, s/t, in] -> all of it, [b, s, out/t]. Raises ValueError
    where `out` does not divide over the ranks.
    """

    one_input: "OneInput | None" = None

    def _shard_of(self, parameter: Tensor) -> nn.Parameter:
        return shard_parameter(parameter, self.comm, dim=0)  # [out/t, in] or [out/t]

    def forward(self, x: Tensor) -> Tensor:
        if self.one_input is not None:
            return self.one_input(self, x)
        return columns([self], x)[0]

    @property
    def beside(self) -> "list[ColumnParallelLinear]":
        """The layers whose parameters a call of this one may use, too."""
        return [] if self.one_input is None else self.one_input.layers


class RowParallelLinear(ShardedLinear):
    """x [..., in/t], this rank's features -> nn.Linear's whole output [..., out] on all ranks; with
    `sequence` [b, s, in/t] -> a shard of it, [b, s/t, out]. Every rank has the whole bias. Raises
    ValueError where `in` does not divide over the ranks or, with `sequence`, s does not.
    """

    def _shard_of(self, parameter: Tensor) -> nn.Parameter:
        if parameter.ndim == 1:
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)  # [out]
            return marked_as(parameter, copy)
        return shard_parameter(parameter, self.comm, dim=1)  # [out, in/t]

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)  # [b, s, out]
        y = (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(summand, self.comm)
        if self.bias is None:
            return y
        # On a shard of the sequence, the gradient of the bias is a part of its sum.
        bias = copy_to_ranks(self.bias, self.comm) if self.sequence else self.bias
        return y + bias.to(y.dtype)


class OneInput:
    """Column-parallel layers of the same x, as q, k and v: the first call multiplies for all of
    them, so that x is gathered once, and its gradient sent once."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]):
        self.layers = list(layers)
        self._x: Tensor | None = None
        self._versions: Any = None  # of x and the weights, and whether gradients are on
        self._ys: dict[ColumnParallelLinear, Tensor] = {}  # not asked for yet
        for layer in layers:
            layer.one_input = self

    def __call__(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        tensors = [] if x.is_inference() else [x, *(p for n in self.layers for p in n.parameters())]
        versions = torch.is_grad_enabled(), [tensor._version for tensor in tensors]
        if self._x is not x or self._versions != versions or layer not in self._ys:
            self._x, self._versions = x, versions
            self._ys = dict(zip(self.layers, columns(self.layers, x), strict=True))
        y = self._ys.pop(layer)
        if not self._ys:
            self._x = None
        return y


def columns(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of column-parallel layers of one input."""
    first = layers[0]
    x = x.to(low_type_around(x) or x.dtype)  # before it is sent and saved, not after
    shards = [shard for layer in layers for shard in (layer.weight, layer.bias)]
    return _Columns.apply(x, first.comm, first.sequence, *shards)


class _Columns(torch.autograd.Function):
    """x [..., in] and weights [out/t, in], biases [out/t] or None -> an output for each weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Comm, sequence: bool, *shards: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = shards[::2], shards[1::2]
        sequence = sequence and comm.size > 1
        ctx.save_for_backward(x, *weights)  # with `sequence`, the shard of x
        ctx.comm, ctx.sequence = comm, sequence
        ctx.set_materialize_grads(False)
        whole = gathered(x, comm, dim=1) if sequence else x
        ys = [F.linear(_rows(whole), w, b) for w, b in zip(weights, biases, strict=True)]
        # No views, which an activation could not write to.
        return tuple(torch.ops.aten._unsafe_view(y, (*whole.shape[:-1], y.shape[-1])) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, *weights), comm = ctx.saved_tensors, ctx.comm
        needs_dx, _, _, *needed = ctx.needs_input_grad
        parts, gather, reduction = [x], None, None
        dx: Any = None
        if ctx.sequence and any(needed[::2]):  # x arrives while its gradient is computed, ...
            parts = list(x.new_empty([comm.size, *x.shape]))
            gather = comm.all_gather(parts, x, async_op=True)
        if needs_dx:
            for dy, w in zip(grads, weights):
                if dy is not None:
                    summand = dy @ w.to(dy.dtype)  # [b, s, in]
                    dx = summand if dx is None else dx.add_(summand)
            if ctx.sequence:  # ... which is sent while those of the weights are
                dx, reduction = sum_scattered(dx, comm, dim=1, async_op=True)
            elif comm.size > 1:
                reduction = comm.all_reduce(dx, async_op=True)
        if gather:
            gather.wait()
        x_rows = _rows(torch.cat(parts, dim=1) if len(parts) > 1 else x)  # [b s, in]
        shards: list[Tensor | None] = []
        for dy, needs_dw, needs_db in zip(grads, needed[::2], needed[1::2], strict=True):
            rows = None if dy is None else _rows(dy)  # [b s, out/t]
            shards.append(rows.t() @ x_rows if rows is not None and needs_dw else None)
            shards.append(rows.sum(0) if rows is not None and needs_db else None)
        if reduction:
            reduction.wait()
        return dx, None, None, *shards


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def shard_parameter(
    whole: Tensor, comm: Comm, dim: int, *, padded_to: int | None = None
) -> nn.Parameter:
    """This rank's of t equal shards along `dim`, marked, in memory of its own; `padded_to`: of so
    many elements, of which those behind the whole's are zeros. Raises ValueError where these do not
    divide over the ranks."""
    size, shape = whole.shape[dim], [*whole.shape]
    if (padded := padded_to or size) % comm.size:
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"dim {dim} of a weight {shape} is {size} long, which does not divide over "
            f"{comm.size} tensor-parallel ranks; sizes that would: {fits}"
        )
    shape[dim] = length = padded // comm.size
    start = min(comm.rank * length, size)
    stop = min(start + length, size)
    own = whole.detach().new_empty(shape)
    own.narrow(dim, 0, stop - start).copy_(whole.detach().narrow(dim, start, stop - start))
    if stop - start < length:
        own.narrow(dim, stop - start, length - (stop - start)).zero_()
    shard = marked_as(whole, nn.Parameter(own, whole.requires_grad))
    mark_shard(shard, Shard(comm, dim, start, stop, size))
    return shard
