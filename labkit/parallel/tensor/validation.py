"""Checks that every layer can be sharded, and that all ranks receive the same input.

Each layer runs in one process, with random tensors as its linears' outputs; no weights are read.

    whole     x ─▶ columns ─▶ random h ───────▶ the layer's code ─▶ rows ─▶ random y ─▶ ... output
    rank r    x ─▶ columns ─▶ slice r of h ───▶ the layer's code ─▶ rows ─▶ the same y ─▶ ... output
                                                                ▲                          ▲
                                                must be slice r of whole            must be equal
"""

from collections.abc import Iterator
from copy import copy, deepcopy
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.comm import Comm
from labkit.dispatch import generators, no_modes
from labkit.events import ranks_in_words
from labkit.parallel.common.shards import check_same
from labkit.parallel.tensor.layers import SAME_BATCH, ShardedLinear

LAYERS = (["q", "k", "v"], "out"), (["gate", "up"], "down"), (["up"], "down")


def layers_to_shard(model: nn.Module) -> Iterator[tuple[str, Any, list[str], str]]:
    """Attention and MLPs, found by their linears' names: (path, layer, columns, row)."""
    for path, layer in model.named_modules():
        for columns, row in LAYERS:
            if all(hasattr(layer, name) for name in (*columns, row)):
                yield path, layer, columns, row
                break


def split_trials(model: nn.Module, comm: Comm) -> list["SplitTrial"]:
    """One trial per layer. Raises ValueError if no layer is found or a layer cannot be sharded."""
    trials = [SplitTrial(comm.size, *layer) for layer in layers_to_shard(model)]
    if not trials:
        raise ValueError(
            f"{type(model).__name__} has no layer that tensor_parallel can shard; name its "
            "linear layers q, k, v and out (attention), or up, down and, if gated, gate (an MLP)"
        )
    return trials


def check_edited(model: nn.Module, before: dict[str, int], lacks_ends: bool) -> None:
    """Raises ValueError if the model lacks `tokens` or `head`, or a tie was broken."""
    if lacks_ends:
        raise ValueError(
            "sequence=True needs an embedding `tokens` and a linear layer `head`; this model lacks "
            "one, so ranks would mistake all of x for their shard"
        )
    now = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter_id in before.items():
        tied = first.setdefault(parameter_id, name)
        if now.get(name) is not now.get(tied):
            raise ValueError(
                f"{tied} and {name} are tied and would be sharded separately; rebuild the model "
                "without this tie: only `head` and `tokens` may share a weight"
            )


