"""The optimizer that steps on ZeRO-3's shards: does it treat each element by itself?

Nobody tells ZeRO-3 which optimizer that is. But torch calls a hook before each step of any, and a
shard knows whose it is.
"""

from functools import cache, partial, update_wrapper
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.parallel.parts.elementwise import check_elementwise
from labkit.parallel.parts.zero3_state import WholeState

_known: WeakSet[torch.optim.Optimizer] = WeakSet()


@cache
def check_optimizers() -> None:
    """From now on, before an optimizer's first step on shards."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _known:
        shards = [p for group in optimizer.param_groups for p in group["params"] if _is_shard(p)]
        if not shards:
            return
        for group in optimizer.param_groups:
            options = {key: x for key, x in group.items() if "param" not in key}
            check_elementwise(_constructor(optimizer), options, shards[0].device)
        # torch's scaler then gives `found_inf` to the optimizer, and calls a step it would skip.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        _known.add(optimizer)
    if hasattr(optimizer, "found_inf"):
        raise ValueError(
            "ZeRO3: torch.amp.GradScaler looks for infs in this rank's shards only, so one rank "
            "would skip a step that the others take; use labkit.GradScaler, whose ranks decide "
            "together, or train in bfloat16, which needs no loss scaling"
        )


def _is_shard(parameter: torch.Tensor) -> bool:
    return isinstance(getattr(parameter, "_labkit_owner", lambda: None)(), WholeState)


def _constructor(optimizer: torch.optim.Optimizer) -> Any:
    """Of one more of its kind, with the arguments that it keeps as defaults."""
    kind = type(optimizer)
    known = signature(kind).parameters
    given = {key: x for key, x in optimizer.defaults.items() if key in known}
    return update_wrapper(partial(kind, **given), kind)
