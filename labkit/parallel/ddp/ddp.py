"""Distributed data parallelism: gradients travel in buckets while backward still runs.

    each rank holds   the whole model: parameters P, gradients P, Adam 2P; its share of the batch
    travels           2(n-1)/n P bytes from each rank and step, in P / bucket_mb messages

Backward makes the last layer's gradient first. Parameters are therefore put into buckets in
reverse order, and a bucket leaves as soon as its last gradient is there:

        rank 0   forward | backward: g9 g8 g7 | g6 g5 g4 | g3 g2 g1 g0 | wait | step
                                            [ bucket 0 ][ bucket 1 ][ bucket 2 ]
        rank 1   the same

Few large messages pay the latency once, and only the last bucket is not hidden by computation.
After backward the gradients *are* views of the buckets: nothing is copied back, and a rank holds P
of gradients, not 2P.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv 2006.15704, sections 3.2 and 4.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.footprint import replicated
from labkit.parallel.common.grad_reducer import MB, GradReducer, check_bucket_mb
from labkit.parallel.common.replicas import Replica, copy_from, register_grad_ready_hook
from labkit.parallel.ddp.buckets import STATIC, Bucket, agreed_order, agreed_used, buckets_of
from labkit.parallel.ddp.comm_hooks import Hook, all_reduced
from labkit.parallel.ddp.joining import JoinCoordinator, Phase


class DDP(GradReducer, Replica):
    """Replicas of `module`, whose gradients are averaged while `backward()` runs.

    Args:
        module: any module; replicas start as rank 0's.
        comm: the ranks that hold replicas; all by default.
        bucket_mb: gradients travel in pieces of about this many MiB.
        overlap: send a bucket as soon as it is full; False: when backward is over, to compare.
        static_graph: every step uses the parameters that the first one used, on all ranks. The
            others are not sent at all; ValueError where it turns out otherwise.
        hook: how a bucket travels, as `compressed(torch.bfloat16)`; see `comm_hooks`.
        find_unused_parameters: changes nothing: unused parameters are found without a search (see
            `grad_buffer.UNUSED`).

    When `backward()` returns, the gradients are the averages; they stay valid until the next
    backward. Use `.module` for the wrapped module. After the first backward, buckets are filled
    anew in the order in which gradients came.

    Raises ValueError, on every rank, where the ranks' modules differ or one is wrapped already; in
    forward, where parameters were changed since.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        bucket_mb: float = 25,
        overlap: bool = True,
        static_graph: bool = False,
        hook: Hook = all_reduced,
        find_unused_parameters: bool = False,
    ):
        check_bucket_mb(bucket_mb)
        super().__init__(module, comm)
        self.overlap, self.static_graph, self.hook = overlap, static_graph, hook
        self._bucket_bytes = bucket_mb * MB
        self._make_buckets(self.comm)

    def _attach(self) -> None:
        super()._attach()
        self._names = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        self._came: list[torch.Tensor] | None = None  # the first backward's gradients, in order
        self._join: JoinCoordinator | None = None  # inside join()
        self._set_buckets([])
        for parameter in self._parameters_to_average:
            register_grad_ready_hook(parameter, self._on_grad_ready)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_buckets(None)

    def _make_buckets(self, comm: Comm | None) -> None:
        self._set_buckets(buckets_of(self._parameters_to_average, self._bucket_bytes, comm))
        self._came = [] if len(self._buckets) > 1 or self.static_graph else None

    # --- forward and backward -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # the last one was cut short by an error
            self._reset()
        if self.training and torch.is_grad_enabled() and self._synchronise:
            self._unchanged.check()
            self._copy_buffers()
        return self.module(*args, **kwargs)

    def _copy_buffers(self) -> None:
        buffers = list(self.module.buffers())
        if buffers and self._join and self._join.is_active:
            self._join.announce(Phase.FORWARD)
        copy_from(self._join.first if self._join else 0, buffers, self.comm)

    def _on_grad_ready(self, parameter: torch.Tensor) -> None:
        if parameter not in self._bucket_of:
            self._refuse(parameter, "got a gradient, and had none in the first backward")
        if self._synchronise:
            super()._on_grad_ready(parameter)

    def _begin_backward(self) -> None:
        if self._join:
            self._join.announce(Phase.BACKWARD)
        if self._came is not None:
            self._came = []

    def _take(self, parameter: torch.Tensor) -> None:
        self._bucket_of[parameter].note(parameter)
        if self._came is not None:
            self._came.append(parameter)

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        """Divide the gradients into the bucket, and all-reduce it."""
        divisor = self._join.divisor if self._join else self.comm.size
        bucket.handle = self.hook(bucket.fill(divisor), self.comm, async_op)

    def _receive(self, bucket: Bucket) -> None:
        bucket.receive()

    def _end_backward(self) -> None:
        """Backward is over. Raises ValueError when a static graph used less than before."""
        if self.static_graph and self._came is None:
            for parameter, bucket in self._bucket_of.items():
                if parameter in bucket.missing:
                    self._refuse(parameter, "got no gradient, and had one in the first backward")
        super()._end_backward()

    def _finish(self) -> None:
        super()._finish()
        if self._came is not None:
            self._rebuild(self._came)

    def _refuse(self, parameter: torch.Tensor, what: str) -> NoReturn:
        self._reset()
        raise ValueError(f"{self._names[parameter]} {what}; {STATIC}")  # type: ignore[index]

    def _rebuild(self, came: list[Any]) -> None:
        """Once, after the first backward: fill the buckets in the order in which gradients came."""
        self._came = None
        src = self._join.first if self._join else 0
        order = agreed_order(self._parameters_to_average, came, self.comm, src)
        if self.static_graph:
            unused = {p for bucket in self._buckets for p in bucket.unused}
            mine = None if self._join and not self._join.is_active else {*order} - unused
            used = agreed_used(self._names, mine, self.comm)
            order = [p for p in order if p in used]
        buckets = buckets_of(order[::-1], self._bucket_bytes, self.comm)
        if [set(b.parameters) for b in buckets] != [set(b.parameters) for b in self._buckets]:
            for bucket in buckets:
                bucket.take_over()
            self._set_buckets(buckets)

    # --- ranks whose data ends early ----------------------------------------------------------

    @contextmanager
    def join(self, divide_by_active: bool = False) -> Iterator[None]:
        """Around a loop whose number of steps may differ between the ranks; see `joining`.

        A rank that leaves the block keeps the others company, with no gradient of its own, until
        all leave it; then all have the weights of a rank that was active last. Gradients are
        divided by the number of ranks, or with `divide_by_active` of those still active. The state
        of an optimizer (momentum, Adam) is each rank's own: make a new one to train on.
        """
        device = self._parameters_to_average[0].device
        self._join = join = JoinCoordinator(self.comm, device, divide_by_active)
        try:
            yield
            while phase := join.announce(Phase.DONE):
                if phase == Phase.FORWARD:
                    self._copy_buffers()
                else:
                    self.zero_grad()
                    self._finish()
            if len(join.active) < self.comm.size:
                tensors = [*self.module.parameters(), *self.module.buffers()]
                copy_from(join.first, tensors, self.comm)
        finally:
            self._join = None

    predict = staticmethod(replicated)  # the bytes of NaiveDDP, in fewer messages
