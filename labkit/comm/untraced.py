"""Keep torch.compile from tracing communication: each operation is a graph break."""

from functools import wraps
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Class decorator: torch.compile traces neither the methods of `cls` nor their callees."""

    def wrapped(method: Any) -> Any:
        disabled = torch._disable_dynamo(method)  # imports torch._dynamo (1 s) when called

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            compiled = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
            return (disabled if compiled else method)(*args, **kwargs)

        return call

    for name, method in [*vars(cls).items()]:
        if isfunction(method) and not name.startswith("__"):
            setattr(cls, name, wrapped(method))
    return cls
