"""The vocabulary cut over ranks: embedding, head and loss, and no rank ever has all logits.

    rank 0   rows 0, 1, 2 of the table        tokens ──> own rows, zeros for others' tokens
    rank 1   rows 3, 4, 5                                │ all-reduce: one rank knew each token
    rank 2   rows 6, 7, padding                          x  [b, s, w]
                                                         :
             the same rows as the head        x ──> own logits [b, s, V/t] ──> loss

    each rank holds   V/t rows of w numbers, V = v rounded up to a multiple of t, and V/t logits
                      for each token
    travels           embedding  forward an all-reduce of b s w, backward nothing
                      head       forward nothing, backward an all-reduce of b s w
                      loss       forward an all-reduce (max) of b s numbers, one (sum) of 2 b s

Legend: b rows, s positions, w width, v vocabulary, t ranks.

The loss of a token is log(sum of exp(its logits)) - the logit of its target. Each rank has a part
of the sum, and one has the target, so 3 numbers a token travel where the logits would be v. Rows of
padding are zeros: no token looks them up, their logits are -inf or cut off, and so their gradients
are zero.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3 (embedding, fused cross-entropy).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.parts.conjugate import (
    all_gather_sequence,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_sequence,
)
from labkit.parallel.parts.shards import Shard, mark_shard

IGNORED = -100  # a target that does not count, as in F.cross_entropy


def padded_vocab(vocab: int, size: int) -> int:
    """The least number of rows, `vocab` or more, that divides over `size` ranks.

    >>> padded_vocab(50257, 8)
    50264
    """
    return -(-vocab // size) * size


def cut_rows(whole: Tensor, comm: Comm) -> nn.Parameter:
    """This rank's rows of `whole` [v, ...], as a parameter [V/t, ...] with zeros for padding."""
    vocab = whole.shape[0]
    height = padded_vocab(vocab, comm.size) // comm.size  # V/t
    start = min(comm.rank * height, vocab)
    stop = min(start + height, vocab)
    own = whole.detach().new_zeros(height, *whole.shape[1:])
    own[: stop - start] = whole.detach()[start:stop]
    cut = nn.Parameter(own, requires_grad=whole.requires_grad)
    mark_shard(cut, Shard(comm, dim=0, start=start, stop=stop, whole=vocab))
    return cut


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding, its rows cut over the ranks of `comm`.

    Args:
        num_embeddings, embedding_dim, padding_idx: as of nn.Embedding. The whole table is drawn,
            for a moment, so that the same seed gives the same rows for every number of ranks.
        sequence: give each rank its part of the positions, [b, s/t, w], by a reduce-scatter in
            place of the all-reduce.

    tokens [b, s] integers, the same on all ranks -> [b, s, w], the same on all ranks.
    Raises ValueError for a token outside the vocabulary (on a GPU the device asserts).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Comm,
        *,
        padding_idx: int | None = None,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        table = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = table.padding_idx  # whose row never learns
        self.comm, self.sequence = comm, sequence
        self.weight = cut_rows(table.weight, comm)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Comm, *, sequence: bool = False
    ) -> "VocabParallelEmbedding":
        """With this rank's rows of `embedding`, which is left as it is.

        Raises ValueError for options that look at the whole table: max_norm, sparse,
        scale_grad_by_freq.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(
                    f"an embedding with {option}={getattr(embedding, option)} cannot be cut by "
                    f"its vocabulary; build it without {option}"
                )
        sizes = embedding.num_embeddings, embedding.embedding_dim
        with torch.device("meta"):
            made = cls(*sizes, comm, padding_idx=embedding.padding_idx, sequence=sequence)
        made.weight = cut_rows(embedding.weight, comm)
        return made.train(embedding.training)

    def forward(self, tokens: Tensor) -> Tensor:
        check_inside("a token", tokens, self.num_embeddings)
        own, mine = _own_of(tokens, len(self.weight), self.comm)
        x = F.embedding(own, self.weight, self._own_padding_idx())  # [b, s, w]
        x = x.masked_fill(~mine.unsqueeze(-1), 0)
        if self.sequence:
            return reduce_scatter_sequence(x, self.comm)  # [b, s/t, w]
        return reduce_from_ranks(x, self.comm)  # [b, s, w]

    def _own_padding_idx(self) -> int | None:
        if self.padding_idx is None:
            return None
        index = self.padding_idx - self.comm.rank * len(self.weight)
        return index if 0 <= index < len(self.weight) else None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {_whose(self)}"


class VocabParallelHead(nn.Module):
    """nn.Linear from x to logits, its rows (one for each token of the vocabulary) cut over ranks.

    Args:
        in_features, out_features, bias: as of nn.Linear, without a bias by default. The whole
            matrix is drawn, for a moment, as the embedding's is.
        gather_output: give every rank all logits, [b, s, v]. Else each has its own, [b, s, V/t],
            those of padding -inf: for `vocab_parallel_cross_entropy`.
        sequence: x comes as each rank's part of the positions, [b, s/t, w].

    Tied weights: `head.weight = embedding.weight`, of a `VocabParallelEmbedding` over the same
    ranks; both have the same rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Comm,
        *,
        bias: bool = False,
        gather_output: bool = True,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias)
        self.in_features, self.out_features = in_features, out_features
        self.comm, self.gather_output, self.sequence = comm, gather_output, sequence
        self.weight = cut_rows(whole.weight, comm)
        self.bias = cut_rows(whole.bias, comm) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, comm: Comm, *, gather_output: bool = True, sequence: bool = False
    ) -> "VocabParallelHead":
        """With this rank's rows of `linear`, which is left as it is."""
        how = {"bias": linear.bias is not None, "gather_output": gather_output}
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, comm, **how, sequence=sequence)
        made.weight = cut_rows(linear.weight, comm)
        made.bias = None if linear.bias is None else cut_rows(linear.bias, comm)
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        enter = all_gather_sequence if self.sequence else copy_to_ranks
        x = enter(x, self.comm)  # [b, s, w]
        if not self.gather_output:
            return F.linear(x, self.weight, self._bias_that_hides_padding())  # [b, s, V/t]
        logits = F.linear(x, self.weight, self.bias)
        return gather_from_ranks(logits, self.comm, -1)[..., : self.out_features]  # [b, s, v]

    def _bias_that_hides_padding(self) -> Tensor | None:
        """The bias, -inf where a row is padding."""
        height = len(self.weight)
        real = min(max(self.out_features - self.comm.rank * height, 0), height)
        if real == height:
            return self.bias
        hidden = self.weight.new_zeros(height)
        hidden[real:] = -math.inf
        return hidden if self.bias is None else self.bias + hidden

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {_whose(self)}"


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    comm: Comm,
    *,
    ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocab: int | None = None,
) -> Tensor:
    """F.cross_entropy of logits that are cut over the ranks, in at least float32.

    Args:
        logits: this rank's, [..., V/t] as of `VocabParallelHead(gather_output=False)`.
        targets: integers [...], the same on all ranks; `ignore_index` for those that do not count.
        reduction: the mean over the targets that count, their sum, or "none", [...].
        vocab: v, to tell targets that are padding from others; without it, their loss is inf.

    The same loss on all ranks. Raises ValueError for a target outside the vocabulary (on a GPU the
    device asserts) and where shapes do not fit.
    """
    width = logits.shape[-1]  # V/t
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        raise ValueError(
            f"logits {list(logits.shape)} do not fit targets {list(targets.shape)} of "
            f"{targets.dtype}; expected [..., vocabulary / ranks] and integers [...]"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r}: choose "mean", "sum" or "none"')
    counts = targets != ignore_index
    check_inside("a target", targets.where(counts, 0), vocab or width * comm.size)

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = logits.detach().amax(-1)  # [...]; any number would do: the loss does not depend on it
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
    """Which of this rank's `height` rows each id is (row 0 where it has none), and whether."""
    own = ids - comm.rank * height
    mine = (own >= 0) & (own < height)
    return own.where(mine, 0), mine


def check_inside(what: str, ids: Tensor, vocab: int) -> None:
    """Raise ValueError for an id that no rank has: its vector would silently be zero. A GPU asserts
    by itself, without waiting for the number; on paper there is no number, and no error."""
    inside = (ids >= 0) & (ids < vocab)
    try:
        torch._assert_async(inside.all(), f"{what} is outside the vocabulary of {vocab}")
    except RuntimeError:
        raise ValueError(
            f"{what} is {int(ids[~inside][0])}, and the vocabulary has 0 to {vocab - 1}; check "
            "that the text was cut into tokens for this model"
        ) from None


def _whose(part: VocabParallelEmbedding | VocabParallelHead) -> str:
    return f"{len(part.weight)} rows here, rank {part.comm.rank} of {part.comm.size}"
