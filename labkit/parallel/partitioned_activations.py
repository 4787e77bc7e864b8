"""Partitioned activations (P_a in ZeRO-R): tensor-parallel ranks shard the block inputs they save.

    forward     x, equal on every rank  ──▶ [ block ] ──▶        rank 0 keeps  ▪ ▫
                                                                  rank 1 keeps  ▫ ▪
    backward    all-gather: ▪ ▪ = x ──▶ [ recompute block ] ──▶ gradients

    each rank holds   1/t of every saved input [b, s, h]: 2sbh/t bytes per block in 16-bit dtypes
    traffic           an all-gather of x per block in backward, (t-1)/t sbh elements, in
                      addition to the traffic of tensor parallelism with full recompute

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 6.1 and 8 (one all-gather per block).
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labkit.comm import Comm
from labkit.memory.recompute import Recomputed
from labkit.parallel.tensor.layers import RowParallelLinear


class Partitioned:
    """Replaces the forward of a recomputed module; saves only this rank's slice of each input."""

    def __init__(self, forward: Recomputed, comm: Comm):
        self.forward, self.comm = forward, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack):  # recompute saves only inputs
            return self.forward(*args, **kwargs)

    def pack(self, x: Tensor) -> Any:
        """Returns this rank's slice of the flattened `x` and the shape of `x`; integer tensors
        (tokens) are returned whole."""
        if not x.is_floating_point():
            return x.detach()
        own = x.detach().reshape(-1).tensor_split(self.comm.size)[self.comm.rank]
        return own.clone(), x.shape

    def unpack(self, saved: Any) -> Tensor:
        """The inverse of `pack`: all-gathers the slices."""
        if isinstance(saved, Tensor):
            return saved
        own, shape = saved
        flat = own.new_empty(shape.numel())
        self.comm.all_gather(list(flat.tensor_split(self.comm.size)), own)
        return flat.view(shape)


def partition_activations(model: nn.Module, comm: Comm) -> nn.Module:
    """Makes recomputed blocks save only 1/t of their inputs, which are equal on the t ranks of
    `comm`. Call after `tensor_parallel(model, comm)` and `Recompute(model)`. Returns the model,
    edited in place.

    Raises ValueError if no block is recomputed, if a recomputed block is not sharded over `comm`
    (its inputs may then differ between ranks), or if activations are already sequence-sharded."""
    comm = Comm.of(comm)
    blocks: list[Any] = [
        m for m in model.modules() if isinstance(m.__dict__.get("forward"), Recomputed)
    ]
    if not blocks:
        raise ValueError(
            f"no block of this {type(model).__name__} is recomputed in backward, so no "
            "block saves only its input; call Recompute(model) first"
        )
    if any(getattr(m, "sequence", False) for m in model.modules()):
        raise ValueError(
            "the activations of this model are already sharded along the sequence; omit "
            "partition_activations, or call tensor_parallel(..., sequence=False)"
        )
    for block in blocks:
        ends = [layer for layer in block.modules() if isinstance(layer, RowParallelLinear)]
        if not ends or any(layer.comm.ranks != comm.ranks for layer in ends):
            raise ValueError(
                f"a recomputed {type(block).__name__} is not sharded over ranks {comm.ranks}, so "
                "its inputs may differ between them; call tensor_parallel(model, comm) with "
                "the same comm, then Recompute(model, what='full')"
            )
    for block in blocks if comm.size > 1 else []:
        block.forward = Partitioned(block.forward, comm)
    return model
