"""Spans of forward, backward and optimizer by module, of any model and training loop.

    forward     every call of a module is wrapped (a fifth of the cost of torch's hooks for all
                modules): spans nest as modules do
    backward    the last node of autograd's graph that a module made in forward is the first to
                run in its backward: a hook on it says that this module's backward begins, and
                that of the one before is over. Where a module hands over to its parent, the same.
    optimizer   a hook before and one after `step`; with it a training step ends

Nothing in a model, a strategy or a training loop knows of it.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labkit.comm.clock import Clock
from labkit.trace import Span

MARK = "labkit: whose backward begins"
VIEWS = {
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Split", "Squeeze", "T",
        "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
}  # fmt: skip


class Spans:
    """Makes the spans of one rank while its hooks are in place (`with spans:`).

    `done(span)` is called with each one when it ends; `step_ended()` after an optimizer's step;
    `met(root)` with every outermost module before its forward, for those who want to know it.
    """

    def __init__(
        self,
        clock: Clock,
        done: Callable[[Span], None],
        step_ended: Callable[[torch.optim.Optimizer], None],
        met: Callable[[nn.Module], None],
    ):
        self.step = 0
        self.clock, self._done, self._step_ended, self._met = clock, done, step_ended, met
        self._open: list[Span] = []  # outermost first
        self._own: Span | None = None  # the module whose backward runs
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._loss: Span | None = None  # begun when the last outermost forward ended
        self._on, self._thread = False, 0
        self._marked: Callable[[], object] = lambda: None  # the tensor that was marked last
        self._hooks = ExitStack()

    def __enter__(self) -> "Spans":
        for handle in (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ):
            self._hooks.callback(handle.remove)
        call, backward, forward = nn.Module.__call__, torch.autograd.backward, self._forward
        self._thread, self._on = threading.get_ident(), True

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return call(module, *args, **kwargs)  # one program is recorded, as it was written
            return forward(call, module, args, kwargs)

        self._put(nn.Module, "__call__", recorded_call)
        self._put(torch.autograd, "backward", partial(self._backward, backward))
        return self

    def _put(self, place: Any, name: str, replacement: Any) -> None:
        """Until recording ends."""
        self._hooks.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, replacement)

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._open, self._own, self._loss, self._on = [], None, None, False

    @property
    def in_forward(self) -> bool:
        """Whether a module's forward runs, or the loss of one is computed."""
        return self._loss is not None or (bool(self._open) and self._open[-1].phase == "forward")

    @property
    def innermost(self) -> Span | None:
        """What computes now."""
        return self._own or (self._open[-1] if self._open else None)

    def still_open(self) -> list[Span]:
        return [*self._open, self._own] if self._own else list(self._open)

    def begin(self, phase: str, module: str, kind: str = "") -> Span:
        depth = len(self._open) - self._of_user() + (self._own is not None)
        span = Span(phase, module, self.step, 0.0, 0.0, depth, kind)
        self.clock.mark(span, "began_s")
        self._open.append(span)
        return span

    def end(self, span: Span) -> None:
        """End `span`, and what an error has left open inside it."""
        if not any(one is span for one in self._open):
            return
        while self._open:
            last = self._open.pop()
            self.clock.mark(last, "ended_s")
            self._done(last)
            if last is span:
                return

    def _of_user(self) -> int:
        """How many of the open spans the user has opened: they are no part of the nesting."""
        return sum(one.phase == "user" for one in self._open)

    # --- forward ---

    def _forward(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        outermost = len(self._open) == self._of_user()
        if outermost:
            self._met(module)
        name = self._names.get(module)
        if name is None:
            name = self._name_all(module)
        if not outermost:  # where this one's input was made, backward goes back to the parent
            self._mark(args, self._open[-1])
        span = self.begin("forward", name, type(module).__name__)
        try:
            output = call(module, *args, **kwargs)
            self._mark((output,), span)
            return output
        finally:
            self.end(span)
            if outermost:  # from here to backward, the loss is computed
                self._loss = Span("forward", "loss", self.step, 0.0, 0.0, 0, "loss")
                self.clock.mark(self._loss, "began_s")

    def _name_all(self, root: nn.Module) -> str:
        """Names from the root; a wrapper that holds one `module` does not lengthen them."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name.removeprefix("module.") if name != "module" else "")
        return self._names[root]

    # --- backward ---

    def _mark(self, values: Iterable[Any], span: Span) -> None:
        """When backward comes to what made these tensors, it has come to the module of `span`."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value is self._marked():  # mostly: one module's output is the next one's input
                    continue
                self._marked = ref(value)
                node = _maker(value)
                if node is not None and MARK not in node.metadata:
                    node.metadata[MARK] = True
                    node.register_prehook(partial(self._backward_of, span.module, span.kind))
            elif isinstance(value, (tuple, list)):
                self._mark(value, span)
            elif isinstance(value, dict):
                self._mark(value.values(), span)

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return backward(*args, **kwargs)
        loss, self._loss = self._loss, None
        if loss is not None and loss.step == self.step and len(self._open) == self._of_user():
            self.clock.mark(loss, "ended_s")
            self._done(loss)
        self._end_own()
        whole = self.begin("backward", "")
        try:
            backward(*args, **kwargs)
        finally:
            self._end_own()
            self.end(whole)

    def _backward_of(self, module: str, kind: str, gradients: Any) -> None:
        """Autograd is about to run the first node of `module`'s backward."""
        if not self._on:
            return  # a graph from before the recording ended
        if self._own is None:  # what strategies do when backward is over is not the last module's
            torch.autograd.Variable._execution_engine.queue_callback(self._end_own)
        self._end_own()
        depth = len(self._open) - self._of_user()
        self._own = Span("backward", module, self.step, 0.0, 0.0, depth, kind)
        self.clock.mark(self._own, "began_s")

    def _end_own(self) -> None:
        if self._own is not None:
            self.clock.mark(self._own, "ended_s")
            self._done(self._own)
            self._own = None

    # --- optimizer ---

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        kind = type(optimizer).__name__
        if self._open and (self._open[-1].phase, self._open[-1].kind) == ("optimizer", kind):
            self.end(self._open[-1])  # an error ended that step
        self.begin("optimizer", "", kind)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and self._open[-1].phase == "optimizer":
            self.end(self._open[-1])
        if len(self._open) == self._of_user():
            self._step_ended(optimizer)


def _maker(x: torch.Tensor) -> Any:
    """The node of autograd's graph that computed `x` or what `x` is a view of; None for a leaf."""
    node = x.grad_fn
    while node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    return None if type(node).__name__ == "AccumulateGrad" else node  # a parameter, or its view
