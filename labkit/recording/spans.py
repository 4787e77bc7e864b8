"""Spans of forward, backward and optimizer by module, from torch's own hooks.

    forward     a hook before and one after every module: spans nest as modules do
    backward    the last node of autograd's graph that a module made in forward is the first to
                run in its backward: a hook on it says that this module's backward begins, and
                that of the one before is over. Where a module hands over to its parent, the same.
    optimizer   a hook before and one after `step`; with it a training step ends

Nothing in a model, a strategy or a training loop knows of it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labkit.comm.clock import Clock
from labkit.trace import Span

MARK = "labkit: whose backward begins"


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
        self._forward: Span | None = None  # the outermost one that ended last
        self._hooks = ExitStack()

    def __enter__(self) -> "Spans":
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ):
            self._hooks.callback(handle.remove)
        plain = torch.autograd.backward
        torch.autograd.backward = partial(self._backward, plain)
        self._hooks.callback(setattr, torch.autograd, "backward", plain)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._open, self._own, self._forward = [], None, None

    @property
    def innermost(self) -> Span | None:
        """What computes now."""
        return self._own or (self._open[-1] if self._open else None)

    def still_open(self) -> list[Span]:
        return [*self._open, self._own] if self._own else list(self._open)

    def begin(self, phase: str, module: str, kind: str = "") -> Span:
        span = Span(phase, module, self.step, 0.0, 0.0, len(self.still_open()), kind)
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

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._open:
            self._met(module)
        if module not in self._names:
            self._name_all(module)
        if self._open:  # where this one's input was made, backward goes back to the parent
            self._mark(_nodes(inputs), self._open[-1])
        self.begin("forward", self._names[module], type(module).__name__)

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self._open:
            return  # entered before the hooks were there
        span = self._open[-1]
        self._mark(_nodes((output,)), span)
        self.end(span)
        if not self._open:
            self._forward = span

    def _name_all(self, root: nn.Module) -> None:
        """Names from the root; a wrapper that holds one `module` does not lengthen them."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name.removeprefix("module.") if name != "module" else "")

    # --- backward ---

    def _mark(self, nodes: Iterable[Any], span: Span) -> None:
        for node in nodes:
            if MARK not in node.metadata:
                node.metadata[MARK] = True
                node.register_prehook(partial(self._backward_of, span.module, span.kind))

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._forward is not None and self._forward.step == self.step and not self._open:
            loss = Span("forward", "loss", self.step, self._forward.ended_s, 0.0, 0, "loss")
            self._clock.mark(loss, "ended_s")
            self._done(loss)
        self._forward = None
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


def _nodes(values: Iterable[Any]) -> Iterator[Any]:
    """Autograd's nodes that made the tensors among `values`, also inside tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield value.grad_fn
        elif isinstance(value, (tuple, list)):
            yield from _nodes(value)
        elif isinstance(value, dict):
            yield from _nodes(value.values())
