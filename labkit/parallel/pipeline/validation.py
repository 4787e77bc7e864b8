"""What is said of a pipeline that cannot be: asked on all ranks before anything runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.sharder import DataParallel, LossScaler, fulfils, shards_parameters
from labkit.schedules import schedule as schedule_of
from labkit.schedules.actions import Schedule, chunks_of, microbatches_of
from labkit.schedules.rules import check

MICROBATCHES = 8  # where nobody says how many


def check_stages(stages: Sequence[nn.Module], comm: Comm, chunks: int | None) -> int:
    """How many chunks each rank has. Raises ValueError where the stages do not go over the ranks,
    or differ between them."""
    size = comm.size
    if isinstance(stages, nn.Module) and not isinstance(stages, (nn.ModuleList, nn.Sequential)):
        raise ValueError(
            f"stages is a {type(stages).__name__}; give a list of modules, one for each stage, as "
            f"split(model, {size}) makes it"
        )
    count = len(stages)
    if count < size or count % size:
        raise ValueError(
            f"{count} stages do not go over {size} ranks; give {size}, one for each rank, or a "
            f"multiple of {size}, for as many chunks on each"
        )
    if chunks is not None and count != chunks * size:
        raise ValueError(
            f"{count} stages on {size} ranks are {count // size} chunks on each, not "
            f"chunks={chunks}; give {chunks * size} stages, or leave chunks out"
        )
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {index} is a {type(stage).__name__}; it must be an nn.Module")
    _check_built_alike(stages, comm)
    return count // size


def _check_built_alike(stages: Sequence[nn.Module], comm: Comm) -> None:
    """Raises ValueError where a stage is another on another rank. (One that its rank has wrapped,
    in DDP say, is not compared: on the others it is not.)"""
    mine = [None if fulfils(one, DataParallel) else _looks(one) for one in stages]
    every = comm.all_gather_object(mine)
    for index in range(len(stages)):
        known = [(rank, one[index]) for rank, one in enumerate(every) if one[index : index + 1]]
        known = [(rank, looks) for rank, looks in known if looks is not None]
        for rank, looks in known[1:]:
            if looks != known[0][1]:
                pairs = zip_longest(known[0][1], looks, fillvalue="nothing")
                here, there = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"stage {index} is another on rank {rank} than on rank {known[0][0]}: it has "
                    f"{there}, and not {here}; build the same stages on every rank"
                )


def _looks(stage: nn.Module) -> list[str]:
    return [
        f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
        + ("" if p.requires_grad else ", frozen")
        for name, p in stage.named_parameters()
    ]


def agreed_schedule(
    schedule: str | Schedule, comm: Comm, microbatches: int | None, chunks: int
) -> tuple[Schedule, int]:
    """The lists of actions, and the number of micro-batches. Raises ValueError where there is no
    such schedule, it breaks a rule, it is of other stages, or the ranks have different ones."""
    if isinstance(schedule, str):
        microbatches = MICROBATCHES if microbatches is None else microbatches
        found = schedule_of(schedule, comm.size, microbatches, chunks)
    else:
        found = [list(actions) for actions in schedule]
        check(found, microbatches)
        microbatches = microbatches_of(found)
        if len(found) != comm.size:
            raise ValueError(
                f"the schedule is of {len(found)} stages, and there are {comm.size} ranks; give a "
                "list of actions for each rank"
            )
        if chunks_of(found) != chunks:
            raise ValueError(
                f"the schedule is of {chunks_of(found)} chunks on each rank, and there are "
                f"{chunks * comm.size} stages for {comm.size} ranks: give "
                f"{chunks_of(found) * comm.size} stages"
            )
    every = comm.all_gather_object([[str(one) for one in actions] for actions in found])
    for rank, other in enumerate(every):
        if other != every[0]:
            raise ValueError(_difference(every[0], other, rank))
    return found, microbatches


def _difference(first: list[list[str]], other: list[list[str]], rank: int) -> str:
    said = f"rank {rank} has another schedule than rank 0"
    for stage, (here, there) in enumerate(zip(first, other, strict=True)):
        for position in range(max(len(here), len(there))):
            one, two = ((x[position : position + 1] or ["nothing"])[0] for x in (here, there))
            if one != two:
                said += f": on stage {stage}, position {position}, {two} and not {one}"
                return f"{said}; give the same schedule and microbatches on every rank"
    return said


def check_loss(loss_fn: Any, comm: Comm, stages: int) -> None:
    """Raises ValueError, on all ranks, where the last stage's has no loss."""
    has = comm.all_gather_object(loss_fn is not None)
    last = (stages - 1) % comm.size
    if not has[last]:
        given = [f"rank {rank}" for rank in range(comm.size) if has[rank]]
        where = f"it was given on {', '.join(given)}" if given else "it was given on no rank"
        raise ValueError(
            f"stage {stages - 1} is the last and computes the loss, on rank {last}, which has no "
            f"loss_fn; {where}: give it on rank {last} (the others may have it, too)"
        )


def check_phases(stages: Sequence[nn.Module], schedule: Schedule, comm: Comm) -> None:
    """Raises ValueError, on all ranks, where the stages cannot do what the schedule asks."""
    phases = {one.phase for actions in schedule for one in actions}
    halves, updates = "weight" in phases, "update" in phases
    if halves and updates:
        raise ValueError(
            "this schedule has backward in halves (I, W) and updates (U), and of weights that were "
            "updated in between the second half is not defined; give B for I and W"
        )
    if halves:
        mine = [any(map(shards_parameters, one.modules())) for one in stages]
        for rank, has in enumerate(comm.all_gather_object(mine)):
            if any(has):
                raise ValueError(
                    f"stage {has.index(True)} is in ZeRO3 (on rank {rank}), which lets weights and "
                    "gradients go when a layer's backward is over, and this schedule puts the "
                    'gradients of weights off; choose one that does not, as "1f1b", or use DDP'
                )
    if updates:
        first: dict[nn.Parameter, int] = {}
        for index, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                other = first.setdefault(p, index)
                if other != index and other % comm.size == index % comm.size:
                    raise ValueError(
                        f"{name} of stage {index} is a parameter of stage {other}, too, and this "
                        "schedule updates each stage at its own time; give each its own"
                    )


