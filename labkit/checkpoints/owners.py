"""Who says what this rank owns of a model: its strategy, or those of its stages in a pipeline.

    DDP, or none         nobody: all ranks have every parameter whole
    ZeroOptimizer        the optimizer: `owned(module)`
    ZeRO3                the model: `owned(optimizer)`
    Pipeline             the optimizer, of this rank's stages; or each stage for itself, whole or
                         in ZeRO3, under the names of the whole model

A parameter that is tied over stages has the first of its names everywhere, and the first of its
ranks writes it. The others read it, too.
"""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from torch import nn

from labkit.holdings import OwnedPiece
from labkit.parallel.common.sharder import InStages, OwnsPieces, fulfils
from labkit.parallel.common.whole import plain_module


class Owners:
    """Of `model` and its `optimizer`, on this rank.

    module      what of the model is here, under the names of the whole
    strategies  those that say what is owned, [] where all is whole
    pipeline    the model, where it is one

    Raises ValueError where several say so of one parameter.
    """

    def __init__(self, model: nn.Module, optimizer: Any):
        self.module, self.optimizer = plain_module(model), optimizer
        self.pipeline = model if isinstance(model, InStages) else None
        stages = self.pipeline.stages_here() if self.pipeline else [("", model)]
        self._sharders: list[tuple[str, Any]] = [x for x in stages if fulfils(x[1], OwnsPieces)]
        self._cut = {p for _, one in self._sharders for p in one.module.parameters()}
        self._by_optimizer = fulfils(optimizer, OwnsPieces)
        self.strategies = [optimizer] * self._by_optimizer + [one for _, one in self._sharders]
        if self._by_optimizer and self._sharders:
            names = " and ".join(type(one).__name__ for one in self.strategies[:2])
            raise ValueError(
                f"{names} both say what a rank owns; under {type(self.strategies[1]).__name__} use "
                "a plain torch optimizer, which it gives its pieces to step on"
            )

    def pieces(self) -> list[OwnedPiece]:
        """What this rank owns, under first names."""
        if self._by_optimizer:
            found = list(self.optimizer.owned(self.module))
        else:
            found = [
                replace(piece, name=prefix + piece.name)
                for prefix, stage in self._sharders
                for piece in stage.owned(self.optimizer)
            ]
            found += [whole(name, p, self.optimizer) for name, p in self._in_no_sharder()]
        return [replace(piece, name=self.first_name(piece.name)) for piece in found]

    def unowned(self, names: Container[str]) -> list[OwnedPiece]:
        """Whole pieces of what is not among `names`, which somebody owns: a sharded optimizer may
        leave out frozen parameters, which are whole on all ranks. Also those without elements, of
        which nobody can own a piece."""
        return [whole(n, p, None) for n, p in self.named() if n not in names and p not in self._cut]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are here, under first names."""
        return [(self.first_name(name), p) for name, p in self.module.named_parameters()]

    def _in_no_sharder(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p not in self._cut]

    def first_name(self, name: str) -> str:
        """Under which a parameter is saved, whichever of its names it has here."""
        return self.pipeline.further_names.get(name, name) if self.pipeline else name

    def written_here(self) -> set[str]:
        """The first names of the parameters that no rank before this one has for its stages."""
        every = {name for name, _ in self.named()}
        if self.pipeline is None:
            return every
        return every - {name for name, p in self.named() if not self.pipeline.counts_here(p)}


def whole(name: str, parameter: nn.Parameter, optimizer: Any) -> OwnedPiece:
    """All of a parameter, on which `optimizer` steps if it has it."""
    steps = optimizer is not None and any(
        parameter is p for group in optimizer.param_groups for p in group["params"]
    )
    return OwnedPiece(name, parameter.shape, 0, parameter, optimizer if steps else None)
