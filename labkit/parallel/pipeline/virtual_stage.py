"""One piece of the model on its rank: what it does for a micro-batch, and keeps for the way back.

    forward    x ─▶ module ─▶ y      kept: x, and the end of autograd's graph, which has the
                                     activations
    backward   dx ◀─────────── dy    and the graph is gone
    input      dx ◀─────────── dy    the gradients of weights are put off (deferred_weights.py)
    weight     dW                    ... until here
    update                           PipeDream: one step by this micro-batch (weight_versions.py)

Of y only its place in the graph is kept (torch's GradientEdge), from which backward begins: its
memory goes when it is sent, if no operation has saved it.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.comm import CommError
from labkit.memory.recompute import Recomputed
from labkit.parallel.common.agreement import ParamSnapshot, owner_of
from labkit.parallel.common.flat import running_backward
from labkit.parallel.common.sharder import DataParallel, fulfils, unwrapped
from labkit.parallel.pipeline.deferred_weights import Later, deferring, run_later
from labkit.parallel.pipeline.weight_versions import WeightVersions
from labkit.schedules.actions import Action

# What has nothing to compute is a backward all the same: whoever records a step finds one for each
# action.
NOTHING = partial(torch.zeros, (), requires_grad=True)


class StageError(RuntimeError):
    """A stage could not compute a micro-batch; names stage, rank and micro-batch."""


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward."""

    x: Tensor
    end: GradientEdge | None  # where backward begins; None: nothing here wants a gradient
    later: Later


class VirtualStage:
    """`module`, which is virtual stage `index` of the pipeline, on rank `rank`.

    `actions`: what it does in a step. `ends_in(y, microbatch)`: on the last stage, the loss.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        rank: int,
        actions: Iterable[Action],
        recompute: bool,
        optimizer: torch.optim.Optimizer | None,
        ends_in: Callable[[Tensor, int], Tensor] | None,
    ):
        self.module, self.index, self.rank = module, index, rank
        self.recompute, self._ends_in = recompute, ends_in
        self._unwrapped = unwrapped(module)
        self.unchanged = ParamSnapshot(module)
        self.versions = WeightVersions(module, optimizer) if optimizer else None
        self.in_flight: dict[int, InFlight] = {}
        actions = list(actions)
        self._in_halves = {one.microbatch for one in actions if one.phase == "input"}
        last_of = {one.phase in ("backward", "weight"): one for one in actions
                   if one.phase in ("forward", "backward", "weight")}  # fmt: skip
        self._synchronised = set(last_of.values())

    def do(self, action: Action, came: Tensor | None) -> Tensor | None:
        """Compute `action` with what came for it: the input of a forward, the gradient of the
        output for a backward. Returns what the next stage (or the one before) waits for."""
        k = action.microbatch
        with self._without_sync(action):
            match action.phase:
                case "forward":
                    assert came is not None
                    return self._forward(k, came)
                case "backward":
                    flight = self.in_flight.pop(k)
                    with _without_autocast(flight.x):
                        return self._backward(flight, came, k)
                case "input":
                    flight = self.in_flight[k]
                    with _without_autocast(flight.x), deferring(self.module, flight.later):
                        return self._backward(flight, came, k)
                case "weight":
                    flight = self.in_flight.pop(k)
                    with _without_autocast(flight.x):
                        self._weight(flight, action, k)
                case "update":
                    assert self.versions is not None
                    self.versions.update(k)
        return None

    def _without_sync(self, action: Action) -> AbstractContextManager[Any]:
        """A stage in DDP averages over the replicas once in a step, in its last backward."""
        if action in self._synchronised or not fulfils(self.module, DataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _forward(self, k: int, x: Tensor) -> Tensor:
        later: Later = []
        y = self._computed(k, x, later)
        out = y if self._ends_in is None else self._ends_in(y, k)
        self.in_flight[k] = InFlight(
            x, get_gradient_edge(out) if out.requires_grad else None, later
        )
        return y

    def _computed(self, k: int, x: Tensor, later: Later) -> Tensor:
        def function(x: Tensor) -> Any:
            again = running_backward() is not None
            module = self._unwrapped if again else self.module  # DDP is entered once
            if k in self._in_halves:
                with deferring(module, later):
                    return module(x)
            return self.versions.forward(k, x) if self.versions else module(x)

        try:
            y = (Recomputed(function) if self.recompute else function)(x)
        except CommError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            came = f"from stage {self.index - 1}" if self.index else "of the batch"
            if x.requires_grad and "leaf" in str(error) and "in-place" in str(error):
                raise StageError(
                    f"stage {self.index} (rank {self.rank}), micro-batch {k}: "
                    f"{type(self.module).__name__} changes in place what a gradient goes "
                    f"back to: its input, which came {came}, as nn.ReLU(inplace=True) at its "
                    "beginning does (or a parameter); let the stage begin with an operation that "
                    f"makes a new tensor (inplace=False). {error}"
                ) from error
            raise StageError(
                f"stage {self.index} (rank {self.rank}), micro-batch {k}: "
                f"{type(self.module).__name__} cannot take {list(x.shape)} "
                f"{str(x.dtype).removeprefix('torch.')} {came}: {error}"
            ) from error
        if not isinstance(y, Tensor):
            raise StageError(
                f"stage {self.index} (rank {self.rank}), micro-batch {k}: it returned a "
                f"{type(y).__name__}; a stage hands on one tensor"
            )
        return y

    def _backward(self, flight: InFlight, dy: Tensor | None, k: int) -> Tensor | None:
        if flight.end is not None:
            torch.autograd.backward(flight.end, dy)
            flight.end = None
        else:
            torch.autograd.backward(NOTHING())
        if self.versions:
            self.versions.backward_done(k)
        x = flight.x
        if not x.requires_grad:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weight(self, flight: InFlight, action: Action, k: int) -> None:
        synchronised = action in self._synchronised and self._is_shared()
        if not flight.later:
            flight.later.append(NOTHING)
        run_later(flight.later, self._with_gradient() if synchronised else ())
        if self.versions:
            self.versions.backward_done(k)

    def _is_shared(self) -> bool:
        """Whether somebody waits for gradients, to send them."""
        owned = any(owner_of(p) is not None for p in self.module.parameters())
        return owned or fulfils(self.module, DataParallel)

    def _with_gradient(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad and p.grad is not None]


def _without_autocast(x: Tensor) -> torch.autocast:
    """Backward runs in the types that forward took: autocast, torch's and labkit's, is around
    forward alone. (What is computed again is cast again, see memory/conditions.py.)"""
    return torch.autocast(x.device.type, enabled=False)
