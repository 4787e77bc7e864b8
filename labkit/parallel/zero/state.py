"""Which parts of parameters, gradients and optimizer state a rank owns under ZeRO-1 and 2, for
clipping, checkpoints and pipelines.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.clipping import clip_grad_norm
from labkit.parallel.common.in_stages import piece_of
from labkit.parallel.common.replicas import NoSync
from labkit.parallel.common.shards import marked_as
from labkit.parallel.zero.buckets import ZeroBucket
from labkit.precision.pieces import OwnedPiece


class OwnedShares(NoSync):
    """Methods of `ZeroOptimizer`."""

    comm: Comm
    stage: int
    inner: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    _buckets: Sequence[Any]  # of ZeroBuckets
    _bucket_of: dict[Any, Any]
    _named: Mapping[torch.Tensor, str]
    _depends_on = "rank, world size, bucket_mb or model"
    shards_parameters = False

    def wait(self) -> None:
        raise NotImplementedError

    def finish_averages(self) -> None:
        raise NotImplementedError

    # --- gradients ---

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        """The averaged gradients that this rank owns, flat, to be read or scaled in place, and
        the ranks. (Those in 16 bits are yet to be multiplied by `gradient_factor`.)"""
        return self.own_gradients(), self.comm

    def own_gradients(self) -> list[torch.Tensor]:
        self.finish_averages()
        return [
            piece_of(p, marked_as(p, gradient))
            for bucket in self._buckets
            for p, gradient in zip(bucket.owners_of_pieces, bucket.own_gradients(), strict=True)
            if gradient is not None
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, over all ranks, is at most `max_norm`; returns
        the norm that they had."""
        return clip_grad_norm(self, max_norm, norm_type)

    # --- in a pipeline ---

    @property
    def sends_once(self) -> bool:
        """Stage 1 keeps whole gradients between backwards, so that they may leave after the last
        one of a step. Stage 2 sends in each: that is how it does without them."""
        return self.stage == 1

    def gradient_of_copy(self, p: nn.Parameter) -> ZeroBucket:
        """The bucket of a parameter which is tied over stages: it is alone there, so that all of
        its owners have the same elements of it. Raises ValueError where it is not."""
        bucket = self._bucket_of[p]
        if len(bucket.parameters) > 1:
            raise ValueError(
                f"ZeroOptimizer: {self._named[p]} is tied over stages of a pipeline, which this "
                "optimizer was not told of; make the Pipeline first, then "
                "ZeroOptimizer(pipeline.parameters(), ...)"
            )
        return bucket

    # --- parameters and optimizer state ---

    def owned(self, model: nn.Module) -> list[OwnedPiece]:
        """What this rank owns of `model` (see labkit/precision/pieces.py)."""
        self.wait()
        found = []
        for name, p in model.named_parameters():
            if p not in self._bucket_of or not p.numel():
                found.append(OwnedPiece(name, p.shape, 0, p, None))
                continue
            bucket = self._bucket_of[p]
            for piece, x in zip(bucket.pieces, bucket.stand_ins, strict=True):
                if bucket.parameters[piece.index] is p:
                    found.append(OwnedPiece(name, p.shape, piece.start, x, self.inner))
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

    def _stand_ins(self) -> dict[torch.Tensor, list[nn.Parameter]]:
        found: dict[torch.Tensor, list[nn.Parameter]] = {}
        for bucket in self._buckets:
            for p, x in zip(bucket.owners_of_pieces, bucket.stand_ins, strict=True):
                found.setdefault(p, []).append(x)
        return found

    def _names(self) -> dict[torch.Tensor, str]:
        """A name for each parameter, for errors: two models may use the same ones."""
        found: dict[torch.Tensor, str] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [
                f"parameter {len(found) + i}" for i in range(len(group["params"]))
            ]
            found.update(zip(group["params"], names, strict=True))
        return found
