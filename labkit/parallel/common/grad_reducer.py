"""Reducing gradients while backward runs, as DDP and stages 1 and 2 of ZeRO do.

    parameters   w0 w1 w2 w3 w4 w5              in the order in which forward uses them
    gradients    g5 g4 g3 g2 g1 g0              in the order in which backward computes them
    buckets      [ g5 g4 g3 ][ g2 g1 g0 ]

    backward     g5 g4 g3 | g2 g1 g0 | wait
                          [ bucket 0 ][ bucket 1 ]

A complete bucket leaves while backward computes the gradients of the next. Buckets leave in the
same order on all ranks, whatever order their gradients come in: a complete bucket waits for those
before it, and one that misses a gradient leaves when backward is over. The last bucket cannot be
hidden: nothing is left to compute.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.3 (overlap).
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from labkit.parallel.common.replicas import NoSync, at_end_of_backward

MB = 2**20
P = TypeVar("P", bound=torch.Tensor)


def cut(parameters: Sequence[P], bucket_bytes: float) -> list[list[P]]:
    """The parameters, last first, in lists of one dtype and device and at most `bucket_bytes`; a
    larger parameter has a list of its own."""
    full: list[list[P]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[P]] = {}
    for parameter in reversed(parameters):
        bucket = filling.setdefault((parameter.dtype, parameter.device), [])
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > bucket_bytes:
            full.append(bucket.copy())
            bucket.clear()
        bucket.append(parameter)
    return full + [rest for rest in filling.values() if rest]


def check_bucket_mb(bucket_mb: float) -> None:
    """Raises ValueError for buckets without room."""
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb}: a bucket holds more than 0 MiB; 25 is usual")


class GradReducer(NoSync):
    """A strategy says how a bucket travels, in `_send` and `_receive`; this class says when.

    Register `_on_grad_ready` as a hook on the parameters, and give the buckets to `_set_buckets`.
    """

    overlap = True  # False: all buckets leave when backward is over
    max_in_flight: int | None = None  # buckets at a time; None: all of them

    def _set_buckets(self, buckets: Sequence[Any]) -> None:
        """Buckets have `parameters`, `missing` (those without a gradient yet) and `reset()`."""
        self._buckets = buckets
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._sent = self._received = 0  # buckets, in this backward
        self._in_backward = False

    # --- what a strategy says ---

    def _begin_backward(self) -> None:
        """Called when the first gradient of a backward is there."""

    def _take(self, p: torch.Tensor) -> None:
        """The gradient of `p` is there: note it in its bucket."""
        raise NotImplementedError

    def _send(self, bucket: Any, async_op: bool) -> None:
        """Start to reduce the gradients of `bucket`; `async_op` returns at once."""
        raise NotImplementedError

    def _receive(self, bucket: Any) -> None:
        """Wait for the averages of a bucket that was sent."""
        raise NotImplementedError

    # --- when ---

    def _on_grad_ready(self, p: torch.Tensor) -> None:
        """Called by autograd when it has computed the gradient of `p`."""
        if not self._in_backward:
            self._begin_backward()
            self._in_backward = True
            at_end_of_backward(self._end_backward)
        self._take(p)
        while self._synchronise and self.overlap and self._next_is_complete():
            self._send_next(async_op=True)

    def _next_is_complete(self) -> bool:
        """Whether the next bucket may leave. The last one is left to `_finish`."""
        return self._sent < len(self._buckets) - 1 and not self._buckets[self._sent].missing

    def _send_next(self, async_op: bool) -> None:
        if self.max_in_flight and self._sent - self._received >= self.max_in_flight:
            self._receive_next()
        self._send(self._buckets[self._sent], async_op)
        self._sent += 1

    def _receive_next(self) -> None:
        self._receive(self._buckets[self._received])
        self._received += 1

    def _end_backward(self) -> None:
        if self._synchronise:
            self._finish()
        else:
            self._reset()

    def _finish(self) -> None:
        """Send the remaining buckets, and wait for all."""
        while self._sent < len(self._buckets):
            self._send_next(async_op=self.overlap and self._sent < len(self._buckets) - 1)
        self._reset()

    def _reset(self) -> None:
        """Receive what was sent, and be ready for the next backward, also after one that an error
        cut short: what is in flight would write into the next one's gradients."""
        while self._received < self._sent:
            self._receive_next()
        for bucket in self._buckets:
            bucket.reset()
        self._in_backward, self._sent, self._received = False, 0, 0
