"""Unit order and pending gradients under ZeRO-3; hooks on inputs, outputs and saved tensors."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from labkit.parallel.zero3.flat import Flat
from labkit.parallel.zero3.units import Unit

REDUCES_IN_FLIGHT = 2  # each reduction holds up to a whole unit's gradients


class Order:
    """The order of units in this pass and in the previous pass."""

    def __init__(self) -> None:
        self._now: list[Unit] = []
        self.begin_pass()

    def begin_pass(self) -> None:
        self._before, self._now = self._now, []
        self._follows = True

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """Records the use of `unit`; returns its `count` successors in the previous pass, or
        none once this pass deviates from that order."""
        at = len(self._now)
        self._follows = self._follows and at < len(self._before) and self._before[at] is unit
        self._now.append(unit)
        return self._before[at + 1 : at + 1 + count] if self._follows else []


class PendingGradients:
    """Gradients not yet reduced, per running backward (graph task)."""

    def __init__(self) -> None:
        self._to_send: dict[int, dict[Flat, None]] = {}  # in send order
        self._seen: dict[int, set[Unit]] = {}  # units used in each backward
        self._in_flight: deque[Flat] = deque()

    def __bool__(self) -> bool:
        return bool(self._to_send)

    def begin(self, task: int) -> bool:
        if task in self._to_send:
            return False  # already known
        self._to_send[task], self._seen[task] = {}, set()
        return True

    def expect(self, task: int, unit: Unit) -> None:
        if not (unit.awaited or unit.is_gathered or unit in self._seen[task]):
            self._seen[task].add(unit)
            unit.awaited = set(unit.trainable)
            self._to_send[task].update(dict.fromkeys(unit.trainable))

    def reduce(self, flat: Flat, async_op: bool) -> None:
        """Reduces the gradients of `flat`; at most `REDUCES_IN_FLIGHT` reductions run at once."""
        for pending in self._to_send.values():
            pending.pop(flat, None)
        while len(self._in_flight) >= REDUCES_IN_FLIGHT:
            self._in_flight.popleft().receive_gradients()
        flat.send_gradients(async_op)
        self._in_flight.append(flat)

    def finish(self, task: int) -> None:
        for flat in list(self._to_send[task]):
            self.reduce(flat, async_op=False)
        while self._in_flight:
            self._in_flight.popleft().receive_gradients()
        del self._to_send[task], self._seen[task]

    def clear(self) -> None:
        for queue in (self._to_send, self._seen, self._in_flight):
            queue.clear()


class SavedParameters:
    """Autograd saves gathered parameters, which are freed before backward needs them. These hooks
    gather the unit again even if backward bypasses the unit's output (as an auxiliary loss may)."""

    def __init__(self, units: list[Unit], use: Callable[[Unit], None]):
        self._use = use
        self.unit_of_memory = {
            flat.full.flat.untyped_storage()._cdata: unit for unit in units for flat in unit.flats
        }

    def shares_memory(self, output: Any, unit: Unit) -> bool:
        """Whether `output` contains a view of a parameter of `unit`."""
        memories = (x.untyped_storage() for x in tensors_in(output) if x.layout == torch.strided)
        return any(self.unit_of_memory.get(memory._cdata) is unit for memory in memories)

    def pack(self, x: Tensor) -> tuple[Unit | None, Tensor]:
        """Called by autograd to save `x`; pairs `x` with the unit that owns its memory, if any."""
        return self.unit_of_memory.get(x.untyped_storage()._cdata), x

    def unpack(self, saved: tuple[Unit | None, Tensor]) -> Tensor:
        """Called by autograd to read a saved tensor; gathers its unit first."""
        unit, x = saved
        if unit is not None and not unit.is_gathered:
            self._use(unit)
        return x


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        yield from tensors_in(list(nested.values()))
    elif is_dataclass(nested):
        yield from tensors_in([getattr(nested, field.name) for field in fields(nested)])
    elif isinstance(nested, (tuple, list)):
        for x in nested:
            yield from tensors_in(x)


def watch_outputs(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Calls `hook` with output gradients; raises ValueError if a non-None output has no tensor."""
    outputs = list(tensors_in(output))
    if not outputs and output is not None:
        raise ValueError(
            f"ZeRO3: a unit's output ({type(output).__name__}) has no tensor; return tensors, "
            "alone or in tuples, lists, dicts or dataclasses"
        )
    for x in outputs:
        if x.requires_grad:
            x.register_hook(hook)


def watch_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], hook: Callable[[Tensor], None]
) -> tuple[int, Any]:
    """Calls `hook` with the gradient of each input tensor (not in containers), before the previous
    unit's backward; returns the input count and (args, kwargs) with views to pass to the unit."""
    values = [*args, *kwargs.values()]
    nested = {id(x) for x in tensors_in([y for y in values if not isinstance(y, Tensor)])}
    views = {
        id(x): x.view_as(x) for x in values
        if isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided
        and id(x) not in nested
    }  # fmt: skip
    for view in views.values():
        view.register_hook(hook)
    values = [views.get(id(x), x) for x in values]
    return len(views), (tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :])))


def cast(nested: Any, dtype: torch.dtype) -> Any:
    """Casts each floating-point tensor to `dtype` once, so that `q is k` still holds."""
    done: dict[int, Tensor] = {}

    def convert(x: Tensor) -> Tensor:
        return done.setdefault(id(x), x.to(dtype)) if x.is_floating_point() else x

    return tree_map_only(Tensor, convert, nested)
