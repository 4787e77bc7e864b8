"""One stage on its rank: its computation per micro-batch, and the state kept until backward.

    forward    x ─▶ module ─▶ y      kept: x, and y's node in the graph (torch's GradientEdge); y
                                     is freed after the send, unless an operation saved y
    backward   dx ◀─────────── dy    then the graph is freed
    input      dx ◀─────────── dy    weight gradients are deferred (deferred_weights.py)
    weight     dW                    the deferred gradients
    update                           PipeDream: an optimizer step with this micro-batch's gradient

PipeDream's weight stashing: backward uses the weights of the micro-batch's forward, at the cost
of one copy of the weights per version in use:

    stage 0    F0 F1 F2 B0 U F3 B1 U ...      F0, F1, F2 and B0 use the initial weights v0; F3 uses
               v0 v0 v0 v0   v1 v0            v1, from the first update; B1 still uses v0

Source: Harlap et al., "PipeDream", arXiv 1806.03377, section 3.3.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from labkit.comm import CommError
from labkit.memory.recompute import Recomputed
from labkit.parallel.common.ownership import ParamSnapshot, owner_of
from labkit.parallel.common.sharder import DataParallel, implements, unwrapped
from labkit.parallel.pipeline.deferred_weights import Later, deferring, run_later
from labkit.schedules.actions import Action

# The root of an empty backward, so that a backward is recorded for every action.
NOTHING = partial(torch.zeros, (), requires_grad=True)

Version = dict[str, Tensor]


class StageError(RuntimeError):
    """A stage failed on a micro-batch; the message names stage, rank and micro-batch."""


@dataclass
class MicroBatchState:
    """The state of a micro-batch between forward and backward."""

    x: Tensor
    root: GradientEdge | None  # where backward starts; None if no gradient is needed
    later: Later


class VirtualStage:
    """Virtual stage `index`, on rank `rank`. `loss_of(y, microbatch)`: last stage only."""

    def __init__(
        self, module: nn.Module, index: int, rank: int, actions: Iterable[Action], recompute: bool,
        optimizer: torch.optim.Optimizer | None,
        loss_of: Callable[[Tensor, int], Tensor] | None,
    ):  # fmt: skip
        self.module, self.index, self.rank = module, index, rank
        self.recompute, self._loss_of = recompute, loss_of
        self._unwrapped = unwrapped(module)
        self.unchanged = ParamSnapshot(module)
        self.versions = WeightVersions(module, optimizer) if optimizer else None
        self.in_flight: dict[int, MicroBatchState] = {}
        actions = list(actions)
        self._in_halves = {action.microbatch for action in actions if action.phase == "input"}
        last_of = {action.phase != "forward": action for action in actions
                   if action.phase in ("forward", "backward", "weight")}  # fmt: skip
        self._synchronized = set(last_of.values())

    def run(self, action: Action, message: Tensor | None) -> Tensor | None:
        """Run `action` on an input or an output gradient; returns the tensor to send, or None."""
        k, phase = action.microbatch, action.phase
        with self._without_sync(action):
            if phase == "forward":
                assert message is not None
                return self._forward(k, message)
            if phase == "update":
                assert self.versions is not None
                self.versions.update(k)
                return None
            flight = self.in_flight[k] if phase == "input" else self.in_flight.pop(k)
            with _without_autocast(flight.x):
                if phase == "weight":
                    self._weight(flight, action, k)
                    return None
                deferred = deferring(self.module, flight.later)
                with deferred if phase == "input" else nullcontext():
                    return self._backward(flight, message, k)

    def _without_sync(self, action: Action) -> AbstractContextManager[Any]:
        """A stage in DDP averages over replicas once per step, in its last backward."""
        if action in self._synchronized or not implements(self.module, DataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _forward(self, k: int, x: Tensor) -> Tensor:
        later: Later = []
        y = self._compute(k, x, later)
        out = y if self._loss_of is None else self._loss_of(y, k)
        root = get_gradient_edge(out) if out.requires_grad else None
        self.in_flight[k] = MicroBatchState(x, root, later)
        return y

    def _compute(self, k: int, x: Tensor, later: Later) -> Tensor:
        def function(x: Tensor) -> Any:
            in_backward = torch._C._current_graph_task_id() != -1
            module = self._unwrapped if in_backward else self.module  # enter DDP only once
            if k in self._in_halves:
                with deferring(module, later):
                    return module(x)
            return self.versions.forward(k, x) if self.versions else module(x)

        at = f"stage {self.index} (rank {self.rank}), micro-batch {k}"
        name = type(self.module).__name__
        try:
            y = (Recomputed(function) if self.recompute else function)(x)
        except CommError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            source = f"from stage {self.index - 1}" if self.index else "of the batch"
            if x.requires_grad and "leaf" in str(error) and "in-place" in str(error):
                raise StageError(
                    f"{at}: {name} changes in place a tensor that needs a gradient: a parameter or "
                    f"its input {source} (as nn.ReLU(inplace=True) does in the first "
                    "layer); begin the stage with an operation that returns a new tensor "
                    f"(inplace=False). {error}"
                ) from error
            dtype = str(x.dtype).removeprefix("torch.")
            raise StageError(
                f"{at}: {name} cannot take {list(x.shape)} {dtype} {source}: {error}"
            ) from error
        if not isinstance(y, Tensor):
            raise StageError(
                f"{at}: its output has type {type(y).__name__}; a stage must return one tensor"
            )
        return y

    def _backward(self, flight: MicroBatchState, dy: Tensor | None, k: int) -> Tensor | None:
        if flight.root is not None:
            torch.autograd.backward(flight.root, dy)
            flight.root = None
        else:
            torch.autograd.backward(NOTHING())
        if self.versions:
            self.versions.backward_done(k)
        x = flight.x
        if not x.requires_grad:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weight(self, flight: MicroBatchState, action: Action, k: int) -> None:
        parameters = list(self.module.parameters())
        is_averaged = implements(self.module, DataParallel)
        is_averaged |= any(owner_of(p) is not None for p in parameters)
        ready = []  # parameters whose hooks must run in this backward
        if action in self._synchronized and is_averaged:
            ready = [p for p in parameters if p.requires_grad and p.grad is not None]
        run_later(flight.later or [NOTHING], ready)
        if self.versions:
            self.versions.backward_done(k)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Backward uses forward's dtypes without autocast. (Recompute enables autocast again.)"""
    return torch.autocast(x.device.type, enabled=False)


