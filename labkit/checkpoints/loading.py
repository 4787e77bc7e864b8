"""Load a checkpoint: every rank reads what it owns now, whoever wrote it.

    written by 2 ranks      | a a a a a a a a | a a a a b b b b |
    read by 3               | a a a a a a | a a a a a a | b b b b |

each rank holds   one box of the file beside its model
travels           names and shapes; tensors come from the files, each rank reads its own pieces
"""

import os
import pathlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from labkit.checkpoints import folders
from labkit.checkpoints.contents import Contents, comm_of, lies_like, state_of
from labkit.checkpoints.match import (
    check_format,
    check_model,
    check_optimizer,
    new_hyperparameters,
)
from labkit.checkpoints.stored import Fill, Stored
from labkit.checkpoints.together import together
from labkit.comm import Comm
from labkit.holdings import OwnedPiece

State = tuple[dict[str, Any], list[Fill]]  # a piece's new state, and what of it is still to be read


@dataclass(frozen=True)
class Loaded:
    """Which checkpoint it was, and the `step` and `extra` it was saved with; None where torch's
    own `save` made it."""

    path: pathlib.Path
    step: int | None
    extra: Any


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    comm: Comm | None = None,
    weights_only: bool = True,
) -> Loaded:
    """Load the latest checkpoint in `folder`, or the one that `folder` is, into a model and its
    optimizer, of any strategy and on any number of ranks; every rank calls it.

    Numbers take the dtypes that the model has here. Without `optimizer` the weights alone are
    loaded. `comm` as in `save_checkpoint`. As in torch.load, `weights_only=False` lets the
    checkpoint run code: load only what you trust. Checkpoints of torch's own `save` and of older
    labkits have no checksums: only file sizes are verified, with a warning on rank 0.

    Raises ValueError on every rank, with the model as it was, when there is no finished checkpoint,
    when it is damaged, could run code, has files outside its folder, is of a newer format, or of
    another model or optimizer (it names the first parameters that differ).
    """
    comm = comm_of(model, optimizer) if comm is None else Comm.of(comm)
    folder = pathlib.Path(folder).absolute()
    failed = "nothing was loaded"
    path = together(comm, lambda: folders.find(folder) if comm.rank == 0 else None, failed)[0]
    assert path is not None
    contents = Contents(model, optimizer, comm)
    opened: list[Stored] = []
    together(comm, lambda: opened.append(Stored(path, weights_only)), failed)
    stored = opened[0]
    together(comm, lambda: stored.check(comm.rank, comm.size), failed)
    if not stored.has_checksums and comm.rank == 0:
        why = "has no checksums: changed bytes would go unnoticed; save it again to add them"
        warnings.warn(f"{path} {why}", stacklevel=2)
    kept: list[tuple[dict[str, Any], list[dict[str, Any]], list[State]]] = []

    def look() -> None:
        stored.call_by(contents.also)
        record = check_format(stored)
        check_model(stored, contents)
        groups = []
        if optimizer is not None:
            check_optimizer(stored, contents)
            groups = new_hyperparameters(stored, contents)
        kept.append((record, groups, [_new_state(stored, piece) for piece in contents.pieces]))

    together(comm, look, failed)
    record, groups, states = kept[0]

    def read() -> None:
        stored.read([*_weights(contents), *(fill for _, fills in states for fill in fills)])
        for piece, (state, _) in zip(contents.pieces, states):
            if piece.optimizer is not None:
                piece.optimizer.state[piece.tensor] = state
        for group, new in zip(getattr(optimizer, "param_groups", []), groups):
            group.update(new)

    together(comm, read, f"{path} was loaded in part only; load another checkpoint")
    contents.after_load()
    return Loaded(path, record["step"], record["extra"])


def _weights(contents: Contents) -> list[Fill]:
    pieces = [Fill(("model", p.name), p.shape, p.start, p.tensor, p.shard) for p in contents.pieces]
    buffers = [Fill(("model", name), x.shape, 0, x) for name, x in contents.buffers.items()]
    return [fill for fill in pieces + buffers if fill.tensor.numel()]


def _new_state(stored: Stored, piece: OwnedPiece) -> State:
    state: dict[str, Any] = {}
    fills: list[Fill] = []
    if piece.optimizer is None:
        return state, fills
    now = state_of(piece)
    for key, entry in stored.under("optimizer", "state", piece.name).items():
        path = ("optimizer", "state", piece.name, key)
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = stored.value(path)
            continue
        if lies_like(key, entry.size, piece.whole_shape):
            old = now.get(key)
            fits = isinstance(old, torch.Tensor) and old.shape == piece.tensor.shape
            # Zeros, where there is padding: nothing is read for it.
            state[key] = old if fits else torch.zeros_like(piece.tensor, requires_grad=False)
            fills.append(Fill(path, piece.shape, piece.start, state[key], piece.shard))
        else:
            state[key] = torch.empty(
                entry.size, dtype=entry.properties.dtype, device=_device_of_numbers(piece)
            )
            fills.append(Fill(path, entry.size, 0, state[key]))
    return state, fills


def _device_of_numbers(piece: OwnedPiece) -> torch.device:
    """Where an optimizer has its `step`: on the CPU, but for those that run in one kernel."""
    assert piece.optimizer is not None
    group = piece.optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return piece.tensor.device if on_device else torch.device("cpu")
