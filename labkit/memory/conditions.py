"""The conditions under which a forward is rerun: random state, autocast and function modes.

    forward    conditions = Conditions(inputs)       the generators' states before the function
               fn(...)                               dropout draws a mask
               conditions.forget_unused()            drops states of generators that drew nothing
    backward   with conditions.again(): fn(...)      the same draws: the same mask
               after the block                       the generators continue as before

Covers torch's default generators, not Python's `random`, NumPy or your own torch.Generator.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from labkit.dispatch import generators

States = list[tuple[torch.Generator, torch.Tensor]]


def states_of(generators: Iterable[torch.Generator]) -> States:
    """Each generator, paired with its state."""
    return [(generator, generator.get_state()) for generator in generators]


def used(states: States) -> States:
    """The `states` of generators that have drawn random numbers since."""
    return [
        (generator, state)
        for generator, state in states
        if _raw_bytes(state) != _raw_bytes(generator.get_state())
    ]


def restore(states: States) -> None:
    """Reset the generators to `states`."""
    for generator, state in states:
        generator.set_state(state)


class Conditions:
    """Records the current conditions for the devices of `tensors`. Function modes (torch.device,
    labkit's autocast) are reentered, but a mode with `entered_again` is replaced by a new mode."""

    def __init__(self, tensors: Iterable[torch.Tensor], preserve_rng: bool = True):
        tensors = list(tensors)
        self.states = states_of(generators()) if preserve_rng else []
        kinds = {"cpu", *(x.device.type for x in tensors)}
        self._autocast = {
            kind: _autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }
        self._modes = _modes()

    def forget_unused(self) -> None:
        self.states = used(self.states)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Apply the recorded conditions inside the block, then restore the current conditions."""
        with ExitStack() as stack:
            stack.callback(restore, states_of(generator for generator, _ in self.states))
            restore(self.states)
            for kind, then in self._autocast.items():
                if then != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, *then))
            if self._modes != _modes():
                for mode in self._modes:
                    stack.enter_context(mode if isinstance(mode, TorchFunctionMode) else mode())
            yield


def _raw_bytes(state: torch.Tensor) -> bytes:
    """The bytes of a state, read without torch, so that modes do not see it and dry runs work."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _autocast(kind: str) -> tuple[torch.dtype, bool, bool]:
    dtype = torch.get_autocast_dtype(kind)
    return dtype, torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()


def _modes() -> list[Any]:
    return [getattr(mode, "entered_again", mode) for mode in _get_current_function_mode_stack()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and other pytree containers, in order."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
