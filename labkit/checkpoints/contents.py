"""What a model and its optimizer have for a checkpoint, under names that no strategy changes.

    model.NAME                              a parameter or buffer, named as in the plain module
    optimizer.state.NAME.KEY                its optimizer state, as `exp_avg`
    optimizer.param_groups.GROUP.KEY        hyperparameters; KEY `params` has the names
    labkit                                  {"format": 1, "step": ..., "extra": ...}

These are the names of `torch.distributed.checkpoint.state_dict.get_state_dict`. A rank has `Owned`
pieces of parameters (labkit/holdings.py); several may have the same one, then one writes it. A
parameter that is cut over tensor-parallel ranks has its plain name and its whole shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from labkit.checkpoints.owners import Owners
from labkit.comm import Comm
from labkit.holdings import OwnedPiece
from labkit.parallel.common.agreement import check_same_on_all_ranks
from labkit.parallel.common.sharder import InStages
from labkit.parallel.common.shards import comms_of, shard_of
from labkit.parallel.common.whole import plain_module
from labkit.runtime.attach import attach

Path = tuple[str | int, ...]
FORMAT = 1


def comm_of(model: nn.Module, optimizer: Any) -> Comm:
    """The ranks that hold the model together: those of its strategy; all, where it has none, where
    parameters are cut over further ranks, or where it is in stages."""
    if not comms_of(plain_module(model).parameters()) and not isinstance(model, InStages):
        for owner in (optimizer, model):
            if isinstance(comm := getattr(owner, "comm", None), Comm):
                return comm
    return attach().comm


class Contents:
    """What this rank holds of a model and its optimizer, and what all ranks hold together.

    pieces         this rank's pieces of parameters
    shapes         name -> shape of every parameter that any rank has, whole
    buffers        name -> buffer, of those that a state dict has and this rank has
    buffer_shapes  name -> shape of those that any rank has; buffer_rank: the first that has it
    also           a further name of a tied parameter or buffer -> its first name
    groups         for each parameter group the names of its parameters, of all ranks
    stateful       names of the parameters that the optimizer steps on; trained: unless frozen

    Raises ValueError where the ranks have different models or optimizers, or some are missing.
    """

    def __init__(self, model: nn.Module, optimizer: Any, comm: Comm):
        self.optimizer, self.owners = optimizer, Owners(model, optimizer)
        self._check_all_stages(comm)
        self.buffers, self.also = _buffers(self.owners)
        if not self.owners.strategies and self.owners.pipeline is None:
            named = [(name, _without_cut(p)) for name, p in self._named()]
            check_same_on_all_ranks(named, comm, averaged=False)
        self._shards = {name: shard_of(p) for name, p in self._named()}
        self.pieces = [self._marked(one) for one in self.owners.pieces()]
        self._take(comm.all_gather_object(self._told()))
        self._add_what_no_optimizer_owns(comm)
        self._find_tied()

    def _told(self) -> dict[str, Any]:
        """What all ranks have to know of this one."""
        names = {id(p): name for name, p in self._named()}
        names |= {id(piece.tensor): piece.name for piece in self.pieces}
        return {
            "shapes": {piece.name: piece.whole_shape for piece in self.pieces},
            "stateful": {piece.name for piece in self.pieces if piece.optimizer is not None},
            "trained": {x.name for x in self.pieces if x.optimizer and x.tensor.requires_grad},
            "groups": [
                [names[id(p)] for p in group["params"] if id(p) in names] for group in self._groups
            ],
            "buffers": {name: x.shape for name, x in self.buffers.items()},
        }

    def _take(self, everyone: list[dict[str, Any]]) -> None:
        counts = [len(told["groups"]) for told in everyone]
        if len(set(counts)) > 1:
            raise ValueError(
                "the ranks have different optimizers: the number of parameter groups is "
                f"{', '.join(map(str, counts))}; build the same on all"
            )
        self.shapes = _together([told["shapes"] for told in everyone])
        self.stateful = set().union(*(told["stateful"] for told in everyone))
        self.trained = set().union(*(told["trained"] for told in everyone))
        self.groups = [
            list(dict.fromkeys(name for told in everyone for name in told["groups"][k]))
            for k in range(counts[0])
        ]
        self.buffer_shapes = _together([told["buffers"] for told in everyone])
        self.buffer_rank = {
            name: next(rank for rank, told in enumerate(everyone) if name in told["buffers"])
            for name in self.buffer_shapes
        }

    def _check_all_stages(self, comm: Comm) -> None:
        pipeline = self.owners.pipeline
        if pipeline is not None and not {*pipeline.comm.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"the stages of this Pipeline are on ranks {list(pipeline.comm.ranks)}, and ranks "
                f"{list(comm.ranks)} would save a part of the model; give comm=mesh.comm"
            )

    def _marked(self, piece: OwnedPiece) -> OwnedPiece:
        return replace(piece, shard=self._shards[piece.name])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return self.owners.named()

    def _add_what_no_optimizer_owns(self, comm: Comm) -> None:
        added = [self._marked(one) for one in self.owners.unowned(self.shapes)]
        self.pieces += added
        mine = {piece.name: piece.whole_shape for piece in added}
        # Without a pipeline all ranks add the same.
        every = [mine] if self.owners.pipeline is None else comm.all_gather_object(mine)
        self.shapes = _together([self.shapes, *every])

    def _find_tied(self) -> None:
        first = {id(p): name for name, p in self._named()}
        for name, parameter in self.owners.module.named_parameters(remove_duplicate=False):
            if first[id(parameter)] != name:
                self.also[name] = first[id(parameter)]
        there = self.shapes | self.buffer_shapes
        self.also = {name: first for name, first in self.also.items() if first in there}

    def to_write(self) -> Iterator[OwnedPiece]:
        """This rank's pieces, of what all tensor-parallel ranks have only on the first of them:
        data-parallel ranks may cut it at other places on the others. Of what several stages have,
        on the first of these."""
        first = all(comm.rank == 0 for comm in comms_of(p for _, p in self._named()))
        here = self.owners.written_here()
        return (
            piece for piece in self.pieces
            if piece.name in here and (first or piece.shard is not None)
        )  # fmt: skip

    def has_elements(self, name: str) -> bool:
        """Whether there is anything of a parameter; where not, a strategy may leave it out."""
        return name in self.shapes and self.shapes[name].numel() > 0

    def hyperparameters(self) -> Iterator[tuple[Path, Any]]:
        """Those of each group, with the names of its parameters."""
        for k, (group, names) in enumerate(zip(self._groups, self.groups, strict=True)):
            for key, value in {**group, "params": names}.items():
                if key == "param_names":  # `params` has them
                    continue
                yield ("optimizer", "param_groups", k, key), value

    def after_load(self) -> None:
        """The pieces were written to: what the strategy makes of them has to follow."""
        for strategy in self.owners.strategies:
            strategy.after_load()


def state_of(piece: OwnedPiece) -> dict[str, Any]:
    """The optimizer state of a piece; nothing before the first step."""
    if piece.optimizer is None:
        return {}
    return piece.optimizer.state.get(piece.tensor, {})


def lies_like(key: str, shape: torch.Size, parameter: torch.Size) -> bool:
    """Whether a state, like `exp_avg`, has an element for each of its parameter's. (`step` is one
    number for all, also where the parameter itself is one number.)"""
    return key != "step" and shape == parameter


def check_one_for_all(piece: OwnedPiece, key: str, shape: torch.Size) -> None:
    """Raises ValueError for a state with neither one number in all nor one for each element, as
    Adafactor has for rows: of a parameter that is cut, nobody knows how to join or cut it."""
    if piece.shard is not None and shape.numel() > 1:
        raise ValueError(
            f"the optimizer's {key} of {piece.name} has shape {list(shape)}, and the parameter, of "
            f"shape {list(piece.whole_shape)}, is cut over ranks {list(piece.shard.comm.ranks)}; "
            "use an optimizer that treats each element by itself, as AdamW, or optimizer=None"
        )


def _together(shapes: Sequence[dict[str, torch.Size]]) -> dict[str, torch.Size]:
    """All names that the ranks have. Raises ValueError where one is of several shapes."""
    found: dict[str, torch.Size] = {}
    for rank, mine in enumerate(shapes):
        for name, shape in mine.items():
            if found.setdefault(name, shape) != shape:
                raise ValueError(
                    f"the ranks have different models: {name} is {list(shape)} on rank {rank} and "
                    f"{list(found[name])} on one before; build the same model on every rank"
                )
    return found


def _without_cut(parameter: nn.Parameter) -> torch.Tensor:
    """What describes the whole parameter."""
    if (shard := shard_of(parameter)) is None:
        return parameter
    whole = torch.empty(shard.whole_shape(parameter.shape), dtype=parameter.dtype, device="meta")
    return whole.requires_grad_(parameter.requires_grad)


def _buffers(owners: Owners) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The buffers that a state dict has, and further names of those that have several; of a
    pipeline, further names in all stages."""
    buffers: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    also = dict(owners.pipeline.further_names) if owners.pipeline else {}
    for prefix, part in owners.module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            name = owners.first_name(f"{prefix}.{key}" if prefix else key)
            if buffer is None or key in part._non_persistent_buffers_set:
                continue
            if first.setdefault(id(buffer), name) == name:
                buffers[name] = buffer
            else:
                also[name] = first[id(buffer)]
    return buffers, also
