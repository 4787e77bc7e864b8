"""What the ranks of a strategy agree on: they have the same parameters in the same order, equal to
rank 0's; no other strategy has them; they stay what they were when the module was wrapped.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from labkit.comm import Comm


def marks_of(x: Tensor) -> list[Any]:
    """Each a `Mark` (shards.py): other ranks have other parts of `x`, or of its gradient."""
    return [vars(x)[name] for name in ("_labkit_shard", "_labkit_sequence") if name in vars(x)]


def check_same_on_all_ranks(
    named: Sequence[tuple[str, Tensor]], comm: Comm, averaged: bool = True
) -> None:
    """Raises ValueError on every rank when names, shapes, dtypes, order or frozen ones differ, or
    where a mark forbids `comm`; `averaged`: to average gradients over it."""
    for name, x in named:
        for mark in marks_of(x):
            mark.check(name, comm, averaged)
    mine = [_described(name, x) for name, x in named]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    every = comm.all_gather_object(mine)
    rank = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    both = zip_longest(every[0], every[rank], fillvalue="missing")
    for position, (here, there) in enumerate(both):
        if here != there:
            raise ValueError(
                f"the ranks have different models: parameter {position} is {here} on rank 0 and "
                f"{there} on rank {rank}; build the same model, in the same order, on every rank"
            )


def _described(name: str, x: Tensor) -> str:
    frozen = "" if x.requires_grad else ", frozen"
    part = "".join(f", {text}" for mark in marks_of(x) if (text := str(mark)))
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{frozen}{part}"


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters to be averaged. Raises ValueError when there are none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, so there is nothing to "
            "synchronise; use the module as it is"
        )
    return parameters


def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, src: int = 0) -> None:
    """Make all ranks' tensors equal to rank `src`'s."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x.detach())
    for group in kinds.values():
        comm.broadcast(flat := _flatten_dense_tensors(group), src)
        for x, part in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            x.copy_(part)


def claim(named: Iterable[tuple[str, Tensor]], owner: object) -> None:
    """Make `owner` their strategy, while it lives. Raises ValueError where one has another."""
    named = list(named)
    for name, parameter in named:
        before = owner_of(parameter)
        if before is not None and before is not owner:
            raise ValueError(
                f"{type(owner).__name__}: {name} belongs to a {type(before).__name__} already; "
                "a module is wrapped once: unwrap it (`.module`) and delete the other first"
            )
    for _, parameter in named:
        parameter._labkit_owner = WeakMark(owner)  # type: ignore[attr-defined]


def owner_of(parameter: Tensor) -> Any:
    return getattr(parameter, "_labkit_owner", _nobody)()


def pipeline_with(parameter: Tensor) -> Any:
    """The pipeline of which a stage here has it, or None."""
    return getattr(parameter, "_labkit_pipeline", _nobody)()


class WeakMark(ref):
    """A weak reference, as an attribute of a parameter; a pickled parameter has a dead one."""

    def __reduce__(self) -> Any:
        return partial, (_nobody,)


def _nobody() -> None: ...


class ParamSnapshot:
    def __init__(self, module: nn.Module):
        self._modules = list(module.modules())  # kept, so that no other gets the id of one
        self._parameters = list(module.parameters())
        self._places: list[dict[str, Any]] = []
        for part in self._modules:
            self._places += [part._parameters, part._modules]
        self._before, self._fingerprint_before = self._now(), self._fingerprint()

    def _fingerprint(self) -> tuple[list[int], list[bool]]:
        """Which tensors are where, and which are frozen: much cheaper than their names."""
        present = chain.from_iterable(map(dict.values, self._places))
        return [*map(id, present)], [p.requires_grad for p in self._parameters]

    def _now(self) -> dict[str, tuple[int, bool]]:
        named = self._modules[0].named_parameters()
        return {name: (id(p), p.requires_grad) for name, p in named}

    def check(self) -> None:
        """Raises ValueError, naming the parameter that has changed."""
        if self._fingerprint() == self._fingerprint_before:
            return
        now = self._now()
        for name in {**self._before, **now}:
            was, is_now = self._before.get(name), now.get(name)
            if was != is_now:
                break
        else:
            return  # modules without parameters
        if was is None or is_now is None:
            what = "was added" if was is None else "was removed"
        elif was[0] != is_now[0]:
            what = "is another tensor"
        else:
            what = "takes gradients now" if is_now[1] else "was frozen"
        raise ValueError(
            f"{name} {what} after the module was wrapped; change a module first, then wrap it"
        )
