"""What one rank holds of a model: how many bytes (`Footprint`: a strategy predicts them, and
parallel/common/held.py counts them), which elements (`OwnedPiece`), and for which strategy."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn


@dataclass(frozen=True)
class Footprint:
    """Bytes held on one rank, and `bus_bytes` sent by one rank in one step (mean over ranks)."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    bus_bytes: float


def parameter_bytes(module: nn.Module, trainable_only: bool = False) -> int:
    """Bytes of the parameters; a tied one counts once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trainable_only)


def adam_bytes(module: nn.Module) -> int:
    """Bytes of Adam's state for the trainable parameters: two moments each, and step counts."""
    tensors = sum(p.requires_grad for p in module.parameters())
    return 2 * parameter_bytes(module, trainable_only=True) + 4 * tensors


def replicated(module: nn.Module, size: int) -> Footprint:
    """Everything whole on every rank; 2(n-1)/n of the gradients sent."""
    grads = parameter_bytes(module, trainable_only=True)
    bus_bytes = 2 * (size - 1) / size * grads
    return Footprint(parameter_bytes(module), grads, adam_bytes(module), bus_bytes)


@dataclass(frozen=True)
class OwnedPiece:
    """A piece of parameter `name`, which has `shape` on this rank: from element `start` on, of the
    parameter lying flat. Optimizer state lies alike, so a checkpoint can be read into other pieces.

    tensor      what the optimizer steps on: [numel] flat, or the whole parameter, or a master copy
    optimizer   the torch optimizer whose `state[tensor]` is the piece's state; None if frozen
    shard       of a parameter that is cut over tensor-parallel ranks (parallel/common/shards.py)
    """

    name: str
    shape: torch.Size
    start: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None
    shard: Any = None

    @property
    def whole_shape(self) -> Any:
        return self.shape if self.shard is None else self.shard.whole_shape(self.shape)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters to be averaged. Raises ValueError when there are none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, so there is nothing to "
            "synchronise; use the module as it is"
        )
    return parameters


def claim(named: Iterable[tuple[str, torch.Tensor]], owner: object) -> None:
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


def owner_of(parameter: torch.Tensor) -> Any:
    """The living strategy that has claimed `parameter`, or None."""
    return getattr(parameter, "_labkit_owner", _nothing)()


def pipeline_with(parameter: torch.Tensor) -> Any:
    """The pipeline of which a stage here has `parameter`, or None."""
    return getattr(parameter, "_labkit_pipeline", _nothing)()


class WeakMark(ref):
    """A weak reference, as an attribute of a parameter; a pickled parameter has a dead one."""

    def __reduce__(self) -> Any:
        return partial, (_nothing,)


def _nothing() -> None: ...


class ParamSnapshot:
    """The parameters of `module` as they are now, by name: which tensors, and which are frozen."""

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
        """Raises ValueError, naming a parameter that was added, removed, replaced, (un)frozen."""
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
