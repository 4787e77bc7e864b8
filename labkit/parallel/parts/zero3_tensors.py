"""Tensors that look plain to a model and a training loop, and act where a shard would be wrong.

UngatheredParameter    in a module while a pass runs and the module's unit is not gathered
ShardGradient          the `.grad` of a shard
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

T = torch.Tensor
METADATA = {
    *(getattr(T, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn",
        "is_cuda", "is_meta", "is_sparse", "is_quantized",
    )),
    T.size, T.dim, T.numel, T.is_floating_point, T.is_complex, T.element_size,
}  # fmt: skip
NORMS = {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, T.norm}


class UngatheredParameter(torch.Tensor):
    """Gathers its unit when an operation uses it outside of the unit's forward, as a head with
    `F.linear(x, self.embedding.weight)` does, and is replaced by the gathered parameter there."""

    parameter: torch.Tensor
    gather: Callable[[], None]
    _is_param = True  # as in ShardedParameter

    @staticmethod
    def of(parameter: torch.Tensor, gather: Callable[[], None]) -> "UngatheredParameter":
        self: UngatheredParameter = T._make_subclass(UngatheredParameter, torch.empty(0))
        self.parameter, self.gather = parameter, gather  # type: ignore[method-assign]
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, cls):
                    x.gather()
        args, kwargs = tree_map_only(cls, lambda x: x.parameter, (args, kwargs))
        return func(*args, **kwargs)


class ShardGradient(torch.Tensor):
    """A plain gradient, except that its norm, that of one shard, is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            raise ValueError(
                "ZeRO3: this rank's .grad are shards, so their norm is not that of the model's "
                "gradient; clip with labkit.clip_grad_norm(model, max_norm), which returns the "
                "norm over all ranks (of a shard alone: p.grad.detach().norm())"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (T.__deepcopy__, T.__reduce_ex__):  # copies are plain
                args = (args[0].detach(), *args[1:])
            return func(*args, **(kwargs or {}))
