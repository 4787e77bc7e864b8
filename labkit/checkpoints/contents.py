"""The contents of a checkpoint, under the same names for every strategy.

    model.NAME                              a parameter or buffer, named as in the plain module
    optimizer.state.NAME.KEY                that parameter's optimizer state, such as `exp_avg`
    optimizer.param_groups.GROUP.KEY        hyperparameters; KEY `params` lists the names
    labkit                                  {"format": 1, "step": ..., "extra": ...}

These are the names of `torch.distributed.checkpoint.state_dict.get_state_dict`. A tensor-parallel
parameter is saved under its plain name, with its whole shape. A rank owns these slices:

    DDP, no strategy     all parameters, each as one slice
    ZeroOptimizer        `optimizer.owned(module)`
    ZeRO3                `model.owned(optimizer)`
    Pipeline             the optimizer's slices for this rank's stages, or each stage's own slices
                         (whole parameters or ZeRO3's), named as in the whole model

If several ranks own a slice, one of them writes it. A parameter tied across stages is saved under
its first name. The first rank with the parameter writes it; all ranks with the parameter read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.holdings import OwnedPiece
from labkit.parallel.common.ownership import check_same_on_all_ranks
from labkit.parallel.common.sharder import InStages, OwnsPieces, implements, plain_module
from labkit.parallel.common.shards import shard_of
from labkit.runtime.attach import attach

Key = tuple[str | int, ...]
FORMAT = 1


def comm_of(model: nn.Module, optimizer: Any) -> Comm:
    """The strategy's ranks, or all if there is tensor parallelism, a pipeline or no strategy."""
    if not (any(map(shard_of, plain_module(model).parameters())) or isinstance(model, InStages)):
        for owner in (optimizer, model):
            if isinstance(comm := getattr(owner, "comm", None), Comm):
                return comm
    return attach().comm