def check_same_input(comm: Comm, sequence: bool, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook: in a `World` with checks, raises ValueError unless the input tensors and,
    with dropout on, the random states are equal on all ranks."""

    def inputs() -> list[Tensor]:  # with `sequence`, x of a later pipeline stage is a shard
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        return [x for x in tensors if not (sequence and x.is_floating_point())]

    check_same(comm, "input", inputs, SAME_BATCH)
    advice = "call torch.manual_seed with the same seed on all of them"
    check_same(comm, "random state", partial(random_states, model), advice)


def random_states(model: nn.Module) -> list[Tensor]:
    """The states of the generators that `model` draws from; empty if dropout is off."""
    devices = {torch.device("cpu"), *(x.device for x in model.parameters())}
    return [g.get_state() for g in generators() if g.device in devices and has_dropout(model)]


def has_dropout(module: nn.Module) -> bool:
    """Whether dropout is on, in a torch dropout module or a float attribute `dropout`."""
    training = [part for part in module.modules() if part.training]
    rates = [part.p for part in training if isinstance(part, _DropoutNd)]
    others = [getattr(part, "dropout", 0) for part in training]
    return any(p > 0 for p in [*rates, *(p for p in others if isinstance(p, float))])


class SplitTrial:
    """Tries one layer on a small input; if forward needs different arguments, replaces forward and
    tries the first real input. Raises ValueError if the layer cannot be sharded."""

    def __init__(self, size: int, path: str, layer: Any, columns: list[str], row: str) -> None:
        self.size, self.layer, self.forward = size, layer, layer.forward
        self.path, self.names = path or "the model", [*columns, row]
        self.columns, self.row = columns, row
        self._check_parts(path and f"{path}.")
        self._check_sizes(path and f"{path}.")
        # No trial for a layer that another strategy edited: its forward communicates.
        attributes = [x for module in layer.modules() for x in vars(module).values()]
        self.pending = size > 1 and not any(isinstance(x, Comm) for x in attributes)
        if self.pending:  # on a copy without weights: a forward may change its module
            memo: Any = {id(x): x for x in attributes if isinstance(x, Tensor) and not x.is_leaf}
            memo |= {id(getattr(layer, name)): None for name in self.names}
            try:
                self.copy = deepcopy(layer, memo).eval()
            except Exception as error:
                raise self._refusal(f"it cannot be copied for a trial ({error})") from None
            with no_modes():
                self._try_at_edit()

    def _check_parts(self, prefix: str) -> None:
        for name in self.names:
            linear, problem = getattr(self.layer, name), ""
            if isinstance(linear, ShardedLinear):
                ranks = ranks_in_words(linear.comm.size)
                problem = f"is already sharded over {ranks}; shard a model only once"
            elif type(linear) is not nn.Linear:
                kind = type(linear).__name__
                problem = f"has type {kind}, not nn.Linear; shard first, then make other edits"
            elif "forward" in vars(linear) or any(
                hooks for key, hooks in vars(linear).items() if key.endswith("_hooks")
            ):
                problem = (
                    "has hooks or its own forward, which a sharded layer would not call; "
                    "shard first, then add them"
                )
            if problem:
                raise ValueError(f"{prefix}{name} {problem}")
        for name, _ in self.layer.named_parameters():
            if name.partition(".")[0] not in self.names:
                raise ValueError(
                    f"{prefix}{name} is a parameter of a layer in which tensor_parallel can "
                    f"shard only {', '.join(self.names)}; move it out of the layer, or "
                    "shard by hand with ColumnParallelLinear, RowParallelLinear and copy_to_ranks"
                )

    def _check_sizes(self, prefix: str) -> None:
        layer = self.layer
        if self.row == "out":
            if not isinstance(width := getattr(layer, "head_width", None), int):
                raise ValueError(
                    f"{prefix[:-1]} has q, k, v and out, but no `head_width`, the features per "
                    "head; set it, because attention is sharded by heads"
                )
            heads = {"query heads": layer.q, "key-value heads": layer.k}
            counts = {unit: linear.out_features // width for unit, linear in heads.items()}
        else:
            counts = {"hidden features": layer.up.out_features}
            if hasattr(layer, "gate") and layer.gate.out_features != layer.up.out_features:
                raise ValueError(
                    f"{prefix}gate has {layer.gate.out_features} features, but up has "
                    f"{layer.up.out_features}; make them equal, or rename the gate"
                )
        for unit, count in counts.items():
            if count % self.size:
                raise ValueError(
                    f"{count} {unit} of {self.path} are not divisible by {self.size} "
                    f"tensor-parallel ranks; use a rank count that divides {gcd(*counts.values())}"
                )

    def _try_at_edit(self) -> None:
        column, row = getattr(self.layer, self.columns[0]), getattr(self.layer, self.row)
        device = "cpu" if _has_no_memory(column.weight) else column.weight.device
        for width in (column.in_features, row.in_features):
            x = _random(2, 3, width).to(device, column.weight.dtype)
            try:
                whole = self._run((x,), {})
            except Exception:  # forward needs different arguments
                continue
            return self._compare(whole, (x,), {})
        if type(self.layer).forward is nn.Module.forward:
            raise self._refusal("it has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pending and not any(map(_has_no_memory, tree_leaves((args, kwargs)))):
            self._compare(self._run(args, kwargs), args, kwargs)
        return self.forward(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any, rank: int | None = None) -> list[tuple[str, Tensor]]:
        """Runs the layer with random linear outputs, or `rank`'s slices of these outputs. Returns
        (name, input) per linear call, then ("", output) per output of the layer."""
        calls: list[tuple[str, Tensor]] = []

        def compute(name: str, x: Tensor) -> Tensor:
            features = getattr(self.layer, name).out_features
            y = _random(*x.shape[:-1], features, seed=len(calls)).to(x)
            calls.append((name, x.clone()))
            return y if rank is None or name == self.row else y.chunk(self.size, -1)[rank].clone()

        def fresh(x: Tensor) -> Tensor:  # writable; autograd tracks its dependents
            traced = x.requires_grad or (x.is_floating_point() and args and x is args[0])
            return x.detach().clone().requires_grad_() * 1 if traced else x.clone()

        for name in self.names:
            self.copy._modules[name] = linear = copy(getattr(self.layer, name))
            linear.forward, linear._forward_pre_hooks = partial(compute, name), {}
        forked = torch.random.fork_rng(range(len(generators()) - 1))
        try:
            with torch.inference_mode(False), torch.enable_grad(), forked:
                before = random_states(self.layer)
                args, kwargs = tree_map_only(Tensor, fresh, (args, kwargs))
                output = tree_leaves(self.copy.forward(*args, **kwargs))
                # Dropout that ignores eval mode makes slices differ, so slices are not compared.
                self.is_random = not all(map(torch.equal, before, random_states(self.layer)))
        finally:  # the copy keeps no weights
            self.copy._modules.update(dict.fromkeys(self.names))
        return calls + [("", x) for x in output if isinstance(x, Tensor)]

    def _compare(self, whole: list[tuple[str, Tensor]], args: Any, kwargs: Any) -> None:
        called = [name for name, _ in whole]
        if unused := {*self.names} - {*called}:
            raise self._refusal(f"its forward does not call {' and '.join(sorted(unused))}")
        if any(name == self.row and x.requires_grad for name, x in whole):
            raise self._refusal(f"the input of {self.row} depends on more than these features")
        for rank in (0, self.size - 1) if not self.is_random else ():
            expected = [x.chunk(self.size, -1)[rank] if n == self.row else x for n, x in whole]
            try:
                calls = self._run(args, kwargs, rank)
            except Exception as error:
                raise self._refusal(f"its forward fails on a slice ({error})") from None
            same = [name for name, _ in calls] == called
            if not same or not all(_close(x, y) for (_, x), y in zip(calls, expected)):
                raise self._refusal("its forward computes wrong values on a slice")
        self.pending = False

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"tensor_parallel cannot shard {self.path}, a {type(self.layer).__name__}, by the "
            f"features between {', '.join(self.columns)} and {self.row}: {why}. Use a separate "
            "nn.Linear for each projection, rename the layers to leave the module unsharded, or "
            "shard it by hand with ColumnParallelLinear and RowParallelLinear"
        )


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def _has_no_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or hasattr(x, "fake_mode"))


def _close(x: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype.itemsize > 2 else 1e-2
    both = x.to(torch.complex128), expected.to(torch.complex128)
    return x.shape == expected.shape and torch.allclose(*both, tolerance, tolerance, True)
