"""Checks of lab 07, "ZeRO"."""

from collections.abc import Iterator

import torch
from torch import nn

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import difference, fail
from labkit.course.ranks import alone, run, warm
from labkit.parallel.common.flat import FlatPartition

from .buckets import (
    BEST_KB,
    MESSAGES,
    backwards,
    equal_counts,
    sent_in_buckets,
)
from .scenarios import (
    ADAM_STEPS,
    CUTS,
    clipped,
    first_adam,
    gathered,
    right_shares,
    right_weights,
    shares_of_rank,
    some_adam_steps,
    some_weights,
    two_steps,
)
from .verdicts import (
    bytes_of_adam,
    bytes_to_owners,
    freed,
    is_a_short_cut,
    same_norm,
    same_pieces,
    same_shares,
    same_weights,
    under_way,
)

# ---- pieces(numels, ranks, rank)

LAYOUTS: tuple[tuple[list[int], int], ...] = (
    ([8, 2, 11], 3), ([4, 4, 4, 4], 2), ([5, 1, 4], 3), ([1, 1, 1, 9], 4), ([3], 4),
)  # fmt: skip


@exercise(points=2)
def pieces(student: Student) -> Iterator[str]:
    """pieces(numels, ranks, rank): what of each tensor lies in the share of `rank`."""
    for numels, ranks in LAYOUTS:
        layout = FlatPartition([torch.Size([numel]) for numel in numels], ranks)
        for rank in range(ranks):
            right = [(one.index, one.start, one.numel) for one in layout.pieces(rank)]
            found = alone(student, list(numels), ranks, rank)
            where = f"tensors of {numels} elements on {ranks} ranks: rank {rank}"
            same_pieces(found, right, where, layout.share)
    yield "every share equally large, on 2, 3 and 4 ranks, with padding at the end"
    for numels, ranks in LAYOUTS[:3]:
        ran = run(ranks, gathered, student, numels)
        for whole in ran.values:
            wanted = [100.0 * i + torch.arange(float(numel)) for i, numel in enumerate(numels)]
            assert torch.equal(whole, torch.cat(wanted)), "the pieces are right, and so is this"
    yield "gathered from real ranks, the shares are the tensors again"


# ---- ToOwners(comm, buckets)


@exercise(points=3)
def ToOwners(student: Student) -> Iterator[str]:
    """ToOwners(comm, buckets): each full bucket is reduced to its owners while backward runs."""
    full = len(CUTS) - 1  # the last one waits for the first layer
    for size in (2, 3):
        ran = run(size, two_steps, student)
        for rank, steps in enumerate(ran.values):
            for seed, step in enumerate(steps):
                under_way(rank, step, full)
                right = right_shares(size, rank, seed)
                same_shares(size, rank, seed, step.shares, right)
                freed(rank, step, sum(x.nbytes for x in right))
        bytes_to_owners(size, ran)
    yield "this rank's share of the mean, in two steps, on 2 and 3 ranks"
    yield f"{full} of {full + 1} buckets under way before backward comes to the first layer"
    yield "(n-1)/n of the bytes sent; afterwards a rank holds its shares, and nothing else"


# ---- ShardedAdam(comm, flat, lr)


@exercise(points=3)
def ShardedAdam(student: Student) -> Iterator[str]:
    """ShardedAdam(comm, flat, lr): Adam on this rank's share, in fp32; then all get all."""
    size = 3
    warm(size, first_adam)
    ran = run(size, some_adam_steps, student)
    right, before = right_weights(size), some_weights(size)
    for rank, (weights, held_bytes) in enumerate(ran.values):
        same_weights(size, rank, weights, right, before)
        if held_bytes > 12 * len(right) / size + 64:
            fail(
                f"rank {rank} holds {held_bytes / len(right):.3g} bytes per parameter beside the "
                "weights.",
                expected=f"12/n = {12 / size:g} on {size} ranks: master copy and two moments of "
                "its share",
                hint="Who else keeps the state of the other shares? Is a gradient left over?",
            )
    bytes_of_adam(size, ran, right.nbytes)
    yield f"the weights of one process after {ADAM_STEPS} steps, on {size} ranks"
    yield "12/n bytes per parameter held for the optimizer"
    yield "(n-1)/n of the weights sent by a rank, in bf16"


# ---- clip(comm, shares, max_norm)


@exercise(points=2)
def clip(student: Student) -> Iterator[str]:
    """clip(comm, shares, max_norm): as torch's clip_grad_norm_ on the whole gradient."""
    for size, max_norm in ((2, 1.0), (3, 0.5), (3, 1e6)):
        whole = [[x.clone() for x in shares_of_rank(size, rank)] for rank in range(size)]
        parameters = [nn.Parameter(torch.zeros_like(x)) for its in whole for x in its]
        for p, x in zip(parameters, [x for its in whole for x in its]):
            p.grad = x
        right = float(nn.utils.clip_grad_norm_(parameters, max_norm))
        ran = run(size, clipped, student, max_norm)
        for rank, (norm, shares) in enumerate(ran.values):
            same_norm(size, rank, norm, right)
            for mine, good, was in zip(shares, whole[rank], shares_of_rank(size, rank)):
                if not difference(mine, good, 1e-4):
                    continue
                hint = "By which factor does the whole gradient shrink?"
                if max_norm > right:
                    hint = "A gradient that is short enough stays as it is."
                elif torch.equal(mine, was):
                    hint = "Scale them in place: the caller has these tensors."
                fail(
                    f"on {size} ranks, with max_norm={max_norm:g} and a norm of {right:.4g}, rank "
                    f"{rank}'s gradient is {float((mine / was).mean()):.3g} × what it was.",
                    expected=f"{min(1, max_norm / right):.3g} ×, on every rank",
                    hint=hint,
                )
        if max(ran.sent_bytes) > 2 * 8:
            fail(
                f"rank 0 sends {ran.sent_bytes[0]:,.0f} bytes.",
                expected="one number",
                hint="What of its shares must another rank know?",
            )
    yield "norm and gradients as torch's clip_grad_norm_ has them, on 2 and 3 ranks"
    yield "one number sent"


# ---- choose_buckets(backward, messages)


@exercise(points=3)
def choose_buckets(student: Student) -> Iterator[str | Score]:
    """choose_buckets(backward, messages): how many gradients each bucket takes."""
    total = equal = 0
    for case in backwards():
        ran = run(2, sent_in_buckets, student, case)
        for rank, counts in enumerate(ran.values):
            is_a_short_cut(rank, counts, len(case.nbytes))
        counts = ran.values[0]
        total += case.peak_bytes(counts)
        equal += case.peak_bytes(equal_counts(len(case.nbytes), MESSAGES))
    if total >= equal:
        fail(
            f"on both clusters together, the peaks are {total / 1e6:.1f} MB of gradients.",
            expected=f"less than {equal / 1e6:.1f} MB, with as many gradients in each bucket",
            hint="A bucket holds memory until it is full, and then until it has been sent.",
        )
    yield f"every gradient in one of {MESSAGES} buckets, reduce-scattered by 2 ranks"
    yield Score(round(total / 1e3), BEST_KB, "kB held at the peaks of both clusters")
