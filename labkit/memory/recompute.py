"""Recompute: keep a function's inputs, and rerun the function when backward needs the rest.

    forward    x ──> [ f1 ─ f2 ─ f3 ] ──> y        autograd saves an empty slot for each tensor
    kept       x       ▫    ▫    ▫
    backward   x ──> [ f1 ─ f2 ─ f3 ]              the first use of a slot reruns f; the n-th
                       ▪    ▪    ▪                 saved tensor fills the n-th slot
                       gradients, from right to left

    kept bytes    only the inputs: 2sbh per layer, not sbh(34 + 5as/h)
    time          one more forward: 4/3 of a step if backward takes twice as long as forward

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; bytes:
Korthikanti et al., arXiv 2205.05198, section 5; slots: torch.utils.checkpoint, use_reentrant=False.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Literal
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from labkit.memory.conditions import Conditions, tensors_in

Check = Literal["shapes", "values", "none"]


class Recomputed:
    """Calls `fn` with recompute. For each call, `kept()` creates an object that keeps some results:
    its `keeping()` wraps forward, and its `serving()` wraps the rerun."""

    runs_again_in_backward = True  # read by context_parallel

    def __init__(
        self,
        fn: Callable[..., Any],
        kept: Callable[[], Any] | None = None,
        preserve_rng: bool = True,
        check: Check = "shapes",
    ):
        if check not in ("shapes", "values", "none"):
            raise ValueError(f'check={check!r}: choose "shapes", "values" or "none"')
        self.fn, self.kept, self.preserve_rng, self.check = fn, kept, preserve_rng, check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        inputs = _Inputs(args, kwargs)
        conditions = Conditions(tensors_in((args, kwargs)), self.preserve_rng)
        call = _Call(self, inputs, conditions)
        with (
            saved_tensors_hooks(call.save, call.wanted),
            call.kept.keeping() if call.kept else nullcontext(),
        ):
            output = self.fn(*args, **kwargs)
        inputs.check_unchanged(tensors_in((args, kwargs)))
        conditions.forget_unused()
        return output


class _Slot:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _Enough(BaseException):
    """Ends the rerun once all slots are filled; a user's `except Exception` does not catch it."""


