"""Flat buffers of a ZeRO-3 unit, one set per kind of parameter (dtype, device, frozen, kept whole).

                    | a a a a a a | b b | c c c c c c c | pad |      a FlatPartition
    share           |     rank 0     |  rank 1  ...                  always: master dtype, 1/n
    full            | a a a a a a | b b | c c c c c c c | pad |      while in use: compute dtype
    unreduced       | gradients, divided by n           | pad |      until reduced

The memory of `full` and `unreduced` is freed and reallocated even while autograd keeps views.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm, Handle
from labkit.parallel.common.flat import FlatPartition, GradBuffer, flagged_unused
from labkit.parallel.common.ownership import broadcast_tensors, marks_of
from labkit.parallel.zero3.sharded_init import ShardedParameter

HALF = (torch.float16, torch.bfloat16)
NORMS = {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}


@dataclass(frozen=True)
class Place:
    """The location of a parameter: `module.attribute`, gathered for the forward of `unit`."""

    name: str
    module: nn.Module
    attribute: str
    owner: nn.Module  # the nearest enclosing module with a forward
    unit: nn.Module

    def put(self, parameter: Any) -> None:
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = parameter
        else:  # recurrent layers also update their list of weights
            setattr(self.module, self.attribute, parameter)


def compute_dtype_of(parameter: Tensor, requested: torch.dtype | None) -> torch.dtype:
    """The dtype of the gathered parameter; integer parameters keep their dtype."""
    return requested if requested and parameter.is_floating_point() else parameter.dtype


def master_dtype_of(parameter: Tensor, requested: torch.dtype | None) -> torch.dtype:
    """The dtype of the optimizer's copy: float32 if `requested` is a 16-bit dtype."""
    in_half = requested in HALF and parameter.is_floating_point()
    return torch.float32 if in_half else parameter.dtype


class ResizableBuffer:
    """A flat tensor whose memory can be freed and reallocated while views exist."""

    def __init__(self, partition: FlatPartition, dtype: torch.dtype, device: torch.device):
        self.flat = torch.empty(partition.padded, dtype=dtype, device=device)
        self.nbytes = self.flat.nbytes
        self._storage = self.flat.untyped_storage()

    def allocate(self) -> None:
        if not self.held_bytes:
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    @property
    def held_bytes(self) -> int:
        return self._storage.nbytes()


