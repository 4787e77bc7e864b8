"""The gradients of some parameters in one flat tensor, as DDP and all stages of ZeRO fill it.

    parameters   w0 w1 w2
    flat         | g0 g0 g0 g0 | g1 g1 | g2 g2 g2 | pad |      a view for each; divided by n ranks
    missing      {w1}                                          not there yet, in this backward

A rank that did not use a parameter contributes -0.0 to the sum of its gradients. It changes no
sum, and a sum is -0.0 only where all its terms are: where the result is -0.0, no rank used the
parameter, and its gradient stays None, as in a single process. The flag travels for free, in the
first element of each piece that is reduced. Gradients are divided before they are summed, so that
fp16 sums do not overflow; a quotient may underflow to -0.0, and + 0.0 makes that 0.0.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from labkit.parallel.common.flat import FlatPartition

UNUSED = -0.0


class GradBuffer:
    """`note` each gradient as it comes, `put` it in its place, `flag_unused` before it is reduced.

    Args:
        parameters: in the order of `partition`.
        partition: where their gradients lie, over the ranks that each get a share.
        names: of the parameters, for errors.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        partition: FlatPartition,
        names: Mapping[Any, str] | None = None,
    ):
        self.parameters, self.partition, self._names = list(parameters), partition, names or {}
        self.flat: torch.Tensor | None = None
        self.view: dict[torch.Tensor, torch.Tensor] = {}
        begins = [
            rank * partition.share + piece.at
            for rank in range(partition.ranks)
            for piece in partition.pieces(rank)
        ]
        first = self.parameters[0]
        self._begins = torch.tensor(begins, dtype=torch.long, device=first.device)
        self._zeros = torch.zeros(len(begins), dtype=first.dtype, device=first.device)
        self.missing = set(self.parameters)  # their gradients are still to come in this backward
        self.unused: set[torch.Tensor] = set()  # by this rank, in the last one

    def use(self, flat: torch.Tensor, views: Iterable[torch.Tensor] | None = None) -> None:
        """Have the gradients in `flat` [padded]."""
        views = self.partition.views(flat) if views is None else views
        self.flat, self.view = flat, dict(zip(self.parameters, views, strict=True))

    def free(self) -> None:
        self.flat, self.view = None, {}

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.missing = set(self.parameters)

    def note(self, p: torch.Tensor) -> None:
        """The gradient of `p` is there. Raises RuntimeError for a second one in one backward."""
        if p not in self.missing:
            raise RuntimeError(
                f"the gradient of {self._names.get(p, 'a parameter')} came twice in one backward, "
                "which reentrant checkpointing does: use torch.utils.checkpoint(..., "
                "use_reentrant=False). Where an error cut the last backward short, call zero_grad()"
            )
        self.missing.remove(p)

    def put(self, p: torch.Tensor, divisor: float) -> None:
        """Move the gradient of `p`, divided, to its place, maybe where it is already."""
        assert p.grad is not None
        check_dense([p.grad])
        torch.div(p.grad.detach(), divisor, out=self.view[p])
        p.grad = self.view[p]

    def fill(self, divisor: float) -> torch.Tensor:
        """Put all gradients here, divided; returns them, flat."""
        for p in self.parameters:
            if p.grad is not None:
                self.put(p, divisor)
        return self.flag_unused()

    def flag_unused(self) -> torch.Tensor:
        """The flat gradients, which say what this rank has not used."""
        assert self.flat is not None
        self.flat.index_add_(0, self._begins, self._zeros)  # no used one begins with -0.0
        self.unused = {p for p in self.parameters if p.grad is None}
        for p in self.unused:
            self.view[p].fill_(UNUSED)
        return self.flat


def mark_used(flat: torch.Tensor) -> None:
    """A gradient's first element may be -0.0 by itself; then it is 0.0."""
    flat[:1].add_(0.0)


def nobody_used(flat: torch.Tensor) -> bool:
    """Whether the reduced gradient says that no rank used its parameter."""
    first = flat[:1].real if flat.is_complex() else flat[:1]
    return bool(((first == 0) & torch.signbit(first)).all())


def check_dense(gradients: Iterable[torch.Tensor]) -> None:
    """Raises TypeError when a gradient is sparse."""
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise TypeError(
                f"a gradient is {gradient.layout}; only dense ones are reduced: make the layer "
                "with sparse=False"
            )
