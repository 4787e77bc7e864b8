"""One training step in detail: memory by category, FLOPs and bytes per span.

A dispatch mode intercepts every operation. The mode adds the operation's FLOPs and bytes moved to
the current span, and a ledger lists each storage (which many tensors may share) until it is freed.

    parameters              of modules, and parameters that a strategy keeps separately
    gradients               storages of `.grad`, including buckets; an optimizer's
                            `gradient_pieces()`
    optimizer state         moments, and parameter copies that the optimizer updates
    activations             allocated in forward and not yet freed
    communication buffers   allocated inside the communicator
    other                   allocated in backward or by the optimizer; batches; module buffers

Recording takes longer than the step itself: use this step for counting, never for timing.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from labkit.dispatch import DispatchMode
from labkit.memory.buffers import is_host_memory
from labkit.memory.conditions import tensors_in
from labkit.parallel.common.sharder import OwnsGradientPieces, implements
from labkit.trace import CATEGORIES, MemoryPoint, RankTrace
from labkit.trace.recording.operations import operation_of
from labkit.trace.recording.spans import Spans

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, OTHER = range(len(CATEGORIES))
FREEING = ("backward", "optimizer")  # phases that create no activations
QUERY_DEVICE = torch.ops.prim.device.default  # called often on fake tensors


class Ledger:
    """Live storages by category. Every change calls `changed` with the bytes of each category."""

    def __init__(self, changed: Callable[[tuple[int, ...]], object]):
        self._changed = changed
        self._lock = threading.RLock()  # reentrant: entering a storage may free another
        self._held: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # id -> ref, category, bytes
        self._sums = [0] * len(CATEGORIES)

    def enter(self, x: torch.Tensor, category: int, move: bool = False) -> None:
        """Enter the storage of `x` if new; with `move`, recategorize a known storage."""
        storage = x.untyped_storage()
        key = id(storage)
        with self._lock:
            if key in self._held and self._held[key][0]() is storage:
                _, was, nbytes = self._held[key]
                if not move or was == category:
                    return
                self._sums[was] -= nbytes
            nbytes = storage.nbytes()
            watcher = weakref.ref(storage, lambda ref: self._leave(key, ref))
            self._held[key] = (watcher, category, nbytes)
            self._sums[category] += nbytes
            self._changed(tuple(self._sums))

    def has(self, x: torch.Tensor, category: int) -> bool:
        """Whether the storage of `x` is in this category."""
        return self._held.get(id(x.untyped_storage()), (None, None))[1] == category

    def _leave(self, key: int, ref: "weakref.ref[Any]") -> None:
        with self._lock:
            if key in self._held and self._held[key][0] is ref:
                _, category, nbytes = self._held.pop(key)
                self._sums[category] -= nbytes
                self._changed(tuple(self._sums))

    def measure_again(self, only: Any = None) -> None:
        """Update the size of storage `only`, or of all if None: strategies may resize storages."""
        with self._lock:
            for key in list(self._held) if only is None else [id(only)]:
                ref, category, nbytes = self._held.get(key, (None, 0, 0))
                storage = ref() if ref else None
                if ref and storage is not None and (only is None or only is storage):
                    self._held[key] = (ref, category, storage.nbytes())
                    self._sums[category] += storage.nbytes() - nbytes
            self._changed(tuple(self._sums))


class Detail:
    """Records memory and operations from `begin` to `end` in `trace` and `spans`."""

    def __init__(self, spans: Spans, trace: RankTrace):
        self._spans, self._trace = spans, trace
        self._ledger = Ledger(self._changed)
        self._modules: list[nn.Module] = []
        self._in_place = ExitStack()  # hooks and patches, removed at the end of the step
        self._tracked: set[int] = set()  # ids of parameters kept alive by hooks
        self._communicating = threading.local()
        self._thread = threading.get_ident()
        self._counting = False

    def begin(self, modules: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
        """Enter existing tensors, then start counting."""
        for module in modules:
            self.add_module(module)
        for optimizer in optimizers:
            self.enter_state(optimizer)
        gc.collect()  # excludes cyclic garbage from earlier runs
        for x in gc.get_objects():
            if type(x) not in (torch.Tensor, nn.Parameter, FakeTensor):
                continue  # (isinstance would load lazy objects)
            if not isinstance(x, nn.Parameter):
                self._enter(x, OTHER)
            elif not self._ledger.has(x, OPTIMIZER):  # a master copy is also a Parameter
                self._track(x)
        resize = torch.UntypedStorage.resize_

        def resize_and_measure(storage: Any, size: int) -> Any:  # dispatch modes miss resizes
            resized = resize(storage, size)
            self._ledger.measure_again(only=storage)
            return resized

        self._in_place.enter_context(
            patch.object(torch.UntypedStorage, "resize_", resize_and_measure)
        )
        self._counting = True
        self._ledger.measure_again()
        self._in_place.enter_context(_Mode(self))

    def end(self) -> None:
        self._counting = False
        self._in_place.close()

    def add_module(self, root: nn.Module) -> None:
        """Enter a module's parameters, and keep the module alive."""
        if not any(root is module for module in self._modules):
            self._modules.append(root)
            for parameter in root.parameters():
                self._track(parameter)

    def _track(self, parameter: torch.Tensor) -> None:
        self._enter(parameter, PARAMETERS, move=True)
        self._on_grad_ready(parameter)
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._tracked:
            self._tracked.add(id(parameter))
            # torch's method: a ZeRO-3 shard's override refuses hooks that would never run
            hook = torch.Tensor.register_post_accumulate_grad_hook(parameter, self._on_grad_ready)
            self._in_place.callback(hook.remove)

    def enter_state(self, optimizer: Any) -> None:
        """Enter an optimizer's state, parameter copies, and owned gradients."""
        given = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for stepped_on, state in optimizer.state.items():
            for x in state.values():
                if isinstance(x, torch.Tensor):
                    self._enter(x, OPTIMIZER, move=True)
            if id(stepped_on) not in given and not self._ledger.has(stepped_on, PARAMETERS):
                self._enter(stepped_on, OPTIMIZER, move=True)
        if implements(optimizer, OwnsGradientPieces):
            for x in optimizer.gradient_pieces()[0]:
                self._enter(x, GRADIENTS, move=True)
        self._ledger.measure_again()

    def _on_grad_ready(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._enter(parameter.grad, GRADIENTS, move=True)

    @contextmanager
    def inside_communicator(self) -> Iterator[None]:
        """Count new memory in this context as communication buffers, in any thread."""
        outer, self._communicating.on = getattr(self._communicating, "on", False), True
        try:
            with nullcontext() if threading.get_ident() == self._thread else _Mode(self):
                yield
        finally:
            self._communicating.on = outer

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a completed operation and its tensors."""
        communicating, span = getattr(self._communicating, "on", False), self._spans.innermost
        category = OTHER
        if communicating:
            category = BUFFERS
        elif self._spans.in_forward and (span is None or span.phase not in FREEING):
            category = ACTIVATIONS
        for x in tensors_in((args, kwargs)):
            self._enter(x, OTHER)
        for x in tensors_in(out):
            self._enter(x, category)
        if communicating:
            return
        counted = operation_of(func, args, kwargs, out, time.monotonic(), self._spans.step)
        if counted is not None:
            self._trace.operations.append(counted)
        if span is not None:
            span.flops = (span.flops or 0) + (counted.flops if counted else 0)
            span.moved_bytes = (span.moved_bytes or 0) + (counted.moved_bytes if counted else 0)

    def _enter(self, x: torch.Tensor, category: int, move: bool = False) -> None:
        if x.layout is torch.strided and x.device.type != "meta" and not is_host_memory(x):
            self._ledger.enter(x, category, move)

    def _changed(self, held_bytes: tuple[int, ...]) -> None:
        if self._counting:
            point = MemoryPoint(time.monotonic(), self._spans.step, held_bytes)
            self._trace.memory.append(point)


class _Mode(DispatchMode):
    def __init__(self, detail: Detail):
        super().__init__()
        self._detail = detail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is QUERY_DEVICE:
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # prim operations only query tensors
            self._detail.count(func, args, kwargs or {}, out)
        return out
