"""Checks that a wrapped module has one owner and the same, unchanged parameters on all ranks;
registers callbacks for the end of backward."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from labkit.comm import Comm


class Mark:
    """Marks a parameter whose data or gradient differs between the ranks of `comm`."""

    comm: Comm

    def attach_to(self, parameter: Tensor) -> None: ...

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        """Raises ValueError if ranks of `comm` hold different parts of parameter `name` or, with
        `averaged`, if its gradients must not be averaged over `comm` alone."""
        raise NotImplementedError


def marks_of(parameter: Tensor) -> list[Mark]:
    """The marks of `parameter`: its `Shard` first, then sequence marks."""
    attributes = [vars(parameter)[name] for name in sorted(vars(parameter), reverse=True)]
    return [x for x in attributes if isinstance(x, Mark)]


def check_same_on_all_ranks(
    named: Sequence[tuple[str, Tensor]], comm: Comm, averaged: bool = True
) -> None:
    """Raises ValueError, on every rank, if names, shapes, dtypes, order or frozen parameters differ
    between ranks, or if a mark forbids `comm` (with `averaged`: averaging over `comm`)."""
    for name, x in named:
        for mark in marks_of(x):
            mark.check(name, comm, averaged)
    own = [_describe(name, x) for name, x in named]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    models = comm.all_gather_object(own)
    rank = next(rank for rank, model in enumerate(models) if model != models[0])
    pairs = zip_longest(models[0], models[rank], fillvalue="missing")
    for position, (first, other) in enumerate(pairs):
        if first != other:
            raise ValueError(
                f"the ranks have different models: parameter {position} is {first} on rank 0 and "
                f"{other} on rank {rank}; build the same model, in the same order, on every rank"
            )


def _describe(name: str, x: Tensor) -> str:
    frozen = "" if x.requires_grad else ", frozen"
    part = "".join(f", {text}" for mark in marks_of(x) if (text := str(mark)))
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{frozen}{part}"


def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, src: int = 0) -> None:
    """Overwrites the tensors on all ranks with rank `src`'s."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x.detach())
    for group in kinds.values():
        comm.broadcast(flat := _flatten_dense_tensors(group), src)
        for x, part in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            x.copy_(part)


def check_trainable(module: nn.Module) -> None:
    """Raises ValueError if no parameter requires gradients."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, so there is nothing to "
            "synchronize; use the module as it is"
        )


def claim(named: Iterable[tuple[str, Tensor]], owner: object) -> None:
    """Registers `owner` for the parameters; raises ValueError if any has a different live owner."""
    named = list(named)
    for name, parameter in named:
        current = owner_of(parameter)
        if current is not None and current is not owner:
            raise ValueError(
                f"{type(owner).__name__}: {name} already belongs to a {type(current).__name__}; "
                "wrap a module only once: unwrap it (`.module`) and delete the other wrapper first"
            )
    for _, parameter in named:
        parameter._labkit_owner = WeakMark(owner)  # type: ignore[attr-defined]


def owner_of(parameter: Tensor) -> Any:
    """The live strategy that claimed `parameter`, or None."""
    return getattr(parameter, "_labkit_owner", _no_owner)()


def pipeline_with(parameter: Tensor) -> Any:
    """The pipeline with `parameter` in one of this rank's stages, or None."""
    return getattr(parameter, "_labkit_pipeline", _no_owner)()


class WeakMark(ref):
    """A weak reference stored on a parameter; pickling replaces it with a dead reference."""

    def __reduce__(self) -> Any:
        return partial, (_no_owner,)


def _no_owner() -> None: ...


class ParamSnapshot:
    """Records the tensor and the frozen state of each parameter name, to detect later changes."""

    def __init__(self, module: nn.Module):
        self._modules = list(module.modules())  # kept alive, so that their ids are not reused
        self._parameters = list(module.parameters())
        self._places: list[Any] = [x for m in self._modules for x in (m._parameters, m._modules)]
        self._before, self._fingerprint_before = self._now(), self._fingerprint()

    def _fingerprint(self) -> tuple[list[int], list[bool]]:
        present = chain.from_iterable(map(dict.values, self._places))
        return [*map(id, present)], [p.requires_grad for p in self._parameters]

    def _now(self) -> dict[str, tuple[int, bool]]:
        return {name: (id(p), p.requires_grad) for name, p in self._modules[0].named_parameters()}

    def check(self) -> None:
        """Raises ValueError if a parameter was added, removed, replaced, frozen or unfrozen."""
        if self._fingerprint() == self._fingerprint_before:
            return
        now = self._now()
        for name in {**self._before, **now}:
            old, new = self._before.get(name), now.get(name)
            if old == new:
                continue
            if old is None or new is None:
                what = "was added" if old is None else "was removed"
            elif old[0] != new[0]:
                what = "was replaced by another tensor"
            else:
                what = "was unfrozen" if new[1] else "was frozen"
            after = "after the module was wrapped; change a module first, then wrap it"
            raise ValueError(f"{name} {what} {after}")


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the running backward ends, before `backward()` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def running_backward() -> int | None:
    """The id of the running backward; None outside backward."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task
