"""Checks of lab 07, "ZeRO"."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, several
from labkit.course.ranks import Ran, alone, only, run, warm
from labkit.course.samples import gradient_bytes, is_a_cut
from labkit.parallel.common.flat import FlatPartition

from .buckets import BEST_KB, MESSAGES, backwards, equal_counts, sent_in_buckets
from .scenarios import (
    ADAM_STEPS,
    BUCKET_SIZES,
    expected_shares,
    expected_weights,
    first_optimizer,
    gather_pieces,
    initial_weights,
    run_adam_steps,
    run_clip,
    shares_of_rank,
    two_steps,
)

# ---- pieces(numels, ranks, rank)

LAYOUTS: tuple[tuple[list[int], int], ...] = (
    ([8, 2, 11], 3), ([4, 4, 4, 4], 2), ([5, 1, 4], 3), ([1, 1, 1, 9], 4), ([3], 4),
)  # fmt: skip


@exercise(points=2)
def pieces(student: Student) -> Iterator[str]:
    """pieces(numels, ranks, rank): the slice of each tensor in `rank`'s share."""
    for numels, ranks in LAYOUTS:
        layout = FlatPartition([torch.Size([numel]) for numel in numels], ranks)
        for rank in range(ranks):
            expected = [(piece.index, piece.start, piece.numel) for piece in layout.pieces(rank)]
            returned = alone(student, list(numels), ranks, rank)
            call = f"pieces({numels}, {ranks}, {rank})"
            _check_pieces(call, returned, expected, layout.share)
    yield "shares of equal size, on 2, 3 and 4 ranks, with padding at the end"
    for numels, ranks in LAYOUTS[:3]:
        ran = run(ranks, gather_pieces, student, numels)
        for whole in ran.values:
            wanted = [100.0 * i + torch.arange(float(numel)) for i, numel in enumerate(numels)]
            assert torch.equal(whole, torch.cat(wanted)), "correct pieces restore the tensors"
    yield "the shares, all-gathered on real ranks, restore the tensors"


# ---- ToOwners(comm, buckets)


@exercise(points=3)
def ToOwners(student: Student) -> Iterator[str]:
    """ToOwners(comm, buckets): reduces each full bucket to its owners while backward runs."""
    full = len(BUCKET_SIZES) - 1  # the last bucket waits for the first layer
    for size in (2, 3):
        ran = run(size, two_steps, student)
        for rank, steps in enumerate(ran.values):
            for seed, step in enumerate(steps):
                _check_in_flight(rank, step, full)
                expected = expected_shares(size, rank, seed)
                _check_shares(size, rank, seed, step.shares, expected)
                _check_freed(rank, step, sum(x.nbytes for x in expected))
        _check_bucket_bytes(size, ran)
    yield "each rank has its share of the mean, in two steps, on 2 and 3 ranks"
    yield f"{full} of {full + 1} buckets in flight when backward reaches the first layer"
    yield "each rank sends (n-1)/n of the bytes; after finish(), it holds nothing but its shares"


# ---- ShardedAdam(comm, flat, lr)


@exercise(points=3)
def ShardedAdam(student: Student) -> Iterator[str]:
    """ShardedAdam(comm, flat, lr): fp32 Adam on this rank's share, then an all-gather."""
    size = 3
    warm(size, first_optimizer)
    ran = run(size, run_adam_steps, student)
    expected, original = expected_weights(size), initial_weights(size)
    for rank, (weights, held_bytes) in enumerate(ran.values):
        _check_weights(size, rank, weights, expected, original)
        if held_bytes > 12 * len(expected) / size + 64:
            fail(
                f"rank {rank} holds {held_bytes / len(expected):.3g} bytes per parameter in "
                "addition to the weights.",
                expected=f"12/n = {12 / size:g} on {size} ranks: master copy and two moments of "
                "its share",
                hint="Do you keep optimizer state for other ranks' shares? Do you keep a gradient?",
            )
    _check_weight_bytes(size, ran, expected.nbytes)
    yield f"every rank has the weights of one process after {ADAM_STEPS} steps, on {size} ranks"
    yield "12/n bytes of optimizer state per parameter"
    yield "each rank sends (n-1)/n of the weights, in bf16"


