"""Layers sharded over tensor-parallel ranks: linears by columns or rows, vocabulary by rows.

    y = x A, rank r of t holds        A = [A₁ | A₂]  columns          A = [A₁]  rows
                                                                          [A₂]
    input                             all of x                        its features xᵣ
    output                            its features yᵣ = x Aᵣ          a partial sum xᵣ Aᵣ of y
    forward sends                     -                               all-reduce of y
    backward sends                    all-reduce of dx                -

torch stores A transposed, as weight [out, in]. Columns followed by rows need one all-reduce in
forward and one in backward, overlapped with dA = xᵀ dy. With `sequence=True`, x outside the pair is
sharded, [b, s/t, in]: columns gather x (and again in backward, overlapped with dx = dy Aᵀ), and
rows reduce-scatter y; in forward, the two together send as many bytes as the all-reduce.

    rank 0   rows 0, 1, 2 of the table        tokens ──> own rows, zeros for other tokens
    rank 1   rows 3, 4, 5                                │ all-reduce: a token's row is on one rank
    rank 2   rows 6, 7, padding                          x  [b, s, w]
             the head holds the same rows     x ──> own logits [b, s, V/t] ──> loss

    each rank holds   V/t rows of w elements, V = v rounded up to a multiple of t
    traffic           forward: all-reduces of b s w (embedding), b s (max), 2 b s (sum, target)
                      backward: an all-reduce of b s w (head)

No rank needs all logits for a token's loss, log(sum of exp(logits)) - (logit of the target).
Padding rows and their gradients are zero: no token uses them; their logits are -inf or dropped.

Legend: b rows, s positions, in and out features, w width, v vocabulary, t ranks.
Sources: arXiv 1909.08053, section 3; 2205.05198, section 4.2.2; overlap: arXiv 2104.04473.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.comm import Comm
from labkit.dispatch import autocast_dtype
from labkit.parallel.common.conjugate import (
    check_divides,
    copies_to_ranks,
    copy_to_ranks,
    gather_from_ranks,
    gathered,
    own_part,
    reduce_from_ranks,
    reduce_scatter_sequence,
    sum_scattered,
)
from labkit.parallel.common.shards import Shard, check_same, mark_shard, marked_as

SAME_BATCH = "pass all of them the same batch, chosen by the rank along the data-parallel axis"


class ShardedLinear(nn.Module):
    """A sharded nn.Linear. Construction from sizes requires the same seed on all ranks."""

    dim, padded = 0, False  # `weight`'s sharded dim; whether padding is allowed

    def __init__(
        self, in_features: int, out_features: int, comm: Comm, *, bias: bool = True,
        sequence: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._shard(nn.Linear(in_features, out_features, bias, **kwargs), comm, sequence)

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Comm, *, sequence: bool = False) -> Self:
        """This rank's shard of `linear`, which is equal on all ranks and is not modified."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._shard(linear, comm, sequence)
        return layer

    def _shard(self, linear: nn.Linear, comm: Comm, sequence: bool) -> None:
        self.train(linear.training)
        self.comm, self.sequence = Comm.of(comm), sequence
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shard = partial(shard_parameter, comm=self.comm, dim=self.dim, padded=self.padded)
        self.weight = shard(linear.weight)
        self.bias = None if linear.bias is None else shard(linear.bias)

    def extra_repr(self) -> str:
        shape, bias = tuple(self.weight.shape), self.bias is not None
        return f"weight {shape} of {(self.out_features, self.in_features)}, {bias=}"


class ColumnParallelLinear(ShardedLinear):
    """x [..., in] -> [..., out/t]; with `sequence`, a shard [b, s/t, in] -> [b, s, out/t]. Weight
    [out/t, in], bias [out/t]. Raises ValueError if t does not divide `out`."""

    shared_input: Any = None  # a ShardedForward, if several column layers share an input

    def forward(self, x: Tensor) -> Tensor:
        if self.shared_input is not None:
            return self.shared_input.output_of(self, x)
        return columns([self], x)[0]

    @property
    def parallel_siblings(self) -> "list[ColumnParallelLinear]":
        """The layers, including this layer, whose outputs one call of this layer may compute."""
        return [] if self.shared_input is None else self.shared_input.columns


