"""Conjugate operators: what one sends in forward, its partner sends in backward.

                                  forward                 backward
    copy_to_ranks            f    -                       all-reduce
    reduce_from_ranks        g    all-reduce              -
    gather_from_ranks             all-gather              take the own part
    scatter_to_ranks              take the own part       all-gather
    all_gather_sequence           all-gather              reduce-scatter
    reduce_scatter_sequence       reduce-scatter          all-gather

Each line and the next are a pair: one's backward is the other's forward. Around the two matmuls
of an MLP, whose weights A and B are cut, are f and g:

    x ── f ──▶ x A₁ ── gelu ──▶ · B₁ ── g ──▶ y          rank 0 of 2
    x ── f ──▶ x A₂ ── gelu ──▶ · B₂ ── g ──▶ y          rank 1

A parameter that every rank has whole, but uses on a shard of the sequence only, has a gradient in
parts, and goes through f, too.

Bus bytes of a rank, for S bytes of the whole tensor: all-reduce 2(t-1)/t S, the others (t-1)/t S.
Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; the last pair: Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd.function import once_differentiable

from labkit.comm import Comm, Handle

Exchanged = Callable[..., Tensor]


def copy_to_ranks(x: Tensor, comm: Comm) -> Tensor:
    """f: `x`, the same on all ranks; in backward the sum of all ranks' gradients of it."""
    return copies_to_ranks([x], comm)[0]


def copies_to_ranks(xs: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """f of several tensors of one dtype, whose gradients travel in one all-reduce."""
    trained = [x for x in xs if x.requires_grad]
    if comm.size == 1 or not trained:
        return list(xs)
    copies = iter(_Copy.apply(comm, *trained))
    return [next(copies) if x.requires_grad else x for x in xs]


def reduce_from_ranks(x: Tensor, comm: Comm) -> Tensor:
    """g: the sum of all ranks' `x`, any shape; in backward the gradient as it is."""
    return x if comm.size == 1 else Exchange.apply(x, summed, lambda gradient, _: gradient, comm)


def gather_from_ranks(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """All ranks' `x`, of one shape, concatenated along `dim`; in backward the own part. For what is
    the same on all ranks from there on, so that they all have its whole gradient."""
    return x if comm.size == 1 else Exchange.apply(x, gathered, own_part, comm, dim)


def scatter_to_ranks(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """Of `x`, the same on all ranks, the own part along `dim`; in backward all ranks' parts. Raises
    ValueError where `dim` does not divide over the ranks."""
    check_divides(x, comm, dim)
    return x if comm.size == 1 else Exchange.apply(x, own_part, gathered, comm, dim)


def all_gather_sequence(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """x [b, s/t, w], a part of the sequence -> [b, s, w], all of it, of which each rank then
    computes something else: in backward the ranks' gradients are summed, and each gets its part."""
    return x if comm.size == 1 else Exchange.apply(x, gathered, own_sum, comm, dim)


def reduce_scatter_sequence(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """x [b, s, w], a summand on each rank -> [b, s/t, w], the own part of the sum; in backward the
    gradients of all parts. Raises ValueError where `dim` does not divide over the ranks."""
    check_divides(x, comm, dim)
    return x if comm.size == 1 else Exchange.apply(x, own_sum, gathered, comm, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = torch.cat([gradient.reshape(-1) for gradient in grads])
        ctx.comm.all_reduce(flat)
        return None, *_unflatten_dense_tensors(flat, grads)


class Exchange(torch.autograd.Function):
    """`there(x, *others)` in forward, and `back(gradient, *others)` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchanged, back: Exchanged, *others: Any) -> Tensor:
        ctx.back, ctx.others = back, others
        return there(x, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0], *ctx.others), None, None, *(None for _ in ctx.others)


def summed(x: Tensor, comm: Comm) -> Tensor:
    """The sum of all ranks' `x`, any shape, in memory of its own."""
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x)
    return x


def gathered(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """All ranks' `x`, of one shape, concatenated along `dim`."""
    parts = list(x.new_empty([comm.size, *x.shape]))
    comm.all_gather(parts, x)
    return torch.cat(parts, dim)


def own_sum(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`."""
    return sum_scattered(x, comm, dim)[0]


def sum_scattered(
    x: Tensor, comm: Comm, dim: int, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """As `own_sum`, with the handle of the reduce-scatter, or None where it has been waited for."""
    parts = list(x.detach().chunk(comm.size, dim))
    own = torch.empty_like(parts[comm.rank], memory_format=torch.contiguous_format)
    return own, comm.reduce_scatter(own, parts, async_op=async_op)


def own_part(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's of equal parts of `x` along `dim`, in memory of its own."""
    return x.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format)


def check_divides(x: Tensor, comm: Comm, dim: int) -> None:
    """Raises ValueError where `dim` of `x` does not divide over the ranks."""
    if (length := x.shape[dim]) % comm.size:
        below = length - length % comm.size
        fits = f"{below} or {below + comm.size}" if below else f"{comm.size}"
        raise ValueError(
            f"dim {dim} of a tensor {list(x.shape)} is {length} long, which does not divide over "
            f"{comm.size} ranks; choose a multiple of {comm.size}, as {fits}"
        )
