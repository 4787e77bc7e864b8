"""Gathering new parameters while the next forward runs: each module waits for its own only.

step on shares   [ gather of bucket 0 ][ bucket 1 ][ bucket 2 ]
                 forward: embed | block 0 | block 1 | block 2 | ... each when its own are there
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from labkit.parallel.common.agreement import WeakMark
from labkit.parallel.zero.param_share import ParamShare


class ParamGatherer:
    """Before the forward of each module of `model`, its own parameters have arrived.

    A module may use those of a child that it does not call (attention does so with the projection
    of its outputs). So it also waits for those below it that have not been called so far; and for
    those that it names as `beside` it, as column-parallel layers do that multiply together.
    """

    def __init__(self, model: nn.Module, bucket_of: Mapping[torch.Tensor, ParamShare]):
        self._buckets: dict[nn.Module, list[ParamShare]] = {}
        for module in model.modules():
            own = [bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of]
            if own:
                self._buckets[module] = list({id(one): one for one in own}.values())
        self._below: dict[nn.Module, list[nn.Module]] = {}  # itself too, where it has parameters
        before, wait = _while_alive(self._before), _while_alive(self._wait)
        for module in model.modules():
            self._below[module] = [one for one in module.modules() if one in self._buckets]
            module.register_forward_pre_hook(before)
            module.register_state_dict_pre_hook(wait)  # called for each module that is in it
        self._called: WeakSet[nn.Module] = WeakSet()

    def _before(self, module: nn.Module, *_: Any) -> None:
        if module not in self._below:
            return  # a copy of `model` has its hooks, and parameters that nobody gathers
        self._called.add(module)
        self._wait(module)
        for one in getattr(module, "beside", ()):
            self._wait(one)
        for one in self._below[module]:
            if one not in self._called:
                self._wait(one)

    def _wait(self, module: nn.Module, *_: Any) -> None:
        for bucket in self._buckets.get(module, ()):
            bucket.wait_for_parameters()


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, for a hook that does not keep its object alive; nor does a copy of it."""
    return partial(_call, WeakMark(method.__self__), method.__name__)  # type: ignore[attr-defined]


def _call(owner: Callable[[], Any], name: str, *args: Any) -> None:
    if (alive := owner()) is not None:
        getattr(alive, name)(*args)
