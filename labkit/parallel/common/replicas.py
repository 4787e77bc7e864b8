"""What data-parallel strategies share: equal replicas to begin with, backwards that do not
synchronise, and the moments of a backward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.agreement import ParamSnapshot, check_same_on_all_ranks, claim
from labkit.precision.weak_hooks import register_grad_ready_hook as register_grad_ready_hook

Part = TypeVar("Part")


class NoSync:
    """Gradients are averaged in each backward, except in a block `with strategy.no_sync():`."""

    _synchronise = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to the local gradients only; the next one outside sends.
        Stage 2 of ZeRO then holds whole gradients, too."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def accumulate(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The micro-batches of one step, `for x, y in strategy.accumulate(parts):`. Only the last
        backward sends. Gradients add up, so that the loss of a part is the sum over its rows (or
        tokens), times ranks / (rows of all parts on all ranks)."""
        parts = list(parts)
        with self.no_sync():
            yield from parts[:-1]
        yield from parts[-1:]


class Replica(NoSync, nn.Module):
    """`module` on each rank of `comm`, equal to rank 0's: what the wrappers have in common.

    A copy (`copy.deepcopy`, pickle) has parameters of its own. It leaves out what belongs to the
    original's (hooks, buckets, weak references) and creates its own in `_attach`, where nothing
    travels: rank 0 may copy or load alone. What was over all ranks is loaded over all ranks.
    """

    def __init__(self, module: nn.Module, comm: Comm | None = None):
        super().__init__()
        self.module, self.comm = module, Comm.of(comm)
        check_same_on_all_ranks(list(module.named_parameters()), self.comm)
        trainable(module)
        self._set_up()
        copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)

    def _set_up(self) -> None:
        before = {*vars(self)}
        self._attach()
        self._attached = {*vars(self)} - before

    def _attach(self) -> None:
        claim(self.module.named_parameters(), self)
        self._unchanged = ParamSnapshot(self.module)
        self._parameters_to_average = [p for p in self.module.parameters() if p.requires_grad]
        self._synchronise = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in self._attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.comm = Comm.of(self.comm)
        self._set_up()


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters to be kept equal. Raises ValueError when there are none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, so there is nothing to "
            "synchronise; use the module as it is"
        )
    return parameters


def copy_from_rank_0(tensors: Iterable[torch.Tensor], comm: Comm) -> None:
    """Make all ranks' tensors equal to those of rank 0."""
    copy_from(0, tensors, comm)


def copy_from(src: int, tensors: Iterable[torch.Tensor], comm: Comm) -> None:
    """Make all ranks' tensors equal to rank `src`'s: a broadcast for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x.detach())
    for group in kinds.values():
        flat = torch.cat([x.reshape(-1) for x in group])
        comm.broadcast(flat, src)
        for x, part in zip(group, flat.split([x.numel() for x in group]), strict=True):
            x.copy_(part.view_as(x))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that now runs is over, before `backward()` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def running_backward() -> int | None:
    """Which backward runs now, in whose hooks or recomputed forward we are; None outside."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task
