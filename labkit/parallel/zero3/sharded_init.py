"""Sharded construction: a model is built, and no rank ever holds all of it.

    with ZeRO3.init(comm):           # or sharded_init(comm)
        model = GPT(...)             # any module's own code, initialisation included
    model = ZeRO3(model, comm)

A module registers one parameter after the other. Each becomes a `ShardedParameter`: it has the
name, shape and dtype of the whole, and holds this rank's 1/n of its elements. One at a time is
*open*, which means that it is whole: the newest, or the last that was touched. It closes when the
next one is made or touched:

    weight = empty(...)       register      normal_(weight)      bias = empty(...)   register
    rank 0   [whole      ]    open          open, drawn          [0   ] closed       bias is open
    rank 1   [whole      ]    open          open, drawn          [   1] closed       bias is open

    each rank holds   P/n of closed parameters, and the one that is open
    travels           (n-1)/n of a parameter's bytes whenever it closes (rank 0 scatters: what it
                      drew counts, also where the ranks have other seeds), and as much whenever it
                      opens again (all-gather; not where it is overwritten anyway, as by `normal_`)

All ranks run the same code and draw the same random numbers as one process would, so with one seed
the weights are the same to the bit.

Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 7.2 (partitioned
initialisation); DeepSpeed's `zero.Init`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from labkit.comm import Comm
from labkit.dispatch import DispatchMode
from labkit.parallel.zero3.sharded_parameter import Construction, ShardedParameter


@contextmanager
def sharded_init(comm: Comm | None = None) -> Iterator[None]:
    """Parameters that modules register in this block are sharded over the ranks of `comm` (all by
    default), which run the same block. Buffers, lazy and meta parameters stay as they are.

    A view, as `weight[0]`, may be written to until another parameter is made or touched.
    """
    construction = Construction(Comm.of(comm))
    register = nn.Module.register_parameter

    def register_sharded(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)  # raises what torch raises
        if parameter is not None and _can_be_sharded(parameter):
            what = f"{type(module).__name__}.{name}"
            module._parameters[name] = construction.shard(what, parameter)  # type: ignore[assignment]

    with patch.object(nn.Module, "register_parameter", register_sharded):
        try:
            with _ClosesBeforeWhatIsNew(construction):
                yield
            construction.only_open([])
        finally:
            construction.is_over = True


class _ClosesBeforeWhatIsNew(DispatchMode):
    """What makes a tensor from nothing, as `torch.empty`, is about to make the next parameter: the
    open one closes before, and not when there are two."""

    def __init__(self, construction: Construction):
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs))):
            self._construction.only_open([])
        return func(*args, **(kwargs or {}))


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    lazy = nn.parameter.is_lazy(parameter)
    return not (isinstance(parameter, ShardedParameter) or lazy or parameter.is_meta)