# ---- clip(comm, shares, max_norm)


@exercise(points=2)
def clip(student: Student) -> Iterator[str]:
    """clip(comm, shares, max_norm): like torch's clip_grad_norm_ on the whole gradient."""
    for size, max_norm in ((2, 1.0), (3, 0.5), (3, 1e6)):
        whole = [[x.clone() for x in shares_of_rank(size, rank)] for rank in range(size)]
        parameters = [
            nn.Parameter(torch.zeros_like(x)) for rank_shares in whole for x in rank_shares
        ]
        for p, x in zip(parameters, [x for rank_shares in whole for x in rank_shares]):
            p.grad = x
        expected_norm = float(nn.utils.clip_grad_norm_(parameters, max_norm))
        ran = run(size, run_clip, student, max_norm)
        for rank, (norm, shares) in enumerate(ran.values):
            _check_norm(size, rank, norm, expected_norm)
            for clipped, correct, original in zip(shares, whole[rank], shares_of_rank(size, rank)):
                if not difference(clipped, correct, 1e-4):
                    continue
                hint = "By which factor does the whole gradient shrink?"
                if max_norm > expected_norm:
                    hint = "A gradient within max_norm stays unchanged."
                elif torch.equal(clipped, original):
                    hint = "Scale the shares in place: the caller keeps these tensors."
                fail(
                    f"on {size} ranks, with max_norm={max_norm:g} and a norm of "
                    f"{expected_norm:.4g}, rank {rank} scales its gradient by "
                    f"{float((clipped / original).mean()):.3g}.",
                    expected=f"a factor of {min(1, max_norm / expected_norm):.3g} on every rank",
                    hint=hint,
                )
        if max(ran.sent_bytes) > 2 * 8:
            fail(
                f"rank 0 sends {ran.sent_bytes[0]:,.0f} bytes.",
                expected="one element",
                hint="What must another rank know about these shares?",
            )
    yield "norm and gradients equal those of torch's clip_grad_norm_, on 2 and 3 ranks"
    yield "each rank sends one element"


# ---- choose_buckets(backward, messages)


@exercise(points=3)
def choose_buckets(student: Student) -> Iterator[str | Score]:
    """choose_buckets(backward, messages): the number of gradients per bucket."""
    total = equal_total = 0
    for case in backwards():
        ran = run(2, sent_in_buckets, student, case)
        for rank, counts in enumerate(ran.values):
            _check_counts(rank, counts, len(case.nbytes))
        counts = ran.values[0]
        total += case.peak_bytes(counts)
        equal_total += case.peak_bytes(equal_counts(len(case.nbytes), MESSAGES))
    if total >= equal_total:
        fail(
            f"the two clusters' peaks add up to {total / 1e6:.1f} MB of gradients.",
            expected=f"less than {equal_total / 1e6:.1f} MB, the sum with equal numbers of "
            "gradients in each bucket",
            hint="A bucket holds memory until it is full and has been sent.",
        )
    yield f"every gradient in one of {MESSAGES} buckets, reduce-scattered by 2 ranks"
    yield Score(round(total / 1e3), BEST_KB, "kB held at the peaks of both clusters")


# ---- comparisons, with their messages


