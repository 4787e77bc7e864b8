"""Tensor-parallel linear layers: a matrix is cut by columns or by rows, each rank has one piece.

    y = x A, rank r of t has          A = [A₁ | A₂]  columns          A = [A₁]  rows
                                                                          [A₂]
    its input                         x, whole                        xᵣ, its features
    it computes                       yᵣ = x Aᵣ, its features         a summand xᵣ Aᵣ of y
    forward sends                     -                               all-reduce of y
    backward sends                    all-reduce of dx                -

A column-parallel layer's output is a row-parallel one's input, so the two in a row send one
all-reduce forward and one backward. (torch keeps A transposed, weight [out, in]: the columns of A
are the rows of `weight`.)

Backward of the first hides its all-reduce behind the other product:

    dx = g Aᵀ │ all-reduce of dx ................... │ wait
              │ dA = xᵀ g                            │

With `sequence=True` what lies outside of the two is cut along the sequence, x [b, s/t, in]: the
first gathers it, the second reduce-scatters y. Together these are as many bytes as the all-reduce.
Kept for backward is the part of x; it is gathered again there, behind dx = g Aᵀ.

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
from labkit.parallel.common.conjugate import (
    copy_to_ranks,
    gather_parts,
    gathered,
    reduce_from_ranks,
    reduce_scatter_sequence,
    sum_scattered,
)
from labkit.parallel.common.shards import Shard, mark_shard, marked_as
from labkit.precision.autocasting import low_type_around


class PieceOfLinear(nn.Module):
    """What the two have in common: how they are made, from sizes or of an nn.Linear."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, comm: Comm, *, bias: bool = True,
        sequence: bool = False, **of_linear: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._cut(nn.Linear(in_features, out_features, bias, **of_linear), Comm.of(comm), sequence)

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Comm, *, sequence: bool = False) -> Self:
        """This rank's piece of `linear`, which is the same on all ranks, and stays as it is."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(linear, Comm.of(comm), sequence)
        return layer

    def _cut(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        """Take `weight` and `bias`, and all else, from `linear`."""
        raise NotImplementedError

    def _take(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        self.train(linear.training)
        self.comm, self.sequence = comm, sequence
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def extra_repr(self) -> str:
        """What print(model) shows: this rank's piece, and of what."""
        piece, bias = tuple(self.weight.shape), self.bias is not None
        return f"weight {piece} of {(self.out_features, self.in_features)}, {bias=}"