class Flat:
    """Parameters of one unit with one dtype and device, either all frozen or all trainable.

    shards      the optimizer's parameters: this rank's flat slice per parameter, possibly empty
    gathered    the model's parameters in their original shapes, views of `full`
    ungathered  placeholders in the modules during a pass, while `full` is freed

    With `keep_whole` (small parameters), a share is the whole buffer; gradients are all-reduced."""

    def __init__(
        self, group: list[tuple[nn.Parameter, list[Place]]], comm: Comm, keep_whole: bool,
        compute_dtype: torch.dtype | None,
    ):  # fmt: skip
        first = group[0][0]
        self.keep_whole, self.trainable = keep_whole, first.requires_grad
        self.places = [places for _, places in group]
        self.comm = comm.labelled(f"unit of {self.places[0][0].name}")
        cut = FlatPartition([p.shape for p, _ in group], 1 if keep_whole else comm.size)
        self.partition, self.pieces = cut, list(cut.pieces(0 if keep_whole else comm.rank))
        dtype, device = master_dtype_of(first, compute_dtype), first.device
        self.share = torch.zeros(cut.share, dtype=dtype, device=device)
        self._fill([parameter for parameter, _ in group])
        self.shards = self._cut_into_shards()
        self.full = ResizableBuffer(cut, compute_dtype_of(first, compute_dtype), device)
        views = cut.views(self.full.flat)
        self.gathered = [nn.Parameter(x.data, self.trainable) for x in views]
        self.full.free()
        for (parameter, _), shard, gathered in zip(group, self.shards, self.gathered, strict=True):
            for mark in marks_of(parameter):
                mark.attach_to(shard)
                mark.attach_to(gathered)
            if parameter._backward_hooks:  # from `register_hook`
                gathered._backward_hooks = parameter._backward_hooks
            shard.register_hook = refuse_hook  # type: ignore[method-assign]
            shard.register_post_accumulate_grad_hook = refuse_hook  # type: ignore[method-assign]
        self.unreduced = ResizableBuffer(cut, self.full.flat.dtype, device)
        names = {x: at[0].name for x, at in zip(self.gathered, self.places, strict=True)}
        self.gradients = GradBuffer(self.gathered, cut, names)
        self.gradients.use(self.unreduced.flat)
        self.gradient: Tensor | None = None  # [share], memory of the shards' `.grad`
        self.ungathered: list[Tensor] = []  # set by `register_hooks`
        self.resting: Sequence[Tensor] = self.shards
        self._handle: Handle | None = None
        self.reset()
        self.install(self.shards)

    def _fill(self, parameters: Sequence[nn.Parameter]) -> None:
        broadcast_tensors((p for p in parameters if not isinstance(p, ShardedParameter)), self.comm)
        pieces = {piece.index: piece for piece in self.pieces}
        for index, x in enumerate(parameters):
            full = x.whole() if isinstance(x, ShardedParameter) else x.detach()
            if piece := pieces.get(index):
                part = full.reshape(-1)[piece.start : piece.start + piece.numel]
                self.share[piece.at : piece.at + piece.numel].copy_(part)

    def _cut_into_shards(self) -> list[nn.Parameter]:
        parts = [self.share[:0] for _ in self.places]
        for piece in self.pieces:
            parts[piece.index] = self.share[piece.at : piece.at + piece.numel]
        if self.keep_whole:
            parts = [x.view(shape) for x, shape in zip(parts, self.partition.shapes)]
        return [nn.Parameter(x, self.trainable) for x in parts]

    def install(self, parameters: Sequence[Tensor]) -> None:
        for places, parameter in zip(self.places, parameters):
            for place in places:
                place.put(parameter)

    def gather(self, async_op: bool) -> Handle | None:
        self.full.allocate()
        full = self.full.flat
        if self.keep_whole:
            full.copy_(self.share)
            return None
        own = self.share
        if own.dtype != full.dtype:
            own = self.partition.share_of(full, self.comm.rank).copy_(own)
        return self.comm.all_gather_into_tensor(full, own, async_op=async_op)

    def reset(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        self._handle = None
        self.gradients.reset()
        self.unreduced.free()
        for parameter in self.gathered:
            parameter.grad = None

    def take_gradient(self, parameter: Tensor) -> None:
        self.gradients.take(parameter)
        self.unreduced.allocate()
        self.gradients.put(parameter, self.comm.size)  # frees the old gradient

    def send_gradients(self, async_op: bool) -> None:
        """Sums gradients, directly into `gradient` if no shard has a `.grad` and dtypes match."""
        self.unreduced.allocate()
        flat = self.gradients.flag_unused()
        self._are_new = all(self.shards[piece.index].grad is None for piece in self.pieces)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.share)
        if self.keep_whole:
            self._arriving = flat
            self._handle = self.comm.all_reduce(flat, async_op=async_op)
            return
        in_place = self._are_new and self.gradient.dtype == flat.dtype
        self._arriving = self.gradient if in_place else flat.new_empty(self.partition.share)
        self._handle = self.comm.reduce_scatter_tensor(self._arriving, flat, async_op=async_op)

    def receive_gradients(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        assert self.gradient is not None
        for piece in self.pieces:
            shard, span = self.shards[piece.index], slice(piece.at, piece.at + piece.numel)
            is_unused = self.gathered[piece.index] in self.gradients.unused
            if is_unused and flagged_unused(self._arriving[span]):
                continue
            if not self._are_new and shard.grad is not None:
                shard.grad.add_(self._arriving[span].view(shard.shape))
                continue
            if self._arriving is not self.gradient:
                self.gradient[span].copy_(self._arriving[span])
            shard.grad = self.gradient[span].view(shard.shape)
            if type(shard.grad) is Tensor and not self.keep_whole and self.comm.size > 1:
                shard.grad = shard.grad.as_subclass(ShardGradient)
        del self._arriving
        self.reset()


class ShardGradient(Tensor):
    """The `.grad` of a shard. Computing its norm raises ValueError; copies are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            raise ValueError(
                "ZeRO3: this is the norm of one rank's shards, not of the gradient; clip with "
                "labkit.clip_grad_norm(model, max_norm), which returns the norm over all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__):
                args = (args[0].detach(), *args[1:])
            return func(*args, **(kwargs or {}))


def refuse_hook(*_: Any) -> None:
    """Replaces a shard's `register_hook`; raises ValueError."""
    raise ValueError(
        "ZeRO3: this hook would never be called, since autograd computes gradients of gathered "
        "parameters, not of shards; call `register_hook` on a parameter before ZeRO3(module)"
    )
