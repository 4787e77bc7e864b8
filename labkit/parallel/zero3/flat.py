"""The flat memory of a unit under ZeRO-3.

    unit            modules whose parameters are gathered before they compute, and freed after
    its flats       one for each kind of parameter: of one dtype, all trainable or all frozen

                    | a a a a a a | b b | c c c c c c c | pad |      a FlatPartition
    share           |     rank 0     |  rank 1  ...                  always: master dtype, 1/n
    full            | a a a a a a | b b | c c c c c c c | pad |      while in use: compute dtype
    unreduced       | their gradients, divided by n     | pad |      until they are reduced

`full` and `unreduced` are tensors for good, with a view for each parameter; what comes and goes
is the memory behind them. So autograd may keep a view of a parameter from forward to backward: it
costs nothing while freed, and shows the numbers again once they are gathered again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm, Handle
from labkit.parallel.common.flat import FlatPartition
from labkit.parallel.common.grad_buffer import GradBuffer, nobody_used
from labkit.parallel.common.replicas import copy_from_rank_0
from labkit.parallel.common.shards import marked_as
from labkit.parallel.zero3.sharded_parameter import ShardedParameter
from labkit.parallel.zero3.tensors import ShardGradient, UngatheredParameter, refuse_hook

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Place:
    """Where a parameter stands: `module.attribute`; `unit` is the module whose forward uses it."""

    name: str
    module: nn.Module
    attribute: str
    owner: nn.Module  # the nearest module that can be called
    unit: nn.Module

    def put(self, parameter: Any) -> None:
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = parameter
        else:  # recurrent layers keep a list of their weights in step
            setattr(self.module, self.attribute, parameter)


def compute_dtype_of(parameter: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Of the gathered parameter: what was asked for; integers stay what they are."""
    return asked if asked and parameter.is_floating_point() else parameter.dtype