def optimizer_of(
    optimizer: Any,
    own: Sequence[nn.Module],
    schedule: Schedule,
    tied: Mapping[nn.Parameter, Any],
) -> torch.optim.Optimizer | None:
    """That of a schedule that updates; None for others. Raises ValueError where one is missing or
    too many."""
    updates = any(one.phase == "update" for actions in schedule for one in actions)
    if not updates and optimizer is not None:
        raise ValueError(
            "this schedule has no update, so optimizer= would never step; make the optimizer of "
            "pipeline.parameters(), and call its step() after pipeline.step(x, y)"
        )
    if not updates:
        return None
    if optimizer is None:
        raise ValueError(
            "this schedule updates the weights after each micro-batch; give an optimizer, as "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if tied:
        raise ValueError(
            "a parameter is tied over several ranks, and this schedule updates each stage at its "
            "own time, so that its copies would part; give each stage its own (tied=False)"
        )
    for stage in own:
        if fulfils(stage, DataParallel):
            raise ValueError(
                f"a stage is in {type(stage).__name__}, which averages once in a step, and this "
                "schedule updates after each micro-batch; give the module itself"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = optimizer
        trained = [p for stage in own for p in stage.parameters() if p.requires_grad]
        nothing = nn.Parameter(torch.zeros(0))  # where all is frozen: updates all the same
        optimizer = make(trained or [nothing])
    if fulfils(optimizer, DataParallel):
        raise ValueError(
            f"a {type(optimizer).__name__} averages once in a step, and this schedule updates "
            "after each micro-batch; give an optimizer of torch"
        )
    return optimizer


def check_scaler(scaler: LossScaler, pipeline: Any) -> None:
    """Raises ValueError for one whose decision is not that of all stages, or comes too late."""
    if any(one.phase == "update" for actions in pipeline.schedule for one in actions):
        raise ValueError(
            "this schedule updates after each micro-batch, before a scaler has seen all gradients; "
            "train in bf16, which needs no loss scaling, or choose a schedule with a flush"
        )
    if scaler.comm is not None and not {*pipeline.comm.ranks} <= {*scaler.comm.ranks}:
        raise ValueError(
            f"GradScaler: the pipeline spans ranks {list(pipeline.comm.ranks)}, the scaler only "
            f"{list(scaler.comm.ranks)}: some stages would skip a step that the others take; make "
            "the scaler with a comm of all of them, as Mesh.comm"
        )


def check_batch(x: Any, y: Any, microbatches: int, comm: Comm, has_last: bool) -> None:
    """Raises ValueError for a batch that does not make so many micro-batches."""
    if not isinstance(x, Tensor) or x.ndim < 1:
        what = "a scalar" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"rank {comm.rank}: x is {what}; give the batch [rows, ...], the same on every rank: "
            "those behind the first stage need its number of rows"
        )
    if len(x) < microbatches:
        raise ValueError(
            f"a batch of {len(x)} rows does not divide into {microbatches} micro-batches of at "
            f"least 1 row; give at least {microbatches} rows, or microbatches={len(x)} or fewer"
        )
    if has_last and (not isinstance(y, Tensor) or y.ndim < 1 or len(y) != len(x)):
        found = f"{len(y)} rows" if isinstance(y, Tensor) and y.ndim else f"{type(y).__name__}"
        raise ValueError(
            f"rank {comm.rank} has the last stage and computes the loss: y is of {found}, x of "
            f"{len(x)} rows; give the targets of the whole batch"
        )


def check_alike(x: Tensor, pipeline: Any, before: Any) -> Any:
    """What decides how that looks which travels in this step: the batch but for its rows, modes,
    types of parameters. `before`: that of the last step.

    Raises CollectiveMismatch where ranks have other batches or modes, or some have what they had
    `before` and some have not: those would wait for messages that nobody sends.
    """
    modes = modes_of(pipeline, x.device.type)
    looks = x.shape[1:], x.dtype, modes, [p.dtype for p in pipeline.parameters()]
    changed = "first step or changed since the last" if looks != before else "as in the last step"
    pipeline.comm.compare(
        "the batch of a pipeline", lambda: f"x {list(x.shape)} {x.dtype}; {modes}; {changed}"
    )
    return looks


def modes_of(module: nn.Module, device_type: str) -> str:
    """What the ranks must have alike while they compute, in words."""
    autocast = "no autocast"
    if torch.is_autocast_enabled(device_type):
        autocast = f"autocast to {torch.get_autocast_dtype(device_type)}"
    gradients = "gradients" if torch.is_grad_enabled() else "no gradients"
    return f"{'train' if module.training else 'eval'} mode, {gradients}, {autocast}"


def check_has_gradient(loss: Tensor, wanted: bool, at: str) -> None:
    """Raises RuntimeError, as backward in one process does, for a loss without a gradient, where
    one is wanted."""
    if wanted and torch.is_grad_enabled() and not loss.requires_grad:
        raise RuntimeError(
            f"{at}: the loss has no gradient, though parameters want one: the stage or loss_fn "
            "detaches it, or computes it under no_grad; to evaluate, call step inside "
            "torch.no_grad()"
        )
