"""Recompute by policy: the results of some ops are kept, and the other ops run again.

    forward    op 1   op 2   op 3   op 4       a mode intercepts each op below autograd
    policy     again  keep   again  again
    kept              [op 2]
    backward   op 1   served op 3   op 4       op 2 is not rerun: its kept result is returned

`policy(op) -> bool` is called for each op that forward runs; True keeps the op's result, as in
`keep_products`. It is not called for ops that always rerun: views and other ops that return an
input's memory, casts (autocast may have cached them), and ops that write to their inputs.

Source: torch.utils.checkpoint, create_selective_checkpoint_contexts; Korthikanti et al., arXiv
2205.05198, section 5.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from labkit.dispatch import DispatchMode, generators
from labkit.memory.conditions import States, restore, states_of, tensors_in, used

Policy = Callable[[OpOverload], bool]

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear,
    aten.convolution, aten._scaled_mm,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}  # fmt: skip


def keep_products(op: OpOverload) -> bool:
    """A policy: keep the results of matmuls, convolutions and attention kernels."""
    return op.overloadpacket in PRODUCTS


@dataclass
class _Result:
    """A kept result, detached, because its graph would refer back to it: a reference cycle."""

    value: Any
    random: States  # states, after the op, of the generators from which it drew
    seen: list[tuple[torch.Tensor, int]]  # tensors and versions, to detect writes


class Kept:
    """Results of the ops that `policy` keeps: stored in forward, returned in the rerun."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.results: dict[OpOverload, list[_Result | None]] = defaultdict(list)
        self._kept_in: dict[int, tuple[OpOverload, int]] = {}  # storage -> op, call number

    def keeping(self) -> "_Mode":
        return _Mode(self._keep, self._written)

    def serving(self) -> "_Mode":
        calls: dict[OpOverload, int] = defaultdict(int)

        def serve(op: OpOverload, args: Any, kwargs: Any) -> Any:
            call = calls[op]
            calls[op] += 1
            if call >= len(self.results[op]):
                raise ValueError(
                    f"recompute with a policy: the rerun made call {call + 1} of {op}, but forward "
                    f"made only {call}; the function must do the same both times, so let it depend "
                    "only on its arguments"
                )
            kept = self.results[op][call]
            if kept is None:
                return op(*args, **kwargs)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self.results[op][call] = None  # the graph is freed, and so is the result
            return self._value(op, kept)

        return _Mode(serve)

    def _keep(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        draws = torch.Tag.nondeterministic_seeded in op.tags
        before = states_of(generators()) if draws else []
        out = op(*args, **kwargs)
        value = tree_map_only(torch.Tensor, _same_version, out)
        seen = [(x, x._version) for x in tensors_in(value)]
        kept = None
        # The result shares an input's memory, but not its version counter.
        if shared := _storage_ids(out) & _storage_ids((args, kwargs)):
            for maker, call in (self._kept_in[memory] for memory in shared & self._kept_in.keys()):
                if (maker_result := self.results[maker][call]) is not None:
                    maker_result.seen.extend(seen)
        elif self.policy(op):
            random = states_of(generator for generator, _ in used(before))
            kept = _Result(value, random, seen)
            self._kept_in |= dict.fromkeys(_storage_ids(out), (op, len(self.results[op])))
        self.results[op].append(kept)
        return out

    def _written(self, x: torch.Tensor) -> None:
        """Drop the kept results that share memory with `x`, because an op writes to `x`."""
        for memory in _storage_ids(x) & self._kept_in.keys():
            op, call = self._kept_in.pop(memory)
            self.results[op][call] = None

    def _value(self, op: OpOverload, kept: _Result) -> Any:
        if any(x._version != version for x, version in kept.seen):
            raise ValueError(
                f"recompute with a policy: the kept result of {op} was changed in place after the "
                "function returned; avoid `op_`, `out=` and `x[...] =`, or let the "
                "policy return False for this op"
            )
        restore(kept.random)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, kept.value)


class _Mode(DispatchMode):
    """Calls `run` for ops that compute new tensors, and `written` for tensors that ops modify."""

    def __init__(
        self,
        run: Callable[[OpOverload, Any, Any], Any],
        written: Callable[[torch.Tensor], object] = lambda x: None,
    ):
        super().__init__()
        self._run, self._written = run, written

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            for place, argument in enumerate(op._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else kwargs.get(argument.name)
                    for x in tensors_in(value):
                        self._written(x)
        elif not op.is_view and op.namespace != "prim" and op.overloadpacket is not aten._to_copy:
            return self._run(op, args, kwargs)
        return op(*args, **kwargs)


def _same_version(x: torch.Tensor) -> torch.Tensor:
    """Detach `x` and share its version counter; below autograd, a plain detach would not share."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _storage_ids(value: Any) -> set[int]:
    tensors = (x for x in tensors_in(value) if x.layout is torch.strided)
    return {x.untyped_storage()._cdata for x in tensors}
