"""Gradient clipping by global norm.

    ||g|| = ( sum over elements |g_i|^p )^(1/p)          p = 2, or p = inf: max |g_i|
    g <- g * min(1, max_norm / ||g||)

Under data parallelism every rank holds all averaged gradients and clips like a single process.
Under ZeRO each rank holds a gradient slice; sums of |g|^p add up, so one scalar is all-reduced.

        rank 0   |g g g g|        sum |g|^2 = 3 \\
        rank 1           |g g g|  sum |g|^2 = 6 /  all-reduce: 9, norm 3 on both ranks

Under tensor parallelism, a rank holds shards of some parameters and replicas of the rest
(common/shards.py). Replicas must count once, so only the shards' sums are all-reduced:

        tp rank 0   shards 3    replicas 2 \\
        tp rank 1   shards 6    replicas 2 /  all-reduce of the shards' sums: 9; plus 2: 11

Pipeline ranks all-reduce their stages' sums; an embedding tied across stages counts only on the
first rank that holds it.

    all-reduced    over ZeRO ranks: the sums of replicas and of shards, if any; over
                   tensor-parallel ranks: the shards' sum; over pipeline ranks: the total

Sources: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
arXiv 1211.5063, section 3.2; replicas counted once: Megatron-LM, `get_grad_norm_fp32`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from labkit.comm import Comm
from labkit.parallel.common.ownership import owner_of, pipeline_with
from labkit.parallel.common.sharder import InStages, OwnsGradientPieces, implements, unwrapped
from labkit.parallel.common.shards import shard_of
from labkit.precision.shadow_optimizer import LOW, ShadowOptimizer
from labkit.precision.unscaling import mark_clipped

Trained = nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]
Gradients = list[tuple[Tensor, Tensor]]  # (parameter, its whole gradient or a piece)


def clip_grad_norm(
    trained: "Trained | OwnsGradientPieces", max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales gradients to a global norm of at most `max_norm`; returns the norm before clipping,
    equal on all ranks. Collective: call after backward on every rank, with a wrapped module, its
    optimizer or its parameters. Under a Pipeline, the norm covers all stages.

    With a loss scaler, call `scaler.unscale_(optimizer)` first. With MasterWeights, pass the
    optimizer, not the model: the optimizer's step unscales and clips 16-bit gradients. Raises
    ValueError for an empty parameter list; for sharded gradients, also if `norm_type` is not
    positive or the parameters are not exactly the strategy's."""
    parameters = _parameters_of(trained)
    groups, pipeline = comms_of(parameters), pipeline_of(trained, parameters)
    comm, stages = None, pipeline.comm if pipeline else None
    owners = _owners_of_pieces(trained, parameters)
    optimizer = next((x for x in (trained, *owners) if isinstance(x, ShadowOptimizer)), None)
    factor = optimizer.gradient_factor if optimizer else None
    if owners:
        owned = [owner.gradient_pieces() for owner in owners]
        gradients = [(getattr(x, "piece_of", x), x) for pieces, _ in owned for x in pieces]
        comm = owned[0][1]
    elif groups or stages or optimizer:
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    else:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        mark_clipped(p.grad for p in parameters if p.grad is not None)
        return norm
    counted = [(p, x) for p, x in gradients if _counts_here(p, x)]
    if not counted:  # this rank counts no gradient: an empty tensor sets the dtype
        counted = [(x, x.new_empty(0)) for x in [*(g for _, g in gradients), *parameters][:1]]
    norm = norm_of_pieces(counted, comm, norm_type, factor, groups, stages)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula
    to_scale = [x for _, x in gradients]
    if optimizer and factor is not None:
        optimizer.gradient_factor = factor * scale
        to_scale = [x for x in to_scale if x.dtype not in LOW]
    if to_scale:
        torch._foreach_mul_(to_scale, scale)
        mark_clipped(to_scale)
    return norm


def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """`clip_grad_norm(self, ...)`; labkit/parallel/__init__.py makes this a method of sharders."""
    return clip_grad_norm(self, max_norm, norm_type)


def comms_of(parameters: Iterable[Tensor]) -> list[Comm]:
    """Groups over which `parameters` are sharded, in parameter order."""
    comms = [shard.comm for p in parameters if (shard := shard_of(p)) is not None]
    return list({comm.ranks: comm for comm in comms}.values())


