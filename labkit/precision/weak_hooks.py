"""Hooks on gradients that do not keep their objects alive."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


def register_grad_ready_hook(parameter: torch.Tensor, method: Callable[[Any], None]) -> Any:
    """Have autograd call `method(parameter)` whenever it has finished the gradient of `parameter`.
    Returns the hook's handle, with `remove()`.

    The parameter does not keep the method's object alive: the two would hold each other through
    torch's C++, where Python finds no cycle, and no wrapped model would ever be freed.
    """
    weak = WeakMethod(method)

    def hook(finished: torch.Tensor) -> None:
        if (alive := weak()) is not None:
            alive(finished)

    return parameter.register_post_accumulate_grad_hook(hook)


class NotCopyable:
    """Whose hooks are on given parameters: a copy would have none, and do nothing in silence."""

    copy_advice: str  # what to do

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; {self.copy_advice}")
