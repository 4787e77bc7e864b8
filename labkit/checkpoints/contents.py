"""What a model and its optimizer have for a checkpoint, under names that no strategy changes.

    model.NAME                              a parameter or buffer, named as in the plain module
    optimizer.state.NAME.KEY                its optimizer state, as `exp_avg`
    optimizer.param_groups.GROUP.KEY        hyperparameters; KEY `params` has the names
    labkit                                  {"format": 1, "step": ..., "extra": ...}

These are the names of `torch.distributed.checkpoint.state_dict.get_state_dict`. A rank has `Owned`
pieces of parameters (precision/pieces.py); several may have the same one, then one writes it. A
parameter that is cut over tensor-parallel ranks has its plain name and its whole shape.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.parts.agreement import check_same_on_all_ranks
from labkit.parallel.parts.in_stages import InStages
from labkit.parallel.parts.shards import comms_of, shard_of
from labkit.parallel.parts.whole import plain_module
from labkit.precision.pieces import OwnedPiece
from labkit.world.attach import attach

Path = tuple[str | int, ...]
FORMAT = 1


def comm_of(model: nn.Module, optimizer: Any) -> Comm:
    """The ranks that hold the model together: those of its strategy; all, where it has none or
    where parameters are cut over further ranks."""
    if not comms_of(plain_module(model).parameters()):
        for owner in (optimizer, model):
            if isinstance(comm := getattr(owner, "comm", None), Comm):
                return comm
    return attach().comm


class Contents:
    """What this rank holds of a model and its optimizer, and what all ranks hold together.

    pieces      this rank's pieces of parameters
    shapes      name -> shape of every parameter that any rank has, whole
    buffers     name -> buffer, of those that a state dict has; the same on all ranks
    also        a further name of a tied parameter or buffer -> its first name
    groups      for each parameter group the names of its parameters, of all ranks
    stateful    names of the parameters that the optimizer steps on
    """

    def __init__(self, model: nn.Module, optimizer: Any, comm: Comm):
        if isinstance(model, InStages):
            raise ValueError(
                "each rank of a Pipeline has other stages, and a checkpoint is of one model; save "
                "the weights as state = pipeline.full_state_dict(), and torch.save it on one rank; "
                "to go on, model.load_state_dict(state) before split (the optimizer's state is not "
                "saved)"
            )
        self.optimizer = optimizer
        self.module = plain_module(model)
        self.strategy = _sharder(model, optimizer)
        self.buffers, self.also = _buffers(self.module)
        names = {id(p): name for name, p in self.module.named_parameters()}
        if self.strategy is None:
            named = [(name, _without_cut(p)) for name, p in self._named()]
            check_same_on_all_ranks(named, comm, averaged=False)
            self.pieces = [_whole(name, p, optimizer) for name, p in self._named()]
        else:
            other = self.module if self.strategy is optimizer else optimizer
            self.pieces = list(self.strategy.owned(other))
        self._shards = {name: shard_of(p) for name, p in self._named()}
        self.pieces = [replace(one, shard=self._shards[one.name]) for one in self.pieces]
        names |= {id(piece.tensor): piece.name for piece in self.pieces}
        mine = (
            {piece.name: piece.whole_shape for piece in self.pieces},
            {piece.name for piece in self.pieces if piece.optimizer is not None},
            [[names[id(p)] for p in group["params"] if id(p) in names] for group in self._groups],
        )
        everyone = comm.all_gather_object(mine)
        if len({len(groups) for _, _, groups in everyone}) > 1:
            raise ValueError(
                "the ranks have different optimizers: the number of parameter groups is "
                f"{', '.join(str(len(groups)) for _, _, groups in everyone)}; build the same on all"
            )
        self.shapes = {name: shape for shapes, _, _ in everyone for name, shape in shapes.items()}
        self.stateful = set().union(*(stateful for _, stateful, _ in everyone))
        self.groups = [
            list(dict.fromkeys(name for _, _, groups in everyone for name in groups[k]))
            for k in range(len(self._groups))
        ]
        self._add_what_no_optimizer_owns()
        self._find_tied()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def _add_what_no_optimizer_owns(self) -> None:
        """A sharded optimizer may leave out frozen parameters: they are whole on all ranks. Also
        those without elements, of which nobody can own a piece."""
        sharded_module = self.strategy is not None and self.strategy is not self.optimizer
        for name, parameter in self._named():
            if name not in self.shapes and not sharded_module:
                piece = replace(_whole(name, parameter, None), shard=self._shards[name])
                self.pieces.append(piece)
                self.shapes[name] = piece.whole_shape

    def _find_tied(self) -> None:
        first = {id(p): name for name, p in self._named()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if first[id(parameter)] != name:
                self.also[name] = first[id(parameter)]

    def to_write(self) -> Iterator[OwnedPiece]:
        """This rank's pieces, of what all tensor-parallel ranks have only on the first of them:
        data-parallel ranks may cut it at other places on the others."""
        first = all(comm.rank == 0 for comm in comms_of(p for _, p in self._named()))
        return (piece for piece in self.pieces if first or piece.shard is not None)

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
        if self.strategy is not None:
            self.strategy.after_load()


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


def _sharder(model: nn.Module, optimizer: Any) -> Any:
    """Who says what this rank owns; None where every rank has all."""
    found = [x for x in (optimizer, model) if hasattr(x, "owned")]
    if len(found) > 1:
        names = " and ".join(type(x).__name__ for x in found)
        raise ValueError(
            f"{names} both say what a rank owns; under {type(model).__name__} use a plain "
            "torch optimizer, which it gives its pieces to step on"
        )
    return found[0] if found else None


def _whole(name: str, parameter: nn.Parameter, optimizer: Any) -> OwnedPiece:
    steps = optimizer is not None and any(
        parameter is p for group in optimizer.param_groups for p in group["params"]
    )
    return OwnedPiece(name, parameter.shape, 0, parameter, optimizer if steps else None)


def _without_cut(parameter: nn.Parameter) -> torch.Tensor:
    """What describes the whole parameter."""
    if (shard := shard_of(parameter)) is None:
        return parameter
    whole = torch.empty(shard.whole_shape(parameter.shape), dtype=parameter.dtype, device="meta")
    return whole.requires_grad_(parameter.requires_grad)


def _buffers(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The buffers that a state dict has, and further names of those that have several."""
    buffers: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    also: dict[str, str] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in part._non_persistent_buffers_set:
                continue
            if first.setdefault(id(buffer), name) == name:
                buffers[name] = buffer
            else:
                also[name] = first[id(buffer)]
    return buffers, also
