"""Gradients in a loss scaler: collect them, check for inf and NaN, and divide by the scale.

                        gradients       are unscaled                   kept until the step
    torch's optimizers  fp32 (or bf16)  at once, in place
    a ShadowOptimizer   fp32            at once, in place
                        fp16, bf16      in its step, with the cast     gradient_factor = 1 / scale
                                        to fp32

Division in place would lose fp16 gradients that the scale has saved from underflow. So
MasterWeights and ZeroOptimizer multiply fp32 copies of the gradients by `gradient_factor`.
"""

from collections.abc import Iterable

import torch
from torch import nn

from labkit.comm import Comm
from labkit.precision.shadow_optimizer import LOW, ShadowOptimizer

Trained = torch.optim.Optimizer | nn.Module


def parameters_of(trained: Trained) -> list[torch.Tensor]:
    """The parameters of a module or an optimizer."""
    if isinstance(trained, nn.Module):
        return list(trained.parameters())
    return [p for group in trained.param_groups for p in group["params"]]


def gradients_of(trained: Trained) -> list[torch.Tensor]:
    """This rank's gradients; for a sparse gradient, only its values."""
    if isinstance(trained, ShadowOptimizer):
        gradients = trained.own_gradients()
    else:
        gradients = [p.grad for p in parameters_of(trained) if p.grad is not None]
    return [x._values() if x.is_sparse else x for x in gradients]


@torch.no_grad()
def unscale(trained: Trained, scale: float) -> torch.Tensor | None:
    """Divide the gradients by `scale`. Returns 1 if any element is inf or NaN, else 0, as a tensor,
    to avoid a GPU sync; None without gradients. Raises ValueError if it would divide in fp16."""
    gradients = gradients_of(trained)
    keeps_scale = isinstance(trained, ShadowOptimizer)
    low = [x for x in gradients if keeps_scale and x.dtype in LOW]
    unscaled_here = [x for x in gradients if not (keeps_scale and x.dtype in LOW)]
    if any(x.dtype == torch.float16 for x in unscaled_here):
        raise ValueError(
            f"GradScaler: {type(trained).__name__} has float16 gradients, and dividing them by "
            "the scale in float16 would lose small gradients again. Keep float32 weights and "
            "compute in float16 (autocast), or pass a float16 model's parameters to "
            "MasterWeights(params, torch.optim.AdamW, ...) and call unscale_ on that optimizer"
        )
    if low and isinstance(trained, ShadowOptimizer):
        trained.gradient_factor = 1 / scale
    flags = [_multiply(group, 1 / scale) for group in _by_kind(unscaled_here)]
    flags += [_multiply(group, 1.0) for group in _by_kind(low)]  # checks without dividing
    return torch.stack([x.to(flags[0].device) for x in flags]).amax() if flags else None


def _multiply(gradients: list[torch.Tensor], factor: float) -> torch.Tensor:
    nonfinite = torch.zeros((), device=gradients[0].device)
    by = torch.full((), factor, device=nonfinite.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, nonfinite, by)
    return nonfinite


def _by_kind(gradients: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for x in gradients:
        kinds.setdefault((x.device, x.dtype), []).append(x)
    return kinds.values()


def still_scaled(trained: Trained) -> list[tuple[int, int]]:
    """(address, version) of each gradient that the optimizer unscales in its step."""
    if not isinstance(trained, ShadowOptimizer):
        return []
    return [(x.data_ptr(), x._version) for x in gradients_of(trained) if x.dtype in LOW]


def check_owner(trained: Trained, comm: Comm | None) -> None:
    """Raise ValueError if an optimizer owns the gradients, or `comm` lacks any of their ranks."""
    parameters = parameters_of(trained)
    owner = getattr(parameters[0], "_labkit_owner", lambda: None)() if parameters else None
    name, owners = type(owner).__name__, getattr(owner, "comm", None)
    if isinstance(trained, nn.Module) and isinstance(owner, ShadowOptimizer):
        raise ValueError(
            f"GradScaler.unscale_: a {name} owns the gradients of this model; pass that optimizer"
        )
    marks = (getattr(p, "_labkit_shard", None) for p in parameters)  # see parallel/common/shards.py
    spans = [(f"the {name} spans", owners)]
    spans += [("parameters are sharded over", mark.comm) for mark in marks if mark is not None]
    for what, needed in spans:
        if comm is not None and needed is not None and not {*needed.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"GradScaler: {what} ranks {list(needed.ranks)}, but the scaler spans "
                f"only {list(comm.ranks)}, so some ranks would skip a step that others take; "
                "create the scaler with a comm of all these ranks"
            )


# --- clipping before unscaling: `clip_grad_norm` marks the base tensors ---


def mark_clipped(gradients: Iterable[torch.Tensor]) -> None:
    """Marks `gradients` as clipped, until they change."""
    for x in gradients:
        _base(x)._labkit_clipped = x._version  # type: ignore[attr-defined]


def check_not_clipped(trained: Trained, scale: float) -> None:
    """Raise ValueError if gradients were clipped and have not changed since."""
    if any(getattr(_base(x), "_labkit_clipped", -1) == x._version for x in gradients_of(trained)):
        raise ValueError(
            "GradScaler: the gradients were clipped while still multiplied by the scale, "
            f"{scale:g}, so to a norm that is too small by this factor; call "
            "scaler.unscale_(optimizer) before clip_grad_norm"
        )


def forget_clipped(trained: Trained) -> None:
    """Removes the marks of `mark_clipped`."""
    for x in gradients_of(trained):
        vars(_base(x)).pop("_labkit_clipped", None)


def _base(x: torch.Tensor) -> torch.Tensor:
    """The tensor of which `x` is a view, or `x`: its version counts writes to all its views."""
    return x if x._base is None else x._base
