"""The tensors that forward saves for backward, as autograd reports them.

Autograd passes each saved tensor to a hook, which attributes it to the module that is running.

    norm1(x) ──> q(·)    saves its input             counted for the module "attn.q"
             └─> k(·)    saves the same memory       not counted again

Parameters, buffers and sparse tensors are excluded. Source: torch, "Hooks for autograd saved
tensors".
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class SavedTensor:
    """Memory saved for backward, described by the first saved tensor that uses it."""

    module: str  # path of the running module: "attn.q", or "" for the outermost
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of the whole storage


def saved_by(module: nn.Module, *args: Any, **kwargs: Any) -> list[SavedTensor]:
    """Call `module(*args, **kwargs)` and list the tensors saved for backward, in order.

    >>> sum(saved.nbytes for saved in saved_by(block, x))
    """
    weights = (*module.parameters(), *module.buffers())
    own = {_memory(x) for x in weights if x.layout is torch.strided}
    running, saved = [""], []
    alive: dict[int, torch.Tensor] = {}  # keeps storages: a freed address could be reused

    def save(x: torch.Tensor) -> torch.Tensor:
        if x.layout is torch.strided and (key := _memory(x)) not in own and key not in alive:
            alive[key] = x.detach()
            nbytes = x.untyped_storage().nbytes()
            saved.append(SavedTensor(running[-1], tuple(x.shape), x.dtype, nbytes))
        return x.detach()  # detached: a saved output would keep its graph alive

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(part.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda x: x))
        output = module(*args, **kwargs)  # keeps the graph and saved tensors alive
    del output
    return saved


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
