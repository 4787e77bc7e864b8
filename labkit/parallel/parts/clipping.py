"""Gradient clipping by global norm: the length of all gradients together is at most max_norm.

    ||g|| = ( sum over elements |g_i|^p )^(1/p)          p = 2, or p = inf: max |g_i|
    g <- g * min(1, max_norm / ||g||)

Under data parallelism every rank has all (averaged) gradients, and clips as a single process does.
Under ZeRO each rank has a part: sums of p-th powers add up, so one number travels.

        rank 0   |g g g g|        sum |g|^2 = 3 \\
        rank 1           |g g g|  sum |g|^2 = 6 /  all-reduce: 9, the norm is 3 on both

A rank that clipped its own part by that part's norm would take other steps than the rest.

Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
arXiv 1211.5063, section 3.2.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from labkit.comm import Comm
from labkit.precision.stand_ins import LOW, StandIns
from labkit.precision.unscaling import mark_clipped


@runtime_checkable
class OwnsGradientPieces(Protocol):
    """A strategy whose ranks own parts of the gradients.

    `gradient_pieces()` gives this rank's, of any shape, to be scaled in place, and the ranks over
    which each element is in exactly one piece.
    """

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]: ...


def clip_grad_norm(
    trained: nn.Module | torch.optim.Optimizer | OwnsGradientPieces,
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns what it was, the same on
    all ranks. Call it on every rank, after backward, with a wrapped module or an optimizer.

    Under a loss scaler unscale first: `scaler.unscale_(optimizer)`. Gradients that the optimizer
    keeps in 16 bits are then clipped as its step unscales them, in float32; so give it, not the
    model, where it is MasterWeights or a ZeroOptimizer.

    Raises ValueError for a norm that is no power sum, where gradients are in pieces.
    """
    factor = trained.gradient_factor if isinstance(trained, StandIns) else None
    if isinstance(trained, OwnsGradientPieces):
        pieces, comm = trained.gradient_pieces()
        norm = norm_of_pieces(pieces, comm, norm_type, factor)
    elif isinstance(trained, StandIns):
        pieces = trained.own_gradients()
        norm = norm_of_pieces(pieces, None, norm_type, factor)
    else:
        parameters = _parameters_of(trained)
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        mark_clipped(p.grad for p in parameters if p.grad is not None)
        return norm
    if isinstance(trained, StandIns) and factor is not None:
        trained.gradient_factor = factor * _share_of(max_norm, norm)
        pieces = [x for x in pieces if x.dtype not in LOW]
    scale_to(max_norm, norm, pieces)
    return norm


def scale_to(max_norm: float, norm: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Scale, in place, what has this norm so that it has at most `max_norm`."""
    if gradients:
        torch._foreach_mul_(gradients, _share_of(max_norm, norm))
        mark_clipped(gradients)


def _share_of(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch does


def norm_of_pieces(
    pieces: list[torch.Tensor],
    comm: Comm | None,
    norm_type: float = 2.0,
    factor: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of what all ranks' pieces are together, those in 16 bits times `factor`; 0 where
    there are none.

    A rank without pieces may give an empty one: its dtype and device are those of the result.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type}: pieces add up for p > 0, as 2.0, or inf")
    # In float32 or better: 16 bits would round each piece's norm to 3 digits.
    norms = [
        torch.linalg.vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32))
        * (1.0 if factor is None or x.dtype not in LOW else factor)
        for x in pieces
        if x.numel()
    ]
    like = pieces[0] if pieces else torch.empty(0, device=comm.own_device() if comm else "cpu")
    mine = torch.zeros((), dtype=torch.float64, device=like.device)  # no power overflows
    if norms:
        mine = torch.linalg.vector_norm(torch.stack([x.to(mine) for x in norms]), p)
    if comm is None:
        total = mine
    elif p == float("inf"):
        comm.all_reduce(mine, "max")
        total = mine
    else:
        mine = mine**p
        comm.all_reduce(mine)
        total = mine ** (1 / p)
    return total.to(torch.promote_types(like.dtype, torch.float32))


def _parameters_of(trained: nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    if isinstance(trained, nn.Module):
        return list(trained.parameters())
    return [p for group in trained.param_groups for p in group["params"]]
