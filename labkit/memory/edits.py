"""Which parts of a model are computed again or moved away, decided from outside its file.

    Recompute(model)                              each block, from its input         2sbh a layer
    Recompute(model, what="selective")            the core of attention, from q k v   34sbh
    Recompute(model, what=keep_products)          each block, but for the matrix products
    Recompute(model, blocks=model.blocks[:4])     some of the blocks
    Choices(model, ["full", "none", "offload"])   one of these for each block:

    none         keeps its activations                              34 + 5as/h of sbh
    selective    computes the core of attention again               34
    full         computes all of it again, from its input            2
    offload      moves them to the host's memory and back            0, and what is in flight

Names, parameters, hooks and checkpoints of the model stay what they are: only `forward` of these
modules is replaced. So it goes with any strategy, before or after it wraps the model.

Source: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, Literal, Self

from torch import nn

from labkit.memory.offload import Offload
from labkit.memory.policies import Policy
from labkit.memory.recompute import Check, Recomputed

CHOICES = ("none", "selective", "full", "offload")


class _Edit:
    """Replaces `forward` of modules. `remove()`, or the end of a `with`, restores it."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []  # a module, and its own forward before

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def remove(self) -> None:
        while self._replaced:
            module, forward = self._replaced.pop()
            del module.forward
            if forward is not None:
                module.forward = forward

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class Recompute(_Edit):
    """Edits `model` so that backward computes parts of its forward again. Use the model as before.

    Args:
        what: "full": whole blocks; "selective": in each block the module `core`; a policy:
            whole blocks, but for operations of which `policy(op)` is True (policies.py).
        blocks: which; by default the entries of the outermost ModuleLists.
        core: the path from a block to its core of attention.
        preserve_rng, check: see `recompute`.

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
        super().__init__()
        if not callable(what) and what not in ("full", "selective"):
            raise ValueError(f"what={what!r}: choose full, selective or a policy (op) -> bool")
        modules = blocks_of(model) if blocks is None else blocks
        if what == "selective":
            modules = [_core_of(block, core) for block in modules]
        modules = list(dict.fromkeys(modules))  # blocks may share one
        for module in modules:
            if isinstance(module.__dict__.get("forward"), Recomputed):
                raise ValueError(
                    f"this {type(module).__name__} is computed again already; call remove() of the "
                    "first Recompute, or give other blocks"
                )
        policy = what if callable(what) else None
        for module in modules:
            self._replace(module, Recomputed(module.forward, policy, preserve_rng, check))


class Choices(_Edit):
    """Edits `model`: block i does `chosen[i]`, one of CHOICES.

    Args:
        chosen: for each block; or one for all.
        blocks, core: as for `Recompute`.
        offload: of `offload_activations(model)`, for "offload".

    Raises ValueError for an unknown choice, another number of blocks, or a missing `offload`.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: str | Sequence[str],
        blocks: Iterable[nn.Module] | None = None,
        core: str = "attn.core",
        offload: Offload | None = None,
    ):
        super().__init__()
        modules = blocks_of(model) if blocks is None else list(blocks)
        names = [chosen] * len(modules) if isinstance(chosen, str) else list(chosen)
        if len(names) != len(modules) or not set(names) <= set(CHOICES):
            raise ValueError(
                f"chosen={chosen!r}: give one of {', '.join(CHOICES)} for each of the "
                f"{len(modules)} blocks"
            )
        if "offload" in names and offload is None:
            raise ValueError(
                "a block is to offload, but there is nothing to do it with; give "
                "offload=offload_activations(model)"
            )
        for what in ("selective", "full"):
            if blocks := [block for block, name in zip(modules, names) if name == what]:
                self._replaced += Recompute(model, what, blocks, core)._replaced
        for block, name in zip(modules, names):
            if name == "offload":
                self._replace(block, _Offloaded(block.forward, offload))


class _Offloaded:
    """`forward`, whose saved tensors are offloaded."""

    def __init__(self, forward: Callable[..., Any], offload: Any):
        self.forward, self.offload = forward, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.offload:
            return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Offloaded":
        """In a copy of the model: the copy's own method, over the same bus to the same memory."""
        return _Offloaded(deepcopy(self.forward, memo), self.offload)


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
