"""Layers cut over tensor-parallel ranks: matrices by columns or rows; embedding, head and loss by
the vocabulary.

    y = x A, rank r of t has          A = [A₁ | A₂]  columns          A = [A₁]  rows
                                                                          [A₂]
    its input                         x, whole                        xᵣ, its features
    it computes                       yᵣ = x Aᵣ, its features         a summand xᵣ Aᵣ of y
    forward sends                     -                               all-reduce of y
    backward sends                    all-reduce of dx                -

torch stores A transposed, weight [out, in]: its columns are the rows of `weight`. A column-parallel
layer's output is a row-parallel one's input, so the pair sends one all-reduce forward and one
backward, which hides behind dA = xᵀ dy. With `sequence=True` x is cut along the sequence outside of
the two, [b, s/t, in]: the first gathers it, the second reduce-scatters y, together as many bytes as
the all-reduce. The shard of x is saved, and gathered again in backward, behind dx = dy Aᵀ.

    rank 0   rows 0, 1, 2 of the table        tokens ──> own rows, zeros for others' tokens
    rank 1   rows 3, 4, 5                                │ all-reduce: one rank has each token
    rank 2   rows 6, 7, padding                          x  [b, s, w]
             the same rows as the head        x ──> own logits [b, s, V/t] ──> loss

    each rank holds   V/t rows of w elements, V = v rounded up to a multiple of t
    travels           embedding  forward an all-reduce of b s w, backward nothing
                      head       forward nothing, backward an all-reduce of b s w
                      loss       forward an all-reduce (max) of b s elements, one (sum) of 2 b s

The loss of a token is log(sum of exp(its logits)) - the logit of its target: each rank has a part
of the sum, one has the target, and none needs all logits. Rows of padding, and their gradients, are
zeros: no token looks them up, and their logits are -inf or cut off.

Legend: b rows, s positions, in and out features, w width, v vocabulary, t ranks.
Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; Korthikanti et al., arXiv
2205.05198, section 4.2.2; Narayanan et al., arXiv 2104.04473, for the overlap.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.comm import Comm
from labkit.dispatch import low_type_around
from labkit.parallel.common.conjugate import (
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

SAME_BATCH = "give all of them the same batch, chosen by the rank along the data-parallel axis"
IGNORED = -100  # a target that does not count, as in F.cross_entropy


class ShardedLinear(nn.Module):
    """A linear layer of which each rank has a shard: made by `from_linear`, or from sizes of the
    nn.Linear that all ranks, with one seed, would make."""

    dim, padded = 0, False  # which dim of `weight` is cut, and whether it need not divide

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
        shard = partial(shard_parameter, comm=self.comm, dim=self.dim, padded=self.padded)
        self.weight = shard(linear.weight)
        self.bias = None if linear.bias is None else shard(linear.bias)

    def extra_repr(self) -> str:
        shape, bias = tuple(self.weight.shape), self.bias is not None
        return f"weight {shape} of {(self.out_features, self.in_features)}, {bias=}"


class ColumnParallelLinear(ShardedLinear):
    """x [..., in], the same on all ranks -> this rank's features of the output, [..., out/t]; with
    `sequence` a shard of the sequence, [b, s/t, in] -> all of it, [b, s, out/t]. Raises ValueError
    where `out` does not divide over the ranks."""

    # weight [out/t, in], bias [out/t]
    one_input: Any = None  # the forward of a layer in which several columns have one input

    def forward(self, x: Tensor) -> Tensor:
        if self.one_input is not None:
            return self.one_input.output_of(self, x)
        return columns([self], x)[0]

    @property
    def beside(self) -> "list[ColumnParallelLinear]":
        """The layers whose parameters a call of this one may use, too."""
        return [] if self.one_input is None else self.one_input.columns


class RowParallelLinear(ShardedLinear):
    """x [..., in/t], this rank's features -> nn.Linear's whole output [..., out] on all ranks; with
    `sequence` [b, s, in/t] -> a shard of it, [b, s/t, out]. Every rank has the whole bias. Raises
    ValueError where `in` does not divide over the ranks or, with `sequence`, s does not."""

    dim = 1  # weight [out, in/t], bias [out]

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)  # [b, s, out]
        y = (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(summand, self.comm)
        if self.bias is None:
            return y
        # On a shard of the sequence, the gradient of the bias is a part of its sum.
        bias = copy_to_ranks(self.bias, self.comm) if self.sequence else self.bias
        return y + bias.to(y.dtype)


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


def shard_parameter(whole: Tensor, comm: Comm, dim: int, *, padded: bool = False) -> nn.Parameter:
    """This rank's of t equal shards along `dim`, marked, in memory of its own; all of a parameter
    without that dim. `padded`: with zeros behind, where the whole does not divide over the ranks.
    Raises ValueError otherwise."""
    if whole.ndim <= dim:
        return marked_as(whole, nn.Parameter(whole.detach().clone(), whole.requires_grad))
    size, shape = whole.shape[dim], [*whole.shape]
    if size % comm.size and not padded:
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"dim {dim} of a weight {shape} is {size} long, which does not divide over "
            f"{comm.size} tensor-parallel ranks; sizes that would: {fits}"
        )
    shape[dim] = length = -(-size // comm.size)  # rounded up
    start = min(comm.rank * length, size)
    stop = min(start + length, size)
    own = whole.detach().new_zeros(shape)
    own.narrow(dim, 0, stop - start).copy_(whole.detach().narrow(dim, start, stop - start))
    shard = marked_as(whole, nn.Parameter(own, whole.requires_grad))
    mark_shard(shard, Shard(comm, dim, start, stop, size))
    return shard


class SummedGradients:
    """In place of the forward of a module, as a norm, that sees a shard of the sequence: backward
    sums the gradients of its own parameters over the ranks, in one all-reduce."""

    def __init__(self, module: nn.Module, comm: Comm):
        self.module, self.forward, self.comm = module, module.forward, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole: Any = self.module._parameters
        present = {name: p for name, p in whole.items() if p is not None}
        copies: Any = copies_to_ranks([*present.values()], self.comm)
        self.module._parameters = whole | dict(zip(present, copies, strict=True))
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.module._parameters = whole


class OwnPositions(SummedGradients):
    """The table of positions: [s] -> the vectors of the own part, [s/t, w]."""

    def __call__(self, positions: Tensor) -> Any:
        return super().__call__(own_part(positions, self.comm, dim=-1))


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding, its rows cut over the ranks of `comm`; built from sizes, those that all ranks,
    with one seed, would make.

    tokens [b, s] integers, the same on all ranks -> [b, s, w], the same on all ranks; with
    `sequence`, this rank's shard, [b, s/t, w], by a reduce-scatter. Raises ValueError for a token
    outside the vocabulary (on a GPU the device asserts)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, comm: Comm, *,
        padding_idx: int | None = None, sequence: bool = False, **of_embedding: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **of_embedding)
        self._shard(whole, comm, sequence)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Comm, *, sequence: bool = False
    ) -> "VocabParallelEmbedding":
        """This rank's rows of `embedding`, which is the same on all ranks, and stays as it is."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._shard(embedding, comm, sequence)
        return layer

    def _shard(self, embedding: nn.Embedding, comm: Comm, sequence: bool) -> None:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(embedding, option):
                raise ValueError(
                    f"an embedding with {option}={value} cannot be cut by its vocabulary; build "
                    f"it without {option}"
                )
        self.comm, self.sequence = Comm.of(comm), sequence
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.weight = shard_parameter(embedding.weight, self.comm, dim=0, padded=True)  # [V/t, w]
        self.padding_idx = padding = embedding.padding_idx  # whose row never learns
        own = -1 if padding is None else padding - self.comm.rank * len(self.weight)
        self._own_padding_idx = own if 0 <= own < len(self.weight) else None

    def forward(self, tokens: Tensor) -> Tensor:
        check_inside("a token", tokens, self.num_embeddings)
        own, mine = _own_of(tokens, len(self.weight), self.comm)
        x = F.embedding(own, self.weight, self._own_padding_idx)  # [b, s, w]
        x = x.masked_fill(~mine.unsqueeze(-1), 0)
        return (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(x, self.comm)

    def extra_repr(self) -> str:
        whole = self.num_embeddings, self.embedding_dim
        return f"weight {tuple(self.weight.shape)} of {whole}"


class VocabParallelHead(ColumnParallelLinear):
    """nn.Linear from x to logits: a `ColumnParallelLinear` whose columns, one for each token, need
    not divide; without a bias by default.

    gather_output  every rank gets all logits, [b, s, v]; else its own, [b, s, V/t], those of
                   padding -inf: for `vocab_parallel_cross_entropy`

    Tied weights: `head.weight = embedding.weight`, of a `VocabParallelEmbedding`.
    """

    padded = True  # weight [V/t, in], bias [V/t]

    def __init__(
        self, in_features: int, out_features: int, comm: Comm, *, bias: bool = False,
        sequence: bool = False, gather_output: bool = True, **of_linear: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, comm, bias=bias, sequence=sequence, **of_linear)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, comm: Comm, *, sequence: bool = False, gather_output: bool = True
    ) -> Self:
        """This rank's rows of `linear`, which is the same on all ranks, and stays as it is."""
        head = super().from_linear(linear, comm, sequence=sequence)
        head.gather_output = gather_output
        return head

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)  # [b, s, V/t]
        if self.gather_output:
            return gather_from_ranks(logits, self.comm, -1)[..., : self.out_features]  # [b, s, v]
        height = logits.shape[-1]
        real = min(max(self.out_features - self.comm.rank * height, 0), height)
        if real == height:
            return logits
        return F.pad(logits[..., :real], (0, height - real), value=-torch.inf)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, comm: Comm, *, ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum", "none"] = "mean", vocab: int | None = None,
) -> Tensor:  # fmt: skip
    """F.cross_entropy of logits that are cut over the ranks, in at least float32; the same on all.

    Args:
        logits: this rank's, [..., V/t] as of `VocabParallelHead(gather_output=False)`.
        targets: integers [...], the same on all ranks; `ignore_index` for those that do not count.
        reduction: the mean over the targets that count, their sum, or "none", [...].
        vocab: v, to refuse targets that are padding; without it, their loss is inf.

    Raises ValueError for a target outside the vocabulary (on a GPU the device asserts), where
    shapes do not fit and, in a `World` that checks, where targets differ.
    """
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
    peak = logits.detach().amax(-1)  # [...]; any number would do: the loss is the same
    comm.all_reduce(peak, op="max")
    shifted = logits - peak.unsqueeze(-1)  # at most 0, so that exp cannot overflow
    own, mine = _own_of(targets, width, comm)
    picked = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
    both = torch.stack([shifted.exp().sum(-1), picked])  # [2, ...]
    total, picked = reduce_from_ranks(both, comm)  # g: its gradient is every rank's own
    losses = (total.log() - picked).masked_fill(~counts, 0)  # [...]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _own_of(ids: Tensor, height: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """The row of each id among this rank's `height` rows (0 for others' ids), and a mask of own."""
    own = ids - comm.rank * height
    mine = (own >= 0) & (own < height)
    return own.where(mine, 0), mine


def check_inside(what: str, ids: Tensor, vocab: int) -> None:
    """Raises ValueError for an id that no rank has: its vector would silently be zero. A GPU
    asserts without waiting for the values; fake tensors have none, and raise nothing."""
    inside = (ids >= 0) & (ids < vocab)
    try:
        torch._assert_async(inside.all(), f"{what} is outside the vocabulary of {vocab}")
    except RuntimeError:
        raise ValueError(
            f"{what} is {int(ids[~inside][0])}, and the vocabulary has 0 to {vocab - 1}; check "
            "that the text was cut into tokens for this model"
        ) from None
