"""Measures the cost of each choice for each block, and edits a model to fit a memory budget.

    forward     before | block 0 | block 1 |  head, loss  |
    backward                                              | block 1 | block 0 | after
    marks              f0        f1        f2             b1        b0        a

A block's level is the memory held when its forward begins, except for the block's input (kept or
dropped by its choice) and bytes in flight to the host. Its need is the peak of its forward or
backward above that level. Earlier choices do not change this need: one step per choice suffices.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.memory.chooser import Cost, Costs, Plan, least_recompute
from labkit.memory.conditions import tensors_in
from labkit.memory.edits import CHOICES, Choices, blocks_of
from labkit.memory.flops import flops_of
from labkit.memory.offload import Offload
from labkit.memory.peak import PeakMemory, alive_storages, storages_in


def measure(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    blocks: Sequence[nn.Module] | None = None,
    core: str = "attn.core",
    offload: Offload | None = None,
    held_bytes: int | None = None,
    choices: Sequence[str] = CHOICES,
) -> Costs:
    """Run `step().backward()` once per choice, and return the costs per block.

    Args:
        step: computes a scalar loss; must call each block exactly once, in order.
        blocks, core, offload: as for `Choices`; without `offload`, "offload" is skipped.
        held_bytes: memory before a step; by default, all live tensors on the model's device,
            including the state of an optimizer that has stepped.
        choices: the choices to try, which must include "none".

    Clears gradients and restores random state, but not counters that forward updates (BatchNorm's).
    Raises ValueError if a block is listed twice or not called once in order, or gradients exist."""
    all_blocks = blocks_of(model) if blocks is None else list(blocks)
    if "none" not in choices:
        raise ValueError(f'choices={choices!r}: include "none", the baseline for the others')
    if twice := [block for block in all_blocks if all_blocks.count(block) > 1]:
        raise ValueError(
            f"blocks {[i for i, x in enumerate(all_blocks) if x is twice[0]]} are one module, a "
            f"{type(twice[0]).__name__} that forward calls more than once, so the costs of one "
            "call are unknown; omit this module: measure(..., blocks=[...])"
        )
    if any(p.grad is not None for p in model.parameters()):
        raise ValueError("the model already has gradients; call zero_grad() before measure()")
    names = [name for name in choices if name != "offload" or offload is not None]
    old = weakref.WeakSet(alive_storages(next(model.parameters()).device))
    if held_bytes is None:
        held_bytes = sum(x.nbytes() for x in old)
    runs = {}
    for name in names:
        with Choices(model, name, all_blocks, core, offload):
            runs[name] = _one_step(model, step, all_blocks, offload, old)
    none, n = runs["none"].intervals, len(all_blocks)
    costs: list[dict[str, Cost]] = [{} for _ in all_blocks]
    for name, run in runs.items():
        for i, block in enumerate(costs):
            forward, after, backward = (run.intervals[x] for x in (f"f{i}", f"f{i + 1}", f"b{i}"))
            block[name] = Cost(
                kept_bytes=after.held_bytes - forward.held_bytes,
                need_bytes=max(forward.peak_bytes, backward.peak_bytes) - forward.held_bytes,
                again_flops=backward.flops - none[f"b{i}"].flops,
                moved_bytes=forward.moved_bytes,
            )
    ran = [run.intervals for run in runs.values()]
    head = max(x[f"f{n}"].peak_bytes - x[f"f{n}"].held_bytes for x in ran)
    after_bytes = max(x["a"].peak_bytes - x["f0"].held_bytes for x in ran)
    before = held_bytes + max(x["f0"].held_bytes for x in ran)
    leaving = max(run.leaving_bytes for run in runs.values())
    step_flops = sum(interval.flops for interval in none.values())
    return Costs(costs, before, head, after_bytes, leaving, step_flops)


@dataclass(frozen=True)
class Chosen:
    """The plan that fits, the measured costs behind it, and the edit that applies it."""

    plan: Plan
    costs: Costs
    edit: Choices

    def remove(self) -> None:
        self.edit.remove()


def choose_activations(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    budget_bytes: int,
    *,
    blocks: Sequence[nn.Module] | None = None,
    core: str = "attn.core",
    offload: Offload | None = None,
    most_moved_bytes: int = 0,
    held_bytes: int | None = None,
) -> Chosen:
    """Keep, recompute or offload each block's activations, so that forward and backward (not the
    optimizer step) need at most `budget_bytes`, with the least recomputation. To offload blocks,
    pass both `offload`, from `offload_activations(model)`, and `most_moved_bytes`, the bytes that
    the bus can move during a forward. Other arguments: as for `measure`.

    Raises ValueError if no plan fits, naming the smallest possible budget.

    >>> chosen = choose_activations(model, lambda: loss(model(x), batch), budget_bytes=10**9)
    >>> print(chosen.plan)
    """
    costs = measure(model, step, blocks, core, offload, held_bytes)
    plan = least_recompute(costs, budget_bytes, most_moved_bytes)
    return Chosen(plan, costs, Choices(model, plan.choices, blocks, core, offload))


@dataclass
class _Interval:
    held_bytes: int = 0  # at the start of the interval
    peak_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0


class _Marks(PeakMemory):
    """Counts memory, FLOPs and moved bytes between marks; `old` storages do not count."""

    def __init__(
        self, old: "weakref.WeakSet[torch.UntypedStorage]", offload: Offload | None
    ) -> None:
        super().__init__()
        self.intervals: dict[str, _Interval] = {}  # by the mark at which they begin
        self.leaving_bytes = 0  # the most at any mark
        self._now, self._moved_bytes = _Interval(), 0  # since the last mark; bytes moved before it
        self._old, self._offload = old, offload

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages_in((args, kwargs or {})):
            if storage not in self._old:
                self._known.add(storage)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._now.flops += flops_of(func, args, kwargs or {}, out)
        return out

    def mark(self, name: str, *_: Any, without: Any = ()) -> None:
        """Begin the next interval; tensors in `without` do not count as held."""
        leaving_bytes = self._offload.leaving_bytes if self._offload else 0
        moved_bytes = self._offload.moved_bytes if self._offload else 0
        self._now.peak_bytes = self.peak_bytes
        self._now.moved_bytes = moved_bytes - self._moved_bytes
        self.leaving_bytes = max(self.leaving_bytes, leaving_bytes)
        held_bytes = self.held_bytes - leaving_bytes - sum(x.nbytes for x in tensors_in(without))
        self._now = self.intervals[name] = _Interval(held_bytes)
        self.peak_bytes, self._moved_bytes = self.held_bytes, moved_bytes


def _one_step(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    blocks: Sequence[nn.Module],
    offload: Offload | None,
    old: "weakref.WeakSet[torch.UntypedStorage]",
) -> _Marks:
    gpus = {p.device.index for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(sorted(gpus)), ExitStack() as hooks, _Marks(old, offload) as marks:

        def begins(i: int, block: nn.Module, args: Any) -> None:
            if len(marks.intervals) != i + 1:
                raise ValueError(
                    f"block {i} of {len(blocks)} was not called exactly once, in order; list the "
                    "blocks in the order of their calls: measure(..., blocks=[...])"
                )
            marks.mark(f"f{i}", without=args)
            if i == 0:
                _at_gradient(args, partial(marks.mark, "a"))

        def ends(i: int, block: nn.Module, args: Any, output: Any) -> None:
            _at_gradient(output, partial(marks.mark, f"b{i}"))
            if i == len(blocks) - 1:
                marks.mark(f"f{i + 1}", without=output)

        marks.mark("start")
        for i, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(partial(begins, i)).remove)
            hooks.callback(block.register_forward_hook(partial(ends, i)).remove)
        try:
            step().backward()
        finally:
            for p in model.parameters():
                p.grad = None
        marks.mark("end")
    for name in ("a", *(f"b{i}" for i in range(len(blocks)))):
        marks.intervals.setdefault(name, _Interval())  # frozen blocks have no backward
    return marks


def _at_gradient(nested: Any, call: Callable[..., None]) -> None:
    for x in tensors_in(nested):
        if x.requires_grad:
            x.register_hook(call)
            return