class ColumnParallelLinear(PieceOfLinear):
    """x [..., in], the same on all ranks -> this rank's features of the output, [..., out/t].

    sequence  the input is this rank's part of the sequence, [b, s/t, in], the output of all of it,
              [b, s, out/t].

    Built from sizes, it has the piece of the nn.Linear that all ranks, with one seed, would make;
    `from_linear` cuts a given one. Raises ValueError where `out` does not divide over the ranks.
    """

    def _cut(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        self._take(linear, comm, sequence)
        self.weight = piece_of(linear.weight, comm, dim=0)  # [out/t, in]
        self.bias = None if linear.bias is None else piece_of(linear.bias, comm, dim=0)  # [out/t]
        self.one_input: OneInput | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.one_input is not None:
            return self.one_input(self, x)
        return columns([self], x)[0]

    @property
    def beside(self) -> "list[ColumnParallelLinear]":
        """The layers whose parameters a call of this one may use, too."""
        return [] if self.one_input is None else self.one_input.layers


class RowParallelLinear(PieceOfLinear):
    """x [..., in/t], this rank's features -> nn.Linear's whole output [..., out], on all ranks.

    sequence  of the output, each rank gets its part of the sequence: [b, s, in/t] -> [b, s/t, out].

    Every rank has the whole bias, and it is added once, to the sum. Raises ValueError where `in`
    does not divide over the ranks or, with `sequence`, s does not.
    """

    def _cut(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        self._take(linear, comm, sequence)
        self.weight = piece_of(linear.weight, comm, dim=1)  # [out, in/t]
        self.bias = None if linear.bias is None else copy_of(linear.bias)  # [out]

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)  # [b, s, out]
        y = (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(summand, self.comm)
        if self.bias is None:
            return y
        # On a part of the sequence, the gradient of the bias is a part of its sum.
        bias = copy_to_ranks(self.bias, self.comm) if self.sequence else self.bias
        return y + bias.to(y.dtype)


class OneInput:
    """Column-parallel layers that get the same x, as q, k and v do: the one that is called first
    multiplies for all of them, so that x is gathered once, and its gradient sent once."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]):
        self.layers = list(layers)
        self._x: Tensor | None = None
        self._then: Any = None  # what else the products depend on
        self._ys: dict[ColumnParallelLinear, Tensor] = {}  # that are still to be asked for
        for layer in layers:
            layer.one_input = self

    def __call__(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        weights = [p for one in self.layers for p in one.parameters()]
        now = (
            torch.is_grad_enabled(),
            [one._version for one in (x, *weights) if not x.is_inference()],
        )
        if self._x is not x or self._then != now or layer not in self._ys:
            self._x, self._then = x, now
            self._ys = dict(zip(self.layers, columns(self.layers, x), strict=True))
        y = self._ys.pop(layer)
        if not self._ys:
            self._x = None
        return y


def columns(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of column-parallel layers of one input."""
    first = layers[0]
    x = x.to(low_type_around(x) or x.dtype)  # before it travels and is kept, not after
    pieces = [piece for layer in layers for piece in (layer.weight, layer.bias)]
    return _Columns.apply(x, first.comm, first.sequence, *pieces)


class _Columns(torch.autograd.Function):
    """x [..., in] and weights [out/t, in], biases [out/t] or None -> an output for each weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Comm, sequence: bool, *pieces: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = pieces[::2], pieces[1::2]
        sequence = sequence and comm.size > 1
        ctx.save_for_backward(x, *weights)  # with `sequence`, a part of what is multiplied
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
        x_wanted, _, _, *wanted = ctx.needs_input_grad
        parts, arriving = [x], None
        if ctx.sequence and any(wanted[::2]):  # x arrives while its gradient is computed, ...
            parts, arriving = gather_parts(x, comm, async_op=True)
        dx: Any = None
        leaving = None
        if x_wanted:
            for g, w in zip(grads, weights):
                if g is not None:
                    part = g @ w.to(g.dtype)  # [b, s, in]
                    dx = part if dx is None else dx.add_(part)
            if ctx.sequence:  # ... which leaves while those of the weights are
                dx, leaving = sum_scattered(dx, comm, dim=1, async_op=True)
            elif comm.size > 1:
                leaving = comm.all_reduce(dx, async_op=True)
        if arriving:
            arriving.wait()
        x_rows = _rows(torch.cat(parts, dim=1) if len(parts) > 1 else x)  # [b s, in]
        pieces: list[Tensor | None] = []
        for g, w_wanted, b_wanted in zip(grads, wanted[::2], wanted[1::2], strict=True):
            rows = None if g is None else _rows(g)  # [b s, out/t]
            pieces.append(None if rows is None or not w_wanted else rows.t() @ x_rows)
            pieces.append(None if rows is None or not b_wanted else rows.sum(0))
        if leaving:
            leaving.wait()
        return dx, None, None, *pieces


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ---- pieces of parameters


def piece_of(parameter: Tensor, comm: Comm, dim: int) -> nn.Parameter:
    """This rank's of t equal pieces along `dim`, in memory of its own."""
    if (whole := parameter.shape[dim]) % comm.size:
        fits = ", ".join(str(size) for size in range(1, whole + 1) if whole % size == 0)
        raise ValueError(
            f"dim {dim} of a weight {list(parameter.shape)} is {whole} long, which does not divide "
            f"over {comm.size} tensor-parallel ranks; sizes that would: {fits}"
        )
    length = whole // comm.size
    start = comm.rank * length
    part = parameter.detach().narrow(dim, start, length)
    piece = marked_as(parameter, copy_of(part, parameter.requires_grad))
    mark_shard(piece, Shard(comm, dim, start, start + length, whole))
    return piece


def copy_of(x: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
    """A parameter with the numbers of `x`, in memory of its own, and its marks."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    requires_grad = x.requires_grad if requires_grad is None else requires_grad
    return marked_as(x, nn.Parameter(copy, requires_grad))
