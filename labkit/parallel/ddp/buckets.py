"""Gradient buckets: what travels as one message, and where its gradients then live.

    parameters   w0 w1 w2 w3 w4 w5              in the order in which forward uses them
    gradients    g5 g4 g3 g2 g1 g0              in the order in which backward makes them
    buckets      [ g5 g4 g3 ][ g2 g1 g0 ]

A bucket is one flat tensor, and the gradients end as views of it: nothing is copied back.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, sections 3.2.2 and 4.2.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.flat import FlatPartition
from labkit.parallel.common.grad_buffer import GradBuffer, nobody_used
from labkit.parallel.ddp.comm_hooks import Hook, UnderWay, all_reduced

MB = 2**20
P = TypeVar("P", bound=torch.Tensor)


class Bucket(GradBuffer):
    """The gradients of some parameters, which travel together, by a `hook`."""

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm | None):
        super().__init__(parameters, FlatPartition([p.shape for p in parameters], ranks=1))
        numel, first = self.partition.numel, parameters[0].detach()
        self.use(comm.symmetric_empty(numel, first) if comm else first.new_empty(numel))
        self.handle: UnderWay | None = None

    def send(self, comm: Comm, async_op: bool, divisor: int, hook: Hook = all_reduced) -> None:
        """Divide all gradients into their places here and sum them; `async_op` does not wait."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.put(parameter, divisor)
        self.handle = hook(self.flag_unused(), comm, async_op)

    def receive(self) -> None:
        """Wait for the averages, and be ready for the next backward."""
        self._wait()
        for parameter in self.unused:
            if not nobody_used(self.view[parameter].view(-1)):
                parameter.grad = self.view[parameter]
        self.reset()

    def reset(self) -> None:
        """Be ready for the next backward, also where the last was cut short: what is under way
        would write into the next one's gradients."""
        self._wait()
        super().reset()

    def _wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def take_over(self) -> None:
        """Move gradients here from where they are: from the buckets of before."""
        for parameter, view in self.view.items():
            if parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)


def cut(parameters: Sequence[P], bucket_bytes: float) -> list[list[P]]:
    """The parameters, last first, in lists of one dtype and device and at most `bucket_bytes`; a
    larger parameter is alone in its own."""
    full: list[list[P]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[P]] = {}
    for parameter in reversed(parameters):
        some = filling.setdefault((parameter.dtype, parameter.device), [])
        if some and sum(p.nbytes for p in some) + parameter.nbytes > bucket_bytes:
            full.append(some.copy())
            some.clear()
        some.append(parameter)
    return full + [rest for rest in filling.values() if rest]


def buckets_of(params: Sequence[nn.Parameter], nbytes: float, comm: Comm | None) -> list[Bucket]:
    """Of at most `nbytes`, the last parameters first. Without `comm` nothing travels."""
    return [Bucket(some, comm) for some in cut(params, nbytes)]
