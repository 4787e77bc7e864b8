"""ZeRO stages 1 and 2: data parallelism with sharded optimizer state and gradients.

    bytes held with Adam, P parameters, n ranks      model in bf16          in fp32
        DDP                                          2P + 2P + 12P          4P + 4P + 8P
        stage 1 shards optimizer state               2P + 2P + 12P/n        4P + 4P + 8P/n
        stage 2 also shards gradients                2P + (2P + 12P)/n      4P + (4P + 8P)/n

An all-reduce is a reduce-scatter and an all-gather. After the reduce-scatter each rank has a share
of the averaged gradients and can update these parameters, so ZeRO gathers parameters instead:

        rank 1   | backward: g9 g8 g7 | g6 g5 g4 | g3 ...  | step on share 1 |
                         [ reduce-scatter ][ reduce-scatter ]        [ all-gather of parameters ]

    each rank sends   (n-1)/n (G + W) bytes per step, the same as DDP: G bytes of gradients, then
                      W bytes of parameters; each bucket is padded to n equal shares

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5 and 7.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.elementwise import check_elementwise
from labkit.parallel.common.flat import MB, cut, register_grad_ready_hook
from labkit.parallel.common.ownership import (
    broadcast_tensors,
    check_same_on_all_ranks,
    claim,
    pipeline_with,
)
from labkit.parallel.zero.buckets import Stage2Bucket, ZeroBucket
from labkit.parallel.zero.shares import OwnedShares, ParamGatherer, predict_zero
from labkit.precision.shadow_optimizer import value_of

IN_FLIGHT = 2  # maximum number of stage-2 buckets with unsharded gradients


class ZeroOptimizer(OwnedShares):
    """Averages gradients and runs `optimizer_cls` on this rank's share of the parameters.

    Args:
        params: parameters, groups or named parameters; all ranks start with rank 0's values.
        optimizer_cls: a torch optimizer with elementwise updates, created with `defaults`.
        stage: 1 shards optimizer state (and fp32 master copies); 2 also shards gradients.
        comm: the ranks to shard over; default: all ranks.
        bucket_mb: maximum bucket size in MiB; a larger parameter gets a separate bucket.
        gather_in: the model whose next forward overlaps the all-gather of parameters. Call
            `wait()` before other code (such as `copy.deepcopy`) reads parameters.

    After backward, each rank holds its share of the averaged gradients; stage 2 keeps it until
    `zero_grad` or the first backward after `step`. Computing with `.grad` raises ValueError; clip
    with this optimizer's `clip_grad_norm_`. If all ranks set a `.grad` by hand, the next `step`
    averages these gradients. Scale losses with labkit.GradScaler, not torch's. For 16-bit models,
    `step` keeps weights loaded by `load_state_dict` but undoes writes to `p.data`.
    """

    copy_advice = "create one for the copied model, then load the state_dict() of the original"

    def __init__(
        self,
        params: Any,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        stage: int = 1,
        comm: Comm | None = None,
        *,
        bucket_mb: float = 25,
        gather_in: nn.Module | None = None,
        **defaults: Any,
    ):
        if stage not in (1, 2):
            raise ValueError(
                f"stage={stage}: choose 1 (shards optimizer state) or 2 (also gradients)"
            )
        super().__init__(params, dict(defaults))
        self.comm, self.stage = Comm.of(comm), stage
        self._named = self._names()
        named = [(name, p) for p, name in self._named.items()]
        check_same_on_all_ranks(named, self.comm)
        trainable = [p for p in self._named if p.requires_grad]
        if not trainable:
            raise ValueError("ZeroOptimizer: pass at least one parameter that requires gradients")
        for group in self.param_groups:
            options = {**defaults, **{k: x for k, x in group.items() if "param" not in k}}
            check_elementwise(optimizer_cls, options, trainable[0].device)
        untied = [p for p in trainable if not is_tied(p)]
        groups = cut(untied, bucket_mb * MB) + [[p] for p in trainable if is_tied(p)]
        claim(named, self)
        broadcast_tensors([p for p in self._named if not p.requires_grad], self.comm)

        kind = ZeroBucket if stage == 1 else Stage2Bucket
        self._set_buckets([kind(group, self.comm, self._named) for group in groups])
        self._step_on(self._stand_ins(), optimizer_cls, defaults)
        self.max_in_flight = None if stage == 1 else IN_FLIGHT
        self._not_averaged = False  # True while gradients from `no_sync` are unsent
        # Hooks on these nodes, unlike hooks on tensors, do not run in `torch.autograd.grad`.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._bucket_of]
        for (p, bucket), node in zip(self._bucket_of.items(), self._nodes, strict=True):
            node.register_prehook(bucket.accumulate_hook(p))
            register_grad_ready_hook(p, self._on_grad_ready)
        self._gathers = None if gather_in is None else ParamGatherer(gather_in, self._bucket_of)

    def _begin_backward(self) -> None:
        for p, name in self._named.items():
            if p in self._bucket_of:
                self._bucket_of[p].check_in_place(p, name)

    def _send(self, bucket: ZeroBucket, async_op: bool) -> None:
        gradients = bucket.fill()
        share = bucket.receive_buffer(gradients)
        bucket.sending = self.comm.reduce_scatter_tensor(share, gradients, async_op=async_op)

    def _end_backward(self) -> None:
        super()._end_backward()
        self._not_averaged = not self._synchronize

    def finish_averages(self) -> None:
        if self._not_averaged:
            raise ValueError(
                "ZeroOptimizer: the gradients are not averaged, since the last backward ran in "
                "`no_sync`; run the last backward before a step (or clipping) outside `no_sync`"
            )
        self._begin_backward()
        if any(bucket.has_manual_gradient() for bucket in self._buckets):
            for bucket in self._buckets:
                self._send(bucket, async_op=False)
                bucket.receive()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = value_of(closure)
        self.wait()
        self._check_frozen(self._bucket_of)
        self.finish_averages()
        self._hand_down_options()
        factor, self.gradient_factor = self.gradient_factor, None
        for bucket in reversed(self._buckets):  # forward needs the first parameters first
            bucket.sync_master_from_param()
            bucket.step(self.inner, factor)
            bucket.end_step()
            last = bucket is self._buckets[0]  # no computation left to overlap with
            bucket.gather(async_op=not last or self._gathers is not None)
        if self._gathers is None:
            self.wait()
        return value

    def skip(self) -> None:
        super().skip()
        for bucket in self._buckets:
            bucket.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._reset()
        self._not_averaged = False
        if set_to_none:
            super().zero_grad()
        for bucket in self._buckets:
            bucket.discard_gradients() if set_to_none else bucket.zero_gradients()

    predict = staticmethod(predict_zero)


def is_tied(p: Tensor) -> bool:
    """Whether more than one rank of a pipeline holds `p`."""
    return (pipeline := pipeline_with(p)) is not None and len(pipeline.owners(p)) > 1
