"""What is wrong with a model, or with what it is given, where ranks compute it together: said by
the layer's name before anything is cut, and by rank before anything is computed.
"""

import zlib
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import CollectiveMismatch, Comm
from labkit.parallel.parts.random_state import draws
from labkit.parallel.tensor_linear import ColumnParallelLinear, RowParallelLinear


def is_attention(module: nn.Module) -> bool:
    """Whether it has the layers of attention, by name."""
    return all(hasattr(module, name) for name in ("q", "k", "v", "out"))


def is_mlp(module: nn.Module) -> bool:
    """Whether it has the layers of an MLP, by name."""
    return all(hasattr(module, name) for name in ("up", "down"))


def check_fits(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError where a layer cannot be cut, or none is to be."""
    layers = {path: one for path, one in model.named_modules() if is_attention(one) or is_mlp(one)}
    for path, layer in layers.items():
        for name in ("q", "k", "v", "out") if is_attention(layer) else ("up", "down"):
            _check_plain(f"{path}.{name}".lstrip("."), getattr(layer, name))
        _check_no_others(path, layer)
        counts = _heads_of(path, layer) if is_attention(layer) else _hidden_of(layer)
        for what, count in counts.items():
            if count % comm.size:
                fits = gcd(*counts.values())
                sizes = ", ".join(str(n) for n in range(1, fits + 1) if fits % n == 0)
                raise ValueError(
                    f"{count} {what} of {path or 'the model'} do not divide over {comm.size} "
                    f"tensor-parallel ranks; choose a size that does: {sizes}"
                )
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has nothing that tensor_parallel knows to cut: modules with "
            "q, k, v and out (attention) or with up and down (an MLP); give its layers these names"
        )


def _check_no_others(path: str, layer: nn.Module) -> None:
    """What is between columns and rows sees a part of the features: what it learned from them would
    be a part of a gradient, or the whole of it where it stands before or after."""
    known = ("q", "k", "v", "out") if is_attention(layer) else ("up", "down")
    for name, _ in layer.named_parameters():
        if name.partition(".")[0] not in known:
            raise ValueError(
                f"{path}.{name}".lstrip(".") + " is a parameter inside a layer that is cut, and "
                f"tensor_parallel knows {', '.join(known)} there: whether each rank has all of its "
                "gradient depends on where it is used; move it out of the layer, or cut by hand "
                "with ColumnParallelLinear, RowParallelLinear and copy_to_ranks"
            )


def _hidden_of(mlp: Any) -> dict[str, int]:
    return {"hidden features": mlp.up.out_features}


def _heads_of(path: str, attention: Any) -> dict[str, int]:
    if not isinstance(width := getattr(attention, "head_width", None), int):
        raise ValueError(
            f"{path} has q, k, v and out, and no head_width: attention is cut by heads; give it "
            "`head_width`, the features of one head"
        )
    return {
        "query heads": attention.q.out_features // width,
        "key-value heads": attention.k.out_features // width,
    }


def _check_plain(path: str, layer: nn.Module) -> None:
    if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
        raise ValueError(
            f"{path} is cut over {layer.comm.size} ranks already; edit a model once, or build a "
            "new one"
        )
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"{path} is a {type(layer).__name__}; tensor_parallel cuts plain nn.Linear: cut first, "
            "and edit in other ways afterwards"
        )


SAME_BATCH = "give all of them the same batch, chosen by the rank along the data-parallel axis"
SAME_SEED = "call torch.manual_seed with the same seed on all of them"


class SameInput:
    """Before each forward, where the ranks compare notes: have they the same input, and, with
    dropout on, the same random state?"""

    def __init__(self, comm: Comm, sequence: bool):
        self.comm, self.sequence = comm, sequence

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            # With a cut sequence, x of a later stage of the model is a part, and tokens are whole.
            if isinstance(x, Tensor) and not (self.sequence and x.is_floating_point()):
                self._compare("input", partial(_checksum, x), SAME_BATCH)
        self._compare("random state", lambda: _random_state() if draws(model) else 0, SAME_SEED)

    def _compare(self, what: str, number: Callable[[], int], advice: str) -> None:
        try:
            self.comm.compare(what, lambda: f"{number():08x}")
        except CollectiveMismatch as error:
            each = "\n".join(str(error).splitlines()[1:-1])  # without the general advice
            raise ValueError(
                f"the {what} differs between the ranks of a tensor-parallel group, which compute "
                f"one model together; {advice}\n{each}"
            ) from None


def _random_state() -> int:
    return _checksum(torch.default_generator.get_state())


def _checksum(x: Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