class RowParallelLinear(ShardedLinear):
    """x [..., in/t] -> the full output [..., out]; with `sequence`, its shard [b, s/t, out]. The
    bias is replicated. Raises ValueError if t does not divide `in` or, with `sequence`, s."""

    dim = 1  # weight [out, in/t], bias [out]

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)  # [b, s, out]
        y = (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(summand, self.comm)
        if self.bias is None:
            return y
        # On a sequence shard, the bias gradient is a partial sum.
        bias = copy_to_ranks(self.bias, self.comm) if self.sequence else self.bias
        return y + bias.to(y.dtype)


def columns(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """Outputs of column-parallel layers that share their input."""
    first = layers[0]
    x = x.to(autocast_dtype(x) or x.dtype)  # cast x before sending and saving
    shards = [shard for layer in layers for shard in (layer.weight, layer.bias)]
    return _Columns.apply(x, first.comm, first.sequence, *shards)


class _Columns(torch.autograd.Function):
    """x [..., in], weights [out/t, in], biases [out/t] or None -> one output per weight."""

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
        rows = whole.reshape(-1, whole.shape[-1])  # [b s, in]
        ys = [F.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)]
        # Not views: an in-place activation could not modify a view.
        return tuple(torch.ops.aten._unsafe_view(y, (*whole.shape[:-1], y.shape[-1])) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, *weights), comm = ctx.saved_tensors, ctx.comm
        needs_dx, _, _, *needed = ctx.needs_input_grad
        parts, gather, reduction = [x], None, None
        dx: Any = None
        if ctx.sequence and any(needed[::2]):  # gather x while its gradient is computed, ...
            parts = list(x.new_empty([comm.size, *x.shape]))
            gather = comm.all_gather(parts, x, async_op=True)
        if needs_dx:
            for dy, w in zip(grads, weights):
                if dy is not None:
                    summand = dy @ w.to(dy.dtype)  # [b, s, in]
                    dx = summand if dx is None else dx.add_(summand)
            if ctx.sequence:  # ... and reduce dx while weight gradients are computed
                dx, reduction = sum_scattered(dx, comm, dim=1, async_op=True)
            elif comm.size > 1:
                reduction = comm.all_reduce(dx, async_op=True)
        if gather:
            gather.wait()
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else x
        x_rows = whole.reshape(-1, x.shape[-1])  # [b s, in]
        shards: list[Tensor | None] = []
        for dy, needs_dw, needs_db in zip(grads, needed[::2], needed[1::2], strict=True):
            rows = None if dy is None else dy.reshape(-1, dy.shape[-1])  # [b s, out/t]
            shards.append(rows.t() @ x_rows if rows is not None and needs_dw else None)
            shards.append(rows.sum(0) if rows is not None and needs_db else None)
        if reduction:
            reduction.wait()
        return dx, None, None, *shards


def shard_parameter(whole: Tensor, comm: Comm, dim: int, *, padded: bool = False) -> nn.Parameter:
    """This rank's shard of `whole` along `dim`, copied and marked; if `dim` does not exist, a copy.
    Raises ValueError if t does not divide the size of `dim`, unless `padded` adds zeros."""
    if whole.ndim <= dim:
        return marked_as(whole, nn.Parameter(whole.detach().clone(), whole.requires_grad))
    if not padded:
        check_divides(whole, comm, dim)
    size, shape = whole.shape[dim], [*whole.shape]
    shape[dim] = length = -(-size // comm.size)  # rounded up
    start = min(comm.rank * length, size)
    stop = min(start + length, size)
    own = whole.detach().new_zeros(shape)
    own.narrow(dim, 0, stop - start).copy_(whole.detach().narrow(dim, start, stop - start))
    shard = marked_as(whole, nn.Parameter(own, whole.requires_grad))
    mark_shard(shard, Shard(comm, dim, start, stop, size))
    return shard


class SummedGradients:
    """Replaces the forward of a module whose input is a sequence shard, such as a norm: backward
    sums the gradients of the module's parameters over the ranks, in one all-reduce. A position
    embedding takes all positions [s] and returns the vectors of this rank's shard, [s/t, w]."""

    def __init__(self, module: nn.Module, comm: Comm):
        self.module, self.forward, self.comm = module, module.forward, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.module, nn.Embedding):
            args = tuple(own_part(positions, self.comm, dim=-1) for positions in args)
            kwargs = {name: own_part(x, self.comm, dim=-1) for name, x in kwargs.items()}
        whole: Any = self.module._parameters
        present = {name: p for name, p in whole.items() if p is not None}
        copies: Any = copies_to_ranks([*present.values()], self.comm)
        self.module._parameters = whole | dict(zip(present, copies, strict=True))
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.module._parameters = whole


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding sharded by rows. Construction from sizes requires the same seed on all ranks.
    tokens [b, s], equal on all ranks -> [b, s, w]; with `sequence`, its shard [b, s/t, w]. Raises
    ValueError for tokens outside the vocabulary (on a GPU, a device assert)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, comm: Comm, *,
        padding_idx: int | None = None, sequence: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **kwargs)
        self._shard(whole, comm, sequence)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Comm, *, sequence: bool = False
    ) -> "VocabParallelEmbedding":
        """This rank's rows of `embedding`, which is equal on all ranks and is not modified."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._shard(embedding, comm, sequence)
        return layer

    def _shard(self, embedding: nn.Embedding, comm: Comm, sequence: bool) -> None:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(embedding, option):
                why = f"an embedding with {option}={value} cannot be sharded by vocabulary"
                raise ValueError(f"{why}; build it without {option}")
        self.comm, self.sequence = Comm.of(comm), sequence
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.weight = shard_parameter(embedding.weight, self.comm, dim=0, padded=True)  # [V/t, w]
        self.padding_idx = padding = embedding.padding_idx  # its row is never trained
        own = -1 if padding is None else padding - self.comm.rank * len(self.weight)
        self._own_padding_idx = own if 0 <= own < len(self.weight) else None

    def forward(self, tokens: Tensor) -> Tensor:
        check_inside("a token", tokens, self.num_embeddings)
        rows, is_own = _local_rows(tokens, len(self.weight), self.comm)
        x = F.embedding(rows, self.weight, self._own_padding_idx)  # [b, s, w]
        x = x.masked_fill(~is_own.unsqueeze(-1), 0)
        return (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(x, self.comm)

    def extra_repr(self) -> str:
        return f"weight {tuple(self.weight.shape)} of {(self.num_embeddings, self.embedding_dim)}"


class VocabParallelHead(ColumnParallelLinear):
    """nn.Linear to logits [b, s, v], with the vocabulary padded to a multiple of t. Without
    `gather_output`, returns this rank's logits [b, s, V/t], -inf for padding, as needed by
    `vocab_parallel_cross_entropy`. Tie weights with `head.weight = embedding.weight`."""

    padded = True  # weight [V/t, in], bias [V/t]

    def __init__(
        self, in_features: int, out_features: int, comm: Comm, *, bias: bool = False,
        sequence: bool = False, gather_output: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, comm, bias=bias, sequence=sequence, **kwargs)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, comm: Comm, *, sequence: bool = False, gather_output: bool = True
    ) -> Self:
        head = super().from_linear(linear, comm, sequence=sequence)
        head.gather_output = gather_output
        return head

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)  # [b, s, V/t]
        if self.gather_output:
            return gather_from_ranks(logits, self.comm, -1)[..., : self.out_features]  # [b, s, v]
        width = logits.shape[-1]  # V/t
        unpadded = min(max(self.out_features - self.comm.rank * width, 0), width)
        if unpadded == width:
            return logits
        return F.pad(logits[..., :unpadded], (0, width - unpadded), value=-torch.inf)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, comm: Comm, *, ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean", vocab: int | None = None,
) -> Tensor:  # fmt: skip
    """F.cross_entropy of vocabulary-sharded logits, in float32 or wider; equal on all ranks.

    Args:
        logits: this rank's logits [..., V/t], as from `VocabParallelHead(gather_output=False)`.
        targets: integers [...], the same on all ranks; entries equal to `ignore_index` are skipped.
        reduction: "mean" over the targets not skipped, "sum", or "none" for a loss per target.
        vocab: v, to reject targets in the padding; without v, the loss of these targets is inf.

    Raises ValueError if targets are outside the vocabulary (on a GPU, a device assert), do not fit
    the logits or, in a `World` with checks, differ between ranks."""
    comm, width = Comm.of(comm), logits.shape[-1]  # V/t
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        raise ValueError(
            f"logits {list(logits.shape)} do not fit targets {list(targets.shape)} of "
            f"{targets.dtype}; expected [..., vocabulary / ranks] and integers [...]"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r}: choose "mean", "sum" or "none"')
    check_same(comm, "tensor of targets", lambda: [targets], SAME_BATCH)
    targets = targets.long()
    counts = targets != ignore_index
    check_inside("a target", targets.where(counts, 0), vocab or width * comm.size)

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = logits.detach().amax(-1)  # [...]; the loss does not depend on the peak
    comm.all_reduce(peak, op="max")
    shifted = logits - peak.unsqueeze(-1)  # at most 0, so that exp cannot overflow
    rows, is_own = _local_rows(targets, width, comm)
    target = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0)
    both = torch.stack([shifted.exp().sum(-1), target])  # [2, ...]
    total, target = reduce_from_ranks(both, comm)  # g: backward does not communicate
    losses = (total.log() - target).masked_fill(~counts, 0)  # [...]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _local_rows(ids: Tensor, height: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """The local row of each id (0 for ids of other ranks), and a mask of this rank's ids."""
    rows = ids - comm.rank * height
    is_own = (rows >= 0) & (rows < height)
    return rows.where(is_own, 0), is_own


def check_inside(what: str, ids: Tensor, vocab: int) -> None:
    """Raises ValueError for ids that no rank holds: their vectors would silently be zero. A GPU
    asserts asynchronously; fake tensors hold no values and never raise."""
    inside = (ids >= 0) & (ids < vocab)
    try:
        torch._assert_async(inside.all(), f"{what} is outside the vocabulary of {vocab}")
    except RuntimeError:
        raise ValueError(
            f"{what} is {int(ids[~inside][0])}, but valid ids are 0 to {vocab - 1}; check "
            "that the text was tokenized for this model"
        ) from None
