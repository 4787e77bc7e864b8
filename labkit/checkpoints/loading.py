"""Load a checkpoint: every rank reads the slices it owns now, whichever rank wrote them.

    written by 2 ranks      | a a a a a a a a | a a a a b b b b |
    read by 3               | a a a a a a | a a a a a a | b b b b |

memory per rank   the model, and one box of the file
communication     names and shapes; each rank reads its tensors from the files
"""

import os
import pathlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from labkit.checkpoints import folders
from labkit.checkpoints.contents import (
    FORMAT,
    Contents,
    check_single_value,
    comm_of,
    is_per_element,
    whole,
)
from labkit.checkpoints.stored import Fill, Stored
from labkit.checkpoints.together import on_every_rank, on_rank_0, together
from labkit.comm import Comm
from labkit.holdings import OwnedPiece

SHOWN = 3  # names in an error message
State = tuple[dict[str, Any], list[Fill]]  # a slice's new state, and its tensors still to be read


@dataclass(frozen=True)
class Loaded:
    """The checkpoint, and its `step` and `extra`, both None if torch's own `save` wrote it."""

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
    """Load the latest checkpoint in `folder`, or `folder` itself if it is one, into a model and its
    optimizer, with any strategy and number of ranks; every rank must call this.

    Values are cast to the model's dtypes. Without `optimizer`, only the weights are loaded. `comm`:
    as in `save_checkpoint`. As in torch.load, `weights_only=False` lets the checkpoint run code:
    load only checkpoints you trust. Checkpoints of torch's own `save` or an older labkit have
    no checksums: only file sizes are verified, and rank 0 warns.

    Raises ValueError on every rank, before the model changes, if there is no finished checkpoint,
    or if it is damaged, could run code, has files outside its folder, has a newer format, or is of
    a different model or optimizer (naming the first differences). A read error may still occur."""
    comm = comm_of(model, optimizer) if comm is None else Comm.of(comm)
    folder = pathlib.Path(folder).absolute()
    failed = "nothing was loaded"
    path = on_rank_0(comm, lambda: folders.find(folder), failed)
    contents = Contents(model, optimizer, comm)
    stored = on_every_rank(comm, lambda: Stored(path, weights_only), failed)
    together(comm, lambda: stored.check(comm.rank, comm.size), failed)
    if not stored.has_checksums and comm.rank == 0:
        why = "has no checksums: changed bytes would go unnoticed; save it again to add them"
        warnings.warn(f"{path} {why}", stacklevel=2)

    def plan() -> tuple[dict[str, Any], list[dict[str, Any]], list[State]]:
        stored.rename(contents.aliases)
        record = check_format(stored)
        check_model(stored, contents)
        groups = []
        if optimizer is not None:
            check_optimizer(stored, contents)
            groups = new_hyperparameters(stored, contents)
        return record, groups, [_new_state(stored, piece) for piece in contents.pieces]

    record, groups, states = on_every_rank(comm, plan, failed)

    def read() -> None:
        stored.read([*_weights(contents), *(fill for _, fills in states for fill in fills)])
        for piece, (state, _) in zip(contents.pieces, states):
            if piece.optimizer is not None:
                piece.optimizer.state[piece.tensor] = state
        for group, new in zip(getattr(optimizer, "param_groups", []), groups):
            group.update(new)

    together(comm, read, f"{path} was only partly loaded; load another checkpoint")
    contents.after_load()
    return Loaded(path, record["step"], record["extra"])


def _weights(contents: Contents) -> list[Fill]:
    buffers = [whole(name, x) for name, x in contents.buffers.items()]
    return [(("model", x.name), x) for x in contents.pieces + buffers if x.tensor.numel()]


def _new_state(stored: Stored, piece: OwnedPiece) -> State:
    state: dict[str, Any] = {}
    fills: list[Fill] = []
    if piece.optimizer is None:
        return state, fills
    # An optimizer keeps `step` on the CPU, unless it is fused or capturable.
    group = piece.optimizer.param_groups[0]
    device = piece.tensor.device if group.get("fused") or group.get("capturable") else "cpu"
    for key, entry in stored.under("optimizer", "state", piece.name).items():
        path = ("optimizer", "state", piece.name, key)
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = stored.value(path)
        elif is_per_element(key, entry.size, piece.whole_shape):
            old = piece.optimizer.state.get(piece.tensor, {}).get(key)
            fits = isinstance(old, torch.Tensor) and old.shape == piece.tensor.shape
            # Zeros for the padding, which is not in the files.
            state[key] = old if fits else torch.zeros_like(piece.tensor, requires_grad=False)
            fills.append((path, replace(piece, tensor=state[key])))
        else:
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            fills.append((path, whole("", state[key])))
    return state, fills


