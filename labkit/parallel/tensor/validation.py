"""What is wrong with a model, or with what it is given, where ranks compute it together: said by
the layer's name before anything is cut, and by rank before anything is computed.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labkit.comm import Comm
from labkit.events import ranks_in_words
from labkit.memory.conditions import generators
from labkit.parallel.common.shards import check_same, checksum
from labkit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.tensor.random_state import draws
from labkit.parallel.tensor.split_trial import SplitTrial


def is_attention(module: nn.Module) -> bool:
    """Whether it has the layers of attention, by name."""
    return all(hasattr(module, name) for name in ("q", "k", "v", "out"))


def is_mlp(module: nn.Module) -> bool:
    """Whether it has the layers of an MLP, by name."""
    return all(hasattr(module, name) for name in ("up", "down"))


def columns_and_rows(layer: Any) -> tuple[list[str], str]:
    """The names of the linear layers that are cut by columns, and of the one by rows. An MLP may be
    gated, as Llama's: down(act(gate(x)) * up(x)); its `gate` has the columns that `up` has."""
    if is_attention(layer):
        return ["q", "k", "v"], "out"
    return ["gate", "up"] if hasattr(layer, "gate") else ["up"], "down"


def check_fits(model: nn.Module, comm: Comm) -> list[SplitTrial]:
    """Raises ValueError where a layer cannot be cut, or none is to be. Returns the layers' trials:
    those still pending are to be made on the first real input."""
    layers = {path: one for path, one in model.named_modules() if is_attention(one) or is_mlp(one)}
    for path, layer in layers.items():
        columns, row = columns_and_rows(layer)
        for name in (*columns, row):
            _check_plain(f"{path}.{name}".lstrip("."), getattr(layer, name))
        _check_no_others(path, layer, [*columns, row])
        counts = _heads_of(path, layer) if is_attention(layer) else _hidden_of(path, layer)
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
            "q, k, v and out (attention) or with up and down, and gate where it is gated (an MLP); "
            "give its layers these names"
        )
    return [SplitTrial(n, x, *columns_and_rows(x), comm.size) for n, x in layers.items()]


def _check_no_others(path: str, layer: nn.Module, known: Sequence[str]) -> None:
    """What is between columns and rows sees a part of the features: what it learned from them would
    be a part of a gradient, or the whole of it where it stands before or after."""
    for name, _ in layer.named_parameters():
        if name.partition(".")[0] not in known:
            raise ValueError(
                f"{path}.{name}".lstrip(".") + " is a parameter inside a layer that is cut, and "
                f"tensor_parallel knows {', '.join(known)} there: whether each rank has all of its "
                "gradient depends on where it is used; move it out of the layer, or cut by hand "
                "with ColumnParallelLinear, RowParallelLinear and copy_to_ranks"
            )


def _hidden_of(path: str, mlp: Any) -> dict[str, int]:
    hidden: int = mlp.up.out_features
    if hasattr(mlp, "gate") and mlp.gate.out_features != hidden:
        raise ValueError(
            f"{path}.gate".lstrip(".") + f" has {mlp.gate.out_features} features and up {hidden}: "
            "a gate is cut as what it is multiplied with; make them equal, or give it another name"
        )
    return {"hidden features": hidden}


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
            f"{path} is cut over {ranks_in_words(layer.comm.size)} already; edit a model "
            "once, or build a new one"
        )
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"{path} is a {type(layer).__name__}; tensor_parallel cuts plain nn.Linear: cut first, "
            "and edit in other ways afterwards"
        )
    changed = any(hooks for key, hooks in vars(layer).items() if key.endswith("_hooks"))
    if changed or "forward" in vars(layer):
        raise ValueError(
            f"{path} has hooks or a forward of its own, which the layers that take its place would "
            "not call; cut first, then add these"
        )


SAME_BATCH = "give all of them the same batch, chosen by the rank along the data-parallel axis"
SAME_SEED = "call torch.manual_seed with the same seed on all of them"


class SameInput:
    """Before each forward, where the ranks compare notes: have they the same input, all tensors in
    it, and, with dropout on, the same random state?"""

    def __init__(self, comm: Comm, sequence: bool):
        self.comm, self.sequence = comm, sequence

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        def inputs() -> int:
            found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            # With a cut sequence, x of a later stage of the model is a part, and tokens are whole.
            return checksum(x for x in found if not (self.sequence and x.is_floating_point()))

        check_same(self.comm, "input", inputs, SAME_BATCH)
        check_same(
            self.comm, "random state", lambda: _random_state(model) if draws(model) else 0,
            SAME_SEED,
        )  # fmt: skip


def _random_state(model: nn.Module) -> int:
    """Of the generators from which it draws: the CPU's, and that of its device on this rank."""
    devices = {torch.device("cpu"), *(x.device for x in model.parameters())}
    return checksum(g.get_state() for g in generators() if g.device in devices)
