"""torch's global state: dispatch modes, autocast's dtype and random generators."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import _python_dispatch as modes


class DispatchMode(modes.TorchDispatchMode):
    """A dispatch mode that avoids importing torch._dynamo, which takes 3 s on each rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def no_modes() -> AbstractContextManager[None]:
    """A context in which nothing is recorded and dry-run tensors have values."""
    return modes._disable_current_modes() if modes._get_current_dispatch_mode() else nullcontext()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype to which an active autocast (labkit's or torch's) casts `x` in matmuls, or None."""
    kind, castable = x.device.type, x.is_floating_point() and x.dtype != torch.float64
    on = castable and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def generators() -> list[torch.Generator]:
    """torch's default generators: the CPU's and, once CUDA is initialized, one per GPU."""
    return [torch.default_generator, *torch.cuda.default_generators]