class Contents:
    """This rank's part of a model and its optimizer, and the names and shapes on all ranks.

    module         this rank's part of the model, under the names of the whole model
    pipeline       the model if it is a pipeline, else None
    strategies     strategies that define a rank's slices; [] if each rank has the whole model
    named          this rank's parameters, under their first names
    pieces         this rank's slices of parameters (`OwnedPiece`)
    shapes         name -> whole shape, for the parameters of all ranks
    buffers        name -> persistent buffer on this rank
    buffer_shapes  name -> shape, for the buffers of all ranks; buffer_rank: first rank with each
    aliases        additional name of a tied parameter or buffer -> its first name
    groups         parameter names per group, over all ranks
    stateful       names of parameters with an optimizer; trained: those that are not frozen

    Raises ValueError if the ranks' models or optimizers differ, if `comm` lacks a rank of the
    pipeline, or if model and optimizer both define a rank's slices."""

    def __init__(self, model: nn.Module, optimizer: Any, comm: Comm):
        self.module, self.optimizer = plain_module(model), optimizer
        self.pipeline = pipeline = model if isinstance(model, InStages) else None
        stages = pipeline.stages_here() if pipeline else [("", model)]
        self._sharders: list[tuple[str, Any]] = [x for x in stages if implements(x[1], OwnsPieces)]
        self._by_optimizer = implements(optimizer, OwnsPieces)
        sharders = [sharder for _, sharder in self._sharders]
        self._sharded = {p for sharder in sharders for p in sharder.module.parameters()}
        self.strategies = [optimizer] * self._by_optimizer + sharders
        if self._by_optimizer and sharders:
            first, second = (type(x).__name__ for x in self.strategies[:2])
            raise ValueError(
                f"{first} and {second} both shard the optimizer; with {second}, use a plain torch "
                "optimizer, which then steps on shards"
            )
        if pipeline is not None and not {*pipeline.comm.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"the stages of this Pipeline are on ranks {list(pipeline.comm.ranks)}, but ranks "
                f"{list(comm.ranks)} would save only a part of the model; pass comm=mesh.comm"
            )
        self._groups = [] if optimizer is None else optimizer.param_groups
        self.named = [(self.first_name(name), p) for name, p in self.module.named_parameters()]
        self.aliases = dict(pipeline.aliases) if pipeline else {}
        self.buffers = self._find_buffers()
        if not self.strategies and pipeline is None:
            whole_params = [(name, _in_whole_shape(p)) for name, p in self.named]
            check_same_on_all_ranks(whole_params, comm, averaged=False)
        shards = {name: shard_of(p) for name, p in self.named}
        self.pieces = [replace(x, shard=shards[x.name]) for x in self.owned()]
        self.shapes: dict[str, torch.Size] = {}
        self.buffer_shapes: dict[str, torch.Size] = {}
        self._gather(comm)

        # Unowned: frozen parameters, which a sharded optimizer may omit, and empty parameters.
        unowned = [
            replace(whole(name, p), shard=shards[name])
            for name, p in self.named
            if name not in self.shapes and p not in self._sharded
        ]
        self.pieces += unowned
        more = {x.name: x.whole_shape for x in unowned}
        # Without a pipeline, all ranks add the same names.
        of_all = [more] if pipeline is None else comm.all_gather_object(more)
        self.shapes = _union([self.shapes, *of_all])

        first_of = {id(p): name for name, p in self.named}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if first_of[id(p)] != name:
                self.aliases[name] = first_of[id(p)]
        known = self.shapes | self.buffer_shapes
        self.aliases = {name: first for name, first in self.aliases.items() if first in known}

    def first_name(self, name: str) -> str:
        """The name under which a parameter is saved; `name` may be any of its names."""
        return self.pipeline.aliases.get(name, name) if self.pipeline else name

    def owned(self) -> list[OwnedPiece]:
        """The slices that this rank owns according to the strategies, under first names."""
        if self._by_optimizer:
            pieces = list(self.optimizer.owned(self.module))
        else:
            pieces = [
                replace(piece, name=prefix + piece.name)
                for prefix, sharder in self._sharders
                for piece in sharder.owned(self.optimizer)
            ]
            named = self.module.named_parameters()
            pieces += [whole(x, p, self.optimizer) for x, p in named if p not in self._sharded]
        return [replace(piece, name=self.first_name(piece.name)) for piece in pieces]

    def _find_buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers; adds other names of shared buffers to `aliases`."""
        buffers: dict[str, torch.Tensor] = {}
        first_of: dict[int, str] = {}
        for prefix, part in self.module.named_modules(remove_duplicate=False):
            for key, buffer in part._buffers.items():
                name = self.first_name(f"{prefix}.{key}" if prefix else key)
                if buffer is None or key in part._non_persistent_buffers_set:
                    continue
                if first_of.setdefault(id(buffer), name) == name:
                    buffers[name] = buffer
                else:
                    self.aliases[name] = first_of[id(buffer)]
        return buffers

    def _gather(self, comm: Comm) -> None:
        """Exchange names and shapes with the other ranks."""
        names = {id(p): name for name, p in self.named}
        names |= {id(piece.tensor): piece.name for piece in self.pieces}
        stepped_on = [piece for piece in self.pieces if piece.optimizer is not None]
        own_groups = [[names.get(id(p)) for p in group["params"]] for group in self._groups]
        local = (
            {piece.name: piece.whole_shape for piece in self.pieces},
            {name: x.shape for name, x in self.buffers.items()},
            {piece.name for piece in stepped_on},
            {piece.name for piece in stepped_on if piece.tensor.requires_grad},
            [[name for name in group if name is not None] for group in own_groups],
        )
        shapes, buffers, stateful, trained, groups = zip(*comm.all_gather_object(local))
        counts = [len(of_rank) for of_rank in groups]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks have different optimizers, with {', '.join(map(str, counts))} "
                "parameter groups; build the same optimizer on all ranks"
            )
        self.shapes, self.buffer_shapes = _union(shapes), _union(buffers)
        self.stateful, self.trained = set().union(*stateful), set().union(*trained)
        self.groups = [list(dict.fromkeys(chain(*of_ranks))) for of_ranks in zip(*groups)]
        self.buffer_rank = {
            name: next(rank for rank, of_rank in enumerate(buffers) if name in of_rank)
            for name in self.buffer_shapes
        }

    def to_write(self) -> Iterator[OwnedPiece]:
        """The slices this rank writes. Only the first tensor-parallel rank writes replicated slices
        (other ranks may slice them differently); only the first stage writes shared slices."""
        shards = (shard_of(p) for _, p in self.named)
        first = all(shard.comm.rank == 0 for shard in shards if shard is not None)
        here = self.written_here()
        return (x for x in self.pieces if x.name in here and (first or x.shard is not None))

    def written_here(self) -> set[str]:
        """Names of this rank's parameters, without those that an earlier pipeline rank has."""
        counts_here = self.pipeline.counts_here if self.pipeline else lambda p: True
        others = {name for name, p in self.named if not counts_here(p)}
        return {name for name, _ in self.named} - others

    def hyperparameters(self) -> Iterator[tuple[Key, Any]]:
        """Path and value of each group's hyperparameters and of `params`, the parameter names."""
        for k, (group, names) in enumerate(zip(self._groups, self.groups, strict=True)):
            for key, value in {**group, "params": names}.items():
                if key != "param_names":  # `params` has these names
                    yield ("optimizer", "param_groups", k, key), value

    def after_load(self) -> None:
        """Let the strategies update the tensors that they derive from the loaded slices."""
        for strategy in self.strategies:
            strategy.after_load()


