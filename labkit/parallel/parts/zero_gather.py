"""Gathering new parameters while the next forward runs: each module waits for its own only.

step on shares   [ gather of bucket 0 ][ bucket 1 ][ bucket 2 ]
                 forward: embed | block 0 | block 1 | block 2 | ... each when its own are there
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from labkit.parallel.parts.zero_buckets import ZeroBucket


class WaitInForward:
    """Before the forward of each module of `model`, its own parameters have arrived.

    A module may use those of a child that it does not call (attention does so with the projection
    of its outputs). Where a child has not been called so far, the model waits for it as a whole.
    """

    def __init__(self, model: nn.Module, bucket_of: Mapping[torch.Tensor, ZeroBucket]):
        self._buckets: dict[nn.Module, list[ZeroBucket]] = {}
        self._called: WeakSet[nn.Module] = WeakSet()
        hook = _while_alive(self._before)
        for module in model.modules():
            own = {id(p): bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            if own:
                self._buckets[module] = list({id(one): one for one in own.values()}.values())
                module.register_forward_pre_hook(hook)
        model.register_forward_pre_hook(_while_alive(self._before_all))
        model.register_state_dict_pre_hook(_while_alive(self._wait_for_all))

    def _before(self, module: nn.Module, *_: Any) -> None:
        self._called.add(module)
        self._wait(module)

    def _before_all(self, *_: Any) -> None:
        for module in self._buckets:
            if module not in self._called:
                self._wait(module)

    def _wait_for_all(self, *_: Any) -> None:
        for module in self._buckets:
            self._wait(module)

    def _wait(self, module: nn.Module) -> None:
        for bucket in self._buckets[module]:
            bucket.wait_for_parameters()


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, for a hook that does not keep its object alive."""
    weak, name = ref(method.__self__), method.__name__  # type: ignore[attr-defined]

    def hook(*args: Any) -> None:
        if (alive := weak()) is not None:
            getattr(alive, name)(*args)

    return hook
