"""Runs lab 05's answers on ranks.

All ranks have the same small model; each rank has its shard of a batch of random rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import Passing, small_model, some_rows
from labkit.parallel import DDP
from labkit.parallel.common.flat import MB

Gradients = dict[str, Tensor | None]


def current_gradients(model: nn.Module) -> Gradients:
    """The gradients, not copied: a view of a bucket stays a view."""
    return {name: p.grad for name, p in model.named_parameters()}


def after_backward(comm: Any, student: Student) -> tuple[Gradients, list[Tensor]]:
    """Gradients and weights after one backward and a call to the student's function."""
    model, (x, y) = small_model(), some_rows(4 * comm.size)
    shard = slice(4 * comm.rank, 4 * comm.rank + 4)
    F.mse_loss(model(x[shard]), y[shard]).backward()
    student(comm, model)
    return current_gradients(model), [p.detach() for p in model.parameters()]


def two_steps(comm: Any, student: Student) -> tuple[list[tuple[int, int, int, Gradients]], int]:
    """Returns, for each step, how many all-reduces have been started, how many of these block and
    how many have been waited for when backward reaches the first layer, and the gradients. Also
    returns how many of the last step's all-reduces are never waited for."""
    model, steps = small_model(), []
    overlapped = student(comm, model)
    for step in range(2):
        x, y = some_rows(4 * comm.size, seed=step)
        shard = slice(4 * comm.rank, 4 * comm.rank + 4)
        model.zero_grad()
        with listen() as events:
            seen: list[tuple[int, int, int]] = []

            def record(events: list[Any] = events, seen: list[Any] = seen) -> None:
                blocking = sum(e.blocking for e in events)
                seen.append((len(events), blocking, sum(e.wait_ended_s > 0 for e in events)))

            out = model[1:](Passing.apply(model[0](x[shard]), record))
            F.mse_loss(out, y[shard]).backward()
            overlapped.finish()
            unawaited = sum(not event.wait_ended_s for event in events)
        copies = {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        }
        steps.append((*seen[0], copies))
    return steps, unawaited


def accumulated(comm: Any, student: Student, rows: list[int]) -> tuple[Gradients, int]:
    """The gradients after the student's micro-batches of `rows`, and the bytes sent."""
    model = small_model()
    ddp = DDP(model, comm, bucket_mb=200 / MB)
    x, y = (
        part.split(sum(rows))[comm.rank].split(rows) for part in some_rows(comm.size * sum(rows))
    )
    with listen() as events:
        student(ddp, list(zip(x, y)))
    reduced = [event for event in events if event.op == "all_reduce"]
    return current_gradients(model), sum(event.bus_bytes for event in reduced)


def sent_in_buckets(
    comm: Any, student: Student, nbytes: list[int], ready_us: list[float]
) -> list[int]:
    """The student's counts, after one all-reduce per bucket."""
    counts = student(list(nbytes), list(ready_us))
    if isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts):
        first = 0
        for count in counts:
            comm.all_reduce(torch.zeros(sum(nbytes[first : first + count]) // 4))
            first += count
    return counts
