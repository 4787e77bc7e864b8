"""The state of a model under ZeRO-3: this rank's shards, and full state dicts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.holdings import OwnedPiece
from labkit.parallel.zero3.flat import Flat


class WholeState:
    """State methods of `ZeRO3`. Clipping and both full-state-dict methods are collective."""

    module: nn.Module
    comm: Comm
    _flats: list[Flat]
    _named: list[tuple[str, nn.Parameter]]
    _clean_up: Callable[[], None]
    clip_grad_norm_: Callable[..., Tensor]  # from common/clipping.py
    awaits_gradients = False  # True between a forward with autograd and its backward
    shards_parameters = True
    sends_once = False  # unsharded gradients would need the memory that this stage saves

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's nonempty shards, under the parameters' names in the module."""
        for name, shard in self._named:
            if shard.numel():
                yield (f"{prefix}.{name}" if prefix else name), shard

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "ZeRO3: shards cannot be moved or converted; move or convert the module, then wrap it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "ZeRO3: each rank has only shards, so the model cannot be copied or pickled; save its "
            "full_state_dict(), or load it into a second ZeRO3 with load_full_state_dict()"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: every backward reduces, since unsharded gradients need more memory."""
        yield

    @property
    def gathered_bytes(self) -> int:
        """Bytes gathered now; `peak_gathered_bytes` is the peak since its last reset to 0."""
        return sum(flat.full.held_bytes for flat in self._flats if not flat.keep_whole)

    def owned(self, optimizer: torch.optim.Optimizer | None = None) -> list[OwnedPiece]:
        shapes = {
            flat.shards[piece.index]: (flat.partition.shapes[piece.index], piece.start)
            for flat in self._flats
            for piece in flat.pieces
        }
        return [
            OwnedPiece(name, *shapes[shard], shard, optimizer if shard.requires_grad else None)
            for name, shard in self._named
            if shard in shapes
        ]

    def after_load(self) -> None:
        """Does nothing: parameters are gathered from the shards at their next use."""

    def gradient_of_copy(self, p: nn.Parameter) -> NoReturn:
        raise ValueError(
            f"ZeRO3: a parameter {list(p.shape)} is tied across pipeline stages, which would "
            "shard it differently; untie it (tied=False), or use DDP or a ZeroOptimizer"
        )

    def gradient_pieces(self) -> tuple[list[Tensor], Comm]:
        """See OwnsGradientPieces. Parameters kept whole (`persist_below`) are replicated, so
        their pieces count only on rank 0 (`piece.counts_here`)."""
        pieces = []
        for flat in self._flats:
            for shard in (flat.shards[piece.index] for piece in flat.pieces):
                if shard.grad is not None:
                    piece: Any = shard.grad.view(-1)
                    piece.piece_of = shard
                    piece.counts_here = not flat.keep_whole or self.comm.rank == 0
                    pieces.append(piece)
        return pieces, self.comm

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The module's unsharded state in master dtype on the CPU; with `rank0_only`, {} on all
        ranks except 0. Gathers one parameter at a time. Collective."""
        self._clean_up()
        keep = self.comm.rank == 0 or not rank0_only
        state: dict[str, Any] = {}
        gathered: dict[int, Tensor] = {}  # by id, so that tied parameters are gathered once
        for key, x, flat, index in self._entries():
            if flat is not None:
                if id(x) not in gathered:
                    whole = _gathered(flat, index).cpu()
                    gathered[id(x)] = whole if keep else whole.new_empty(0)
                x = gathered[id(x)]
            elif isinstance(x, Tensor):
                x = x.detach().cpu().clone()
            state[key] = x
        return state if keep else {}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads an unsharded state dict, passed on every rank or only on rank 0 (None elsewhere).
        Collective. If a key is missing or unknown or a shape differs, raises ValueError on every
        rank and changes nothing."""
        self._clean_up()
        entries = list(self._entries())
        reports = self.comm.all_gather_object((state is not None, _problem(entries, state)))
        problem = next((problem for _, problem in reports if problem), "")
        if not reports[0][0]:
            problem = "rank 0 has no state to load; pass a state on rank 0 or on every rank"
        if problem:
            raise ValueError(f"load_full_state_dict: {problem}")
        from_rank_0 = not all(given for given, _ in reports)
        for key, x, flat, index in entries:
            if not isinstance(x, Tensor):
                continue
            if state is None:
                whole = x.new_empty(_shape(x, flat, index))
            else:
                whole = state[key].detach().to(x.device, x.dtype, copy=from_rank_0)
            if from_rank_0:
                self.comm.broadcast(whole, src=0)
            if flat is None:
                x.copy_(whole)
                continue
            for piece in flat.pieces:
                if piece.index == index:
                    part = whole.reshape(-1)[piece.start : piece.start + piece.numel]
                    flat.shards[index].view(-1).copy_(part)

    def _entries(self) -> "Iterator[Entry]":
        flat_of = {id(x): (flat, i) for flat in self._flats for i, x in enumerate(flat.shards)}
        for key, x in self.module.state_dict(keep_vars=True).items():
            yield key, x, *flat_of.get(id(x), (None, 0))


Entry = tuple[str, Any, Flat | None, int]  # key, value, and a parameter's Flat and index


def _shape(x: Tensor, flat: Flat | None, index: int) -> torch.Size:
    return x.shape if flat is None else flat.partition.shapes[index]


def _problem(entries: list[Entry], state: Mapping[str, Any] | None) -> str:
    if state is None:
        return ""
    for key, x, flat, index in entries:
        if key not in state:
            return f"{key} is missing from the state; load the state of the same model"
        if isinstance(x, Tensor) and state[key].shape != (shape := _shape(x, flat, index)):
            has = f"{list(state[key].shape)} in the state and {list(shape)} in the model"
            return f"{key} is {has}; load the state of the same model"
    unknown = sorted(set(state) - {key for key, *_ in entries})
    return f"the model has no {unknown[0]}; load the state of the same model" if unknown else ""


def _gathered(flat: Flat, index: int) -> Tensor:
    cut, shard = flat.partition, flat.shards[index].detach()
    if flat.keep_whole or not cut.numels[index]:
        return shard.clone().view(cut.shapes[index])
    sizes = [
        sum(piece.numel for piece in cut.pieces(rank) if piece.index == index)
        for rank in range(cut.ranks)
    ]
    whole = shard.new_empty(cut.numels[index])
    flat.comm.all_gather(list(whole.split(sizes)), shard)
    return whole.view(cut.shapes[index])