class _Call:
    """One call of a function, which can be rerun. Lives as long as any of its slots."""

    def __init__(self, recomputed: Recomputed, inputs: "_Inputs", conditions: Conditions):
        self.fn, self.check = recomputed.fn, recomputed.check
        self.inputs, self.conditions = inputs, conditions
        self.kept = recomputed.kept() if recomputed.kept else None
        self.saved: list[tuple[ref[_Slot], Any]] = []  # in forward order, with `_traits`
        self.versions: dict[int, tuple[ref[torch.Tensor], int]] = {}  # of parameters, by slot

    def save(self, x: torch.Tensor) -> _Slot:
        slot = _Slot()
        if (leaf := _leaf_of(x)) is not None:
            self.versions[len(self.saved)] = ref(leaf), leaf._version
        self.saved.append((ref(slot), _traits(x, self.check)))
        return slot

    def wanted(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None:  # the first slot used in this backward
            self.run_again()
        x, slot.tensor = slot.tensor, None  # the next backward reruns the function
        assert x is not None
        return x

    def run_again(self) -> None:
        filled: list[tuple[_Slot | None, int]] = []  # with the version of its tensor

        def fill(x: torch.Tensor) -> torch.Tensor:
            slot = self._next_slot(len(filled), x)
            filled.append((slot, x._version))
            x = x.detach()  # else the graph of this run would keep itself alive
            if slot is not None:  # None: backward has released the slot
                slot.tensor = x
            if len(filled) == len(self.saved) and self.check != "values":
                raise _Enough
            return x

        args, kwargs = self.inputs.again()
        with (
            suppress(_Enough),
            self.conditions.again(),
            torch.enable_grad(),
            saved_tensors_hooks(fill, lambda x: x),
            self.kept.serving() if self.kept else nullcontext(),
        ):
            self.fn(*args, **kwargs)
        if len(filled) < len(self.saved):
            raise _differs(f"the rerun saved {len(filled)} tensors, but forward {len(self.saved)}")
        for slot, version in filled:
            if slot is not None and slot.tensor is not None and slot.tensor._version != version:
                raise ValueError(
                    "recompute: the function changed in place a tensor that backward needs, "
                    f"{_text(_traits(slot.tensor, 'shapes'))}; avoid `op_`, `out=` "
                    "and `x[...] =`, or change a copy, `x = x.clone()`"
                )

    def _next_slot(self, place: int, x: torch.Tensor) -> _Slot | None:
        if place == len(self.saved):
            raise _differs(f"the rerun saved more tensors than forward, which saved {place}")
        slot, before = self.saved[place]
        if (now := _traits(x, self.check)) != before:
            raise _differs(
                f"saved tensor {place + 1} of {len(self.saved)} is {_text(now)}, but was "
                f"{_text(before)} in forward"
            )
        leaf, (then, version) = _leaf_of(x), self.versions.get(place, (lambda: None, 0))
        if leaf is not None and leaf is then() and leaf._version != version:
            raise RuntimeError(
                f"a parameter that backward needs, {_text(_traits(leaf, 'shapes'))}, has been "
                "modified by an inplace operation since recompute used it in forward; call "
                "backward before you change it"
            )
        return slot()


class _Inputs:
    """The arguments, kept for the rerun. An autograd node saves the tensors, so outer hooks see
    them, and in-place changes are detected."""

    def __init__(self, args: Any, kwargs: Any):
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        self._versions = [x._version for x in tensors.values()]
        self._leaves = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
        self._places = list(tensors)
        self._saved: Any = None  # the output: torch 2.11 frees a node without one
        if tensors:
            anchor = torch.empty(0, requires_grad=True)
            self._saved = _Save.apply(anchor, *tensors.values())

    def again(self) -> Any:
        leaves = list(self._leaves)
        try:
            tensors = self._saved.grad_fn.saved_tensors if self._places else ()
        except RuntimeError as error:
            error.add_note("(recompute needs this input to rerun the function.)")
            raise
        for i, x in zip(self._places, tensors, strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, self._spec)

    def check_unchanged(self, tensors: list[torch.Tensor]) -> None:
        for number, (x, version) in enumerate(zip(tensors, self._versions, strict=True), start=1):
            if x._version != version:
                raise ValueError(
                    f"recompute: the function changed its input tensor {number} of {len(tensors)}, "
                    f"{_text(_traits(x, 'shapes'))}, in place, so backward cannot rerun it; avoid "
                    "`op_`, `out=` and `x[...] =`, or change a copy, `x = x.clone()`"
                )


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _traits(x: torch.Tensor, check: Check) -> Any:
    if check == "none":
        return None
    fingerprint = [_fingerprint(x)] if check == "values" else []
    return x.shape, x.dtype, x.device, *fingerprint


@torch.no_grad()
def _fingerprint(x: torch.Tensor) -> float:
    x = x.detach().resolve_conj()
    flat = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
    weights = torch.arange(1, flat.numel() + 1, device=x.device).sqrt()
    finite = flat.nan_to_num(nan=0.7, posinf=1.3e3, neginf=-1.7e3)
    return (finite * weights).sum().item()


def _leaf_of(x: torch.Tensor) -> torch.Tensor | None:
    """The parameter of which `x` is a view, `x` if it is a parameter itself, or None."""
    root = x if x._base is None else x._base
    return root if root.is_leaf and root.requires_grad else None


def _text(traits: Any) -> str:
    shape, dtype, device, *fingerprint = traits
    values = f" with fingerprint {fingerprint[0]:.6g}" if fingerprint else ""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}{values}"


def _differs(what: str) -> ValueError:
    return ValueError(
        f"recompute: the function behaved differently when backward reran it: {what}. The "
        "gradients would be wrong. Let it depend only on its arguments and parameters, not on a "
        "counter, the time, a switch between train and eval, or random numbers from NumPy, "
        "Python or your own torch.Generator"
    )
