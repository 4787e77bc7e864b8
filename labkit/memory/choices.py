"""What a block can do with its activations, and a model edited so that each block does as chosen.

    none         keeps them                                         34 + 5as/h of sbh
    selective    computes the core of attention again               34
    full         computes all of it again, from its input            2
    offload      moves them to the host's memory and back            0, and what is under way

Names, parameters and checkpoints of the model stay what they are: only `forward` of these modules
is another, so it goes with any strategy.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from labkit.memory.edits import Recompute, blocks_of
from labkit.memory.offload import Offload

CHOICES = ("none", "selective", "full", "offload")


class Choices:
    """Edits `model`: block i does `chosen[i]`, one of CHOICES. `remove()` takes it back.

    Args:
        chosen: for each block; or one for all.
        blocks: by default the entries of the model's outermost ModuleLists.
        core: the path from a block to its core of attention, for "selective".
        offload: of `offload_activations(model)`, for "offload".

    Raises ValueError for another name, another number of blocks, or "offload" without one.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: str | Sequence[str],
        blocks: Iterable[nn.Module] | None = None,
        core: str = "attn.core",
        offload: Offload | None = None,
    ):
        every = blocks_of(model) if blocks is None else list(blocks)
        names = [chosen] * len(every) if isinstance(chosen, str) else list(chosen)
        if len(names) != len(every) or not set(names) <= set(CHOICES):
            raise ValueError(
                f"chosen={chosen!r}: give one of {', '.join(CHOICES)} for each of the "
                f"{len(every)} blocks"
            )
        if "offload" in names and offload is None:
            raise ValueError(
                "a block is to offload, but there is nothing to do it with; give "
                "offload=offload_activations(model)"
            )
        self._edits: list[Any] = []
        for what in ("selective", "full"):
            if its := [block for block, name in zip(every, names) if name == what]:
                self._edits.append(Recompute(model, what, its, core))
        if offload is not None:
            self._edits += [
                _Edited(block, offload) for block, name in zip(every, names) if name == "offload"
            ]

    def remove(self) -> None:
        """The model is as it was."""
        while self._edits:
            self._edits.pop().remove()

    def __enter__(self) -> "Choices":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class _Offloaded:
    """`forward`; what it keeps goes to the host."""

    def __init__(self, forward: Callable[..., Any], offload: Offload):
        self.forward, self.offload = forward, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.offload:
            return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Offloaded":
        """In a copy of the model: the copy's own method, over the same bus to the same memory."""
        return _Offloaded(deepcopy(self.forward, memo), self.offload)


class _Edited:
    """`block` with another `forward`."""

    def __init__(self, block: nn.Module, offload: Offload):
        self.block, self._before = block, block.__dict__.get("forward")
        block.forward = _Offloaded(block.forward, offload)

    def remove(self) -> None:
        del self.block.forward
        if self._before is not None:  # of the instance, from before
            self.block.forward = self._before
