"""Random numbers of tensor-parallel ranks: the same where they hold replicas, others where they
hold parts.

    dropout on                        rank 0     rank 1     so that
    a replica [b, s, w]               1 0 1 1    1 0 1 1    the replicas stay equal
    a part, of heads or positions     1 0 1 1    0 1 1 0    no two heads drop the same

All ranks of the group start with the same seed, and a replica's dropout draws from torch's own
generator. Around what a rank computes on its part, `own_numbers` draws one number there, the same
on all ranks, and makes the seed of a stream from it that is the rank's own; afterwards the
generator is again where those of the others are. So there is no state beside torch's: what saves
and restores that, as recompute and checkpoints do, has all of it.

Source: Shoeybi et al., arXiv 1909.08053, appendix B.2 (with one more generator there).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.dispatch import no_modes
from labkit.memory.conditions import generators, restore, states_of


@contextmanager
def own_numbers(comm: Comm) -> Iterator[None]:
    """Inside, what torch draws is this rank's own. With one rank, nothing."""
    if comm.size == 1:
        yield
        return
    with no_modes():  # a seed is no part of the model: real in a dry run, too
        seed = int(torch.randint(2**62, ())) + comm.rank
    before = states_of(generators())
    for generator, _ in before:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        restore(before)


class DrawsItsOwnBetween:
    """In place of `layer.forward`: as it, with random numbers of the rank's own from where one of
    `begins` is called to where `end` is, as from columns to rows."""

    def __init__(self, layer: nn.Module, comm: Comm, begins: Sequence[nn.Module], end: nn.Module):
        self.layer, self.forward, self.comm = layer, layer.forward, comm
        self._inside: ExitStack | None = None
        for module in begins:
            module.register_forward_pre_hook(self._begin)
        end.register_forward_pre_hook(self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.forward(*args, **kwargs)
        finally:
            self._end()

    def _begin(self, *_: Any) -> None:
        if self._inside is None and draws(self.layer):
            self._inside = ExitStack()
            self._inside.enter_context(own_numbers(self.comm))

    def _end(self, *_: Any) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None


class DrawsItsOwn:
    """In place of `module.forward`: as it, with random numbers of the rank's own."""

    def __init__(self, module: nn.Module, comm: Comm):
        self.module, self.forward, self.comm = module, module.forward, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not draws(self.module):
            return self.forward(*args, **kwargs)
        with own_numbers(self.comm):
            return self.forward(*args, **kwargs)


def draws(module: nn.Module) -> bool:
    """Whether dropout is on in it: a module of torch's, or one with a number `dropout`."""
    return any(one.training and (_probability(one) or 0) > 0 for one in module.modules())


def _probability(module: nn.Module) -> float | None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    dropout = getattr(module, "dropout", None)
    return dropout if isinstance(dropout, float) else None
