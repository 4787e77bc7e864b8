"""The passes of ZeRO-3 over a model: in which order units are used, which backward runs, and what
tensors go in and come out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from labkit.parallel.parts.zero3_flat import Unit


class Order:
    """In which order the units were used in the last pass, and how far this one has followed it."""

    def __init__(self) -> None:
        self._before: list[Unit] = []
        self._now: list[Unit] = []

    def begin_pass(self) -> None:
        self._before, self._now = self._now, []
        self._follows = True

    def note(self, unit: Unit) -> None:
        at = len(self._now)
        self._follows = self._follows and at < len(self._before) and self._before[at] is unit
        self._now.append(unit)

    def coming(self, number: int) -> list[Unit]:
        at = len(self._now)
        return self._before[at : at + number] if self._follows else []

    _follows = True


def running_backward() -> int | None:
    """Which backward runs now, in whose hooks or recomputed forward we are; None outside."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for one in thing:
            yield from tensors_in(one)
    elif isinstance(thing, Mapping):
        yield from tensors_in(list(thing.values()))
    elif is_dataclass(thing):
        yield from tensors_in([getattr(thing, field.name) for field in fields(thing)])


def mapped(thing: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments, with each tensor replaced by what `function` makes of it."""
    if isinstance(thing, torch.Tensor):
        return function(thing)
    if type(thing) in (tuple, list):
        return type(thing)(mapped(one, function) for one in thing)
    if type(thing) is dict:
        return {key: mapped(one, function) for key, one in thing.items()}
    return thing


def cast(thing: Any, dtype: torch.dtype) -> Any:
    """The same arguments, with tensors of real numbers in `dtype`."""
    return mapped(thing, lambda x: x.to(dtype) if x.is_floating_point() else x)
