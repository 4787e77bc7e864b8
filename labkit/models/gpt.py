"""A small GPT in plain torch: the model that every strategy trains.

    tokens                                                            [b, s]
      │
    embed           a vector per token + a vector per position        [b, s, w]
      │
      ├────────┐
      │      norm1
      │      attn   q [b, h, s, e]   k, v [b, g, s, e]                 a block,
      │        │    core: softmax(q kᵀ / √e) v, causal                 depth times
      │        │    out: heads concatenated and projected     [b, s, w]
      + ───────┘
      ├────────┐
      │      norm2
      │      mlp    up [b, s, 4w], GELU, down                 [b, s, w]
      + ───────┘
      │
    norm, head      the token embedding again, if tied                [b, s, v]

Legend: b rows, s positions, w width, h heads, e = w/h head width, g key-value heads, v vocab.

Strategies edit modules by name: tensor parallelism replaces `attn.q, k, v, out` and `mlp.up, down`,
context parallelism `attn.core`, and a pipeline splits `blocks`.
Papers: GPT-2 (Radford et al. 2019); grouped queries, with g < h (Ainslie et al. 2023).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.attention import CausalAttention, Dropout

# Parameter counts: 7,056; 987,096; 3,438,080. The width 132 gives 12 heads of width 11 and an MLP
# of width 528: 12 and 528 are divisible by 1, 2, 3, 4 and 6 ranks.
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"vocab": 256, "width": 12, "depth": 2, "heads": 4, "context": 16},
    "1M": {"vocab": 1024, "width": 132, "depth": 4, "heads": 12, "context": 64},
    "3.4M": {"vocab": 1024, "width": 256, "depth": 4, "heads": 8, "context": 64},
}


class Embed(nn.Module):
    """Token and position embeddings: tokens [rows, length] -> x [rows, length, width]."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        context = self.positions.num_embeddings
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be of shape [rows, length], not {list(tokens.shape)}")
        if tokens.shape[1] > context:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
                f"{context}; cut the sequence or build the model with a larger context"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # [s]
        return self.dropout(self.tokens(tokens) + self.positions(positions))  # [b, s, w]


class Attention(nn.Module):
    """Multi-head attention; the number of heads follows from the widths of q, k and v."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, kv_heads * self.head_width)
        self.v = nn.Linear(width, kv_heads * self.head_width)
        self.core = CausalAttention(dropout)
        self.out = nn.Linear(width, width)

    def heads(self, x: Tensor) -> Tensor:
        """Split the last dim into heads: [b, s, heads * e] -> [b, heads, s, e]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        y = self.core(q, k, v)  # [b, h, s, e]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, h * e] -> [b, s, w]


class FeedForward(nn.Module):
    """An MLP with one hidden layer of 4 x width: x [..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer of the model, x [b, s, w] -> [b, s, w]."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, kv_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A GPT of four parts: `embed`, `blocks`, `norm`, `head`. torch's seed determines its weights.

        vocab     number of tokens               heads     query heads; must divide width
        width     size of a token's vector       kv_heads  key-value heads; must divide heads
        depth     number of blocks                         (None: as many as heads)
        context   longest sequence, in tokens    dropout   probability, 0 <= dropout < 1
        tied      the head is the token embedding: one parameter with two names

    Raises ValueError for incompatible sizes."""

    def __init__(
        self,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        context: int,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(vocab, width, depth, heads, context, kv_heads) < 1:
            raise ValueError(
                f"every size of a GPT must be at least 1, but got {vocab=}, {width=}, {depth=}, "
                f"{heads=}, {context=}, {kv_heads=}"
            )
        if width % heads:
            raise ValueError(
                f"width {width} is not divisible by {heads} heads; choose a number of "
                "heads that divides the width"
            )
        if heads % kv_heads:
            raise ValueError(
                f"{heads} query heads are not divisible by {kv_heads} key-value heads; choose "
                f"kv_heads that divides {heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: choose a probability of 0 or more, below 1")
        self.vocab, self.width, self.depth, self.context = vocab, width, depth, context
        self.heads, self.kv_heads, self.tied = heads, kv_heads, tied
        self.embed = Embed(vocab, width, context, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "GPT":
        """The GPT "tiny", "1M" or "3.4M", with `changes`, as in `GPT.preset("1M", vocab=256)`.
        Raises ValueError for an unknown name."""
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as GPT-2 does, and tie the head: matrices with std 0.02; `out` and `down`,
        which add to x, with 0.02 / √(2 depth), so x does not grow with depth; biases 0, norms 1.
        For a meta model, call `model.to_empty(device=...)` first."""
        if self.tied:  # here and not in __init__, since `to_empty` unties the weights
            self.head.weight = self.embed.tokens.weight
        for name, weight in self.named_parameters():  # a tied weight appears once
            if weight.ndim == 1:
                nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("attn.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.depth))
            else:
                nn.init.normal_(weight, std=0.02)

    @property
    def parameter_count(self) -> int:
        """Number of elements in all parameters; a tied weight counts once. In an unedited model,
        with keys of width c = width * kv_heads / heads:

            embed        (vocab + context) width
            each block   norms  4 width
                         attn   2 (width² + width) for q and out, 2 (width c + c) for k and v
                         mlp    8 width² + 5 width
            norm, head   2 width, and vocab * width more if the head is not tied

        A block without grouped queries has 12 width² + 13 width elements. Count large models on
        the meta device: `with torch.device("meta"): GPT(...).parameter_count`."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Next-token logits: tokens [b, s] integers -> [b, s, vocab]. `positions`: [s] integers
        below context; default 0 to s-1. Raises ValueError if s exceeds the context."""
        x = self.embed(tokens, positions)  # [b, s, w]
        for block in self.blocks:
            x = block(x)  # [b, s, w]
        return self.head(self.norm(x))  # [b, s, v]
