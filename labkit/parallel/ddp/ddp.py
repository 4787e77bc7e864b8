"""Distributed data parallelism: gradient buckets are all-reduced while backward still runs.

    each rank holds   P bytes of parameters, P of gradients, 2P of Adam state; a share of the batch
    each rank sends   2(n-1)/n P bytes per step, in one all-reduce per bucket

Backward computes the last layer's gradients first. Parameters are therefore bucketed in reverse
order, and each bucket is sent as soon as it is full:

        each rank   forward | backward: g9 g8 g7 | g6 g5 g4 | g3 g2 g1 g0 | wait | step
                                               [ bucket 0 ][ bucket 1 ][ bucket 2 ]

At best, only the last all-reduce is exposed. After backward, gradients *are* views of the buckets.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, sections 3.2 and 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from labkit.comm import Comm
from labkit.holdings import replicated
from labkit.parallel.common.data_parallel import GradReducer, Replica
from labkit.parallel.common.flat import MB, FlatPartition, GradBuffer, cut, flagged_unused
from labkit.parallel.common.ownership import broadcast_tensors
from labkit.parallel.ddp.comm_hooks import Hook, PendingReduction, all_reduced
from labkit.parallel.ddp.extras import STATIC, JoinCoordinator, Phase, agreed_order, agreed_used


class Bucket(GradBuffer):
    """A flat buffer of gradients that are all-reduced together."""

    def __init__(self, parameters: Sequence[Any], comm: Comm | None, names: Mapping[Any, str]):
        super().__init__(parameters, FlatPartition([p.shape for p in parameters], ranks=1), names)
        numel, first = self.partition.numel, parameters[0].detach()
        self.use(comm.symmetric_empty(numel, first) if comm else first.new_empty(numel))
        self.handle: PendingReduction | None = None  # of the reduction in flight

    def fill(self, divisor: float) -> torch.Tensor:
        for p in self.parameters:
            if p.grad is not None:
                self.put(p, divisor)
        return self.flag_unused()

    def receive(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        for parameter in self.unused:  # by this rank; other ranks may have used the parameter
            if not flagged_unused(self.view[parameter].view(-1)):
                parameter.grad = self.view[parameter]

    def copy_gradients(self) -> None:  # from the old buckets
        for parameter, view in self.view.items():
            if parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)


class DDP(GradReducer, Replica):
    """Replicates `module` and averages gradients while `backward()` runs. Gradients are views of
    buckets, which the next backward reuses.

    Args:
        module: any module; all replicas start with rank 0's weights.
        comm: the ranks that hold replicas; default: all ranks.
        bucket_mb: maximum bucket size in MiB; a larger parameter gets a separate bucket.
        overlap: whether to send each bucket as soon as it is full, not at the end of backward.
        static_graph: declares that all ranks use the same parameters in every step; unused
            parameters are sent only in the first step. A step that differs raises ValueError.
        hook: function that reduces a bucket, e.g. `compressed(torch.bfloat16)`; see `comm_hooks`.
        find_unused_parameters: ignored, since unused parameters are always found (common/flat.py).

    Raises ValueError, on every rank, if the modules differ between ranks or `module` is already
    wrapped, and in forward if parameters changed after wrapping.
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
        cut([], bucket_mb * MB)  # validates the size before anything changes
        super().__init__(module, comm)
        self.overlap, self.static_graph, self.hook = overlap, static_graph, hook
        self._bucket_bytes = bucket_mb * MB
        self._make_buckets(self.comm)

    def _attach(self) -> None:
        super()._attach()
        self._names = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        self._arrived: list[torch.Tensor] | None = None  # order of gradients in the first backward
        self._join = JoinCoordinator(self.comm)
        self._set_buckets([])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_buckets(None)

    def _make_buckets(self, comm: Comm | None) -> None:
        groups = cut(self._parameters_to_average, self._bucket_bytes)
        self._set_buckets([Bucket(group, comm, self._names) for group in groups])
        self._arrived = [] if len(self._buckets) > 1 or self.static_graph else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # an error interrupted the last backward
            self._reset()
        return super().forward(*args, **kwargs)

    def _copy_buffers(self) -> None:
        buffers = list(self.module.buffers())
        if buffers and self.comm.rank in self._join.active:
            self._join.announce(Phase.FORWARD)
        broadcast_tensors(buffers, self.comm, self._join.first)

    def _on_grad_ready(self, parameter: torch.Tensor) -> None:
        if parameter not in self._bucket_of:
            self._refuse(parameter, "got a gradient but had none in the first backward")
        if self._synchronize:
            super()._on_grad_ready(parameter)
            if self._arrived is not None:
                self._arrived.append(parameter)

    def _begin_backward(self) -> None:
        self._join.announce(Phase.BACKWARD)
        if self._arrived is not None:
            self._arrived = []

    def _send(self, bucket: Bucket, async_op: bool) -> None:
        bucket.handle = self.hook(bucket.fill(self._join.divisor), self.comm, async_op)

    def _end_backward(self) -> None:
        if self.static_graph and self._arrived is None:
            for parameter, bucket in self._bucket_of.items():
                if parameter in bucket.missing:
                    self._refuse(parameter, "got no gradient but had one in the first backward")
        super()._end_backward()

    def _finish(self) -> None:
        super()._finish()
        if self._arrived is not None:
            self._rebuild(self._arrived)

    def _refuse(self, parameter: torch.Tensor, what: str) -> NoReturn:
        self._reset()
        raise ValueError(f"{self._names[parameter]} {what}; {STATIC}")  # type: ignore[index]

    def _rebuild(self, arrived: list[Any]) -> None:
        self._arrived = None  # rebuild once, after the first backward
        order = agreed_order(self._parameters_to_average, arrived, self.comm, self._join.first)
        if self.static_graph:
            unused = {p for bucket in self._buckets for p in bucket.unused}
            own = {*order} - unused if self.comm.rank in self._join.active else None
            used = agreed_used(self._names, own, self.comm)
            order = [p for p in order if p in used]
        groups = cut(order[::-1], self._bucket_bytes)
        if [set(group) for group in groups] != [set(b.parameters) for b in self._buckets]:
            buckets = [Bucket(group, self.comm, self._names) for group in groups]
            for bucket in buckets:
                bucket.copy_gradients()
            self._set_buckets(buckets)

    @contextmanager
    def join(self, divide_by_active: bool = False) -> Iterator[None]:
        """Lets ranks run different numbers of steps in this block. All ranks end with the weights
        of a rank that was active until the end. Optimizer states differ, so create a new
        optimizer. Gradients are divided by the number of ranks, or of active ranks if requested."""
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
                broadcast_tensors(tensors, self.comm, join.first)
        finally:
            self._join = JoinCoordinator(self.comm)

    predict = staticmethod(replicated)  # the same bytes as NaiveDDP, in fewer all-reduces
