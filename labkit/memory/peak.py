"""Peak memory of a section of code, counted tensor by tensor."""

import gc
import weakref
from typing import Any

import torch
from torch import nn

from labkit.dispatch import DispatchMode
from labkit.memory.buffers import is_host_memory
from labkit.memory.conditions import tensors_in


class PeakMemory(DispatchMode):
    """Counts the bytes of tensors created inside the `with` block, on any device, even in backward.

    `held_bytes`: the memory in use now; `peak_bytes`: its maximum, updated after each op. Views,
    tensors created before the block and offloaded tensors do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # freed storages drop out

    @property
    def held_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in storages_in((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for storage in storages_in(out):
            if id(storage) not in before:
                self._known.add(storage)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return out


def storages_in(nested: Any) -> list[torch.UntypedStorage]:
    """The storages of all tensors in `nested` that are not offloaded."""
    return [x.untyped_storage() for x in tensors_in(nested) if not is_host_memory(x)]


def alive_storages(device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of all live tensors on `device` that are not offloaded."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    strided = [x for x in tensors if x.layout is torch.strided and x.device.type != "meta"]
    here = [x for x in strided if x.device == device]
    return list({x._cdata: x for x in storages_in(here)}.values())
