"""The stages of a pipeline: layers of one model, each under its name in the whole.

Parameters are called `blocks.3.attn.q.weight`, wherever block 3 is; those of a stage that is no
`Layers` as in nn.Sequential(*stages). `labkit.split` makes stages: ../splitting.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from labkit.parallel.common.sharder import unwrapped


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
        found: dict[str, Any] = dict.fromkeys(self._paths, self)
        for path in found:
            for name in path.split("."):
                found[path] = found[path]._modules[name]
        return found

    @staticmethod
    def together(stages: Sequence[nn.Module], own: Sequence[int]) -> nn.Module:
        """The stages `own` of one rank, under their names in the whole model, without wrappers, as
        DDP. Raises ValueError where two layers of any stages have one name."""
        layers = [layers_in(index, stage) for index, stage in enumerate(stages)]
        _check_names(layers)
        return Layers({path: layer for index in own for path, layer in layers[index].items()})


def layers_in(index: int, stage: nn.Module) -> dict[str, nn.Module]:
    """The layers of stage `index` by their names in the whole model, without a wrapper."""
    inner = unwrapped(stage)
    return inner.layers if isinstance(inner, Layers) else {str(index): inner}


def prefix_of(index: int, stage: nn.Module) -> str:
    """What the names of the parts of stage `index` begin with in the whole model."""
    inner = unwrapped(stage)
    return "" if isinstance(inner, Layers) else f"{index}."


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


def _check_names(stages: Sequence[Mapping[str, nn.Module]]) -> None:
    """Raises ValueError where two stages have a layer of one name, unless it is the same one."""
    first: dict[str, int] = {}
    for index, layers in enumerate(stages):
        for path, layer in layers.items():
            other = first.setdefault(path, index)
            if layer is not stages[other][path]:
                raise ValueError(
                    f"stages {other} and {index} have a layer called {path} each, and they are not "
                    "the same: one would take the other's place in parameters(), train() and "
                    "full_state_dict(); cut one model, as split(nn.Sequential(*first, *second), "
                    f"{len(stages)}) does"
                )