def _check_pieces(
    call: str, returned: Any, expected: list[tuple[int, int, int]], share: int
) -> None:
    """Fails unless `returned` lists the expected pieces of a share of `share` elements."""
    triples = isinstance(returned, (list, tuple)) and all(
        isinstance(x, (list, tuple)) and len(x) == 3 and all(isinstance(i, int) for i in x)
        for x in returned
    )
    if not triples:
        fail(
            f"{call} returned {brief(returned)}.",
            expected="a list of (index, start, numel), with integers",
        )
    pieces = [(index, start, numel) for index, start, numel in returned]
    if pieces == expected:
        return
    hint = f"A share has {share} elements here: where does it start and end among all elements?"
    if sum(numel for _, _, numel in pieces) > share:
        hint = "Shares have equal size: split a tensor where a share ends."
    elif [x[::2] for x in pieces] == [x[::2] for x in expected]:
        hint = "`start` counts from the first element of the tensor."
    elif any(numel <= 0 for _, _, numel in pieces):
        hint = "Leave out a tensor that has no elements in the share."
    fail(f"{call} returned wrong pieces.", expected=brief(expected), found=brief(pieces), hint=hint)


def _check_in_flight(rank: int, step: Any, full: int) -> None:
    """Fails unless, during backward, all `full` buckets are in flight and their gradients freed."""
    moment = "when backward reached the first layer"
    if step.started != full:
        fail(
            f"{moment}, rank {rank} had sent {step.started} buckets, but {full} were full.",
            expected=f"{full} reduce-scatters in flight",
            hint="A bucket is full when the gradients of all its parameters are ready.",
        )
    if step.blocking or step.waited:
        fail(
            f"{moment}, rank {rank} had waited for {step.blocking or step.waited} of its "
            "reduce-scatters.",
            expected="calls that return at once, and no wait during backward",
            hint="async_op=True returns a handle; finish() may wait for it.",
        )
    if step.not_freed:
        fail(
            f"{moment}, rank {rank} still held {step.not_freed} gradients of buckets in flight.",
            expected="none: the bucket has a copy of each",
            hint="Autograd keeps a gradient in p.grad: when can you set it to None?",
        )
    if step.unawaited:
        fail(
            f"rank {rank} never waits for {step.unawaited} of its reduce-scatters.",
            expected="a wait for each reduce-scatter, in finish()",
        )


def _check_shares(
    size: int, rank: int, seed: int, returned: Any, expected_shares: list[Tensor]
) -> None:
    """Fails unless the rank has its share of every bucket's mean."""
    context = f"on {size} ranks" + (", in the second step" if seed else "")
    expected = f"a list of {len(expected_shares)} tensors, one for each bucket"
    several(returned, len(expected_shares), f"{context}, rank {rank}'s `shares` is", expected)
    for i, (actual, correct) in enumerate(zip(returned, expected_shares)):
        problem = difference(actual, correct, 1e-5)
        if not problem:
            continue
        hint = "Which parameter comes first in its bucket? Where is the padding?"
        if isinstance(actual, Tensor) and actual.shape == correct.shape:
            ratio = float((actual * correct).sum() / (correct * correct).sum())
            if not difference(actual, ratio * correct, 1e-5):
                fail(
                    f"{context}, rank {rank}'s share of bucket {i} is {ratio:.3g} × the correct "
                    "share.",
                    expected="the mean over the ranks",
                    hint="Did you divide once, by the number of gradients you added?",
                )
        elif isinstance(actual, Tensor):
            hint = f"Pad the bucket with zeros to {size} × {len(correct)} elements."
        fail(f"{context}, rank {rank}'s share of bucket {i} is {problem}.", hint=hint)


def _check_freed(rank: int, step: Any, shares_bytes: int) -> None:
    """Fails if the rank holds anything but its shares after finish()."""
    if step.left:
        fail(
            f"after finish(), rank {rank} still holds the gradient of {step.left[0]}.",
            expected="p.grad is None for all parameters: only the owner needs the average",
            hint="After which line is a gradient no longer needed?",
        )
    if step.held_bytes > shares_bytes:
        fail(
            f"after finish(), rank {rank} holds {step.held_bytes:,} bytes of gradients.",
            expected=f"{shares_bytes:,} bytes: its shares",
            hint="A view keeps its whole tensor alive; a handle keeps its tensors alive.",
        )