class WeightVersions:
    """Weights that micro-batches in flight still need; the module holds the newest version."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self.module, self.optimizer = module, optimizer
        self._newest: Version | None = None  # a copy of the module's weights
        self._used: dict[int, Version] = {}  # by micro-batch
        self._gradients: dict[int, Version] = {}

    def forward(self, microbatch: int, x: Tensor) -> Any:
        """The output with the newest weights; recompute uses the first call's weights again."""
        if microbatch not in self._used:
            if self._newest is None:
                self._newest = {
                    name: p.detach().clone().requires_grad_()
                    for name, p in self.module.named_parameters()
                    if p.requires_grad
                }
            self._used[microbatch] = self._newest
        return functional_call(self.module, self._used[microbatch], (x,))

    def backward_done(self, microbatch: int) -> None:
        total = self._gradients.setdefault(microbatch, {})
        for name, weight in self._used[microbatch].items():
            if weight.grad is not None:
                total[name] = weight.grad if name not in total else total[name] + weight.grad
                weight.grad = None

    def update(self, microbatch: int) -> None:
        """One optimizer step on the newest weights, with this micro-batch's gradient."""
        del self._used[microbatch]
        gradients = self._gradients.pop(microbatch)
        for name, p in self.module.named_parameters():
            p.grad = gradients.get(name)
        self.optimizer.step()
        for p in self.module.parameters():
            p.grad = None
        self._newest = None
