"""Forward, backward and optimizer spans per module, for any model and training loop.

    forward     every module call is wrapped (at a fifth of the cost of torch's global module
                hooks); spans nest like modules
    backward    the last autograd node that a module creates in forward runs first in its backward:
                a hook on this node begins the module's span and ends the previous span. Nodes that
                a parent creates between child modules begin a span of the parent.
    optimizer   hooks before and after `step`, which ends a training step

Models, strategies and training loops need no changes.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labkit.runtime.clock import Clock
from labkit.trace import Span

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # next sequence number
_LEAF = 2**64 - 1  # sequence number of AccumulateGrad nodes
FREE = {  # nodes that only pass on the gradient
    f"{name}Backward0"
    for name in (
        "Add", "Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Split", "Squeeze",
        "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
}  # fmt: skip


_Hooks = dict[int, Callable[..., Any]]


@dataclass(slots=True, eq=False)
class _NamedModule:
    """A module, its name and class, and the hooks that begin its backward span."""

    module: "ref[nn.Module]"
    name: str
    kind: str
    hooks: _Hooks


class Spans:
    """Creates one rank's spans while the hooks are installed (`with spans:`).

    `done(span)` is called when a span ends, `step_ended(optimizer)` after an optimizer step, and
    `root_called(root)` before the forward of an outermost module.
    """

    def __init__(
        self,
        clock: Clock,
        done: Callable[[Span], None],
        step_ended: Callable[[torch.optim.Optimizer], None],
        root_called: Callable[[nn.Module], None],
    ):
        self.step = 0
        self.clock, self._done = clock, done
        self._step_ended, self._root_called = step_ended, root_called
        self._open: list[Span] = []  # outermost first
        self._of_user: list[Span] = []  # user spans, outside the nesting
        self._running: Span | None = None  # of the module whose backward is running
        self._known: dict[int, _NamedModule] = {}  # by id(module)
        self._hooks: dict[tuple[str, str], _Hooks] = {}  # by module name and class
        self._hook_holder = torch.empty(0)  # see `_mark`
        self._loss: Span | None = None  # begins at the end of the outermost forward
        self._on, self._thread = False, 0
        self._marked_until = -1  # next sequence number at the last mark
        # (module, first node, count): nodes that a parent created before this module, none of which
        # could be marked; these nodes are skipped.
        self._nothing_before: set[tuple[_NamedModule, int, int]] = set()
        self._first_node = 0  # first autograd node of the outermost forward
        self._in_place = ExitStack()

    def __enter__(self) -> "Spans":
        for handle in (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ):
            self._in_place.callback(handle.remove)
        self._thread, self._on = threading.get_ident(), True
        call, backward = nn.Module.__call__, torch.autograd.backward
        for change in (
            patch.object(nn.Module, "__call__", self._recorded(call)),
            patch.object(torch.autograd, "backward", partial(self._backward, backward)),
        ):
            self._in_place.enter_context(change)
        return self

    def __exit__(self, *_: Any) -> None:
        self._in_place.close()
        self._open.clear()
        self._of_user.clear()
        self._running, self._loss, self._on = None, None, False

    @property
    def in_forward(self) -> bool:
        """Whether a module's forward is running or the loss is being computed."""
        return self._loss is not None or (bool(self._open) and self._open[-1].phase == "forward")

    @property
    def innermost(self) -> Span | None:
        """The innermost open span, preferring module spans to user spans."""
        return self._running or next(
            (spans[-1] for spans in (self._open, self._of_user) if spans), None
        )

    def still_open(self) -> list[Span]:
        return [*self._of_user, *self._open, *([self._running] if self._running else [])]

    def begin(self, phase: str, module: str, kind: str = "") -> Span:
        depth = len(self._open) + (self._running is not None)
        span = Span(phase, module, self.step, 0.0, 0.0, depth, kind)
        self.clock.begin(span)
        (self._of_user if phase == "user" else self._open).append(span)
        return span

    def end(self, span: Span) -> None:
        """End `span` and any nested spans that an error left open."""
        spans = self._of_user if span.phase == "user" else self._open
        last = None
        while last is not span and any(x is span for x in spans):
            last = spans.pop()
            self._finish(last)

    def _finish(self, span: Span) -> None:
        self.clock.end(span)
        self._done(span)

    # --- forward ---

    def _recorded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` (`nn.Module.__call__`) in a span. The wrapper runs hundreds of times per step
        with cold caches, so it does as little as possible."""
        get_ident, is_compiling = threading.get_ident, torch.compiler.is_dynamo_compiling
        spans, all_known, nothing_before = self._open, self._known, self._nothing_before

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != self._thread:
                return call(module, *args, **kwargs)  # record only one thread, no compiled code
            if outermost := not spans:
                self._root_called(module)
                self._first_node = _next_node()
            known = all_known.get(id(module))
            if known is None or known.module() is not module:
                known = self._name_modules(module)
            if not outermost and (made := _next_node() - self._marked_until):
                place = known, self._marked_until - self._first_node, made
                if place in nothing_before:
                    self._marked_until += made
                elif not self._mark_input(args):
                    nothing_before.add(place)
            span = Span("forward", known.name, self.step, 0.0, 0.0, len(spans), known.kind)
            clock = self.clock
            clock.begin(span)
            spans.append(span)
            try:
                output = call(module, *args, **kwargs)
                if _next_node() != self._marked_until:
                    self._mark(output, known.hooks)
                return output
            finally:
                if spans and spans[-1] is span:
                    spans.pop()
                    clock.end(span)
                    self._done(span)
                else:
                    self.end(span)
                if outermost:  # time until backward counts as the loss
                    self._loss = Span("forward", "loss", self.step, 0.0, 0.0, 0, "loss")
                    clock.begin(self._loss)

        return recorded_call

    def _name_modules(self, root: nn.Module) -> _NamedModule:
        """Name `root` and every module below it, without a wrapper's "module." prefix."""
        for path, module in root.named_modules():
            known = self._known.get(id(module))
            if known is None or known.module() is not module:
                name = path.removeprefix("module.") if path != "module" else ""
                kind = type(module).__name__
                hooks = self._hooks_of(name, kind)
                self._known[id(module)] = _NamedModule(ref(module), name, kind, hooks)
        return self._known[id(root)]

    # --- backward ---

    def _mark(self, output: Any, hooks: _Hooks, by_parent: bool = False) -> bool:
        """Make backward call `hooks` at nodes that created these tensors; return whether any node
        was marked. Nodes before the last mark are skipped: most are already marked."""
        since, self._marked_until = self._marked_until, _next_node()
        marked: list[int] = []
        for value in (output,) if type(output) is torch.Tensor else _tensors((output,)):
            node: Any = value.grad_fn
            while node is not None and since <= (number := node._sequence_nr()) < _LEAF:
                if not by_parent or type(node).__name__ not in FREE:
                    if number not in marked:  # one node may create several tensors
                        marked.append(number)
                        # Registering a tensor's hook dict costs a third of `register_prehook`.
                        # All nodes share one holder: a tensor per module would be allocated
                        # among the activations and fragment the heap.
                        self._hook_holder._backward_hooks = hooks
                        node._register_hook_dict(self._hook_holder)
                    break
                node = node.next_functions[0][0]  # this node only passes on the gradient
        return bool(marked)

    def _mark_input(self, args: tuple[Any, ...]) -> bool:
        """Mark the nodes that a parent created after its last child module as the parent's."""
        parent = self._open[-1]
        return self._mark(args, self._hooks_of(parent.module, parent.kind), by_parent=True)

    def _hooks_of(self, module: str, kind: str) -> _Hooks:
        """The hooks for autograd nodes of modules with this name and class."""
        if (module, kind) not in self._hooks:
            self._hooks[module, kind] = {0: partial(self._backward_of, module, kind)}
        return self._hooks[module, kind]

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return backward(*args, **kwargs)
        loss, self._loss = self._loss, None
        if loss is not None and loss.step == self.step and not self._open:
            self._finish(loss)
        self._end_running()
        whole = self.begin("backward", "")
        try:
            backward(*args, **kwargs)
        finally:
            self._end_running()
            self.end(whole)

    def _backward_of(self, module: str, kind: str, gradient: Any) -> None:
        """Hook that autograd calls before the first node of `module`'s backward."""
        if not self._on:
            return  # the graph's forward was recorded, but recording has ended
        if self._running is not None:
            self._end_running()
        else:  # strategies' work after backward is not part of a module
            torch.autograd.Variable._execution_engine.queue_callback(self._end_running)
        self._running = Span("backward", module, self.step, 0.0, 0.0, len(self._open), kind)
        self.clock.begin(self._running)

    def _end_running(self) -> None:
        if self._running is not None:
            self._finish(self._running)
            self._running = None

    # --- optimizer ---

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        kind = type(optimizer).__name__
        if self._open and (self._open[-1].phase, self._open[-1].kind) == ("optimizer", kind):
            self.end(self._open[-1])  # an error ended that step
        self.begin("optimizer", "", kind)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._open and self._open[-1].phase == "optimizer":
            self.end(self._open[-1])
        if not self._open:
            self._step_ended(optimizer)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values`, including those nested in tuples, lists and dicts."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, dict)):
            tensors += _tensors(value.values() if isinstance(value, dict) else value)
    return tensors
