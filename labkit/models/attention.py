"""Two attention cores: the same causal softmax(q kᵀ / √e) v, with different memory for backward.

    CausalAttention   one tiled kernel that stores no scores (FlashAttention, arXiv
                      2205.14135): keeps q, k, v, the result, and 4 bytes per row of scores
    PlainAttention    written out, as in arXiv 2205.05198, section 4.1: keeps the weights, their
                      dropout mask and the result, 5 bytes per score in 2-byte dtypes

GPT uses CausalAttention. To replace it:

    for block in model.blocks:
        block.attn.core = PlainAttention(dropout=0.1)

Legend: b rows, h heads, g key-value heads, s positions, e head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """nn.Dropout with a mask of one byte per element, as torch uses on a GPU. On a CPU, torch
    keeps the mask in the input's dtype: about 10 % more bytes per layer in a 2-byte dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return torch.native_dropout(x, self.p, True)[0]  # [1] is the mask, kept for backward


class CausalAttention(nn.Module):
    """One fused kernel; with dropout on a CPU, unfused ops, in float32 for 2-byte dtypes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q,  # [b, h, s, e]
            k,  # [b, g, s, e]
            v,  # [b, g, s, e]
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],  # h/g query heads share one key-value head
        )  # [b, h, s, e]


class PlainAttention(nn.Module):
    """Attention written out, with all scores stored in q's dtype."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (sharing := q.shape[1] // k.shape[1]) > 1:  # query heads per key-value head: h/g
            k = k.repeat_interleave(sharing, dim=1)  # [b, h, s, e]
            v = v.repeat_interleave(sharing, dim=1)
        ahead = q.new_full((q.shape[2], k.shape[2]), -math.inf).triu(1)  # [s, s]: masked
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + ahead  # [b, h, s, s]
        return self.dropout(torch.softmax(scores, dim=-1)) @ v  # [b, h, s, e]