def _check_bucket_bytes(size: int, ran: Ran) -> None:
    """Fails unless each padded bucket is sent once, by reduce-scatters alone."""
    only(ran, ["reduce_scatter"], "only reduce-scatters")
    padded = sum(len(x) * size * x.element_size() for x in expected_shares(size, 0, 0))
    expected = 2 * (size - 1) * padded  # two steps
    if sum(ran.sent_bytes) != expected:
        fail(
            f"{size} ranks send {sum(ran.sent_bytes):,} bytes in two steps.",
            expected=f"{expected:,} = 2 · (n-1) · bytes of the padded buckets",
            hint=f"The gradients are {sum(gradient_bytes()):,} bytes; send each once.",
        )


def _check_weights(
    size: int, rank: int, actual: Tensor, expected: Tensor, original: Tensor
) -> None:
    """Fails unless a rank's weights equal those of a single process."""
    if actual.dtype != expected.dtype:
        fail(f"rank {rank}'s weights have become {actual.dtype}.", expected=str(expected.dtype))
    share = len(expected) // size
    within = 1 / 128  # the spacing of bf16: a different order of operations may round differently
    is_right = [
        not difference(own.float(), correct.float(), within)
        for own, correct in zip(actual.split(share), expected.split(share))
    ]
    if all(is_right):
        return
    if torch.equal(actual, original):
        fail(
            f"on {size} ranks, rank {rank}'s weights have not changed.",
            hint="Do you write the new values into `flat`? In bf16, 5 + 0.01 rounds to 5: which "
            "tensor does Adam update?",
        )
    if sum(is_right) == 1 and is_right[rank]:
        fail(
            f"on {size} ranks, rank {rank} has the new weights of its own share only.",
            hint="Each rank needs all weights for its next forward.",
        )
    first_wrong = is_right.index(False)
    fail(
        f"on {size} ranks, rank {rank}'s weights are wrong in share {first_wrong}: "
        f"{difference(actual.float(), expected.float(), within)}.",
        hint="Step AdamW with this lr, once per step. Make the fp32 master copy once: it keeps "
        "what bf16 rounds away. Round the copy into the weights.",
    )


def _check_weight_bytes(size: int, ran: Ran, weights_bytes: int) -> None:
    """Fails unless, in each step, each rank sends its bf16 weight share to all other ranks."""
    expected = ADAM_STEPS * (size - 1) * weights_bytes
    if sum(ran.sent_bytes) != expected:
        fail(
            f"{size} ranks send {sum(ran.sent_bytes):,} bytes in {ADAM_STEPS} steps.",
            expected=f"{expected:,}: in each step, each rank sends its share of the bf16 weights "
            "to all other ranks",
            hint="Which collective sends every rank's share to all ranks? In which dtype?",
        )


def _check_norm(size: int, rank: int, returned: Any, expected: float) -> None:
    """Fails unless `returned` is the norm over all ranks' shares."""
    try:
        norm = float(returned)
    except (TypeError, ValueError):
        fail(f"rank {rank} returned {brief(returned)}.", expected="the norm before clipping")
    if not math.isclose(norm, expected, rel_tol=1e-4):
        fail(
            f"on {size} ranks, rank {rank} should return a norm of {expected:.4g}, not {norm:.4g}.",
            expected="the norm of the whole gradient, the same on every rank",
            hint="A norm is a square root: which values may you add over the ranks?",
        )


def _check_counts(rank: int, counts: Any, gradients: int) -> None:
    """Fails unless `counts` splits the gradients into at most MESSAGES buckets."""
    is_a_cut(rank, counts, gradients)
    if len(counts) > MESSAGES:
        fail(f"rank {rank} sends {len(counts)} messages.", expected=f"at most {MESSAGES}")
