"""What must hold before and while a strategy trains a module: the ranks have the same parameters in
the same order, no other strategy has them, and they stay what they were. Where it does not, the
error names the parameter, on every rank.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.shards import check_replicas, check_whole_sequences, shard_of

Named = Sequence[tuple[str, torch.Tensor]]


def check_same_on_all_ranks(named: Named, comm: Comm, averaged: bool = True) -> None:
    """Raises ValueError on every rank when names, shapes, dtypes, order or frozen ones differ; or
    where a parameter is cut over these ranks, or they have different parts of one. `averaged`: its
    gradients will be averaged over them; then also where further ranks have a part of those."""
    check_replicas(named, comm)
    if averaged:
        check_whole_sequences(named, comm)
    mine = [_described(name, x) for name, x in named]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    every = comm.all_gather_object(mine)
    first, other = every[0], next(one for one in every if one != every[0])
    rank = every.index(other)
    for position, (here, there) in enumerate(zip(_padded(first, other), _padded(other, first))):
        if here != there:
            raise ValueError(
                f"the ranks have different models: parameter {position} is {here} on rank 0 and "
                f"{there} on rank {rank}; build the same model, in the same order, on every rank"
            )


def _described(name: str, x: torch.Tensor) -> str:
    frozen = "" if x.requires_grad else ", frozen"
    part = "" if (shard := shard_of(x)) is None else f", {shard}"
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{frozen}{part}"


def _padded(names: list[str], other: list[str]) -> list[str]:
    return names + ["missing"] * (len(other) - len(names))


def claim(named: Iterable[tuple[str, torch.Tensor]], owner: object) -> None:
    """Enter `owner` as the strategy that synchronises these parameters, for as long as it lives.
    Raises ValueError when one has an owner: two would average, or shard, what the other holds."""
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


def owner_of(parameter: torch.Tensor) -> Any:
    """The strategy that synchronises it, or None."""
    return getattr(parameter, "_labkit_owner", lambda: None)()


class WeakMark(ref):
    """A weak reference, as a mark on a parameter; a pickled parameter has nobody there."""

    def __reduce__(self) -> Any:
        return partial, (_nobody,)


def _nobody() -> None:
    """What an owner is called that is gone."""


class ParamSnapshot:
    """The parameters of a module as they were when it was wrapped."""

    def __init__(self, module: nn.Module):
        self._module = ref(module)
        self._parts = list(module.modules())[1:]  # kept, so that no other gets the id of one
        self._parameters = list(module.parameters())
        self._places: list[dict[str, Any]] = []
        for part in module.modules():
            self._places += [part._parameters, part._modules]
        self._before, self._fingerprint_before = self._now(), self._fingerprint()

    def _fingerprint(self) -> tuple[list[int], list[bool]]:
        """Which tensors are where, and which are frozen: much cheaper than their names."""
        present = chain.from_iterable(map(dict.values, self._places))
        return [*map(id, present)], [p.requires_grad for p in self._parameters]

    def _now(self) -> dict[str, tuple[int, bool]]:
        module = self._module()
        assert module is not None
        return {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}

    def check(self) -> None:
        """Raises ValueError, naming the parameter that is new, gone, another, frozen or thawed."""
        if self._fingerprint() == self._fingerprint_before:
            return
        now = self._now()
        for name in {**self._before, **now}:
            was, is_now = self._before.get(name), now.get(name)
            if was == is_now:
                continue
            if was is None or is_now is None:
                what = "was added" if was is None else "was removed"
            elif was[0] != is_now[0]:
                what = "is another tensor"
            else:
                what = "takes gradients now" if is_now[1] else "was frozen"
            raise ValueError(
                f"{name} {what} after the module was wrapped; change a module first, then wrap it"
            )
