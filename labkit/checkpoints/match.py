"""Whether a checkpoint is one of this model and this optimizer; if not, what differs."""

from collections.abc import Iterable
from typing import Any

from labkit.checkpoints.contents import FORMAT, Contents, check_one_for_all, lies_like
from labkit.checkpoints.stored import Stored

SHOWN = 3


def check_format(stored: Stored) -> dict[str, Any]:
    """The record that `save_checkpoint` left: its step and `extra`. None of a plain checkpoint of
    torch. Raises ValueError for a newer format."""
    if ("labkit",) not in stored.entries:
        return {"step": None, "extra": None}
    record: dict[str, Any] = stored.value(("labkit",))
    if record["format"] > FORMAT:
        raise ValueError(
            f"{stored.folder} has format {record['format']}, this labkit reads up to {FORMAT}; "
            "load it with the labkit that wrote it, or a newer one"
        )
    return record


def check_model(stored: Stored, contents: Contents) -> None:
    """Raises ValueError when the checkpoint has not the model's names and shapes."""
    there = {name: entry.size for name, entry in stored.under("model").items() if _is_tensor(entry)}
    if not there:
        raise ValueError(
            f"{stored.folder} has no `model`; it was saved under other names. Save "
            '{"model": ..., "optimizer": ...}, as torch\'s get_state_dict gives them'
        )
    here = contents.shapes | contents.buffer_shapes
    known = here.keys() | contents.also.keys()
    missing = [name for name, shape in here.items() if name not in there and shape.numel()]
    unexpected = [name for name, size in there.items() if name not in known and size.numel()]
    other = [
        f"{name} is {list(there[name])} there and {list(shape)} here"
        for name, shape in here.items()
        if there.get(name, shape) != shape
    ]
    _raise(stored, "model", missing, unexpected, other)


def check_optimizer(stored: Stored, contents: Contents) -> None:
    """Raises ValueError when the checkpoint has no optimizer, or state for what has none here."""
    if not any(path[0] == "optimizer" for path in stored.entries):
        raise ValueError(
            f"{stored.folder} has a model and no optimizer; load it with optimizer=None"
        )
    names = {str(path[2]) for path in stored.entries if path[:2] == ("optimizer", "state")}
    empty = {name for name, entry in stored.under("model").items() if not entry.size.numel()}
    _raise(stored, "optimizer", [], sorted(names - contents.stateful - empty), [])
    for piece in contents.pieces:
        for key, entry in stored.under("optimizer", "state", piece.name).items():
            if _is_tensor(entry) and not lies_like(key, entry.size, piece.whole_shape):
                check_one_for_all(piece, key, entry.size)


def new_hyperparameters(stored: Stored, contents: Contents) -> list[dict[str, Any]]:
    """For each parameter group, the hyperparameters that its parameters had. Raises ValueError
    when they had none or various, or those of another kind of optimizer."""
    groups: dict[Any, dict[Any, Any]] = {}
    for path in stored.entries:
        if path[:2] == ("optimizer", "param_groups"):
            groups.setdefault(path[2], {})[path[3]] = stored.value(path)
    group_of = {
        contents.also.get(name, name): k for k, group in groups.items() for name in group["params"]
    }
    hyperparameters = []
    for names, now in zip(contents.groups, contents.optimizer.param_groups):
        names = [name for name in names if contents.has_elements(name)]
        missing = [name for name in names if name not in group_of and name in contents.trained]
        _raise(stored, "optimizer", missing, [], [])
        names = [name for name in names if name in group_of]
        first = {group_of[name]: name for name in names}
        if len(first) > 1:
            raise ValueError(
                f"{stored.folder}: {_few(first.values())} are in one parameter group here and were "
                "in several; make the groups of the optimizer as they were"
            )
        before = groups[next(iter(first))] if first else {}
        before = {key: x for key, x in before.items() if key not in ("params", "param_names")}
        gone, new = set(now) - set(before) - {"params", "param_names"}, set(before) - set(now)
        if first and gone and new - {"initial_lr"}:
            raise ValueError(
                f"{stored.folder} is of another optimizer: it had {_few(sorted(map(str, new)))} "
                f"and not {_few(sorted(gone))}; load it with optimizer=None"
            )
        hyperparameters.append(before)
    return hyperparameters


def _is_tensor(entry: Any) -> bool:
    return hasattr(entry, "size")


def _raise(
    stored: Stored, what: str, missing: list[str], unexpected: list[str], other: list[str]
) -> None:
    kinds = {"it lacks": missing, f"this {what} has no": unexpected, "of other shape:": other}
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
