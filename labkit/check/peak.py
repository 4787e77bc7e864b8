"""The most memory that a stretch of code holds at once, counted tensor by tensor."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the tensors made inside the `with` block, on any device and in backward, too.

    `peak_bytes`: the most they held at one time; `held_bytes`: what they hold now. A view holds
    nothing of its own, a tensor that was there before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch asks. With True (its default) the first use loads torch._dynamo: 3 s on each rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if id(storage) not in before and storage not in self._known:
                self._known.add(storage)
                self.held_bytes += storage.nbytes()
                weakref.finalize(storage, self._let_go, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return out

    def _let_go(self, nbytes: int) -> None:
        self.held_bytes -= nbytes


def _storages(things: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(things) if isinstance(x, torch.Tensor)]
