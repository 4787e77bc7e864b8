"""Runs lab 07's answers on ranks, and computes the results of a single process."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import Passing, right_gradients, small_model, some_rows
from labkit.memory.peak import PeakMemory
from labkit.parallel.common.flat import FlatPartition

BUCKET_SIZES = (2, 3, 3)  # parameters per bucket, the last parameter first
ADAM_STEPS, LR = 20, 1e-2


# --- pieces(numels, ranks, rank)


def gather_pieces(comm: Any, student: Student, numels: list[int]) -> Tensor:
    """The tensors all-gathered from every rank's pieces."""
    tensors = [100.0 * i + torch.arange(float(numel)) for i, numel in enumerate(numels)]
    layout = FlatPartition([x.shape for x in tensors], comm.size)
    share, offset = torch.zeros(layout.share), 0
    for index, start, numel in student(list(numels), comm.size, comm.rank):
        share[offset : offset + numel] = tensors[index][start : start + numel]
        offset += numel
    whole = torch.empty(layout.padded)
    comm.all_gather_into_tensor(whole, share)
    return whole[: layout.numel]


# --- ToOwners(comm, buckets)


class Step(NamedTuple):
    """A rank's record of one step of backward and finish()."""

    started: int  # reduce-scatters started when backward reaches the first layer
    blocking: int  # started reduce-scatters that block
    waited: int  # started reduce-scatters already waited for
    not_freed: int  # gradients not freed although their bucket is in flight
    shares: Any
    left: list[str]  # parameters that still have a .grad at the end
    held_bytes: int  # allocated in this step, and still held at the end
    unawaited: int


def buckets_of_small_model(model: nn.Module) -> list[list[nn.Parameter]]:
    """The model's parameters in backward's order, split into buckets."""
    last_first = list(model.parameters())[::-1]
    ends = [sum(BUCKET_SIZES[:i]) for i in range(len(BUCKET_SIZES) + 1)]
    return [last_first[begin:end] for begin, end in pairwise(ends)]


def expected_shares(size: int, rank: int, seed: int) -> list[Tensor]:
    """This rank's share of the mean gradients of each bucket."""
    gradients = list(right_gradients(size, seed=seed).values())[::-1]
    shares = []
    for count in BUCKET_SIZES:
        bucket, gradients = gradients[:count], gradients[count:]
        layout = FlatPartition([g.shape for g in bucket], size)
        flat = torch.zeros(layout.padded)
        for g, view in zip(bucket, layout.views(flat), strict=True):
            view.copy_(g)
        shares.append(layout.share_of(flat, rank))
    return shares


def two_steps(comm: Any, student: Student) -> list[Step]:
    """This rank's record of two backwards, with the student's class reducing the gradients."""
    model, steps = small_model(), []
    buckets = buckets_of_small_model(model)
    to_owners = student(comm, buckets)
    for seed in range(2):
        x, y = some_rows(4 * comm.size, seed)
        rows = slice(4 * comm.rank, 4 * comm.rank + 4)
        with listen() as events:
            seen: list[tuple[int, int, int, int]] = []

            def record(events: list[Any] = events, seen: list[Any] = seen) -> None:
                in_flight = [p for bucket in buckets[: len(events)] for p in bucket]
                seen.append(
                    (
                        len(events),
                        sum(event.blocking for event in events),
                        sum(event.wait_ended_s > 0 for event in events),
                        sum(p.grad is not None for p in in_flight),
                    )
                )

            value = F.mse_loss(model[1:](Passing.apply(model[0](x[rows]), record)), y[rows])
            with PeakMemory() as memory:
                value.backward()
                to_owners.finish()
            unawaited = sum(not event.wait_ended_s for event in events)
        left = [name for name, p in model.named_parameters() if p.grad is not None]
        shares = _copies(getattr(to_owners, "shares", None))
        steps.append(Step(*seen[0], shares, left, memory.held_bytes, unawaited))
    return steps


def _copies(shares: Any) -> Any:
    """Copies of the shares, which the next step cannot change."""
    if not isinstance(shares, (list, tuple)):
        return shares
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in shares]


# --- ShardedAdam(comm, flat, lr)


def initial_weights(size: int, share: int = 500) -> Tensor:
    """Weights in bf16, so large that adding one step of Adam rounds to no change; all steps
    together are six times the spacing of bf16."""
    generator = torch.Generator().manual_seed(7)
    return (4.5 + torch.rand(size * share, generator=generator)).bfloat16()


def gradients_of_step(weights: Tensor, step: int) -> Tensor:
    """Gradients in bf16, the same on all ranks, different in each step. Their magnitudes range
    from 1e-4 to 1: Adam's steps are equally large for all elements, unlike SGD's."""
    generator = torch.Generator().manual_seed(100 + step)
    sizes = 10.0 ** -(torch.arange(len(weights)) % 5)
    return (sizes * (0.5 + torch.rand(len(weights), generator=generator))).bfloat16()


def expected_weights(size: int) -> Tensor:
    """The weights of one process after the steps, with an fp32 master copy of all weights."""
    weights = initial_weights(size)
    master = nn.Parameter(weights.float())
    adam = torch.optim.AdamW([master], lr=LR)
    for step in range(ADAM_STEPS):
        master.grad = gradients_of_step(weights, step).float()
        adam.step()
    return master.detach().bfloat16()


def first_optimizer() -> None:
    """Create a rank's first optimizer, which imports much of torch."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])


def run_adam_steps(comm: Any, student: Student) -> tuple[Tensor, int]:
    """The weights after the steps, and the bytes that the student's object then holds."""
    weights = initial_weights(comm.size)
    with PeakMemory() as memory:
        sharded = student(comm, weights, LR)
    for step in range(ADAM_STEPS):
        gradient = gradients_of_step(weights, step).chunk(comm.size)[comm.rank].clone()
        with memory:
            sharded.step(gradient)
        del gradient
    held_bytes = memory.held_bytes
    return weights.detach(), held_bytes


# --- clip(comm, shares, max_norm)


def run_clip(comm: Any, student: Student, max_norm: float) -> tuple[Any, list[Tensor]]:
    """The result of the student's function, and this rank's shares afterward."""
    shares = [part.clone() for part in shares_of_rank(comm.size, comm.rank)]
    norm = student(comm, shares, max_norm)
    return norm, shares


def shares_of_rank(size: int, rank: int) -> Sequence[Tensor]:
    """Two shares, of which the second is longer; the values grow with the rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator) * (rank + 1) for n in (5, 12)]
