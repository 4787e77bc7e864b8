"""Naive data parallelism: one all-reduce per parameter after backward.

    each rank holds   P bytes of parameters, P of gradients, 2P of Adam state; a share of the batch
    each rank sends   2(n-1)/n P bytes per step, in one all-reduce per parameter, fully exposed:

        rank 0   forward | backward | w9 w8 w7 ... w0 | step
        rank 1   forward | backward | w9 w8 w7 ... w0 | step

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.1.
"""

from typing import Any

import torch

from labkit.holdings import replicated
from labkit.parallel.common.data_parallel import Replica
from labkit.parallel.common.flat import check_dense, flagged_unused
from labkit.parallel.common.ownership import at_end_of_backward


class NaiveDDP(Replica):
    """Replicates rank 0's `module` on the ranks of `comm` (default: all ranks) and averages
    gradients before `backward()` returns."""

    _scheduled = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self._synchronize:
            self._scheduled = False  # an error may have interrupted the last backward
        return super().forward(*args, **kwargs)

    def _on_grad_ready(self, p: torch.Tensor) -> None:
        if self._synchronize and not self._scheduled:
            self._scheduled = True
            at_end_of_backward(self._average)

    def _average(self) -> None:
        self._scheduled = False
        for parameter in self._parameters_to_average:
            gradient = flagged_gradient(parameter, self.comm.size)
            self.comm.all_reduce(gradient)
            if parameter.grad is not None or not flagged_unused(gradient.reshape(-1)):
                parameter.grad = gradient

    predict = staticmethod(replicated)


def flagged_gradient(p: torch.Tensor, divisor: float = 1) -> torch.Tensor:
    """Returns `p.grad`, divided in place, or a tensor of -0.0 if this rank did not use `p`."""
    if p.grad is None:
        return torch.full_like(p, -0.0)
    check_dense(p.grad)
    if divisor != 1:
        p.grad.div_(divisor)
    if p.grad.numel():
        p.grad.as_strided((1,), (1,)).add_(0.0)  # a leading -0.0 would mean unused
    return p.grad
