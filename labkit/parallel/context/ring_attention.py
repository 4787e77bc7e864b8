"""Ring attention: each rank keeps its queries; blocks of keys and values travel around the ring.

    n = 4 ranks, each with s/n tokens; k₂ is the block of keys and values of rank 2

              step 0      step 1      step 2      step 3
    rank 0    q₀ k₀       q₀ k₃       q₀ k₂       q₀ k₁       a block moves on to the next rank
    rank 1    q₁ k₁       q₁ k₀       q₁ k₃       q₁ k₂       while this rank computes with it
    rank 2    q₂ k₂       q₂ k₁       q₂ k₀       q₂ k₃
    rank 3    q₃ k₃       q₃ k₂       q₃ k₁       q₃ k₀

Each step computes attention to one block as FlashAttention does: out and, per query, L = log(sum of
exp(score)). Two partial results are combined as:

    L' = log(exp L₁ + exp L₂)        out' = exp(L₁ - L') out₁ + exp(L₂ - L') out₂

With zig-zag shards (zigzag.py), all ranks do equal work, and only diagonal blocks need a mask:

    own block          causal, as in one process    both halves are in order     s²/2n² scores
    an earlier rank's  all queries see its early half; none see its late half    s²/2n²
    a later rank's     the late half of the queries sees all keys                s²/2n²

In backward, k and v travel again; each block's gradient follows the block, back to its owner.

    saved     q, k, v, out, and L (4 bytes per query): linear in s/n; no scores
    forward   n-1 blocks of k and v                    (n-1)/n · 2 b s g e elements sent per rank
    backward  the same, and their gradients in fp32    (n-1)/n · 4 b s g e
    hidden    if a block takes longer to compute than to send: labkit/predict/context.py

Source: Liu et al., "Ring Attention", arXiv 2310.01889, section 3. Zig-zag shards: Llama 3,
arXiv 2407.21783, section 3.3.2, which gathers all k and v at once.
Legend: b rows, h heads, g key-value heads, s tokens per whole sequence, e head width, n ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.comm import Comm
from labkit.memory.flash_attention import check_fit, flash_backward, flash_forward
from labkit.parallel.context.zigzag import check_splits

TILE = 128


class RingAttention(nn.Module):
    """An attention core without parameters, for inputs sharded over `comm`."""

    def __init__(self, comm: Comm, tile: int = TILE) -> None:
        super().__init__()
        self.comm, self.tile = comm, tile

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, self.comm, self.tile)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, comm: Comm, tile: int = TILE) -> Tensor:
    """Causal attention over a whole sequence; each rank passes its `sequence_shard`.

    Args:
        q: [b, h, s/n, e]; k, v: [b, g, s/n, e], where g divides h. 2-byte types are sent
            unchanged and computed in float32.
        tile: queries and keys per tile of scores; memory grows with the square of `tile`.

    Returns [b, h, s/n, e] in q's dtype, differentiable once. Raises ValueError if shapes or dtypes
    do not match, or the shard cannot be halved."""
    check_fit(q, k, v, tile)
    check_splits(q.shape[2] * comm.size, comm.size)
    return _RingAttention.apply(q, k, v, comm, tile)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, tile: int) -> Tensor:
        queries = q.to(torch.promote_types(q.dtype, torch.float32))
        with torch.autocast(q.device.type, enabled=False):  # matmuls in the given dtypes
            for owner, block in _circulate(torch.stack([k, v]), comm):
                rows, keys, causal = _visible(comm.rank, owner, q.shape[2])
                k_seen, v_seen = block[:, :, :, keys]
                part = flash_forward(queries[:, :, rows], k_seen, v_seen, causal, tile)
                if owner == comm.rank:  # the first block
                    out, logsum = part
                else:
                    _merge(out[:, :, rows], logsum[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logsum)
        ctx.comm, ctx.tile = comm, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsum = ctx.saved_tensors
        comm, queries, handle = ctx.comm, q.to(logsum.dtype), None
        for owner, block in _circulate(torch.stack([k, v]), comm):
            rows, keys, causal = _visible(comm.rank, owner, q.shape[2])
            k_seen, v_seen = block[:, :, :, keys].to(logsum.dtype)
            dq_part, *dkv = flash_backward(
                dout[:, :, rows], queries[:, :, rows], k_seen, v_seen,
                out[:, :, rows], logsum[:, :, rows], causal, ctx.tile,
            )  # fmt: skip
            if owner == comm.rank:
                dq, own_dkv = dq_part, torch.stack(dkv)  # [2, b, g, s/n, e]
                arriving = torch.zeros_like(own_dkv)  # the next block has no gradient yet
                continue
            dq[:, :, rows] += dq_part
            if handle is not None:
                handle.wait()  # for this block's gradient from previous ranks
            leaving, arriving = arriving, torch.empty_like(own_dkv)
            leaving[:, :, :, keys] += torch.stack(dkv)
            handle = comm.ring_exchange(arriving, leaving, async_op=True)
        if handle is not None:
            handle.wait()
            own_dkv += arriving
        dk, dv = own_dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _circulate(block: Tensor, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Yields (owner, block), this rank's block first, while the next block arrives."""
    for step in range(comm.size - 1):
        arriving = torch.empty_like(block)
        handle = comm.ring_exchange(arriving, block, async_op=True)
        yield (comm.rank - step) % comm.size, block
        assert handle is not None
        handle.wait()
        block = arriving
    yield (comm.rank + 1) % comm.size, block


def _visible(rank: int, owner: int, length: int) -> tuple[slice, slice, bool]:
    """The queries that see `owner`'s keys, the visible keys, and whether the mask is causal."""
    half, full = length // 2, slice(0, length)
    if owner == rank:
        return full, full, True
    return (full, slice(0, half), False) if owner < rank else (slice(half, length), full, False)


def _merge(out: Tensor, logsum: Tensor, part: Tensor, part_logsum: Tensor) -> None:
    """Merge a part's attention into out [b, h, queries, e] and logsum [b, h, queries], in place."""
    both = torch.logaddexp(logsum, part_logsum)
    out *= torch.exp(logsum - both).unsqueeze(-1)
    out += part * torch.exp(part_logsum - both).unsqueeze(-1)
    logsum.copy_(both)
