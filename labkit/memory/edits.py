"""Which parts of a model are computed again, decided from outside its file.

    Recompute(model)                              each block, from its input         2sbh a layer
    Recompute(model, what="selective")            the core of attention, from q k v   34sbh
    Recompute(model, what=keep_products)          each block, but for the matrix products
    Recompute(model, blocks=model.blocks[:4])     some of the blocks

Names, parameters, hooks and checkpoints of the model stay what they are: only `forward` of these
modules is another. So it goes with any strategy, before or after it wraps the model.

Source: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from labkit.memory.policies import Policy
from labkit.memory.recompute import Check, Recomputed


class Recompute:
    """Edits `model` so that backward computes parts of its forward again. Use the model as before.

    Args:
        what: "full": whole blocks; "selective": in each block the module `core`; a policy:
            whole blocks, but for operations of which `policy(op)` is True (policies.py).
        blocks: which; by default the entries of the outermost ModuleLists.
        core: the path from a block to its core of attention.
        preserve_rng, check: see `recompute`.

    `remove()` takes the edit back. As a context (`with Recompute(model):`) it does so at the end.

    Raises ValueError where there are no blocks, no core, or one is edited already.
    """

    def __init__(
        self,
        model: nn.Module,
        what: Literal["full", "selective"] | Policy = "full",
        blocks: Iterable[nn.Module] | None = None,
        core: str = "attn.core",
        preserve_rng: bool = True,
        check: Check = "shapes",
    ):
        if not callable(what) and what not in ("full", "selective"):
            raise ValueError(f"what={what!r}: choose full, selective or a policy (op) -> bool")
        every = blocks_of(model) if blocks is None else blocks
        if what == "selective":
            every = [_core_of(block, core) for block in every]
        chosen = list(dict.fromkeys(every))  # blocks may share one
        for module in chosen:
            if isinstance(module.__dict__.get("forward"), Recomputed):
                raise ValueError(
                    f"this {type(module).__name__} is computed again already; call remove() of the "
                    "first Recompute, or give other blocks"
                )
        self.modules, self._forwards = chosen, [m.__dict__.get("forward") for m in chosen]
        policy = what if callable(what) else None
        for module in chosen:
            module.forward = Recomputed(module.forward, policy, preserve_rng, check)

    def remove(self) -> None:
        """The model computes nothing twice any more."""
        for module, forward in zip(self.modules, self._forwards, strict=True):
            del module.forward
            if forward is not None:  # of the instance, from before
                module.forward = forward
        self.modules, self._forwards = [], []

    def __enter__(self) -> "Recompute":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost ModuleLists. Raises ValueError where there are none."""

    def found_in(module: nn.Module) -> list[nn.Module]:
        if isinstance(module, nn.ModuleList):
            return list(module)
        return [block for child in module.children() for block in found_in(child)]

    if not (blocks := found_in(model)):
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks; say which modules are to be "
            "computed again: Recompute(model, blocks=[...])"
        )
    return blocks


def _core_of(block: nn.Module, path: str) -> nn.Module:
    try:
        return block.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in block.named_modules() if name]
        raise ValueError(
            f"{type(block).__name__} has no module {path!r}, which what='selective' computes "
            f"again; give its path as core=..., one of {', '.join(names)}"
        ) from None