def master_dtype_of(parameter: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Of what the optimizer steps on: float32 where the model computes in 16 bits."""
    return torch.float32 if asked in HALF and parameter.is_floating_point() else parameter.dtype


class ResizableBuffer:
    """A flat tensor of a partition with a view for each parameter, whose memory comes and goes."""

    def __init__(self, partition: FlatPartition, dtype: torch.dtype, device: torch.device):
        self.flat = torch.empty(partition.padded, dtype=dtype, device=device)
        self.nbytes = self.flat.nbytes
        self.views = partition.views(self.flat)
        self._storage = self.flat.untyped_storage()
        self.free()

    def allocate(self) -> None:
        self._storage.resize_(self.nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    @property
    def held_bytes(self) -> int:
        return self._storage.nbytes()


class Flat:
    """Parameters of one unit and kind: this rank's share of them, all of them while they are used,
    their gradients until they are reduced.

    shards      what the optimizer steps on: of each parameter this rank's piece, [numel] flat and
                without elements where it has none
    gathered    what the model computes with: the parameters in their shapes, views of `full`
    ungathered  what the modules have during a pass while `full` is free

    Kept whole (few elements), the "share" is everything and the gradients are all-reduced.
    """

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
        self.share = torch.empty(self.partition.share, dtype=dtype, device=device)
        self._fill([parameter for parameter, _ in group])
        self.shards = self._cut_into_shards()
        self.full = ResizableBuffer(self.partition, compute_dtype_of(first, compute_dtype), device)
        self.gathered = [nn.Parameter(x.data, self.trainable) for x in self.full.views]
        for (parameter, _), *both in zip(group, self.shards, self.gathered, strict=True):
            for x in both:
                marked_as(parameter, x)
            if parameter._backward_hooks:  # of `register_hook`
                both[1]._backward_hooks = parameter._backward_hooks
            both[0].register_hook = refuse_hook  # type: ignore[method-assign]
            both[0].register_post_accumulate_grad_hook = refuse_hook  # type: ignore[method-assign]
        self.unreduced = ResizableBuffer(self.partition, self.full.flat.dtype, device)
        names = {x: at[0].name for x, at in zip(self.gathered, self.places, strict=True)}
        self.gradients = GradBuffer(self.gathered, self.partition, names)
        self.gradients.use(self.unreduced.flat, self.unreduced.views)
        self.gradient: torch.Tensor | None = None  # [share], what the shards' gradients lie in
        self.ungathered: list[UngatheredParameter] = []  # ZeRO3 makes them
        self.resting: Sequence[torch.Tensor] = self.shards
        self._handle: Handle | None = None
        self.reset()
        self.show(self.shards)

    def _fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Rank 0's numbers, of which this rank keeps its pieces. Parameters that were sharded
        while they were constructed are gathered for it, one at a time."""
        self.share.zero_()
        copy_from_rank_0([p for p in parameters if not isinstance(p, ShardedParameter)], self.comm)
        pieces = {piece.index: piece for piece in self.pieces}
        for index, x in enumerate(parameters):
            everything = x.whole() if isinstance(x, ShardedParameter) else x.detach()
            if piece := pieces.get(index):
                part = everything.reshape(-1)[piece.start : piece.start + piece.numel]
                self.share[piece.at : piece.at + piece.numel].copy_(part)

    def _cut_into_shards(self) -> list[nn.Parameter]:
        parts = [self.share[:0] for _ in self.places]
        for piece in self.pieces:
            parts[piece.index] = self.share[piece.at : piece.at + piece.numel]
        if self.keep_whole:
            parts = [x.view(shape) for x, shape in zip(parts, self.partition.shapes)]
        return [nn.Parameter(x, self.trainable) for x in parts]

    def show(self, parameters: Sequence[torch.Tensor]) -> None:
        """Have the modules see these: `gathered` or `resting`."""
        for places, parameter in zip(self.places, parameters):
            for place in places:
                place.put(parameter)

    # --- parameters ---

    def gather(self, async_op: bool) -> Handle | None:
        """Make `full`, from all ranks' shares; `async_op` returns a handle."""
        self.full.allocate()
        full = self.full.flat
        if self.keep_whole:
            full.copy_(self.share)
            return None
        mine = self.share
        if mine.dtype != full.dtype:
            mine = self.partition.share_of(full, self.comm.rank).copy_(mine)
        return self.comm.all_gather_into_tensor(full, mine, async_op=async_op)

    # --- gradients ---

    def reset(self) -> None:
        """Be ready for the next backward, also where the last was cut short."""
        if self._handle is not None:
            self._handle.wait()
        self._handle = None
        self.gradients.reset()
        self.unreduced.free()
        for parameter in self.gathered:
            parameter.grad = None

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Move a parameter's gradient, divided, to its place in the flat memory."""
        self.gradients.note(parameter)
        if not self.unreduced.held_bytes:
            self.unreduced.allocate()
        self.gradients.put(parameter, self.comm.size)  # the other one is freed

    def send_gradients(self, async_op: bool) -> None:
        """Sum them over the ranks, each share on the rank that owns it. Where the sums arrive,
        and what then becomes of them:

            shards have      of one dtype     the sums arrive in     and then
            no gradient      yes              `gradient` itself      are what shards show
            no gradient      no, kept whole   a place of their own   are copied to `gradient`
            some             any              a place of their own   are added
        """
        if not self.unreduced.held_bytes:
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
        """Wait for them, and add them to what the shards have."""
        if self._handle is not None:
            self._handle.wait()
        assert self.gradient is not None
        for piece in self.pieces:
            shard, here = self.shards[piece.index], slice(piece.at, piece.at + piece.numel)
            is_unused = self.gathered[piece.index] in self.gradients.unused
            if is_unused and nobody_used(self._arriving[here]):
                continue
            if not self._are_new and shard.grad is not None:
                shard.grad.add_(self._arriving[here].view(shard.shape))
                continue
            if self._arriving is not self.gradient:
                self.gradient[here].copy_(self._arriving[here])
            shard.grad = self.gradient[here].view(shard.shape)
            if type(shard.grad) is torch.Tensor and not self.keep_whole and self.comm.size > 1:
                shard.grad = shard.grad.as_subclass(ShardGradient)
        del self._arriving
        self.reset()


class Unit:
    """Modules whose parameters are gathered before they compute, and freed after."""

    def __init__(self, members: list[nn.Module], flats: list[Flat]):
        self.members, self.flats = members, flats
        self.trainable = [flat for flat in flats if flat.trainable]
        self.has_frozen = len(self.trainable) < len(flats)
        self.frees_itself = False  # its last gradient was its last moment in the last backward
        self.inputs = self.inputs_back = 0  # of the last forward; those with their gradients there
        self.has_run: set[nn.Module] = set()  # members, since the last gather
        self.awaited: set[Flat] = set()  # whose gradients this backward still has to make
        self.is_gathered = False  # and shown to the modules
        self.stays = False  # to the end of the pass, as what is outside of the unit may use it
        self._handles: list[Handle | None] | None = None

    def start_gather(self, async_op: bool) -> None:
        """Nothing to do where they are here, or on their way."""
        if self._handles is None:
            self._handles = [flat.gather(async_op) for flat in self.flats]

    def finish_gather(self) -> None:
        self._wait()
        for flat in self.flats:
            flat.show(flat.gathered)
        self.is_gathered = True

    def _wait(self) -> None:
        for handle in self._handles or ():
            if handle is not None:
                handle.wait()

    def free(self) -> None:
        """What is under way has to arrive first."""
        if self._handles is None or self.stays:
            return
        self._wait()
        for flat in self.flats:
            if self.is_gathered:
                flat.show(flat.resting)
            flat.full.free()
        self._handles, self.is_gathered = None, False
        self.has_run.clear()

    def note_input_gradient(self, gradient: torch.Tensor) -> None:
        """The gradient of an input is there. With the last one all that the unit did in forward is
        undone: autograd goes back in the order of forward."""
        self.inputs_back += 1
        if self.inputs_back >= self.inputs:
            self.free()

    def end_pass(self) -> None:
        """Free the unit, whatever state the pass left it in."""
        self.stays = False
        self.free()
        self.rest(in_pass=False)
        self.inputs_back = 0
        if self.awaited:  # some parameter was not used
            self.frees_itself = False
            self.awaited.clear()

    def rest(self, in_pass: bool) -> None:
        """While the unit is free, the modules see its shards, or in a pass `ungathered`."""
        for flat in self.flats:
            flat.resting = flat.ungathered if in_pass else flat.shards
            if not self.is_gathered:
                flat.show(flat.resting)
