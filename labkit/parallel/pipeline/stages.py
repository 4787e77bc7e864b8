"""Pipeline stages, with layers under their names in the whole model, such as `blocks.3`. Names in a
stage that is not a `Layers` are those in nn.Sequential(*stages), such as `1.weight`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.ownership import WeakMark
from labkit.parallel.common.sharder import full_state_dict, unwrapped


class Layers(nn.Module):
    """Runs layers in order, registered under their paths in the model: `Layers({"norm": norm})`."""

    def __init__(self, layers: Mapping[str, nn.Module]):
        super().__init__()
        self._paths = list(layers)
        for path, layer in layers.items():
            *parents, name = path.split(".")
            place: Any = self
            for parent in parents:
                place = place._modules.setdefault(parent, nn.Module())
            place._modules[name] = layer  # add_module would reject the name `layers`

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x

    @property
    def layers(self) -> dict[str, nn.Module]:
        layers: dict[str, Any] = dict.fromkeys(self._paths, self)
        for path in layers:
            for name in path.split("."):
                layers[path] = layers[path]._modules[name]
        return layers

    @staticmethod
    def together(stages: Sequence[nn.Module], own: Sequence[int]) -> nn.Module:
        """One module of the stages `own`. Raises ValueError if different layers share a name."""
        layers = [layers_in(index, stage) for index, stage in enumerate(stages)]
        first: dict[str, int] = {}
        for index, paths in enumerate(layers):
            for path, layer in paths.items():
                other = first.setdefault(path, index)
                if layer is not layers[other][path]:
                    raise ValueError(
                        f"stages {other} and {index} have different layers with the same name, "
                        f"{path}, so one would replace the other in parameters(), train() and "
                        "full_state_dict(); split one model instead, as "
                        f"split(nn.Sequential(*first, *second), {len(stages)}) does"
                    )
        return Layers({path: layer for index in own for path, layer in layers[index].items()})


class StagedModel(nn.Module):
    """The model interface of a Pipeline, documented in `InStages` (common/sharder.py)."""

    comm: Comm
    module: nn.Module
    _optimizer: torch.optim.Optimizer | None
    copy_advice = "copy pipeline.module, or save pipeline.full_state_dict() or a labkit checkpoint"

    def _set_stages(
        self, stages: Sequence[nn.Module], own: Sequence[int], owners: Mapping[Any, tuple[int, ...]]
    ) -> None:
        self._owners = dict(owners)
        self.aliases = aliases_of(stages)
        self._own = {index: stages[index] for index in own}
        self.module = Layers.together(stages, own)
        for p in self.module.parameters():
            p._labkit_pipeline = WeakMark(self)  # type: ignore[attr-defined]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        return self._owners.get(parameter, (self.comm.rank,))

    def counts_here(self, parameter: Tensor) -> bool:
        return self.owners(parameter)[0] == self.comm.rank

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        return [
            ("" if isinstance(unwrapped(stage), Layers) else f"{index}.", stage)
            for index, stage in self._own.items()
        ]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of the whole model, on every rank's CPU; shards (tensor parallelism, ZeRO3)
        are gathered. All ranks of the mesh must call this."""
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
    """The layers of stage `index` by their names in the whole model."""
    inner = unwrapped(stage)
    return inner.layers if isinstance(inner, Layers) else {str(index): inner}


def aliases_of(stages: Sequence[nn.Module]) -> dict[str, str]:
    """Maps aliases of tied tensors to their first names: {"head.weight": "embed.tokens.weight"}."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for index, stage in enumerate(stages):
        layers = Layers(layers_in(index, stage))
        for named in (layers.named_parameters, layers.named_buffers):
            for name, x in named(remove_duplicate=False):
                if (known := first.setdefault(id(x), name)) != name:
                    further[name] = known
    return further
