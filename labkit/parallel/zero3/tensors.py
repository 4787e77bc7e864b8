"""What ZeRO-3 puts where a model's code or a training loop expects parameters and gradients."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.dispatch import no_modes

T = torch.Tensor
NAMES = "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"
METADATA = {T.size, T.dim, T.numel, *(getattr(T, name).__get__ for name in NAMES)}
NORMS = {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, T.norm}


class UngatheredParameter(torch.Tensor):
    """In a module during a pass: an operation outside of the unit's forward that uses it, as
    `F.linear(x, self.embedding.weight)` in a head, gathers the unit first."""

    _is_param = True  # as in ShardedParameter

    def __new__(cls, parameter: T, gather_unit: Any) -> Any:
        with no_modes():  # it holds no numbers, in a dry run neither
            self: Any = T._make_subclass(cls, torch.empty(0))
        self.parameter, self.gather_unit = parameter, gather_unit
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in () if func in METADATA else tree_leaves((args, kwargs)):
            if hasattr(x, "gather_unit"):
                x.gather_unit()
        args, kwargs = tree_map_only(cls, lambda x: x.parameter, (args, kwargs or {}))
        return func(*args, **kwargs)


class ShardGradient(torch.Tensor):
    """The `.grad` of a shard: a norm does not take it for the whole. Copies of it are plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            raise ValueError(
                "ZeRO3: this is the norm of one rank's shards, not of the gradient; clip with "
                "labkit.clip_grad_norm(model, max_norm), which returns the norm over all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (T.__deepcopy__, T.__reduce_ex__):
                args = (args[0].detach(), *args[1:])
            return func(*args, **(kwargs or {}))


def refuse_hook(*_: Any) -> None:
    """Raises ValueError: for a hook on a shard, or one that would stay behind on a parameter."""
    raise ValueError(
        "ZeRO3: this hook would never be called, as autograd computes gradients of gathered "
        "parameters, not of shards; call `register_hook` on a parameter before ZeRO3(module)"
    )
