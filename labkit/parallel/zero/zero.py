"""ZeRO, stages 1 and 2: data parallelism in which each rank keeps the optimizer of its share.

    bytes held for Adam, P parameters, n ranks       model in bf16          in fp32
        DDP                                          2P + 2P + 12P          4P + 4P + 8P
        stage 1, the optimizer's state is sharded    2P + 2P + 12P/n        4P + 4P + 8P/n
        stage 2, the gradients, too                  2P + (2P + 12P)/n      4P + (4P + 8P)/n

An all-reduce is a reduce-scatter, then an all-gather. Between the two, each rank has the averages
of one share only, and that is all it needs to step on that share. So the optimizer moves in
between, and what is gathered is not gradients, but new parameters:

        rank 0   | backward: g9 g8 g7 | g6 g5 g4 | g3 ...  | step on share 0 |
        rank 1   | the same                                | step on share 1 |
                         [ reduce-scatter ][ reduce-scatter ]        [ all-gather of parameters ]

    travels      (n-1)/n (G + P) from each rank and step, as with DDP: G bytes of gradients, then P
                 of parameters, of the same dtype and size; each bucket is padded to n equal shares

A bucket is one flat buffer, cut into n equal shares wherever that falls (common/flat.py);
the parameters are views of it, so nothing is copied to be sent or gathered. In stage 2 a bucket's
gradients are freed as soon as they have left.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, sections 5 and 7.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.agreement import check_same_on_all_ranks, claim
from labkit.parallel.common.clipping import clip_grad_norm
from labkit.parallel.common.in_stages import piece_of, tied_with
from labkit.parallel.common.replicas import copy_from_rank_0
from labkit.parallel.common.shards import marked_as
from labkit.parallel.ddp.buckets import MB, cut
from labkit.parallel.zero.buckets import Stage2Bucket, ZeroBucket
from labkit.parallel.zero.elementwise import check_elementwise
from labkit.parallel.zero.footprint import predict_zero
from labkit.parallel.zero.grad_reduce import GradReducer
from labkit.parallel.zero.param_gather import ParamGatherer
from labkit.precision.pieces import OwnedPiece
from labkit.precision.shadow_optimizer import ShadowOptimizer, value_of
from labkit.precision.weak_hooks import NotCopyable

IN_FLIGHT = 2  # buckets of stage 2 whose gradients are whole, on their way


class ZeroOptimizer(NotCopyable, ShadowOptimizer):
    """`optimizer_cls`, of which each rank has its share, and the averaging of gradients.

    Args:
        params: parameters, groups of them, or named ones, as for any torch optimizer. Replicas
            start as rank 0's; no DDP goes around the model.
        optimizer_cls: any torch optimizer that treats each element by itself.
        stage: 1 shards the optimizer's state (and fp32 master copies); 2 the gradients, too.
        comm: the ranks that share; all by default.
        bucket_mb: gradients and parameters travel in pieces of about this many MiB.
        gather_in: the model; then `step` returns at once, and new parameters arrive while the next
            forward runs: each module waits for its own. `wait()` waits for all, before anything
            else reads them (a norm, `copy.deepcopy`).
        defaults: the arguments of `optimizer_cls`.

    After `loss.backward()` each rank has the averages of its share; in stage 2 they stay until the
    next backward after `step` or until `zero_grad`. `.grad` then only says that there is a
    gradient: computing with it, as torch's `clip_grad_norm_` does, raises ValueError. Clip with
    `clip_grad_norm_` of this optimizer. A `.grad` that is set by hand, on all ranks, is averaged
    by the next `step`. Scale losses with labkit.GradScaler; torch's is refused.

    What is written to the model from elsewhere (`load_state_dict`) fp32 master copies take, too.
    Past autograd (`p.data.fill_(0)`) it is not seen, and the next step undoes it: write with
    `torch.no_grad()` instead.
    """

    _depends_on = "rank, world size, bucket_mb or model"
    copy_advice = "make one of the copied model's parameters and load this one's state_dict()"

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
            raise ValueError(f"stage={stage}: 1 shards the optimizer, 2 the gradients, too")
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb}: a bucket holds more than 0 MiB; 25 is usual")
        super().__init__(params, dict(defaults))
        self.comm, self.stage = Comm.of(comm), stage
        self._named = self._names()
        trainable = [p for p in self._named if p.requires_grad]
        if not trainable:
            raise ValueError(
                "ZeroOptimizer: no parameter takes gradients, so there is none to step on"
            )
        for group in self.param_groups:
            options = {**defaults, **{k: x for k, x in group.items() if "param" not in k}}
            check_elementwise(optimizer_cls, options, trainable[0].device)
        named = [(name, p) for p, name in self._named.items()]
        check_same_on_all_ranks(named, self.comm)
        claim(named, self)
        copy_from_rank_0([p for p in self._named if not p.requires_grad], self.comm)
        kind = ZeroBucket if stage == 1 else Stage2Bucket
        copies = [p for p in trainable if tied_with(p)]
        others = [p for p in trainable if not tied_with(p)]
        some_together = cut(others, bucket_mb * MB) + [[p] for p in copies]
        self._buckets = [kind(some, self.comm, self._named) for some in some_together]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._step_on(self._stand_ins(), optimizer_cls, defaults)
        in_flight = len(self._buckets) if stage == 1 else IN_FLIGHT
        self._sends = GradReducer(self._buckets, self._named, self.comm, in_flight)
        self._gathers = None if gather_in is None else ParamGatherer(gather_in, self._bucket_of)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to the local gradients only; the next one outside sends. In
        stage 2, too, a rank then holds whole gradients: without this block it does not."""
        before, self._sends.synchronise = self._sends.synchronise, False
        try:
            yield
        finally:
            self._sends.synchronise = before

    # --- in a pipeline ---

    @property
    def sends_once(self) -> bool:
        """Whether whole gradients stay here between backwards, so that they may leave after the
        last one of a step. Stage 2 sends in each: that is how it does without them."""
        return self.stage == 1

    def bucket_of_copy(self, p: nn.Parameter) -> ZeroBucket:
        """That of a parameter which is tied over stages: it is alone there, so that all of its
        owners have the same elements of it. Raises ValueError where it is not."""
        bucket = self._bucket_of[p]
        if len(bucket.parameters) > 1:
            raise ValueError(
                f"ZeroOptimizer: {self._named[p]} is tied over stages of a pipeline, which this "
                "optimizer was not told of; make the Pipeline first, then "
                "ZeroOptimizer(pipeline.parameters(), ...)"
            )
        return bucket

    # --- step: each rank on its share, then all get all ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = value_of(closure)
        self.wait()
        self._check_frozen(self._bucket_of)
        self._sends.finish_averages()
        self._hand_down_options()
        self._hand_down_factor()
        for bucket in reversed(self._buckets):  # forward needs the first parameters first
            bucket.sync_master_from_param()
            bucket.step(self.inner)
            last = bucket is self._buckets[0]  # nothing here could hide it
            bucket.gather(async_op=not last or self._gathers is not None)
        if self._gathers is None:
            self.wait()
        return value

    def _hand_down_factor(self) -> None:
        """For this step, what a loss scaler and clipping have left to be done in it."""
        for bucket in self._buckets:
            bucket.gradient_factor = self.gradient_factor
        self.gradient_factor = None

    def skip(self) -> None:
        """In place of `step`, on all ranks, where gradients are inf or NaN (labkit.GradScaler)."""
        super().skip()
        for bucket in self._buckets:
            bucket.skip()

    def wait(self) -> None:
        """Return when all new parameters are there."""
        for bucket in reversed(self._buckets):
            bucket.wait_for_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sends.forget()
        if set_to_none:
            super().zero_grad()
        for bucket in self._buckets:
            bucket.forget_gradients() if set_to_none else bucket.zero_gradients()

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        """The averaged gradients that this rank owns, flat, to be read or scaled in place, and
        the ranks. (Those in 16 bits are yet to be multiplied by `gradient_factor`.)"""
        return self.own_gradients(), self.comm

    def own_gradients(self) -> list[torch.Tensor]:
        self._sends.finish_averages()
        return [
            piece_of(bucket.parameters[one.index], marked_as(bucket.parameters[one.index], g))
            for bucket in self._buckets
            for one, g in zip(bucket.pieces, bucket.own_gradients(), strict=True)
            if g is not None
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, over all ranks, is at most `max_norm`; returns
        the norm that they had."""
        return clip_grad_norm(self, max_norm, norm_type)

    # --- what is whose ---

    def owned(self, model: nn.Module) -> list[OwnedPiece]:
        """What this rank owns of `model` (see labkit/precision/pieces.py)."""
        self.wait()
        found = []
        for name, p in model.named_parameters():
            if p not in self._bucket_of or not p.numel():
                found.append(OwnedPiece(name, p.shape, 0, p, None))
                continue
            bucket = self._bucket_of[p]
            for one, x in zip(bucket.pieces, bucket.stand_ins, strict=True):
                if bucket.parameters[one.index] is p:
                    found.append(OwnedPiece(name, p.shape, one.start, x, self.inner))
        return found

    @torch.no_grad()
    def after_load(self) -> None:
        """The owned pieces were written to: give all ranks the new parameters."""
        self.wait()
        for bucket in self._buckets:
            bucket.gather(async_op=False)

    def _masters(self) -> list[torch.Tensor]:
        self.wait()
        return [bucket.stepped for bucket in self._buckets if bucket.low]

    def _whose(self) -> list[int]:
        shares = [bucket.layout.share for bucket in self._buckets]
        return [self.comm.rank, self.comm.size, *shares]

    predict = staticmethod(predict_zero)

    def _stand_ins(self) -> dict[torch.Tensor, list[nn.Parameter]]:
        found: dict[torch.Tensor, list[nn.Parameter]] = {}
        for bucket in self._buckets:
            for one, x in zip(bucket.pieces, bucket.stand_ins, strict=True):
                found.setdefault(bucket.parameters[one.index], []).append(x)
        return found

    def _names(self) -> dict[torch.Tensor, str]:
        """A name for each parameter, for what is told of it: two models may use the same ones."""
        found: dict[torch.Tensor, str] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [
                f"parameter {len(found) + i}" for i in range(len(group["params"]))
            ]
            found.update(zip(group["params"], names, strict=True))
        return found