# --- validation against the model and the optimizer ---


def check_format(stored: Stored) -> dict[str, Any]:
    """The step and `extra`, None in torch's checkpoints. Raises ValueError for a newer format."""
    if ("labkit",) not in stored.entries:
        return {"step": None, "extra": None}
    record: dict[str, Any] = stored.value(("labkit",))
    if record["format"] > FORMAT:
        raise ValueError(
            f"{stored.folder} has format {record['format']}, but this labkit reads up to "
            f"{FORMAT}; use the version of labkit that wrote it, or a newer one"
        )
    return record


def check_model(stored: Stored, contents: Contents) -> None:
    """Raises ValueError if the checkpoint's names or shapes differ from the model's."""
    saved = {
        name: entry.size for name, entry in stored.under("model").items() if hasattr(entry, "size")
    }
    if not saved:
        raise ValueError(
            f"{stored.folder} has no `model`; it was saved under other names. Save "
            '{"model": ..., "optimizer": ...}, as torch\'s get_state_dict returns them'
        )
    here = contents.shapes | contents.buffer_shapes
    known = here.keys() | contents.aliases.keys()
    missing = [name for name, shape in here.items() if name not in saved and shape.numel()]
    unexpected = [name for name, size in saved.items() if name not in known and size.numel()]
    other = [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} here"
        for name, shape in here.items()
        if saved.get(name, shape) != shape
    ]
    _raise(stored, "model", missing, unexpected, other)


def check_optimizer(stored: Stored, contents: Contents) -> None:
    """Raises ValueError if the checkpoint has no optimizer, or state for a stateless parameter."""
    if not any(path[0] == "optimizer" for path in stored.entries):
        raise ValueError(
            f"{stored.folder} has a model but no optimizer; load it with optimizer=None"
        )
    names = {str(path[2]) for path in stored.entries if path[:2] == ("optimizer", "state")}
    empty = {name for name, entry in stored.under("model").items() if not entry.size.numel()}
    _raise(stored, "optimizer", [], sorted(names - contents.stateful - empty), [])
    for piece in contents.pieces:
        if piece.shard is None:
            continue  # only the shards of a parameter could need different states
        for key, entry in stored.under("optimizer", "state", piece.name).items():
            if hasattr(entry, "size") and not is_per_element(key, entry.size, piece.whole_shape):
                check_single_value(piece, key, entry.size)


def new_hyperparameters(stored: Stored, contents: Contents) -> list[dict[str, Any]]:
    """The stored hyperparameters of each group. Raises ValueError if a group's parameters were
    saved in no group, in several groups, or with a different kind of optimizer."""
    groups: dict[Any, dict[Any, Any]] = {}
    for path in stored.entries:
        if path[:2] == ("optimizer", "param_groups"):
            groups.setdefault(path[2], {})[path[3]] = stored.value(path)
    aliases = contents.aliases
    group_of = {aliases.get(x, x): k for k, group in groups.items() for x in group["params"]}
    hyperparameters = []
    for names, now in zip(contents.groups, contents.optimizer.param_groups):
        names = [x for x in names if x in contents.shapes and contents.shapes[x].numel()]
        missing = [name for name in names if name not in group_of and name in contents.trained]
        _raise(stored, "optimizer", missing, [], [])
        names = [name for name in names if name in group_of]
        first = {group_of[name]: name for name in names}
        if len(first) > 1:
            raise ValueError(
                f"{stored.folder}: {_few(first.values())} are in one parameter group here but were "
                "saved in several; build the optimizer with the saved groups"
            )
        before = groups[next(iter(first))] if first else {}
        before = {key: x for key, x in before.items() if key not in ("params", "param_names")}
        gone, new = set(now) - set(before) - {"params", "param_names"}, set(before) - set(now)
        if first and gone and new - {"initial_lr"}:
            raise ValueError(
                f"{stored.folder} has a different optimizer: it had {_few(sorted(map(str, new)))} "
                f"and not {_few(sorted(gone))}; load it with optimizer=None"
            )
        hyperparameters.append(before)
    return hyperparameters


def _raise(
    stored: Stored, what: str, missing: list[str], unexpected: list[str], other: list[str]
) -> None:
    kinds = {"it lacks": missing, f"this {what} has no": unexpected, "of different shape:": other}
    differences = [f"{words} {_few(names)}" for words, names in kinds.items() if names]
    if differences:
        raise ValueError(
            f"{stored.folder} is a checkpoint of another {what}: {'; '.join(differences)}; build "
            f"the {what} as it was when it was saved"
        )


def _few(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
