"""Validates a pipeline's stages and schedule when it is created, and each step's batch and loss."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.sharder import DataParallel, LossScaler, implements, shards_parameters
from labkit.schedules.actions import Schedule, chunks_of, microbatches_of
from labkit.schedules.catalogue import schedule as schedule_of
from labkit.schedules.rules import check

MICROBATCHES = 8  # by default


def check_stages(stages: Sequence[nn.Module], comm: Comm, chunks: int | None) -> int:
    """Chunks per rank. Raises ValueError if the number of stages is invalid or ranks disagree."""
    size = comm.size
    if isinstance(stages, nn.Module) and not isinstance(stages, (nn.ModuleList, nn.Sequential)):
        raise ValueError(
            f"stages has type {type(stages).__name__}; pass a list of modules, one per stage, as "
            f"split(model, {size}) returns"
        )
    count = len(stages)
    if count < size or count % size:
        raise ValueError(
            f"{count} stages are not divisible by {size} ranks; pass {size} stages, one per rank, "
            f"or a multiple of {size} for several chunks per rank"
        )
    if chunks is not None and count != chunks * size:
        raise ValueError(
            f"{count} stages on {size} ranks are {count // size} chunks per rank, not "
            f"chunks={chunks}; pass {chunks * size} stages, or omit chunks"
        )
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {index} has type {type(stage).__name__}; pass an nn.Module")
    # A stage already in DDP is not compared: only its own rank has wrapped the stage.
    own = [None if implements(stage, DataParallel) else _parameters_of(stage) for stage in stages]
    if difference := _difference(own, comm):
        index, first, rank, _, expected, actual = difference
        raise ValueError(
            f"stage {index} differs between ranks: rank {rank} has {actual}, rank {first} has "
            f"{expected}; build the same stages on every rank"
        )
    return count // size


def _parameters_of(stage: nn.Module) -> list[str]:
    return [
        f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
        + ("" if p.requires_grad else ", frozen")
        for name, p in stage.named_parameters()
    ]


def _difference(
    own: Sequence[list[str] | None], comm: Comm
) -> tuple[int, int, int, int, str, str] | None:
    """The first difference between ranks: (stage, two ranks, position, the two entries)."""
    for stage, by_rank in enumerate(zip_longest(*comm.all_gather_object(own))):
        given = [(rank, names) for rank, names in enumerate(by_rank) if names is not None]
        for rank, names in given[1:]:
            first, first_names = given[0]
            pairs = zip_longest(first_names, names, fillvalue="nothing")
            for position, (expected, actual) in enumerate(pairs):
                if expected != actual:
                    return stage, first, rank, position, expected, actual
    return None


def agreed_schedule(
    schedule: str | Schedule, comm: Comm, microbatches: int | None, chunks: int
) -> tuple[Schedule, int]:
    """The action lists and the number of micro-batches. Raises ValueError if the lists are invalid
    for `comm` and `chunks`, or differ between ranks."""
    if isinstance(schedule, str):
        microbatches = MICROBATCHES if microbatches is None else microbatches
        schedule = schedule_of(schedule, comm.size, microbatches, chunks)
    else:
        schedule = [list(actions) for actions in schedule]
        check(schedule, microbatches)
        if len(schedule) != comm.size:
            raise ValueError(
                f"the schedule has {len(schedule)} stages, but there are {comm.size} ranks; pass "
                "a list of actions for each rank"
            )
        if (scheduled := chunks_of(schedule)) != chunks:
            raise ValueError(
                f"the schedule has {scheduled} chunks per rank, but there are {chunks * comm.size} "
                f"stages for {comm.size} ranks; pass {scheduled * comm.size} stages"
            )
    if difference := _difference([list(map(str, actions)) for actions in schedule], comm):
        stage, first, rank, position, expected, actual = difference
        raise ValueError(
            f"ranks {first} and {rank} have different schedules: on stage {stage}, position "
            f"{position}, rank {rank} has {actual}, rank {first} has {expected}; pass the same "
            "schedule and microbatches on every rank"
        )
    return schedule, microbatches_of(schedule)


def check_loss(loss_fn: Any, comm: Comm, stages: int) -> None:
    """Raises ValueError, on all ranks, if the last stage's rank has no `loss_fn`."""
    last = (stages - 1) % comm.size
    given = [rank for rank, has in enumerate(comm.all_gather_object(loss_fn is not None)) if has]
    if last not in given:
        where = ", ".join(f"rank {rank}" for rank in given) or "no rank"
        raise ValueError(
            f"rank {last} has the last stage, {stages - 1}, and computes the loss, but loss_fn was "
            f"passed on {where}; pass loss_fn on rank {last} (other ranks may have it, too)"
        )


def check_phases(stages: Sequence[nn.Module], schedule: Schedule, comm: Comm) -> None:
    """Raises ValueError, on all ranks, if the stages cannot run this schedule's phases."""
    halves, updates = _has(schedule, "weight"), _has(schedule, "update")
    if halves and updates:
        raise ValueError(
            "this schedule splits backwards (I, W) and updates weights between the halves (U), so "
            "the second half would use different weights; use B instead of I and W"
        )
    if halves:
        sharded = [any(map(shards_parameters, stage.modules())) for stage in stages]
        for rank, has in enumerate(comm.all_gather_object(sharded)):
            if any(has):
                raise ValueError(
                    f"stage {has.index(True)} uses ZeRO3 (on rank {rank}), which frees weights "
                    "and gradients at the end of a layer's backward, but this schedule defers "
                    'weight gradients; choose a schedule that does not, such as "1f1b", or use '
                    "DDP"
                )
    if updates:
        first: dict[nn.Parameter, int] = {}
        for index, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                other = first.setdefault(p, index)
                if other != index and other % comm.size == index % comm.size:
                    raise ValueError(
                        f"{name} of stage {index} is also a parameter of stage {other}, but this "
                        "schedule updates stages at different times; use separate parameters"
                    )


