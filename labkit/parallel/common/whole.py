"""A model whose parameters are cut, put together again: for a look, or to compare. Checkpoints do
without: there each rank writes its part (labkit/checkpoints)."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.common.sharder import InStages, Sharder, fulfils, shards_parameters
from labkit.parallel.common.shards import Shard, shard_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`state_dict()` as of the plain model: every cut parameter is whole, and the same on all
    ranks, which call it together. `model`: edited by `tensor_parallel`, or a strategy around one;
    of a Pipeline, that of all stages, on the CPU. After steps of a ZeroOptimizer that gathers in
    forward (`gather_in`), call its `wait()` first.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if isinstance(model, InStages):
        return model.full_state_dict()
    if any(shards_parameters(part) for part in model.modules() if part is not model):
        raise ValueError("full_state_dict: this model has a ZeRO3 inside of it; give that one")
    parts = plain_module(model).state_dict(keep_vars=True)
    # ZeRO3's are whole over its own ranks, and may be cut over others.
    sharded: Any = model
    found = sharded.full_state_dict() if shards_parameters(model) else dict(parts)
    whole: dict[int, Tensor] = {}
    for name, x in found.items():
        if isinstance(x, Tensor) and id(x) not in whole:
            shard = shard_of(parts[name])
            whole[id(x)] = x.detach() if shard is None else _joined(x.detach(), shard)
    return {name: whole.get(id(x), x) for name, x in found.items()}


def plain_module(model: nn.Module) -> nn.Module:
    """The module whose names count: without the strategy around it, which has nothing but it. Of a
    Pipeline, what it has on this rank."""
    if isinstance(model, InStages):
        return model.module
    inside = getattr(model, "module", None)
    if isinstance(inside, nn.Module) and (
        fulfils(model, Sharder)
        or (list(model.children()) == [inside] and not model._parameters and not model._buffers)
    ):
        return plain_module(inside)
    return model


def _joined(x: Tensor, shard: Shard) -> Tensor:
    """All ranks' parts beside each other, without the padding at the end."""
    own = x.to(shard.comm.own_device())
    parts = list(own.new_empty([shard.comm.size, *own.shape]))
    shard.comm.all_gather(parts, own)
    return torch.cat(parts, shard.dim).narrow(shard.dim, 0, shard.whole).to(x.device)
