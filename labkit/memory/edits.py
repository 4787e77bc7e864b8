"""Recompute or offload the activations of a function or model, without changing its code.

    recompute(fn, x)                              recomputes a function from its inputs
    Recompute(model)                              each block from its input: keeps 2sbh bytes
    Recompute(model, what="selective")            only the attention core: keeps 34sbh bytes
    Recompute(model, what=keep_products)          each block, except its matmuls
    Recompute(model, blocks=model.blocks[:4])     some of the blocks
    Choices(model, ("none", "full", "offload"))   one choice for each block

Only the modules' `forward` methods change; names, parameters, hooks and checkpoints stay the same.
So any strategy works, whether it wraps the model before or after the edit.

Source: Korthikanti et al., arXiv 2205.05198, section 5 (b sequences of s tokens, width h, a heads).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar

from torch import nn

from labkit.memory.offload import Offload
from labkit.memory.policies import Kept, Policy
from labkit.memory.recompute import Check, Recomputed

CHOICES = ("none", "selective", "full", "offload")
Result = TypeVar("Result")


def recompute(
    fn: Callable[..., Result],
    *args: Any,
    policy: Policy | None = None,
    preserve_rng: bool = True,
    check: Check = "shapes",
    **kwargs: Any,
) -> Result:
    """Call `fn(*args, **kwargs)` and keep only its inputs; backward reruns `fn`.

    Args:
        fn: a function or module. Both runs must compute the same result and leave inputs unchanged.
            Side effects happen twice; BatchNorm, for example, counts a batch twice.
        policy: `policy(op) -> bool`; True also keeps the results of `op`.
        preserve_rng: restore torch's default generators, so that dropout draws the same masks.
        check: "shapes" compares the number, shapes, dtypes and devices of the tensors that both
            runs save; "values" also compares elements, which takes time; "none" compares nothing.

    Gradients are the same as without recompute, bit for bit if the same kernels run. Calls may
    nest, and backward may run several times. Raises ValueError if `fn` changes an input or behaves
    differently in backward, and RuntimeError if a parameter that backward needs (a weight, but not
    a bias) has changed since forward."""
    kept = None if policy is None else partial(Kept, policy)
    return Recomputed(fn, kept, preserve_rng, check)(*args, **kwargs)


class _ForwardEdits(AbstractContextManager["_ForwardEdits"]):
    """Replaces `forward` methods; `remove()`, or leaving the context, restores the originals."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def remove(self) -> None:
        while self._before:
            module, forward = self._before.pop()
            del module.forward
            if forward is not None:  # an instance attribute set before the edit
                module.forward = forward

    def __exit__(self, *_: Any) -> None:
        self.remove()


class Recompute(_ForwardEdits):
    """Edits `model` so that backward recomputes parts of its forward.

    Args:
        what: "full": whole blocks; "selective": each block's module `core`; a policy: whole blocks,
            except ops for which `policy(op)` is True (see policies.py).
        blocks: the blocks to edit; by default the entries of the outermost ModuleLists.
        core: the path from a block to its attention core.
        preserve_rng, check: as for `recompute`.

    Raises ValueError if there are no blocks, a core is missing, or a module is already edited."""

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
            raise ValueError(f'what={what!r}: choose "full", "selective" or a policy (op) -> bool')
        modules = blocks_of(model) if blocks is None else blocks
        if what == "selective":
            modules = [_core_of(block, core) for block in modules]
        modules = list(dict.fromkeys(modules))  # blocks may share a core
        for module in modules:
            if isinstance(module.__dict__.get("forward"), Recomputed):
                raise ValueError(
                    f"this {type(module).__name__} is already recomputed; call remove() of the "
                    "first Recompute, or choose other blocks"
                )
        kept = partial(Kept, what) if callable(what) else None
        for module in modules:
            self._replace(module, Recomputed(module.forward, kept, preserve_rng, check))


class Choices(_ForwardEdits):
    """Edits `model` so that block i follows `chosen[i]`, one of CHOICES. `remove()` undoes it.

        choice       what happens to the block's activations    bytes kept
        none         they stay in device memory                 sbh(34 + 5as/h)
        selective    the attention core is recomputed           34sbh
        full         the block is recomputed from its input     2sbh
        offload      they move to host memory and back          0, plus tensors in flight

    `chosen`: one choice for each block, or one for all; `blocks`, `core`: as for `Recompute`;
    `offload`: from `offload_activations(model)`. Raises ValueError for an unknown choice, a wrong
    number of choices, or "offload" without `offload`."""

    def __init__(
        self,
        model: nn.Module,
        chosen: str | Sequence[str],
        blocks: Iterable[nn.Module] | None = None,
        core: str = "attn.core",
        offload: Offload | None = None,
    ):
        super().__init__()
        all_blocks = blocks_of(model) if blocks is None else list(blocks)
        names = [chosen] * len(all_blocks) if isinstance(chosen, str) else list(chosen)
        if len(names) != len(all_blocks) or not set(names) <= set(CHOICES):
            raise ValueError(
                f"chosen={chosen!r}: pass one of {', '.join(CHOICES)} for each of the "
                f"{len(all_blocks)} blocks"
            )
        if "offload" in names and offload is None:
            raise ValueError(
                '"offload" needs an offloader; pass offload=offload_activations(model)'
            )
        for what in ("selective", "full"):
            if chosen_blocks := [block for block, name in zip(all_blocks, names) if name == what]:
                self._before += Recompute(model, what, chosen_blocks, core)._before
        for block, name in zip(all_blocks, names):
            if name == "offload" and offload is not None:
                self._replace(block, partial(offload.run, block.forward))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost ModuleLists. Raises ValueError if there are none."""

    def blocks_in(module: nn.Module) -> list[nn.Module]:
        if isinstance(module, nn.ModuleList):
            return list(module)
        return [block for child in module.children() for block in blocks_in(child)]

    if not (blocks := blocks_in(model)):
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks; name the modules to recompute: "
            "Recompute(model, blocks=[...])"
        )
    return blocks


def _core_of(block: nn.Module, path: str) -> nn.Module:
    try:
        return block.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in block.named_modules() if name]
        raise ValueError(
            f"{type(block).__name__} has no module {path!r}, which what='selective' recomputes; "
            f"pass its path as core=..., one of {', '.join(names)}"
        ) from None