def whole(name: str, tensor: torch.Tensor, optimizer: Any = None) -> OwnedPiece:
    """The whole tensor as one slice, with `optimizer` if it steps on the tensor."""
    groups = [] if optimizer is None else optimizer.param_groups
    steps = any(tensor is p for group in groups for p in group["params"])
    return OwnedPiece(name, tensor.shape, 0, tensor, optimizer if steps else None)


def is_per_element(key: str, shape: torch.Size, parameter: torch.Size) -> bool:
    """Whether a state has one element per parameter element, like `exp_avg` but not `step`."""
    return key != "step" and shape == parameter


def check_single_value(piece: OwnedPiece, key: str, shape: torch.Size) -> None:
    """Raises ValueError if a sharded parameter's state has several values, but not one per element,
    like Adafactor's row statistics, because this state cannot be joined or split."""
    if piece.shard is not None and shape.numel() > 1:
        raise ValueError(
            f"the optimizer's {key} of {piece.name} has shape {list(shape)}, and the parameter, of "
            f"shape {list(piece.whole_shape)}, is split over ranks {list(piece.shard.comm.ranks)}; "
            "use an optimizer that treats each element independently, like AdamW, or optimizer=None"
        )


def _union(shapes: Sequence[dict[str, torch.Size]]) -> dict[str, torch.Size]:
    """Merge the ranks' shapes by name. Raises ValueError if a name has different shapes."""
    union: dict[str, torch.Size] = {}
    for rank, of_rank in enumerate(shapes):
        for name, shape in of_rank.items():
            if union.setdefault(name, shape) != shape:
                raise ValueError(
                    f"the ranks have different models: {name} is {list(shape)} on rank {rank} and "
                    f"{list(union[name])} on an earlier rank; build the same model on every rank"
                )
    return union


def _in_whole_shape(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter, or a meta tensor of its whole shape if it is sharded."""
    if (shard := shard_of(parameter)) is None:
        return parameter
    whole = torch.empty(shard.whole_shape(parameter.shape), dtype=parameter.dtype, device="meta")
    return whole.requires_grad_(parameter.requires_grad)
