"""The stages of a pipeline: layers of one model, each under its name in the whole. Parameters are
called `blocks.3.attn.q.weight`, wherever block 3 is; those of a stage that is no `Layers` as in
nn.Sequential(*stages). `labkit.split` makes stages: ../splitting.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.ownership import WeakMark
from labkit.parallel.common.sharder import full_state_dict, unwrapped


class Layers(nn.Module):
    """Layers that run one after the other, x -> ... -> y, each under its path in the whole model:
    `Layers({"blocks.3": block, "norm": norm})`."""

    def __init__(self, layers: Mapping[str, nn.Module]):
        super().__init__()
        self._paths = list(layers)
        for path, layer in layers.items():
            *parents, name = path.split(".")
            place: Any = self
            for parent in parents:
                place = place._modules.setdefault(parent, nn.Module())
            place._modules[name] = layer  # whatever its name: a model may have a part `layers`

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Each with its path."""
        layers: dict[str, Any] = dict.fromkeys(self._paths, self)
        for path in layers:
            for name in path.split("."):
                layers[path] = layers[path]._modules[name]
        return layers

    @staticmethod
    def together(stages: Sequence[nn.Module], own: Sequence[int]) -> nn.Module:
        """The stages `own` of one rank, under their names in the whole model, without wrappers, as
        DDP. Raises ValueError where two layers of any stages have one name."""
        layers = [layers_in(index, stage) for index, stage in enumerate(stages)]
        first: dict[str, int] = {}
        for index, paths in enumerate(layers):
            for path, layer in paths.items():
                other = first.setdefault(path, index)
                if layer is not layers[other][path]:
                    raise ValueError(
                        f"stages {other} and {index} have a layer called {path} each, and they are "
                        "not the same: one would take the other's place in parameters(), train() "
                        "and full_state_dict(); cut one model, as split(nn.Sequential(*first, "
                        f"*second), {len(stages)}) does"
                    )
        return Layers({path: layer for index in own for path, layer in layers[index].items()})


class StagedModel(nn.Module):
    """What a Pipeline shows of its model, as `InStages` asks (common/sharder.py)."""

    comm: Comm
    module: nn.Module
    _optimizer: torch.optim.Optimizer | None
    copy_advice = "copy pipeline.module, save pipeline.full_state_dict() or a labkit checkpoint"

    def _take(
        self, stages: Sequence[nn.Module], own: Sequence[int], owners: Mapping[Any, tuple[int, ...]]
    ) -> None:
        """`own`: the stages of this rank; `owners`: the ranks of each parameter that is tied."""
        self._owners = dict(owners)
        self.further_names = further_names(stages)
        self._own = {index: stages[index] for index in own}
        self.module = Layers.together(stages, own)
        for p in self.module.parameters():
            p._labkit_pipeline = WeakMark(self)  # type: ignore[attr-defined]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of a schedule that updates weights on its way, as `save_checkpoint` wants it."""
        return self._optimizer

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks that have it."""
        return self._owners.get(parameter, (self.comm.rank,))

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank is the first, or only one that has it."""
        return self.owners(parameter)[0] == self.comm.rank

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        """The stages of this rank, as they were given, each after what its names begin with."""
        return [
            ("" if isinstance(unwrapped(stage), Layers) else f"{index}.", stage)
            for index, stage in self._own.items()
        ]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of the whole model, on every rank, on the CPU; all ranks call it together, of
        a mesh all. What is cut over further ranks (tensor parallelism, ZeRO3) is whole."""
        own: dict[str, Tensor] = {}
        for index, stage in self._own.items():
            names = Layers(layers_in(index, stage)).state_dict()
            whole = full_state_dict(stage).values()  # in the same order
            own |= {name: x.detach().cpu() for name, x in zip(names, whole, strict=True)}
        states = self.comm.all_gather_object(own)
        return {name: x for state in states for name, x in state.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a Pipeline cannot be copied or pickled; {self.copy_advice}")


def layers_in(index: int, stage: nn.Module) -> dict[str, nn.Module]:
    """The layers of stage `index` by their names in the whole model, without a wrapper."""
    inner = unwrapped(stage)
    return inner.layers if isinstance(inner, Layers) else {str(index): inner}


def further_names(stages: Sequence[nn.Module]) -> dict[str, str]:
    """Each further name of a parameter or buffer that is in the whole model several times, with the
    first: {"head.weight": "embed.tokens.weight"}."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for index, stage in enumerate(stages):
        layers = Layers(layers_in(index, stage))
        for named in (layers.named_parameters, layers.named_buffers):
            for name, x in named(remove_duplicate=False):
                if (known := first.setdefault(id(x), name)) != name:
                    further[name] = known
    return further
