"""What torch does around every operation, and how to step out of it: torch.compile, dispatch modes
(recordings, dry runs), autocast."""

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils import _python_dispatch as modes

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Class decorator: torch.compile traces no method of `cls`, nor what it calls."""

    def wrapped(method: Any) -> Any:
        outside = torch._disable_dynamo(method)  # loads torch._dynamo when called, which takes 1 s

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            compiled = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
            return (outside if compiled else method)(*args, **kwargs)

        return call

    for name, method in [*vars(cls).items()]:
        if isfunction(method) and not name.startswith("__"):
            setattr(cls, name, wrapped(method))
    return cls


class DispatchMode(modes.TorchDispatchMode):
    """A mode whose first use does not load torch._dynamo, which takes 3 s on each rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def no_modes() -> AbstractContextManager[None]:
    """A block that no recording counts, and whose tensors have numbers in a dry run, too."""
    return modes._disable_current_modes() if modes._get_current_dispatch_mode() else nullcontext()


def low_type_around(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which an autocast region around this line, ours or torch's, runs matmuls of `x`;
    None where they run in the dtype of `x`."""
    kind, castable = x.device.type, x.is_floating_point() and x.dtype != torch.float64
    on = castable and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None
