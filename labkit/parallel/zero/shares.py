"""A bucket's parameters under ZeRO-1 and ZeRO-2, and this rank's share.

Parameters a, b and c (6, 2 and 3 elements) on rank 1 of 3:

    whole        a a a a a a b b c c c .    the parameters' memory, padded; equal on all ranks
    share                a a b b            rank 1's share, a view of whole
    stepped              a a b b            the share, or the fp32 master copy of a 16-bit share
    stand_ins           [a a|b b]           views of stepped: the optimizer's parameters
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from labkit.comm import Comm, Handle
from labkit.holdings import Footprint, OwnedPiece, parameter_bytes
from labkit.parallel.common.data_parallel import GradReducer
from labkit.parallel.common.flat import MB, FlatPartition, cut, while_alive
from labkit.precision.shadow_optimizer import (
    LOW,
    NotCopyable,
    ShadowOptimizer,
    fp32_of,
    sync_master_from_param,
)

STEP_COUNT_BYTES = 4  # Adam's step count per tensor


class ParamShare:
    """Parameters of one dtype and device in a flat buffer, and this rank's share of the buffer."""

    def __init__(self, parameters: Sequence[Tensor], comm: Comm):
        self.parameters, self.comm = list(parameters), comm
        self.partition = FlatPartition([p.shape for p in parameters], comm.size)
        first = parameters[0]
        self.whole = torch.zeros(self.partition.padded, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.partition.views(self.whole), strict=True):
            view.copy_(p.detach())
            p.data = view
        comm.broadcast(self.whole)
        self.share = self.partition.share_of(self.whole, comm.rank)
        self.pieces = list(self.partition.pieces(comm.rank))
        self.piece_params = [self.parameters[piece.index] for piece in self.pieces]
        self.low = first.dtype in LOW
        self.stepped = fp32_of(self.share)  # the share itself, or its master copy
        self.stand_ins = [
            nn.Parameter(self.stepped[piece.at : piece.at + piece.numel]) for piece in self.pieces
        ]
        self._versions = [p._version for p in self.parameters]
        self._gathering: Handle | None = None

    def check_in_place(self, p: Tensor, name: str) -> None:
        """Raises ValueError if `p` is no longer in the memory of `whole`."""
        memory, flat = p.untyped_storage(), self.whole
        if memory._cdata != flat.untyped_storage()._cdata or p.dtype != flat.dtype:
            raise ValueError(
                f"ZeroOptimizer: {name} has moved since the optimizer was created (p.data = ..., "
                "or module.to(...)); change the model first, then create the optimizer"
            )

    def gather(self, async_op: bool) -> None:
        if self.low:
            self.share.copy_(self.stepped)
        self._gathering = self.comm.all_gather_into_tensor(
            self.whole, self.share, async_op=async_op
        )
        # A backward through an earlier forward must raise, as after any torch optimizer's step.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [p._version for p in self.parameters]

    def wait_for_parameters(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def sync_master_from_param(self) -> None:
        if self.low and self._versions != [p._version for p in self.parameters]:
            sync_master_from_param(self.stepped, self.share)


class OwnedShares(GradReducer, NotCopyable, ShadowOptimizer):
    """The gradient, parameter and state pieces that a ZeroOptimizer owns on this rank."""

    comm: Comm
    stage: int
    _named: Mapping[Tensor, str]
    _depends_on = "rank, world size, bucket_mb or model"
    shards_parameters = False
    clip_grad_norm_: Callable[..., Tensor]  # from common/clipping.py
    finish_averages: Callable[[], None]

    def wait(self) -> None:
        for bucket in reversed(self._buckets):
            bucket.wait_for_parameters()

    def gradient_pieces(self) -> tuple[list[Tensor], Comm]:
        """See OwnsGradientPieces; 16-bit pieces are not yet multiplied by `gradient_factor`."""
        return self.own_gradients(), self.comm

    def own_gradients(self) -> list[Tensor]:
        self.finish_averages()
        pieces = []
        for bucket in self._buckets:
            for p, piece in zip(bucket.piece_params, bucket.own_gradients(), strict=True):
                if piece is not None:
                    piece.piece_of = p
                    pieces.append(piece)
        return pieces

    @property
    def sends_once(self) -> bool:
        return self.stage == 1  # stage 2 frees unsharded gradients after each backward

    def gradient_of_copy(self, p: nn.Parameter) -> Any:
        bucket = self._bucket_of[p]
        if len(bucket.parameters) > 1:
            raise ValueError(
                f"ZeroOptimizer: {self._named[p]} is tied across stages of a pipeline created "
                "later; create the Pipeline first, then ZeroOptimizer(pipeline.parameters(), ...)"
            )
        return bucket

    def owned(self, model: nn.Module) -> list[OwnedPiece]:
        self.wait()
        owned = []
        for name, p in model.named_parameters():
            if p not in self._bucket_of or not p.numel():
                owned.append(OwnedPiece(name, p.shape, 0, p, None))
                continue
            bucket = self._bucket_of[p]
            for piece, x in zip(bucket.pieces, bucket.stand_ins, strict=True):
                if bucket.parameters[piece.index] is p:
                    owned.append(OwnedPiece(name, p.shape, piece.start, x, self.inner))
        return owned

    @torch.no_grad()
    def after_load(self) -> None:
        self.wait()
        for bucket in self._buckets:
            bucket.gather(async_op=False)

    def _masters(self) -> list[Tensor]:
        self.wait()
        return [bucket.stepped for bucket in self._buckets if bucket.low]

    def _position(self) -> list[int]:
        shares = [bucket.partition.share for bucket in self._buckets]
        return [self.comm.rank, self.comm.size, *shares]

    def _stand_ins(self) -> dict[Tensor, list[nn.Parameter]]:
        stand_ins: dict[Tensor, list[nn.Parameter]] = {}
        for bucket in self._buckets:
            for p, x in zip(bucket.piece_params, bucket.stand_ins, strict=True):
                stand_ins.setdefault(p, []).append(x)
        return stand_ins

    def _names(self) -> dict[Tensor, str]:
        names: dict[Tensor, str] = {}
        for group in self.param_groups:
            numbered = [f"parameter {len(names) + i}" for i in range(len(group["params"]))]
            names.update(zip(group["params"], group.get("param_names") or numbered, strict=True))
        return names


class ParamGatherer:
    """Waits for the all-gather of a module's direct parameters before forward. Also waits for the
    parameters of submodules not yet called, which the module may use directly (attention), and of
    modules in its attribute `parallel_siblings` (column-parallel layers of one call)."""

    def __init__(self, model: nn.Module, bucket_of: Mapping[Tensor, ParamShare]):
        self._buckets: dict[nn.Module, list[ParamShare]] = {}
        for module in model.modules():
            own = [bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of]
            if own:
                self._buckets[module] = list(dict.fromkeys(own))
        self._below: dict[nn.Module, list[nn.Module]] = {}  # including the module itself
        self._called: WeakSet[nn.Module] = WeakSet()
        before, wait = while_alive(self._before), while_alive(self._wait)
        for module in model.modules():
            self._below[module] = [part for part in module.modules() if part in self._buckets]
            module.register_forward_pre_hook(before)
            module.register_state_dict_pre_hook(wait)  # called for each submodule

    def _before(self, module: nn.Module, *_: Any) -> None:
        if module not in self._below:
            return  # a copied model: its hooks run, but its parameters are in no bucket
        self._called.add(module)
        uncalled = [part for part in self._below[module] if part not in self._called]
        for part in (module, *getattr(module, "parallel_siblings", ()), *uncalled):
            self._wait(part)

    def _wait(self, module: nn.Module, *_: Any) -> None:
        for bucket in self._buckets.get(module, ()):
            bucket.wait_for_parameters()


def predict_zero(
    module: nn.Module, size: int, stage: int, bucket_mb: float = 25, rank: int | None = None
) -> Footprint:
    """Bytes with Adam on `rank` (None: mean over ranks). Only the bytes sent include padding."""
    ranks = range(size) if rank is None else [rank]
    gradients = optimizer = sent = 0  # bytes; the first two summed over `ranks`
    for bucket in cut([p for p in module.parameters() if p.requires_grad], bucket_mb * MB):
        layout = FlatPartition([p.shape for p in bucket], size)
        element = bucket[0].element_size()
        state = 4 + 2 * 4 if bucket[0].dtype in LOW else 2 * element  # master copy, two moments
        pieces = [piece for r in ranks for piece in layout.pieces(r)]
        own = sum(piece.numel for piece in pieces)
        gradients += (own if stage == 2 else layout.numel * len(ranks)) * element
        optimizer += own * state + STEP_COUNT_BYTES * len(pieces)
        sent += 2 * (size - 1) * layout.share * element
    n = len(ranks)
    return Footprint(parameter_bytes(module), gradients / n, optimizer / n, sent)
