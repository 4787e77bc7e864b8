"""Distributed data parallelism: gradients travel in buckets while backward still runs.

    each rank holds   the whole model: parameters P, gradients P, Adam 2P; its share of the batch
    travels           2(n-1)/n P bytes from each rank and step, in P / bucket_mb messages

Backward makes the last layer's gradient first. Parameters are therefore put into buckets in
reverse order, and a bucket leaves as soon as its last gradient is there:

        rank 0   forward | backward: g9 g8 g7 | g6 g5 g4 | g3 g2 g1 g0 | wait | step
                                            [ bucket 0 ][ bucket 1 ][ bucket 2 ]
        rank 1   the same

Few large messages pay the latency once, and only the last bucket is not hidden by computation.
A bucket is one flat tensor, and after backward the gradients *are* views of it: nothing is copied
back, and a rank then holds P of gradients, not 2P. (During backward, the gradients of the bucket
that is filling are there beside it.)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv 2006.15704, sections 3.2 and 4.2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm, Handle
from labkit.parallel.naive_ddp import NaiveDDP
from labkit.parallel.replicas import (
    UNUSED,
    at_end_of_backward,
    check_dense,
    copy_from_rank_0,
    nobody_used,
    trainable,
    when_gradient_is_there,
)

MB = 2**20


class Bucket:
    """The gradients of some parameters, one after the other in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        sizes = [p.numel() for p in parameters]
        self.flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.flat.split(sizes)
        self.view = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.missing = set(parameters)  # whose gradient has not come in this backward
        self.handle: Handle | None = None
        self._unused: list[nn.Parameter] = []
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

    def send(self, comm: Comm, meanwhile: bool) -> None:
        """Move all gradients, divided, to their places here and sum them, `meanwhile` or at once.
        What this rank has not used it says (see `replicas.UNUSED`)."""
        self._unused = [p for p in self.view if p.grad is None]
        for parameter, view in self.view.items():
            if parameter.grad is not None:
                check_dense([parameter.grad])
                torch.div(parameter.grad.detach(), comm.size, out=view)  # maybe in place already
                parameter.grad = view
        self.flat.index_add_(0, self._starts, self._zeros)  # no used one begins with -0.0
        for parameter in self._unused:
            self.view[parameter].fill_(UNUSED)
        self.handle = comm.all_reduce(self.flat, async_op=meanwhile)

    def receive(self) -> None:
        """Wait for the averages, and be ready for the next backward."""
        if self.handle is not None:
            self.handle.wait()
        for parameter in self._unused:
            if not nobody_used(self.view[parameter].view(-1)):
                parameter.grad = self.view[parameter]
        self.reset()

    def reset(self) -> None:
        self.missing, self.handle = set(self.view), None


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Cut the parameters, last first, into buckets of one dtype and device and at most
    `bucket_bytes`; a larger parameter has a bucket to itself."""
    buckets: list[Bucket] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        filling = open_ones.setdefault((parameter.dtype, parameter.device), [])
        if filling and sum(p.nbytes for p in filling) + parameter.nbytes > bucket_bytes:
            buckets.append(Bucket(filling))
            filling.clear()
        filling.append(parameter)
    return buckets + [Bucket(rest) for rest in open_ones.values()]


class DDP(nn.Module):
    """Replicas of `module`, whose gradients are averaged while `backward()` runs.

    Args:
        module: any module; replicas start as rank 0's.
        comm: the ranks that hold replicas; all by default.
        bucket_mb: gradients travel in pieces of about this many MiB.
        overlap: send a bucket as soon as it is full; False: when backward is over, to compare.

    When `backward()` returns, the gradients are the averages; they stay valid until the next
    backward. Use `.module` for the wrapped module.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        bucket_mb: float = 25,
        overlap: bool = True,
    ):
        super().__init__()
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb}: a bucket holds more than 0 MiB; 25 is usual")
        self.module = module
        self.comm = comm or Comm()
        self.overlap = overlap
        copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)
        parameters = trainable(module)
        self._buckets = buckets_of(parameters, bucket_mb * MB)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.view}
        self._synchronise = True
        self._in_backward = False
        self._sent = 0  # buckets leave in the same order on all ranks
        for parameter in parameters:
            when_gradient_is_there(parameter, self._gradient_is_there)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # the last one was cut short by an error
            self._reset()
        if self.training and torch.is_grad_enabled() and self._synchronise:
            copy_from_rank_0(self.module.buffers(), self.comm)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to the local gradients only; the next one outside sends."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Called by autograd when it has finished the gradient of `parameter`."""
        if not self._synchronise:
            return
        if not self._in_backward:
            self._in_backward = True
            at_end_of_backward(self._finish)
        self._bucket_of[parameter].gradient_is_there(parameter)  # type: ignore[index,arg-type]
        while self.overlap and self._sent < len(self._buckets) - 1 and not self._next.missing:
            self._send_next()

    def _finish(self) -> None:
        """Backward is over: send what is left (at least the last bucket, which nothing can hide,
        and all after one that misses a parameter), and wait."""
        while self._sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.receive()
        self._in_backward, self._sent = False, 0

    @property
    def _next(self) -> Bucket:
        return self._buckets[self._sent]

    def _send_next(self) -> None:
        is_last = self._sent == len(self._buckets) - 1
        self._next.send(self.comm, meanwhile=self.overlap and not is_last)
        self._sent += 1

    def _reset(self) -> None:
        self._in_backward, self._sent = False, 0
        for bucket in self._buckets:
            bucket.reset()

    predict = NaiveDDP.predict  # the same bytes, in fewer messages
