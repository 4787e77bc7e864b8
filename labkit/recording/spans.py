"""Spans of forward, backward and optimizer by module, of any model and training loop.

    forward     every call of a module is wrapped (a fifth of the cost of torch's hooks for all
                modules): spans nest as modules do
    backward    the last node of autograd's graph that a module made in forward is the first to
                run in its backward: a hook on it says that this module's backward begins, and
                that of the one before is over. Where a module hands over to its parent, the same.
    optimizer   a hook before and one after `step`; with it a training step ends

Nothing in a model, a strategy or a training loop knows of it.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

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
        self._clock, self._done, self._step_ended, self._met = clock, done, step_ended, met
        self._open: list[Span] = []  # outermost first
        self._own: Span | None = None  # the module whose backward runs
        self._names: dict[nn.Module, str] = {}
        self._last: Span | None = None  # the outermost forward that ended last
        self._marked: Callable[[], object] = lambda: None  # the tensor that was marked last
        self._hooks = ExitStack()

    def __enter__(self) -> "Spans":
        for handle in (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ):
            self._hooks.callback(handle.remove)
        call, backward, forward = nn.Module.__call__, torch.autograd.backward, self._forward

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
        self._open, self._own, self._last = [], None, None
        self._names = {}  # keeps no model alive

    @property
    def innermost(self) -> Span | None:
        """What computes now."""
        return self._own or (self._open[-1] if self._open else None)

    def still_open(self) -> list[Span]:
        return [*self._open, self._own] if self._own else list(self._open)

    def begin(self, phase: str, module: str, kind: str = "") -> Span:
        depth = len(self._open) + (self._own is not None)
        span = Span(phase, module, self.step, 0.0, 0.0, depth, kind)
        self._clock.mark(span, "began_s")
        self._open.append(span)
        return span

    def end(self, span: Span) -> None:
        """End `span`, and what an error has left open inside it."""
        while self._open:
            last = self._open.pop()
            self._clock.mark(last, "ended_s")
            self._done(last)
            if last is span:
                return

    # --- forward ---

    def _forward(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._open:
            self._met(module)
        if module not in self._names:
            self._name_all(module)
        if self._open:  # where this one's input was made, backward goes back to the parent
            self._mark(args, self._open[-1])
        span = self.begin("forward", self._names[module], type(module).__name__)
        try:
            output = call(module, *args, **kwargs)
            self._mark((output,), span)
            return output
        finally:
            self.end(span)
            if not self._open:
                self._last = span

    def _name_all(self, root: nn.Module) -> None:
        """Names from the root; a wrapper that holds one `module` does not lengthen them."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name.removeprefix("module.") if name != "module" else "")

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
        if self._last is not None and self._last.step == self.step and not self._open:
            loss = Span("forward", "loss", self.step, self._last.ended_s, 0.0, 0, "loss")
            self._clock.mark(loss, "ended_s")
            self._done(loss)
        self._last = None
        self._end_own()
        whole = self.begin("backward", "")
        try:
            backward(*args, **kwargs)
        finally:
            self._end_own()
            self.end(whole)

    def _backward_of(self, module: str, kind: str, gradients: Any) -> None:
        """Autograd is about to run the first node of `module`'s backward."""
        if self._own is None:  # what strategies do when backward is over is not the last module's
            torch.autograd.Variable._execution_engine.queue_callback(self._end_own)
        self._end_own()
        self._own = Span("backward", module, self.step, 0.0, 0.0, len(self._open), kind)
        self._clock.mark(self._own, "began_s")

    def _end_own(self) -> None:
        if self._own is not None:
            self._clock.mark(self._own, "ended_s")
            self._done(self._own)
            self._own = None

    # --- optimizer ---

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.begin("optimizer", "", type(optimizer).__name__)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and self._open[-1].phase == "optimizer":
            self.end(self._open[-1])
        if not self._open:
            self._step_ended(optimizer)


def _maker(x: torch.Tensor) -> Any:
    """The node of autograd's graph that computed `x` or what `x` is a view of; None for a leaf."""
    node = x.grad_fn
    while node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    return node
