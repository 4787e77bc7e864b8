"""Replicas, and gradient buckets reduced while backward runs (in DDP, ZeRO-1 and ZeRO-2).

All ranks send buckets in the same order: a full bucket waits for earlier buckets. At the end of
backward, the remaining buckets are sent, even if some gradients are missing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.flat import register_grad_ready_hook
from labkit.parallel.common.ownership import (
    ParamSnapshot,
    at_end_of_backward,
    broadcast_tensors,
    check_same_on_all_ranks,
    check_trainable,
    claim,
)

MicroBatch = TypeVar("MicroBatch")


class NoSync:
    """Gradient accumulation: backward passes that do not communicate."""

    _synchronize = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate local gradients; the next backward
        outside the block averages the total. Until then, ZeRO stage 2 holds unsharded gradients."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def accumulate(self, microbatches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a step; only the last backward communicates. Multiply each
        loss, a sum over rows (or tokens), by ranks / (rows per step on all ranks)."""
        microbatches = list(microbatches)
        with self.no_sync():
            yield from microbatches[:-1]
        yield from microbatches[-1:]


class Replica(NoSync, nn.Module):
    """Replicates rank 0's `module` on the ranks of `comm`. A copy (`copy.deepcopy`, pickle) creates
    new hooks and buckets without communication, so a single rank may copy or load."""

    def __init__(self, module: nn.Module, comm: Comm | None = None):
        super().__init__()
        self.module, self.comm = module, Comm.of(comm)
        check_same_on_all_ranks(list(module.named_parameters()), self.comm)
        check_trainable(module)  # not for copies, which may be frozen weight averages
        self._set_up()
        broadcast_tensors([*module.parameters(), *module.buffers()], self.comm)

    def _set_up(self) -> None:
        before = {*vars(self)}
        self._attach()
        self._attached = {*vars(self)} - before

    def _attach(self) -> None:
        self._parameters_to_average = [p for p in self.module.parameters() if p.requires_grad]
        claim(self.module.named_parameters(), self)
        self._unchanged = ParamSnapshot(self.module)
        self._synchronize = True
        for parameter in self._parameters_to_average:
            register_grad_ready_hook(parameter, self._on_grad_ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self._synchronize:
            self._unchanged.check()
            self._copy_buffers()
        return self.module(*args, **kwargs)

    def _copy_buffers(self) -> None:
        broadcast_tensors(self.module.buffers(), self.comm)

    def _on_grad_ready(self, p: Tensor) -> None: ...  # autograd has computed the gradient of `p`

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in self._attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.comm = Comm.of(self.comm)
        self._set_up()


class GradReducer(NoSync):
    """Decides when a gradient bucket is sent; each strategy implements the reduction in `_send`."""

    overlap = True  # False: send all buckets at the end of backward
    max_in_flight: int | None = None  # buckets; None: no limit

    def _set_buckets(self, buckets: Sequence[Any]) -> None:
        """Each bucket must define `parameters`, `missing`, `take`, `receive` and `reset`."""
        self._buckets = buckets
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._last = len(buckets) - 1  # sent by `_finish`
        self._sent = self._received = 0  # bucket counts in this backward
        self._in_backward = False

    def _begin_backward(self) -> None: ...

    def _send(self, bucket: Any, async_op: bool) -> None:
        """Reduces the gradients of `bucket`; with `async_op`, only starts the reduction."""
        raise NotImplementedError

    def _on_grad_ready(self, p: Tensor) -> None:
        if not self._in_backward:
            self._begin_backward()
            self._in_backward = True
            at_end_of_backward(self._end_backward)
        self._bucket_of[p].take(p)
        if self._synchronize and self.overlap:
            while self._sent < self._last and not self._buckets[self._sent].missing:
                self._send_next(async_op=True)

    def _send_next(self, async_op: bool) -> None:
        if self.max_in_flight and self._sent - self._received >= self.max_in_flight:
            self._receive_next()
        self._send(self._buckets[self._sent], async_op)
        self._sent += 1

    def _receive_next(self) -> None:
        self._buckets[self._received].receive()
        self._received += 1

    def _end_backward(self) -> None:
        if self._synchronize:
            self._finish()
        else:
            self._reset()

    def _finish(self) -> None:
        while self._sent < len(self._buckets):
            self._send_next(async_op=self.overlap and self._sent < self._last)
        self._reset()

    def _reset(self) -> None:
        """Also runs after an error; otherwise, sent buckets would overwrite the next gradients."""
        while self._received < self._sent:
            self._receive_next()
        for bucket in self._buckets:
            bucket.reset()
        self._in_backward, self._sent, self._received = False, 0, 0
