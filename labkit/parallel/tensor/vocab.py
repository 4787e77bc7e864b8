"""The vocabulary cut over ranks: embedding, head and loss, so that no rank needs all logits.

    rank 0   rows 0, 1, 2 of the table        tokens ──> own rows, zeros for others' tokens
    rank 1   rows 3, 4, 5                                │ all-reduce: one rank has each token
    rank 2   rows 6, 7, padding                          x  [b, s, w]
             the same rows as the head        x ──> own logits [b, s, V/t] ──> loss

    each rank holds   V/t rows of w elements, V = v rounded up to a multiple of t
    travels           embedding  forward an all-reduce of b s w, backward nothing
                      head       forward nothing, backward an all-reduce of b s w
                      loss       forward an all-reduce (max) of b s elements, one (sum) of 2 b s

The loss of a token is log(sum of exp(its logits)) - the logit of its target. Each rank has a part
of the sum, and one has the target. Rows of padding, and their gradients, are zeros: no token looks
them up, and their logits are -inf or cut off.

Legend: b rows, s positions, w width, v vocabulary, t ranks.
Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3 (embedding, fused cross-entropy).
"""

from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.conjugate import (
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_sequence,
)
from labkit.parallel.common.shards import check_same
from labkit.parallel.tensor.linear import ColumnParallelLinear, shard_parameter
from labkit.parallel.tensor.validation import SAME_BATCH

IGNORED = -100  # a target that does not count, as in F.cross_entropy


def padded_vocab(vocab: int, size: int) -> int:
    """The least number of rows, `vocab` or more, that divides over `size` ranks.

    >>> padded_vocab(50257, 8)
    50264
    """
    return -(-vocab // size) * size


def shard_rows(whole: Tensor, comm: Comm) -> nn.Parameter:
    """This rank's rows of `whole` [v, ...], as a parameter [V/t, ...] with zeros for padding."""
    return shard_parameter(whole, comm, 0, padded_to=padded_vocab(len(whole), comm.size))


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding, its rows cut over the ranks of `comm`; built from sizes, those that all ranks,
    with one seed, would make.

    tokens [b, s] integers, the same on all ranks -> [b, s, w], the same on all ranks; with
    `sequence`, this rank's shard, [b, s/t, w], by a reduce-scatter. Raises ValueError for a token
    outside the vocabulary (on a GPU the device asserts).
    """

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
        self.weight = shard_rows(embedding.weight, self.comm)
        self.padding_idx = padding = embedding.padding_idx  # whose row never learns
        height = len(self.weight)
        own = -1 if padding is None else padding - self.comm.rank * height
        self._own_padding_idx = own if 0 <= own < height else None

    def forward(self, tokens: Tensor) -> Tensor:
        check_inside("a token", tokens, self.num_embeddings)
        own, mine = _own_of(tokens, len(self.weight), self.comm)
        x = F.embedding(own, self.weight, self._own_padding_idx)  # [b, s, w]
        x = x.masked_fill(~mine.unsqueeze(-1), 0)
        if self.sequence:
            return reduce_scatter_sequence(x, self.comm)  # [b, s/t, w]
        return reduce_from_ranks(x, self.comm)  # [b, s, w]

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"weight {shape} of {(self.num_embeddings, self.embedding_dim)}"


class VocabParallelHead(ColumnParallelLinear):
    """nn.Linear from x to logits: a `ColumnParallelLinear` whose columns, one for each token, need
    not divide; without a bias by default.

    gather_output  every rank gets all logits, [b, s, v]; else its own, [b, s, V/t], those of
                   padding -inf: for `vocab_parallel_cross_entropy`

    Tied weights: `head.weight = embedding.weight`, of a `VocabParallelEmbedding`.
    """

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

    def _shard_of(self, parameter: Tensor) -> nn.Parameter:
        return shard_rows(parameter, self.comm)  # [V/t, in] or [V/t]

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
