"""Conjugate operators: pairs whose forward and backward collectives are swapped.

                                  forward                 backward
    copy_to_ranks            f    -                       all-reduce
    reduce_from_ranks        g    all-reduce              -
    gather_from_ranks             all-gather              slice
    scatter_to_ranks              slice                   all-gather
    all_gather_sequence           all-gather              reduce-scatter
    reduce_scatter_sequence       reduce-scatter          all-gather

Rows 1-2, 3-4 and 5-6 are pairs. f and g enclose the two sharded matmuls A and B of an MLP:

    x ── f ──▶ x A₁ ── gelu ──▶ · B₁ ── g ──▶ y          rank 0 of 2
    x ── f ──▶ x A₂ ── gelu ──▶ · B₂ ── g ──▶ y          rank 1

A replicated parameter that each rank applies to its shard of the sequence has a partial gradient on
each rank, so the parameter passes through f, too.

Bus bytes per rank (S bytes before sharding): all-reduce 2(t-1)/t S, other collectives (t-1)/t S.
Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; the last pair: Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd.function import once_differentiable

from labkit.comm import Comm, Handle


def copy_to_ranks(x: Tensor, comm: Comm) -> Tensor:
    """f: returns `x`, which is equal on all ranks; backward all-reduces its gradient."""
    return copies_to_ranks([x], comm)[0]


def copies_to_ranks(xs: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """f for tensors of one dtype; a single all-reduce sums their gradients."""
    trained = [x for x in xs if x.requires_grad]
    if comm.size == 1 or not trained:
        return list(xs)
    copies = iter(_Copy.apply(comm, *trained))
    return [next(copies) if x.requires_grad else x for x in xs]


def reduce_from_ranks(x: Tensor, comm: Comm) -> Tensor:
    """g: all-reduces `x` (any shape); backward passes the gradient through."""
    return x if comm.size == 1 else Exchange.apply(x, summed, lambda gradient, _: gradient, comm)


def gather_from_ranks(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """Concatenates all ranks' `x` (equal shapes) along `dim`; backward slices the gradient. Use
    only if all ranks use the result identically, so that each rank has the whole gradient."""
    return x if comm.size == 1 else Exchange.apply(x, gathered, own_part, comm, dim)


def scatter_to_ranks(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's slice along `dim` of `x`, which is equal on all ranks; backward all-gathers.
    Raises ValueError if the size of `dim` is not divisible by the rank count."""
    check_divides(x, comm, dim)
    return x if comm.size == 1 else Exchange.apply(x, own_part, gathered, comm, dim)


def all_gather_sequence(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """x [b, s/t, w], a shard of the sequence -> [b, s, w], the whole sequence. Each
    rank uses the result differently, so backward reduce-scatters the gradients."""
    return x if comm.size == 1 else Exchange.apply(x, gathered, own_sum, comm, dim)


def reduce_scatter_sequence(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """x [b, s, w], one summand per rank -> [b, s/t, w], this rank's slice of the sum; backward
    all-gathers. Raises ValueError if the size of `dim` is not divisible by the rank count."""
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
    """Forward: `send(x, *args)`; backward: `send_back(gradient, *args)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Any, send_back: Any, *args: Any) -> Tensor:
        ctx.send_back, ctx.args = send_back, args
        return send(x, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.send_back(grads[0], *ctx.args), None, None, *(None for _ in ctx.args)


def summed(x: Tensor, comm: Comm) -> Tensor:
    """The sum of `x` (any shape) over the ranks, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x)
    return x


def gathered(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """All ranks' `x` (equal shapes), concatenated along `dim`."""
    parts = list(x.new_empty([comm.size, *x.shape]))
    comm.all_gather(parts, x)
    return torch.cat(parts, dim)


def own_sum(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum of `x` over the ranks."""
    return sum_scattered(x, comm, dim)[0]


def sum_scattered(
    x: Tensor, comm: Comm, dim: int, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Returns `own_sum` and the reduce-scatter's handle (None unless `async_op`)."""
    parts = list(x.detach().chunk(comm.size, dim))
    own = torch.empty_like(parts[comm.rank], memory_format=torch.contiguous_format)
    return own, comm.reduce_scatter(own, parts, async_op=async_op)


def own_part(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's slice of `x` along `dim` (equal sizes), in a new tensor."""
    return x.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format)


def check_divides(x: Tensor, comm: Comm, dim: int) -> None:
    """Raises ValueError unless the size of `dim` is divisible by the rank count."""
    if (length := x.shape[dim]) % comm.size:
        below = length - length % comm.size
        fits = f"{below} or {below + comm.size}" if below else f"{comm.size}"
        raise ValueError(
            f"dim {dim} of a tensor of shape {list(x.shape)} has size {length}, which cannot be "
            f"split evenly over {comm.size} ranks; choose a multiple of {comm.size}, such as {fits}"
        )