def _has(schedule: Schedule, phase: str) -> bool:
    return any(action.phase == phase for actions in schedule for action in actions)


def optimizer_of(
    optimizer: Any, own: Sequence[nn.Module], schedule: Schedule, tied: Mapping[nn.Parameter, Any]
) -> torch.optim.Optimizer | None:
    """The optimizer for a schedule with updates, else None. Raises ValueError on a mismatch."""
    if not _has(schedule, "update"):
        if optimizer is not None:
            raise ValueError(
                "this schedule has no updates, so optimizer= would never step; create the "
                "optimizer from pipeline.parameters() and call its step() after pipeline.step(x, "
                "y)"
            )
        return None
    if optimizer is None:
        raise ValueError(
            "this schedule updates the weights after each micro-batch, so it needs the optimizer: "
            "pass optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if tied:
        raise ValueError(
            "a parameter is tied across ranks, but this schedule updates stages at different "
            "times, so its copies would diverge; untie it (tied=False)"
        )
    for stage in own:
        if implements(stage, DataParallel):
            raise ValueError(
                f"a stage is wrapped in {type(stage).__name__}, which averages gradients once per "
                "step, but this schedule updates after each micro-batch; pass the plain module"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        trained = [p for stage in own for p in stage.parameters() if p.requires_grad]
        # A rank whose stages are all frozen runs updates as well.
        optimizer = optimizer(trained or [nn.Parameter(torch.zeros(0))])
    if implements(optimizer, DataParallel):
        raise ValueError(
            f"a {type(optimizer).__name__} averages gradients once per step, but this schedule "
            "updates after each micro-batch; use a torch optimizer"
        )
    update: torch.optim.Optimizer = optimizer
    return update


def check_scaler(scaler: LossScaler, pipeline: Any) -> None:
    """Raises ValueError if the scaler covers only some stages, or checks gradients too late."""
    if _has(pipeline.schedule, "update"):
        raise ValueError(
            "this schedule updates after each micro-batch, before the scaler has checked all "
            "gradients; train in bf16, which needs no loss scaling, or choose a schedule with a "
            "flush"
        )
    if scaler.comm is not None and not {*pipeline.comm.ranks} <= {*scaler.comm.ranks}:
        raise ValueError(
            f"GradScaler: the pipeline spans ranks {list(pipeline.comm.ranks)}, the scaler only "
            f"{list(scaler.comm.ranks)}, so some stages would skip a step that others take; "
            "create the scaler with a comm over all stages, such as Mesh.comm"
        )


def check_batch(x: Any, y: Any, microbatches: int, comm: Comm, has_last: bool) -> None:
    """Raises ValueError if the batch cannot be split into `microbatches` micro-batches."""
    if not isinstance(x, Tensor) or x.ndim < 1:
        what = "is a scalar" if isinstance(x, Tensor) else f"has type {type(x).__name__}"
        raise ValueError(
            f"rank {comm.rank}: x {what}; pass the batch [rows, ...], the same on every rank: "
            "later stages need its number of rows"
        )
    if len(x) < microbatches:
        raise ValueError(
            f"a batch of {len(x)} rows cannot be split into {microbatches} micro-batches of at "
            f"least 1 row; use at least {microbatches} rows, or microbatches={len(x)} or fewer"
        )
    if has_last and (not isinstance(y, Tensor) or y.ndim < 1 or len(y) != len(x)):
        what = f"{len(y)} rows" if isinstance(y, Tensor) and y.ndim else f"type {type(y).__name__}"
        raise ValueError(
            f"rank {comm.rank} has the last stage and computes the loss, but y has {what} and x "
            f"has {len(x)} rows; pass the targets of the whole batch"
        )


def check_agreement(x: Tensor, pipeline: Any, before: Any) -> Any:
    """The settings that determine shapes and dtypes of a step's messages. `before`: the last step's
    settings. Under `World(check=True)`, raises CollectiveMismatch if settings, or whether they
    changed, differ between ranks: some ranks would wait for metadata that no rank sends."""
    kind, autocast = x.device.type, "no autocast"
    if torch.is_autocast_enabled(kind):
        autocast = f"autocast to {torch.get_autocast_dtype(kind)}"
    gradients = "gradients" if torch.is_grad_enabled() else "no gradients"
    modes = f"{'train' if pipeline.training else 'eval'} mode, {gradients}, {autocast}"
    agreed = x.shape[1:], x.dtype, modes, [p.dtype for p in pipeline.parameters()]
    changed = "first step or changed since the last" if agreed != before else "as in the last step"
    pipeline.comm.compare(
        "the batch of a pipeline", lambda: f"x {list(x.shape)} {x.dtype}; {modes}; {changed}"
    )
    return agreed


def check_loss_of(loss: Any, needed: bool, at: str) -> None:
    """Raises ValueError for a non-scalar loss, RuntimeError if it lacks a `needed` gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = (
            f"shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        )
        raise ValueError(
            f"{at}: loss_fn returned a value of {what}; return a scalar, the mean over the rows"
        )
    if needed and torch.is_grad_enabled() and not loss.requires_grad:
        raise RuntimeError(
            f"{at}: the loss has no gradient, but parameters need one: the stage or loss_fn "
            "detaches it, or computes it under no_grad; to evaluate, call step inside "
            "torch.no_grad()"
        )
