"""Sending gradients while backward runs: each bucket leaves when its last gradient is there.

    backward     g9 g8 g7 | g6 g5 g4 | g3 g2 g1
                 [ reduce-scatter of bucket 0 ][ bucket 1 ][ bucket 2 ]

Buckets leave in the same order on all ranks, whatever order their gradients came in: one that is
full waits for those before it, and one that misses a gradient leaves when backward is over.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.comm import Comm
from labkit.parallel.common.grad_buffer import GradBuffer
from labkit.parallel.common.replicas import at_end_of_backward, register_grad_ready_hook
from labkit.parallel.zero.buckets import ZeroBucket


class GradReducer:
    """Sends `buckets`, at most `in_flight` of them at a time; `names` are for errors."""

    def __init__(
        self,
        buckets: Sequence[ZeroBucket],
        names: Mapping[torch.Tensor, str],
        comm: Comm,
        in_flight: int,
    ):
        self.synchronise = True
        self._buckets, self._names, self._comm, self._in_flight = buckets, names, comm, in_flight
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._sent = self._received = 0  # buckets, in this backward
        self._in_backward = False
        self._adds: set[torch.Tensor] = set()  # to whose gradient this backward adds
        self._not_averaged = False  # gradients of `no_sync` that no backward has sent since
        # Hooks on these nodes, unlike hooks on tensors, do not run in `torch.autograd.grad`.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._bucket_of]
        for p, node in zip(self._bucket_of, self._nodes, strict=True):
            node.register_prehook(partial(_divided, p, self._bucket_of[p], self._adds))
            register_grad_ready_hook(p, self._on_grad_ready)

    def _on_grad_ready(self, p: torch.Tensor) -> None:
        """Called by autograd when it has finished the gradient of `p`."""
        if not self._in_backward:
            self.check_unchanged()
            self._in_backward = True
            at_end_of_backward(self._finish)
        self._bucket_of[p].take(p, divided=p in self._adds)
        self._adds.discard(p)
        last = len(self._buckets) - 1
        while self.synchronise and self._sent < last and not self._next.missing:
            self._send_next(async_op=True)

    @property
    def _next(self) -> GradBuffer:
        return self._buckets[self._sent].gradients

    def _send_next(self, async_op: bool) -> None:
        if self._sent - self._received >= self._in_flight:
            self._receive_next()
        self._buckets[self._sent].send(async_op)
        self._sent += 1

    def _receive_next(self) -> None:
        self._buckets[self._received].receive()
        self._received += 1

    def _finish(self) -> None:
        """Backward is over: send what is left (at least the last bucket, which nothing can hide,
        and all after one that misses a parameter), and wait."""
        while self.synchronise and self._sent < len(self._buckets):
            self._send_next(async_op=self._sent < len(self._buckets) - 1)
        self._not_averaged = not self.synchronise
        self._reset()

    def _reset(self) -> None:
        """Be ready for the next backward, with what this one has sent received."""
        while self._received < self._sent:
            self._receive_next()
        for bucket in self._buckets:
            bucket.reset()
        self._in_backward, self._sent, self._received = False, 0, 0
        self._adds.clear()

    def forget(self) -> None:
        """For `zero_grad`, also after a backward that was cut short by an error."""
        self._reset()
        self._not_averaged = False

    # --- what must hold ---

    def finish_averages(self) -> None:
        """Average what was set by hand. Raises ValueError for gradients of `no_sync`."""
        if self._not_averaged:
            raise ValueError(
                "ZeroOptimizer: the gradients are this rank's own, not averages: the last backward "
                "ran in `no_sync`; run the last one before a step (or clipping) outside of it"
            )
        self.check_unchanged()
        if any(p.grad is not bucket.in_pieces.get(p) for p, bucket in self._bucket_of.items()):
            for bucket in self._buckets:
                bucket.send(async_op=False)
                bucket.receive()

    def check_unchanged(self) -> None:
        """Raises ValueError, naming the parameter, when one lies elsewhere than in its bucket."""
        for p, name in self._names.items():
            if p in self._bucket_of and not self._bucket_of[p].has(p):
                raise ValueError(
                    f"ZeroOptimizer: the memory of {name} is another than when the "
                    "optimizer was made (p.data = ..., or module.to(...)); change a model first, "
                    "then make its optimizer"
                )


def _divided(p: Tensor, bucket: ZeroBucket, adds: set[Tensor], gradients: Any) -> Any:
    """What a backward has left in `.grad` is divided, so what autograd adds to it must be, too."""
    if not bucket.uncover(p):
        return None
    adds.add(p)
    return (gradients[0] / bucket.comm.size,)
