"""The whole state of a model that ZeRO-3 has sharded, one parameter at a time, and what a
checkpoint and gradient clipping need to know of the pieces.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.clipping import norm_of_pieces, scale_to
from labkit.parallel.common.in_stages import pipeline_of
from labkit.parallel.common.shards import comms_of, marked_as
from labkit.parallel.zero3.flat import Flat, Unit
from labkit.parallel.zero3.passes import PendingGradients
from labkit.precision.pieces import OwnedPiece


class WholeState:
    """Methods of `ZeRO3`. All but `owned` and `gradient_pieces` are called on all ranks."""

    module: nn.Module
    comm: Comm
    units: list[Unit]
    _flats: list[Flat]
    _pending: PendingGradients
    _named: list[tuple[str, nn.Parameter]]
    awaits_gradients = False  # since a forward with autograd
    shards_parameters = True
    sends_once = False  # whole gradients would need the memory that this stage saves

    def _clean_up(self) -> None:
        """Free what an error has left of the last pass."""
        for unit in self.units:
            unit.end_pass()
            unit.inputs = 0
        if self._pending:
            for flat in self._flats:
                flat.reset()
            self._pending.clear()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, under the names that their parameters have in the module."""
        for name, shard in self._named:
            if shard.numel():
                yield (f"{prefix}.{name}" if prefix else name), shard

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "ZeRO3: the shards stay what and where they are; move or convert the module first, "
            "then wrap it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """`copy.deepcopy` comes here, too; it would read parameters whose memory is freed."""
        raise ValueError(
            "ZeRO3: each rank has only shards, so the model cannot be copied or pickled; save its "
            "full_state_dict(), or load that into a second ZeRO3 with load_full_state_dict()"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops that accumulate: every backward adds to the shards' gradients, as in one
        process. Nothing is held back, since that would need the memory of whole gradients."""
        yield

    @property
    def gathered_bytes(self) -> int:
        """Of gathered parameters (not of those kept whole), now; `peak_gathered_bytes`: the most
        since one set it to 0."""
        return sum(flat.full.held_bytes for flat in self._flats if not flat.keep_whole)

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The module's state, whole, in master dtype, on the CPU: on every rank, or on rank 0 only
        and {} on the others. Beside the result one parameter at a time is gathered."""
        self._clean_up()
        found: dict[str, Any] = {}
        gathered: dict[int, torch.Tensor] = {}  # a tied one once
        for key, x, flat, index in self._entries():
            if flat is not None:
                if id(x) not in gathered:
                    gathered[id(x)] = _gathered(flat, index).cpu()
                    if rank0_only and self.comm.rank > 0:
                        gathered[id(x)] = gathered[id(x)].new_empty(0)
                x = gathered[id(x)]
            elif isinstance(x, torch.Tensor):
                x = x.detach().cpu().clone()
            found[key] = x
        return {} if rank0_only and self.comm.rank > 0 else found

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take the module's state from `state`, whole: given on every rank, or on rank 0 only and
        None on the others.

        Raises ValueError on every rank, and changes nothing, where a key is missing or not known,
        or a shape is another.
        """
        self._clean_up()
        entries = list(self._entries())
        told = self.comm.all_gather_object((state is not None, self._problem(entries, state)))
        problem = next((problem for _, problem in told if problem), "")
        if not told[0][0]:
            problem = "rank 0 has no state to load; give it there, or on every rank"
        if problem:
            raise ValueError(f"load_full_state_dict: {problem}")
        from_rank_0 = not all(given for given, _ in told)
        for key, x, flat, index in entries:
            if not isinstance(x, torch.Tensor):
                continue
            shape = x.shape if flat is None else flat.partition.shapes[index]
            if state is None:
                whole = torch.empty(shape, dtype=x.dtype, device=x.device)
            else:
                whole = state[key].detach().to(x.device, x.dtype)
                whole = whole.clone() if from_rank_0 else whole
            if from_rank_0:
                self.comm.broadcast(whole, src=0)
            if flat is None:
                x.copy_(whole)
                continue
            for piece in flat.pieces:
                if piece.index == index:
                    part = whole.reshape(-1)[piece.start : piece.start + piece.numel]
                    flat.shards[index].view(-1).copy_(part)

    def owned(self, optimizer: torch.optim.Optimizer | None = None) -> list[OwnedPiece]:
        """This rank's pieces, in the order of the module's parameters (see `pieces.py`)."""
        shapes = {
            places[0].name: shape
            for flat in self._flats
            for places, shape in zip(flat.places, flat.partition.shapes, strict=True)
        }
        starts = {flat.shards[x.index]: x.start for flat in self._flats for x in flat.pieces}
        return [
            OwnedPiece(
                name, shapes[name], starts[shard], shard,
                optimizer if shard.requires_grad else None,
            )
            for name, shard in self._named
            if shard in starts
        ]  # fmt: skip

    def gradient_of_copy(self, p: nn.Parameter) -> NoReturn:
        """The copies of a tied parameter would be cut elsewhere in each stage."""
        raise ValueError(
            f"ZeRO3: a parameter {list(p.shape)} is tied over stages of a pipeline, each of which "
            "would keep another part of it; untie it (as tied=False), or use DDP or a ZeroOptimizer"
        )

    def after_load(self) -> None:
        """The pieces were written to. What is gathered is gathered anew at its next use."""

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        """This rank's gradients, of which every element is on one rank, and the ranks.

        Raises ValueError where some are kept whole, so on all: see `clip_grad_norm_`.
        """
        if any(flat.keep_whole for flat in self._flats):
            raise ValueError(
                "ZeRO3: with persist_below some gradients are whole on every rank, and no pieces; "
                "clip with model.clip_grad_norm_(max_norm)"
            )
        return self._gradients_once(), self.comm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that the norm of all ranks' together is at most `max_norm`;
        returns what it was. `torch.nn.utils.clip_grad_norm_` would take this rank's pieces for
        everything."""
        shards = [shard for _, shard in self._named]
        pipeline = pipeline_of(self, shards)
        norm = norm_of_pieces(
            self._gradients_once(), self.comm, norm_type, None, comms_of(shards),
            pipeline.comm if pipeline else None,
        )  # fmt: skip
        scale_to(max_norm, norm, [p.grad for _, p in self._named if p.grad is not None])
        return norm

    def _gradients_once(self) -> list[torch.Tensor]:
        """Over all ranks, every element once: those kept whole are rank 0's. Where this rank has
        none, a tensor without elements that tells dtype and device."""
        flats = [flat for flat in self._flats if not flat.keep_whole or self.comm.rank == 0]
        mine = [flat.shards[piece.index] for flat in flats for piece in flat.pieces]
        found = [marked_as(shard, shard.grad.detach()) for shard in mine if shard.grad is not None]
        return found or [self._flats[0].share[:0]]

    def _entries(self) -> Iterator[tuple[str, Any, Flat | None, int]]:
        """Key, value and, of a parameter, its flat memory and number there."""
        homes = {x: (flat, i) for flat in self._flats for i, x in enumerate(flat.shards)}
        for key, x in self.module.state_dict(keep_vars=True).items():
            is_parameter = isinstance(x, nn.Parameter) and x in homes
            yield key, x, *(homes[x] if is_parameter else (None, 0))

    def _problem(
        self, entries: list[tuple[str, Any, Flat | None, int]], state: Mapping[str, Any] | None
    ) -> str:
        """What is wrong with a state, in words."""
        if state is None:
            return ""
        for key, x, flat, index in entries:
            if key not in state:
                return f"{key} is missing in the state; is it the state of another model?"
            if isinstance(x, torch.Tensor):
                shape = x.shape if flat is None else flat.partition.shapes[index]
                if state[key].shape != shape:
                    has = f"{list(state[key].shape)} in the state and {list(shape)} in the model"
                    return f"{key} is {has}; load the state of the same model"
        unknown = sorted(set(state) - {key for key, *_ in entries})
        return f"the model has no {unknown[0]}, which is in the state" if unknown else ""


def _gathered(flat: Flat, index: int) -> torch.Tensor:
    """A parameter, whole, in its shape, from the pieces of all ranks."""
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