def pipeline_of(trained: Any, parameters: Iterable[Tensor]) -> InStages | None:
    """The pipeline of `trained` or `parameters`; None unless a pipeline has at least 2 ranks."""
    pipelines = [trained] if isinstance(trained, InStages) else map(pipeline_with, parameters)
    pipeline = next((x for x in pipelines if x is not None), None)
    return pipeline if pipeline is not None and pipeline.comm.size > 1 else None


def _counts_here(parameter: Tensor, piece: Tensor) -> bool:
    """Whether the norm counts `piece` on this rank (False if a different rank counts a copy)."""
    pipeline = pipeline_with(parameter)
    return getattr(piece, "counts_here", True) and (
        pipeline is None or pipeline.counts_here(parameter)
    )


def _owners_of_pieces(trained: Any, parameters: list[Tensor]) -> list[OwnsGradientPieces]:
    """Strategies that shard gradients; raises ValueError unless they own exactly `parameters`."""
    if implements(trained, OwnsGradientPieces):
        return [trained]
    unique = {id(owner): owner for owner in map(owner_of, parameters)}.values()
    owners: list[Any] = [owner for owner in unique if implements(owner, OwnsGradientPieces)]
    own = {p for owner in owners for p in _parameters_of(owner) if p.requires_grad and p.numel()}
    others = own ^ {p for p in parameters if p.requires_grad and p.numel()}
    kinds = {owner if isinstance(owner, ShadowOptimizer) else owner.comm.ranks for owner in owners}
    if len(kinds) > 1 or (owners and others):
        name = type(owners[0]).__name__
        raise ValueError(
            f"clip_grad_norm: a {name} shards these gradients, but the parameters passed are not "
            f"exactly its parameters; pass the {name} instead"
        )
    return owners


def norm_of_pieces(
    gradients: Gradients,
    comm: Comm | None,
    norm_type: float = 2.0,
    factor: float | Tensor | None = None,
    groups: Sequence[Comm] = (),
    stages: Comm | None = None,
) -> Tensor:
    """Norm over all ranks' pieces (0 without pieces); `factor` multiplies 16-bit pieces. `comm`:
    ranks with disjoint pieces (None: this rank holds every piece); `groups`: groups that shard
    parameters; `stages`: pipeline ranks. The first piece sets the result's dtype and device."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type}: choose p > 0, such as 2.0, or inf")
    op: Literal["max", "sum"] = "max" if p == float("inf") else "sum"
    any_comm = comm or next(iter(groups), stages)
    like = (
        gradients[0][1]
        if gradients
        else torch.empty(0, device=any_comm.own_device() if any_comm else "cpu")
    )
    # max |g| or sum |g|^p of the shards per group; the last entry is for replicas.
    sums = torch.zeros(len(groups) + 1, dtype=torch.float64, device=like.device)
    for k, group in enumerate([*groups, None]):
        # Norms in at least float32 (16-bit dtypes keep 3 digits); float64 powers do not overflow.
        norms = [
            vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32)).double()
            * (1.0 if factor is None or x.dtype not in LOW else factor)
            for parameter, x in gradients
            if _is_sharded_over(group, parameter) and x.numel()
        ]
        if norms:
            norm = vector_norm(torch.stack(norms), p)
            sums[k] = norm if op == "max" else norm**p
    if comm is not None:
        comm.all_reduce(sums, op)
    for k, group in enumerate(groups):
        group.all_reduce(sums[k], op)
    total = sums.amax() if op == "max" else sums.sum()
    if stages is not None:
        stages.all_reduce(total, op)
    if op == "sum":
        total = total ** (1 / p)
    return total.to(torch.promote_types(like.dtype, torch.float32))


def _is_sharded_over(group: Comm | None, parameter: Tensor) -> bool:
    shard = shard_of(parameter)
    return (shard and shard.comm.ranks) == (group and group.ranks)


def _parameters_of(trained: Any) -> list[Tensor]:
    """Reads the inner module's parameters, to include ZeRO-3 shards that are empty on this rank."""
    if isinstance(trained, nn.Module):
        return list(unwrapped(trained).parameters())
    if implements(trained, OwnsGradientPieces) or hasattr(trained, "param_groups"):
        return [p for group in getattr(trained, "param_groups", ()) for p in group["params"]]
    given = [trained] if isinstance(trained, Tensor) else list(trained)
    if not given or not all(isinstance(p, Tensor) for p in given):
        raise ValueError(
            f"clip_grad_norm: this {type(trained).__name__} is empty or has items other than "
            "tensors (a used generator is empty); pass parameters, the wrapped model or optimizer"
        )
    return given
