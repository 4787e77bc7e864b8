"""Whether a layer computes the same when it is cut: tried on random numbers, in one process.

    whole     x ─▶ columns ─▶ random h ───────▶ the layer's code ─▶ rows ─▶ random y ─▶ ... output
    rank r    x ─▶ columns ─▶ slice r of h ───▶ the layer's code ─▶ rows ─▶ the same y ─▶ ... output
                                                                ▲                          ▲
                                                must be slice r of the whole's      must be equal

What mixes features (chunk, softmax, a norm), or orders heads in a way of its own, gives other
numbers, whatever its name. No weight is read, so models on paper are tried, too.
"""

from contextlib import ExitStack
from copy import copy, deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.comm import Comm
from labkit.dispatch import no_modes
from labkit.memory.conditions import generators, restore, states_of, used
from labkit.parallel.tensor.random_state import draws


class SplitTrial:
    """Tries one layer on a small input; while `pending`, as its forward takes another, it stands in
    place of `layer.forward` and tries the first real one. Raises ValueError if it cannot be cut."""

    def __init__(self, path: str, layer: Any, columns: list[str], row: str, size: int) -> None:
        self.path, self.layer, self.size = path or "the model", layer, size
        self.columns, self.row, self.forward = columns, row, layer.forward
        # A part that another strategy has edited exchanges data in its forward.
        things = [thing for one in layer.modules() for thing in vars(one).values()]
        self.pending = size > 1 and not any(isinstance(thing, Comm) for thing in things)
        if self.pending:  # on a copy without the weights: a forward may change its module
            kept: Any = {id(x): x for x in things if isinstance(x, Tensor) and not x.is_leaf}
            kept |= {id(getattr(layer, name)): None for name in (*columns, row)}
            try:
                self.copy = deepcopy(layer, kept).eval()
            except Exception as error:
                raise self._refusal(f"it cannot be copied to be tried ({error})") from None
            self._at_edit()

    def _at_edit(self) -> None:
        column, row = getattr(self.layer, self.columns[0]), getattr(self.layer, self.row)
        device = "cpu" if _on_paper(column.weight) else column.weight.device
        for width in (column.in_features, row.in_features):
            with no_modes():
                x = _random(2, 3, width).to(device, column.weight.dtype)
                try:
                    whole = self._run((x,), {})
                except Exception:  # it takes another input, or more
                    continue
                return self._compare(whole, (x,), {})
        if type(self.layer).forward is nn.Module.forward:
            raise self._refusal("it has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pending and not any(map(_on_paper, tree_leaves((args, kwargs)))):
            self._compare(self._run(args, kwargs), args, kwargs)
        return self.forward(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any, rank: int | None = None) -> Any:
        """With random numbers in place of what the linear layers compute; or `rank`'s slice.
        Returns the names of those called; their inputs, and then the outputs."""
        names, tensors = list[str](), list[Tensor]()

        def compute(name: str, x: Tensor) -> Tensor:
            features = getattr(self.layer, name).out_features
            y = _random(*x.shape[:-1], features, seed=len(names)).to(x)
            names.append(name)
            tensors.append(x.clone())
            return y if rank is None or name == self.row else y.chunk(self.size, -1)[rank].clone()

        def fresh(x: Tensor) -> Tensor:  # may be written to, and autograd sees what depends on it
            traced = x.requires_grad or (x.is_floating_point() and args and x is args[0])
            return x.detach().clone().requires_grad_() * 1 if traced else x.clone()

        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            before = states_of(generators())
            stack.callback(restore, before)
            for name in (*self.columns, self.row):
                self.copy._modules[name] = linear = copy(getattr(self.layer, name))
                linear.forward, linear._forward_pre_hooks = partial(compute, name), {}
                stack.callback(self.copy._modules.__setitem__, name, None)
            copies = tree_map_only(Tensor, fresh, (args, kwargs))
            output = tree_leaves(self.copy.forward(*copies[0], **copies[1]))
            # Dropout that ignores eval mode draws for each rank's part: nothing to compare.
            self.draws = bool(used(before)) and draws(self.layer)
        return names, [*tensors, *(x for x in output if isinstance(x, Tensor))]

    def _compare(self, whole: Any, args: Any, kwargs: Any) -> None:
        names, tensors = whole
        if unused := {*self.columns, self.row} - {*names}:
            raise self._refusal(f"its forward does not call {' and '.join(sorted(unused))}")
        if any(n == self.row and x.requires_grad for n, x in zip(names, tensors)):
            raise self._refusal("its forward computes with more than their outputs there")
        for rank in (0, self.size - 1) if not self.draws else ():
            right = [
                x.chunk(self.size, -1)[rank] if name == self.row else x
                for name, x in zip_longest(names, tensors)
            ]
            try:
                called, found = self._run(args, kwargs, rank)
            except Exception as error:
                raise self._refusal(f"its forward fails on a slice ({error})") from None
            if (called, len(found)) != (names, len(right)) or not all(map(_close, found, right)):
                raise self._refusal("its forward computes something else on a slice")
        self.pending = False

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"tensor_parallel cannot cut {self.path}, a {type(self.layer).__name__}: each rank "
            f"would have a slice of the features from {', '.join(self.columns)} to {self.row}, and "
            f"{why}. Give each projection an nn.Linear of its own, rename the layers to leave the "
            "module whole, or cut it by hand with ColumnParallelLinear and RowParallelLinear"
        )


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def _on_paper(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or hasattr(x, "fake_mode"))


def _close(x: Tensor, right: Tensor) -> bool:
    off, both = 1e-4 if right.dtype.itemsize > 2 else 1e-2, torch.complex128
    return x.shape == right.shape and torch.allclose(x.to(both), right.to(both), off, off, True)
