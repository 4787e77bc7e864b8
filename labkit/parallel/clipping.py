"""Gradient clipping by the norm of all ranks' gradients."""

from typing import Any

import torch


@torch.no_grad()
def clip_grad_norm(target: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the averaged gradients of `target` so that their norm, over all ranks, is at most
    `max_norm`; returns the norm that they had, float64 [], the same on all ranks.

    target: what has `gradient_pieces() -> (tensors, comm)`, the gradients that this rank owns.
    """
    gradients, comm = target.gradient_pieces()
    largest = norm_type == float("inf")
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    device = target.param_groups[0]["params"][0].device
    mine = torch.stack([x.double() for x in norms] or [torch.zeros((), device=device).double()])
    total = mine.max() if largest else mine.pow(norm_type).sum()
    comm.all_reduce(total, "max" if largest else "sum")
    norm = total if largest else total.pow(1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(scale.to(g.dtype) if g.dtype == torch.float64 else scale.float())
    return norm
