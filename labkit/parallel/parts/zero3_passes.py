"""The passes of ZeRO-3 over a model: in which order units are used, which backward runs, what
tensors go in and come out, and which of them autograd keeps from forward to backward.

    forward     x --view--> [  unit  ] --> y
    backward        ^  after it          ^  before it: hooks on the gradients of the view and of y
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import is_not
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


def watch_outputs(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Have `hook` called before the backward of what a unit has put out."""
    found = list(tensors_in(output))
    if not found and output is not None:
        raise ValueError(
            f"ZeRO3: a unit has put out a {type(output).__name__}, in which no tensor is "
            "found; let it return tensors, also in tuples, lists, dicts or dataclasses"
        )
    for x in found:
        if x.requires_grad:
            x.register_hook(hook)


def watch_inputs(inputs: Any, hook: Callable[[torch.Tensor], None]) -> tuple[int, Any]:
    """Have `hook` called with the gradient of each of a unit's inputs; returns how many have one,
    and what to give to the unit: views. The gradient of a view is there before that of the tensor
    itself, for which the unit before is called."""
    views: list[torch.Tensor] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad or x.layout != torch.strided:
            return x
        views.append(x.view_as(x))
        views[-1].register_hook(hook)
        return views[-1]

    given = mapped(inputs, watched)
    return len(views), given


class SavedParameters:
    """What autograd saves for backward is often a parameter, whose memory is gone by then. Of which
    unit it was is noted, for what reaches it by another way than the unit's output (a loss that a
    layer keeps aside)."""

    def __init__(self, units: list[Unit], use: Callable[[Unit], None]):
        self._use = use
        self._unit_of_memory = {
            flat.full.flat.untyped_storage()._cdata: unit for unit in units for flat in unit.flats
        }

    def come_back(self) -> torch.autograd.graph.saved_tensors_hooks:
        """`with` this: forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._saved, self._wanted_back)

    def _saved(self, x: torch.Tensor) -> torch.Tensor | tuple[Unit, torch.Tensor]:
        unit = self._unit_of_memory.get(x.untyped_storage()._cdata)
        return x if unit is None else (unit, x)

    def _wanted_back(self, saved: torch.Tensor | tuple[Unit, torch.Tensor]) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        unit, x = saved
        if not unit.is_gathered:
            self._use(unit)
        return x


def mapped(thing: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments, with each tensor replaced by what `function` makes of it. An object that
    occurs twice (`q is k`) is replaced by one object, and is kept where nothing in it changes."""
    made: dict[int, Any] = {}

    def replaced(old: Any) -> Any:
        if id(old) not in made:
            new = old
            if isinstance(old, torch.Tensor):
                new = function(old)
            elif type(old) in (tuple, list, dict):
                before = [*old.values()] if type(old) is dict else old
                after = [*map(replaced, before)]
                if any(map(is_not, after, before)):
                    new = dict(zip(old, after)) if type(old) is dict else type(old)(after)
            made[id(old)] = new
        return made[id(old)]

    return replaced(thing)


def cast(thing: Any, dtype: torch.dtype) -> Any:
    """The same arguments, with tensors of real numbers in `dtype`."""
    return mapped(thing, lambda x: x.to(dtype) if x.is_floating_point() else x)
