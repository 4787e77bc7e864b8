"""PipeDream's weight versions: each micro-batch goes back through the weights it went forward by.

    stage 0    F0 F1 F2 B0 U F3 B1 U ...      F0, F1 and F2 by the weights of the beginning, F3 by
               v0 v0 v0 v0   v1 v0            those after the first update; B1 by v0, still

Without a flush, weights are updated while micro-batches are under way. Their gradients are stale:
computed at weights of some updates ago. But forward and backward of one agree, so each gradient
is a true one, of the loss at those weights. The price: a copy of the weights for each version in
use, up to one for each stage behind this one.

Source: Harlap et al., "PipeDream", arXiv 1806.03377, section 3.3 (weight stashing).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Version = dict[str, Tensor]


class WeightVersions:
    """The weights of `module` that micro-batches in flight still need. The module's own
    parameters are the newest."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self.module, self.optimizer = module, optimizer
        self._newest: Version | None = None  # a copy of what the module has now
        self._used: dict[int, Version] = {}  # by micro-batch
        self._gradients: dict[int, Version] = {}

    def forward(self, microbatch: int, x: Tensor) -> Any:
        """The module's output by the newest weights. Called again, by those of the first time."""
        if microbatch not in self._used:
            if self._newest is None:
                self._newest = {
                    name: p.detach().clone().requires_grad_()
                    for name, p in self.module.named_parameters()
                    if p.requires_grad
                }
            self._used[microbatch] = self._newest
        return functional_call(self.module, self._used[microbatch], (x,))

    def backward_done(self, microbatch: int) -> None:
        """What gradients there are now belong to this micro-batch."""
        version, found = self._used[microbatch], self._gradients.setdefault(microbatch, {})
        for name, weight in version.items():
            if weight.grad is not None:
                found[name] = weight.grad if name not in found else found[name] + weight.grad
                weight.grad = None

    def update(self, microbatch: int) -> None:
        """One step of the optimizer on the newest weights, by the gradient of this micro-batch."""
        del self._used[microbatch]
        gradients = self._gradients.pop(microbatch)
        for name, p in self.module.named_parameters():
            p.grad = gradients.get(name)
        self.optimizer.step()
        for p in self.module.parameters():
            p.grad = None
        self._newest = None

    @property
    def in_use(self) -> int:
        """How many versions are kept for micro-batches in flight."""
        return len({id(version) for version in self._used.values()})
