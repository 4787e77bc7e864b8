"""The parameter slices that this rank owns, as its strategy gives them.

    DDP, or none         all ranks have every parameter whole
    ZeroOptimizer        the optimizer's `owned(module)`
    ZeRO3                the model's `owned(optimizer)`
    Pipeline             the optimizer's, of this rank's stages; or each stage's own, whole or
                         in ZeRO3, under the names of the whole model

A parameter that is tied over stages has the first of its names everywhere; the first of its ranks
writes it, the others read it, too.
"""

from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from labkit.holdings import OwnedPiece
from labkit.parallel.common.sharder import InStages, OwnsPieces, fulfils, plain_module


class Owners:
    """The owners of the slices of `model` and its `optimizer`, on this rank.

    module      the part of the model that is here, under the names of the whole
    strategies  those with an `owned` method, [] where all is whole
    pipeline    the model, where it is one

    Raises ValueError where model and optimizer both have one."""

    def __init__(self, model: nn.Module, optimizer: Any):
        self.module, self.optimizer = plain_module(model), optimizer
        self.pipeline = model if isinstance(model, InStages) else None
        stages = self.pipeline.stages_here() if self.pipeline else [("", model)]
        self._sharders: list[tuple[str, Any]] = [x for x in stages if fulfils(x[1], OwnsPieces)]
        self._cut = {p for _, sharder in self._sharders for p in sharder.module.parameters()}
        self._by_optimizer = fulfils(optimizer, OwnsPieces)
        sharders = [sharder for _, sharder in self._sharders]
        self.strategies = [optimizer] * self._by_optimizer + sharders
        if self._by_optimizer and sharders:
            first, second = (type(x).__name__ for x in self.strategies[:2])
            raise ValueError(
                f"{first} and {second} both say what a rank owns; under {second} use "
                "a plain torch optimizer, which it gives its pieces to step on"
            )

    def pieces(self) -> list[OwnedPiece]:
        """What this rank owns, under first names."""
        if self._by_optimizer:
            pieces = list(self.optimizer.owned(self.module))
        else:
            pieces = [
                replace(piece, name=prefix + piece.name)
                for prefix, sharder in self._sharders
                for piece in sharder.owned(self.optimizer)
            ]
            named = self.module.named_parameters()
            pieces += [whole(name, p, self.optimizer) for name, p in named if p not in self._cut]
        return [replace(piece, name=self.first_name(piece.name)) for piece in pieces]

    def unowned(self, names: Container[str]) -> list[OwnedPiece]:
        """Whole pieces of parameters without an owner, not among `names`: frozen ones, which a
        sharded optimizer may leave out, and those without elements."""
        return [whole(n, p) for n, p in self.named() if n not in names and p not in self._cut]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are here, under first names."""
        return [(self.first_name(name), p) for name, p in self.module.named_parameters()]

    def first_name(self, name: str) -> str:
        """The name under which a parameter is saved, whichever of its names it has here."""
        return self.pipeline.further_names.get(name, name) if self.pipeline else name

    def written_here(self) -> set[str]:
        """The first names of the parameters that no rank before this one has for its stages."""
        named, pipeline = self.named(), self.pipeline
        others = {name for name, p in named if pipeline and not pipeline.counts_here(p)}
        return {name for name, _ in named} - others


def whole(name: str, tensor: torch.Tensor, optimizer: Any = None) -> OwnedPiece:
    """All of a tensor, on which `optimizer` steps if it has it."""
    groups = [] if optimizer is None else optimizer.param_groups
    steps = any(tensor is p for group in groups for p in group["params"])
    return OwnedPiece(name, tensor.shape, 0, tensor, optimizer if steps else None)
