"""torch's dispatch modes, which see every operation: their base, and a block that none sees."""

from contextlib import AbstractContextManager, nullcontext

from torch.utils import _python_dispatch as modes


class DispatchMode(modes.TorchDispatchMode):
    """A mode whose first use does not load torch._dynamo, which takes 3 s on each rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def no_modes() -> AbstractContextManager[None]:
    """A block that no recording counts, and whose tensors have numbers in a dry run, too."""
    return modes._disable_current_modes() if modes._get_current_dispatch_mode() else nullcontext()
