"""FlashAttention: softmax(q kᵀ / √e) v without storing all scores at once.

                 k, v tiles, one after the other ──>
    q tile 0    [S₀₀]                                   only one tile of scores exists at a time
    q tile 1    [S₁₀] [S₁₁]                             causal: tiles in the future are skipped
    q tile 2    [S₂₀] [S₂₁] [S₂₂]

Each row keeps a running maximum m, sum ℓ and result o, rescaled when a tile S raises the maximum:

    m' = max(m, rowmax S)     P = exp(S - m')     c = exp(m - m')
    ℓ' = c ℓ + rowsum P       o' = c o + P v      at the end  out = o / ℓ,  L = m + log ℓ

Backward recomputes P from q, k and L, tile by tile; with dP = dout vᵀ and D = rowsum(dout · out):

    dv += Pᵀ dout     dS = P · (dP - D)     dq += dS k / √e     dk += dSᵀ q / √e

    kept        q, k, v, out, and L at 4 bytes per row: linear in s; scores would grow as s²
    FLOPs       as in plain attention, plus q kᵀ once more in backward

Source: Dao, "FlashAttention-2", arXiv 2307.08691, Algorithms 1 and 2; Dao et al., arXiv 2205.14135,
section 3.1; the running softmax: Milakov and Gimelshein, arXiv 1805.02867.

Legend: b rows, h heads, g key-value heads, s queries, t keys, e head width; per tile: r queries (of
h/g heads), c keys.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class FlashAttention(nn.Module):
    """An attention core for labkit.GPT: `block.attn.core = FlashAttention()`."""

    def __init__(self, causal: bool = True, tile: int = 64) -> None:
        super().__init__()
        self.causal, self.tile = causal, tile

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v, self.causal, self.tile)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, tile: int = 64) -> Tensor:
    """Attention, like torch's `scaled_dot_product_attention(q, k, v, is_causal=causal)`.

    `q`: [b, h, s, e]; `k`, `v`: [b, g, t, e], where g divides h. 16-bit inputs are
    computed in fp32, even inside autocast. `causal`: query i attends to keys 0 to i.
    `tile`: queries and keys per tile; working memory grows with the square of `tile`.

    Returns [b, h, s, e] in the dtype of q: zeros if there are no keys. Second derivatives are not
    supported. Raises ValueError if shapes or dtypes do not match."""
    check_fit(q, k, v, tile)
    return _Flash.apply(q, k, v, causal, tile)


def _uncast(run: Any) -> Any:
    """Disable autocast, which would round scores and weights to 16 bits."""

    @wraps(run)
    def inside(x: Tensor, *others: Any) -> Any:
        kind = x.device.type
        has_autocast = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if has_autocast else nullcontext():
            return run(x, *others)

    return inside


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int) -> Tensor:
        out, logsum = flash_forward(q, k, v, causal, tile)
        ctx.save_for_backward(q, k, v, out, logsum)
        ctx.causal, ctx.tile = causal, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsum = ctx.saved_tensors
        return *flash_backward(dout, q, k, v, out, logsum, ctx.causal, ctx.tile), None, None


@_uncast
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, Algorithm 1: out [b, h, s, e] and L [b, h, s]."""
    groups, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)  # in the memory layout of q
    logsum = q.new_empty(q.shape[:3], dtype=wide)  # L [b, h, s]
    for rows in _tiles(q.shape[2], tile):
        q_tile = _folded(q, rows, groups).to(wide) / math.sqrt(q.shape[3])  # [b, g, r, e]
        highest = q_tile.new_full((*q_tile.shape[:3], 1), -math.inf)  # m [b, g, r, 1]
        total = torch.zeros_like(highest)  # ℓ
        result = torch.zeros_like(q_tile)  # o [b, g, r, e]
        for columns in _tiles(k.shape[2], tile):
            if causal and columns.start >= rows.stop:
                break  # later tiles are in the future
            scores = _scores(q_tile, k, rows, columns, causal)  # [b, g, r, c]
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - higher)
            rescale = torch.exp(highest - higher)
            total = rescale * total + weights.sum(-1, keepdim=True)
            result = rescale * result + weights @ v[:, :, columns].to(wide)
            highest = higher
        out[:, :, rows] = _unfolded(result / total.clamp(min=1), q.shape[1])  # total 0: no keys
        logsum[:, :, rows] = _unfolded(highest + total.log(), q.shape[1]).squeeze(-1)
    return out, logsum


@_uncast
def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum: Tensor,
    causal: bool, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2, Algorithm 2: dq, dk, dv, in the dtypes of q, k and v."""
    groups, wide, scale = k.shape[1], logsum.dtype, 1 / math.sqrt(q.shape[3])
    delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)  # D [b, h, s, 1]
    dq = torch.zeros_like(q, dtype=wide)  # accumulates over the key tiles
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for columns in _tiles(k.shape[2], tile):
        k_tile, v_tile = k[:, :, columns].to(wide), v[:, :, columns].to(wide)  # [b, g, c, e]
        dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in _tiles(q.shape[2], tile):
            if causal and columns.start >= rows.stop:
                continue
            q_tile = _folded(q, rows, groups).to(wide) * scale
            dout_tile = _folded(dout, rows, groups).to(wide)  # [b, g, r, e]
            scores = _scores(q_tile, k, rows, columns, causal)  # [b, g, r, c]
            weights = torch.exp(scores - _folded(logsum.unsqueeze(-1), rows, groups))
            dv_tile += weights.transpose(2, 3) @ dout_tile
            dweights = dout_tile @ v_tile.transpose(2, 3)
            dscores = weights * (dweights - _folded(delta, rows, groups))
            dq[:, :, rows] += _unfolded(dscores @ k_tile, q.shape[1]) * scale
            dk_tile += dscores.transpose(2, 3) @ q_tile
        dk[:, :, columns], dv[:, :, columns] = dk_tile, dv_tile
    return dq.to(q.dtype), dk, dv


def _tiles(length: int, tile: int) -> Iterator[slice]:
    return (slice(i, min(i + tile, length)) for i in range(0, length, tile))


def _folded(x: Tensor, rows: slice, groups: int) -> Tensor:
    """Stack the queries that share a key-value head: [b, h, s, e] -> [b, g, r, e]."""
    return x[:, :, rows].unflatten(1, (groups, -1)).flatten(2, 3)


def _unfolded(x: Tensor, heads: int) -> Tensor:
    """[b, g, r, e] -> [b, h, r g/h, e]"""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _scores(q_tile: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    scores = q_tile @ k[:, :, columns].to(q_tile.dtype).transpose(2, 3)  # [b, g, r, c]
    if not causal or columns.stop <= rows.start + 1:  # no key is in the future
        return scores
    queries = torch.arange(rows.start, rows.stop, device=k.device)
    keys = torch.arange(columns.start, columns.stop, device=k.device)
    ahead = keys > queries.repeat(q_tile.shape[2] // len(queries)).unsqueeze(1)  # [r, c]
    return scores.masked_fill(ahead, -math.inf)


def check_fit(q: Tensor, k: Tensor, v: Tensor, tile: int) -> None:
    """Raises ValueError for shapes or dtypes that attention does not support."""
    if tile < 1:
        raise ValueError(f"tile={tile}: choose at least 1 query and key per tile")
    if not (q.ndim == k.ndim == 4) or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not "
            "fit together; expected q [rows, heads, queries, head width], k and v both [rows, "
            "key-value heads, keys, head width]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} heads are not divisible by {k.shape[1]} key-value heads"
        )
    if not q.is_floating_point() or not (q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast all to one "
            "floating-point dtype"
        )
