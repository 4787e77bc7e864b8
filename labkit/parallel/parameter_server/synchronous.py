"""A parameter server, synchronous: rank 0 gathers all gradients, steps, and scatters the weights.

    rank 0, the server  parameters P, gradients G, Adam 2G; its share of the batch
    the n-1 others      parameters P, and gradients G until they are sent; their shares
    travels             G from each of the others to the server and G back, every step: over the
                        server's link 2(n-1) G, over each other's 2 G; in a ring 4 (n-1)/n G

        rank 1  forward | backward | push g --.               .--> new w | forward
        rank 2  forward | backward | push g --+               +--> new w | forward
        rank 0  forward | backward |          '-> g+g+g | step '          | forward

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 3; `torch.nn.DataParallel` does the same with threads of one process.
"""

from typing import TypeVar

import torch
from torch import nn

from labkit.holdings import Footprint, adam_bytes, parameter_bytes
from labkit.parallel.common.flat import nobody_used, while_alive
from labkit.parallel.naive_ddp import NaiveDDP, flagged_gradient

SERVER = 0
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class ParameterServer(NaiveDDP):
    """`module` on every rank; rank 0 gathers the gradients, steps, and scatters its weights.

        model = ParameterServer(module)
        optimizer = model.pull_after(torch.optim.AdamW(model.parameters(), lr=1e-3))

    The training loop does not change. When `backward()` returns, rank 0 has the mean gradients and
    the others none: their `optimizer.step()` finds nothing to do, keeps no state, and ends when the
    new weights are there. Clipping acts on rank 0.

    `module`: any, whose copies start as rank 0's; `comm`: the ranks that hold copies, all by
    default. Raises ValueError, on every rank, when the ranks have different models, when a
    parameter belongs to another strategy, or changed after wrapping; and without `pull_after`.
    """

    def _attach(self) -> None:
        super()._attach()
        self._pulls = False  # a copy, too, needs `pull_after`
        for parameter in self._parameters_to_average:
            parameter.register_hook(while_alive(self._share))

    @property
    def is_server(self) -> bool:
        return self.comm.rank == SERVER

    def pull_after(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Bring the server's weights to all ranks after each step of `optimizer`; returns it."""
        optimizer.register_step_post_hook(while_alive(self._pull))
        self._pulls = True
        return optimizer

    def _share(self, gradient: torch.Tensor) -> torch.Tensor:
        """Called by autograd before it adds `gradient` to `.grad`: divided here, and once, a second
        backward before the step is right, too."""
        return gradient / self.comm.size

    def _average(self) -> None:
        """Push gradients to the server, which adds them up; the others keep none."""
        self._scheduled = False
        self._unchanged.check()  # in eval mode, forward does not
        if not self._pulls:
            raise ValueError(
                "ParameterServer: no optimizer brings the weights back; make it with "
                "optimizer = model.pull_after(torch.optim.AdamW(model.parameters()))"
            )
        for parameter in self._parameters_to_average:
            used = parameter.grad is not None
            total = self._gathered(parameter)
            is_used = total is not None and (used or not nobody_used(total.reshape(-1)))
            parameter.grad = total if is_used else None

    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum of all ranks' gradients of `parameter`, on the server; None on the others."""
        mine = flagged_gradient(parameter)
        if not self.is_server:
            self.comm.gather(mine, dst=SERVER)
            return None
        every = [torch.empty_like(mine) for _ in range(self.comm.size)]
        self.comm.gather(mine, every, dst=SERVER)
        for theirs in every[1:]:
            every[0].add_(theirs)
        return every[0]

    def _pull(self, *_: object) -> None:
        for parameter in self._parameters_to_average:
            weights = parameter.detach()
            copies = [weights] * self.comm.size if self.is_server else None
            self.comm.scatter(weights, copies, src=SERVER)

    @staticmethod
    def predict(module: nn.Module, size: int) -> Footprint:
        """Held: the mean of the ranks, since rank 0 alone has gradients and state. `bus_bytes`:
        what passes the busiest link, the server's: 2(n-1) G."""
        grads = parameter_bytes(module, trainable_only=True)
        bus_bytes = 2 * (size - 1) * grads
        state = adam_bytes(module)
        return Footprint(parameter_bytes(module), grads / size, state / size, bus_bytes)
