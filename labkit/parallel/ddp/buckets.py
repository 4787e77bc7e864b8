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
from labkit.parallel.common.replicas import UNUSED, check_dense, nobody_used
from labkit.parallel.ddp.comm_hooks import Hook, UnderWay, all_reduced

MB = 2**20
P = TypeVar("P", bound=torch.Tensor)


class Bucket:
    """The gradients of some parameters, one after the other in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm | None):
        sizes, first = [p.numel() for p in parameters], parameters[0].detach()
        total = sum(sizes)
        self.flat = comm.symmetric_empty(total, first) if comm else first.new_empty(total)
        parts = self.flat.split(sizes)
        self.view = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.missing = set(parameters)  # whose gradient has not come in this backward
        self.unused: list[nn.Parameter] = []  # here, in the last one
        self.handle: UnderWay | None = None
        starts = [part.storage_offset() for part in parts if part.numel()]
        self._starts = torch.tensor(starts, device=self.flat.device)
        self._zeros = self.flat.new_zeros(len(starts))

    def gradient_is_there(self, parameter: nn.Parameter) -> None:
        """Take note of it; raises RuntimeError when it comes a second time in one backward."""
        if parameter not in self.missing:
            raise RuntimeError(
                "the gradient of a parameter came twice in one backward, which reentrant "
                "checkpointing does; use torch.utils.checkpoint(..., use_reentrant=False)"
            )
        self.missing.remove(parameter)

    def send(self, comm: Comm, meanwhile: bool, divisor: int, hook: Hook = all_reduced) -> None:
        """Move all gradients, divided, to their places here and sum them, `meanwhile` or at once.
        What this rank has not used it says (see `replicas.UNUSED`)."""
        self.unused = [p for p in self.view if p.grad is None]
        for parameter, view in self.view.items():
            if parameter.grad is not None:
                check_dense([parameter.grad])
                torch.div(parameter.grad.detach(), divisor, out=view)  # maybe in place already
                parameter.grad = view
        self.flat.index_add_(0, self._starts, self._zeros)  # no used one begins with -0.0
        for parameter in self.unused:
            self.view[parameter].fill_(UNUSED)
        self.handle = hook(self.flat, comm, meanwhile)

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
        self.missing = set(self.view)

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
