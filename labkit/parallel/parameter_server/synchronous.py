"""Synchronous parameter server: rank 0 gathers gradients, steps, and scatters the weights.

    rank 0, the server  parameters P, gradients G, Adam 2G, its share of the batch
    n-1 workers         parameters P, gradients G until sent, their shares of the batch
    bytes per step      G from each worker to the server and G back: 2(n-1) G over the server's
                        link, 2 G over a worker's link; ring all-reduce: 4 (n-1)/n G per link

        rank 1  forward | backward | push g --.               .--> new w | forward
        rank 2  forward | backward | push g --+               +--> new w | forward
        rank 0  forward | backward |          '-> g+g+g | step '          | forward

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3; `torch.nn.DataParallel` does the same with threads in one process.
"""

from typing import TypeVar

import torch
from torch import nn

from labkit.holdings import Footprint, adam_bytes, parameter_bytes
from labkit.parallel.common.flat import flagged_unused, while_alive
from labkit.parallel.naive_ddp import NaiveDDP, flagged_gradient

SERVER = 0
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class ParameterServer(NaiveDDP):
    """Replicates rank 0's `module` on the ranks of `comm` (default: all); only rank 0 steps.

        model = ParameterServer(module)
        optimizer = model.pull_after(torch.optim.AdamW(model.parameters(), lr=1e-3))

    The training loop does not change. After `backward()`, rank 0 has the mean gradients and workers
    have none; `optimizer.step()` on a worker only receives weights. Clipping affects only rank 0.

    Raises ValueError, on every rank, if the models differ between ranks, if a parameter belongs to
    a different strategy or changed after wrapping, and in backward without `pull_after`."""

    def _attach(self) -> None:
        super()._attach()
        self._pulls = False  # a copy must call `pull_after` again
        for parameter in self._parameters_to_average:
            parameter.register_hook(while_alive(self._divide))

    @property
    def is_server(self) -> bool:
        return self.comm.rank == SERVER

    def pull_after(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Makes each `optimizer.step()` end with a pull of the weights; returns `optimizer`."""
        optimizer.register_step_post_hook(while_alive(self._pull))
        self._pulls = True
        return optimizer

    def _divide(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divides a gradient before autograd accumulates it: each gradient is divided once."""
        return gradient / self.comm.size

    def _average(self) -> None:
        self._scheduled = False
        self._unchanged.check()  # in eval mode, forward skips this check
        if not self._pulls:
            raise ValueError(
                "ParameterServer: no optimizer pulls the weights; create it with optimizer = "
                "model.pull_after(torch.optim.AdamW(model.parameters()))"
            )
        for parameter in self._parameters_to_average:
            used = parameter.grad is not None
            total = self._gather_sum(parameter)
            is_used = total is not None and (used or not flagged_unused(total.reshape(-1)))
            parameter.grad = total if is_used else None

    def _gather_sum(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of `parameter` summed over the ranks, on the server; None on workers."""
        own = flagged_gradient(parameter)
        if not self.is_server:
            self.comm.gather(own, dst=SERVER)
            return None
        total, *others = gradients = [torch.empty_like(own) for _ in range(self.comm.size)]
        self.comm.gather(own, gradients, dst=SERVER)
        for gradient in others:
            total.add_(gradient)
        return total

    def _pull(self, *_: object) -> None:
        for parameter in self._parameters_to_average:
            weights = parameter.detach()
            copies = [weights] * self.comm.size if self.is_server else None
            self.comm.scatter(weights, copies, src=SERVER)

    @staticmethod
    def predict(module: nn.Module, size: int) -> Footprint:
        """Mean bytes held per rank after backward (only rank 0 holds gradients and moments);
        `bus_bytes` counts the busiest link, the server's: 2(n-1) G."""
        grads = parameter_bytes(module, trainable_only=True)
        bus_bytes = 2 * (size - 1) * grads
        state = adam_bytes(module)
        return Footprint(parameter_bytes(module), grads / size, state / size, bus_bytes)
