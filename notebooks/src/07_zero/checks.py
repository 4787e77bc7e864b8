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

# ---- pieces(numels, ranks, rank)

LAYOUTS: tuple[tuple[list[int], int], ...] = (
    ([8, 2, 11], 3), ([4, 4, 4, 4], 2), ([5, 1, 4], 3), ([1, 1, 1, 9], 4), ([3], 4),
)  # fmt: skip


@exercise(points=2)
def pieces(student: Student) -> Iterator[str]:
    """pieces(numels, ranks, rank): which part of each tensor lies in the share of `rank`."""
    for numels, ranks in LAYOUTS:
        layout = FlatPartition([torch.Size([numel]) for numel in numels], ranks)
        for rank in range(ranks):
            right = [(one.index, one.start, one.numel) for one in layout.pieces(rank)]
            found = alone(student, list(numels), ranks, rank)
            where = f"tensors of {numels} elements on {ranks} ranks: rank {rank}"
            _same_pieces(found, right, where, layout.share)
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
    """ToOwners(comm, buckets): reduces each full bucket to its owners while backward runs."""
    full = len(CUTS) - 1  # the last one waits for the first layer
    for size in (2, 3):
        ran = run(size, two_steps, student)
        for rank, steps in enumerate(ran.values):
            for seed, step in enumerate(steps):
                _under_way(rank, step, full)
                right = right_shares(size, rank, seed)
                _same_shares(size, rank, seed, step.shares, right)
                _freed(rank, step, sum(x.nbytes for x in right))
        _bytes_to_owners(size, ran)
    yield "this rank's share of the mean, in two steps, on 2 and 3 ranks"
    yield f"{full} of {full + 1} buckets under way before backward comes to the first layer"
    yield "(n-1)/n of the bytes sent; afterwards a rank holds its shares, and nothing else"


# ---- ShardedAdam(comm, flat, lr)


@exercise(points=3)
def ShardedAdam(student: Student) -> Iterator[str]:
    """ShardedAdam(comm, flat, lr): Adam on this rank's share, in fp32; then all ranks get all."""
    size = 3
    warm(size, first_adam)
    ran = run(size, some_adam_steps, student)
    right, before = right_weights(size), some_weights(size)
    for rank, (weights, held_bytes) in enumerate(ran.values):
        _same_weights(size, rank, weights, right, before)
        if held_bytes > 12 * len(right) / size + 64:
            fail(
                f"rank {rank} holds {held_bytes / len(right):.3g} bytes per parameter beside the "
                "weights.",
                expected=f"12/n = {12 / size:g} on {size} ranks: master copy and two moments of "
                "its share",
                hint="Who else keeps the state of the other shares? Is a gradient left over?",
            )
    _bytes_of_adam(size, ran, right.nbytes)
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
            _same_norm(size, rank, norm, right)
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
            _is_a_short_cut(rank, counts, len(case.nbytes))
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


# ---- what a student is told


def _same_pieces(found: Any, right: list[tuple[int, int, int]], where: str, share: int) -> None:
    """Fails unless `found` are the pieces of `share` elements in this rank's share."""
    triples = isinstance(found, (list, tuple)) and all(
        isinstance(one, (list, tuple)) and len(one) == 3 and all(isinstance(x, int) for x in one)
        for one in found
    )
    if not triples:
        fail(
            f"{where} has {brief(found)}.",
            expected="a list of (index, start, numel), whole numbers",
        )
    its = [(index, start, numel) for index, start, numel in found]
    if its == right:
        return
    hint = f"A share has {share} elements here. Where does it begin and end among all elements?"
    if sum(one[2] for one in its) > share:
        hint = "Shares are equally large: a tensor is cut wherever a share ends."
    elif [one[::2] for one in its] == [one[::2] for one in right]:
        hint = "`start` counts inside the tensor, from its own first element."
    elif any(numel <= 0 for _, _, numel in its):
        hint = "A tensor that has nothing in a share is no piece of it."
    fail(f"{where} has other pieces.", expected=brief(right), found=brief(its), hint=hint)


def _under_way(rank: int, step: Any, full: int) -> None:
    """Fails unless, in mid-backward, all `full` buckets are sent and freed and none awaited."""
    moment = "when backward came to the first layer"
    if step.asked != full:
        fail(
            f"{moment}, rank {rank} had sent {step.asked} buckets, but {full} were full.",
            expected=f"{full} reduce-scatters under way",
            hint="A bucket is full when the gradients of all its parameters are there.",
        )
    if step.blocking or step.waited:
        fail(
            f"{moment}, rank {rank} had waited for {step.blocking or step.waited} of its "
            "reduce-scatters.",
            expected="calls that return at once, and no wait during backward",
            hint="async_op=True gives a handle; finish() may wait for it.",
        )
    if step.not_freed:
        fail(
            f"{moment}, rank {rank} still had {step.not_freed} gradients of buckets that it had "
            "sent.",
            expected="none: what is on its way is not needed a second time",
            hint="Autograd keeps a gradient in p.grad: who lets go of it?",
        )
    if step.never_waited_for:
        fail(
            f"rank {rank} never waits for {step.never_waited_for} of its reduce-scatters.",
            expected="a wait for each, in finish()",
        )


def _same_shares(size: int, rank: int, seed: int, found: Any, right: list[Tensor]) -> None:
    """Fails unless the rank has its share of the mean for each bucket."""
    place = f"on {size} ranks" + (", in the second step" if seed else "")
    expected = f"a list of {len(right)} tensors, one for each bucket"
    several(found, len(right), f"{place}, rank {rank}'s `shares` is", expected)
    for i, (mine, good) in enumerate(zip(found, right)):
        problem = difference(mine, good, 1e-5)
        if not problem:
            continue
        hint = "Which parameter comes first in its bucket? Where does the padding stand?"
        if isinstance(mine, Tensor) and mine.shape == good.shape:
            ratio = float((mine * good).sum() / (good * good).sum())
            if not difference(mine, ratio * good, 1e-5):
                fail(
                    f"{place}, rank {rank}'s share of bucket {i} is {ratio:.3g} × the right one.",
                    expected="the mean over the ranks",
                    hint="The sum of how many? Divided how often?",
                )
        elif isinstance(mine, Tensor):
            hint = f"{len(good)} × {size} elements: the bucket, and zeros where it does not divide."
        fail(f"{place}, rank {rank}'s share of bucket {i} is {problem}.", hint=hint)


def _freed(rank: int, step: Any, shares_bytes: int) -> None:
    """Fails if anything but the shares is left after finish()."""
    if step.left:
        fail(
            f"after finish(), rank {rank} still has the gradient of {step.left[0]}.",
            expected="p.grad is None for all: the owner has the average, nobody needs the rest",
            hint="In which line is a gradient of no more use?",
        )
    if step.held_bytes > shares_bytes:
        fail(
            f"after finish(), rank {rank} holds {step.held_bytes:,} bytes of gradients.",
            expected=f"{shares_bytes:,} bytes, its shares",
            hint="A view keeps its whole tensor alive, and a list of handles what they carry.",
        )


def _bytes_to_owners(size: int, ran: Ran) -> None:
    """Fails unless each padded bucket is sent once, by reduce-scatters alone."""
    only(ran, ["reduce_scatter"], "reduce-scatters alone")
    padded = sum(len(x) * size * x.element_size() for x in right_shares(size, 0, 0))
    right = 2 * (size - 1) * padded  # two steps
    if sum(ran.sent_bytes) != right:
        fail(
            f"{size} ranks send {sum(ran.sent_bytes):,} bytes in two steps.",
            expected=f"{right:,} = 2 · (n-1) · bytes of the padded buckets",
            hint=f"The gradients are {sum(gradient_bytes()):,} bytes; each travels once.",
        )


def _same_weights(size: int, rank: int, found: Tensor, right: Tensor, before: Tensor) -> None:
    """Fails unless `found`, the weights of a rank, are those of one process."""
    if found.dtype != right.dtype:
        fail(f"rank {rank}'s weights are {found.dtype} now.", expected=str(right.dtype))
    places = len(right) // size
    within = 1 / 128  # one step of bf16: another order of operations may round to the other side
    good = [
        not difference(mine.float(), its.float(), within)
        for mine, its in zip(found.split(places), right.split(places))
    ]
    if all(good):
        return
    if torch.equal(found, before):
        fail(
            f"on {size} ranks, rank {rank}'s weights are as they were.",
            hint="Does the new value come into `flat`? A step of 0.01 is lost when it is added "
            "to 5 in bf16: what does Adam step on?",
        )
    if sum(good) == 1 and good[rank]:
        fail(
            f"on {size} ranks, rank {rank} has the new weights of its own share only.",
            hint="Each rank needs all weights for its next forward.",
        )
    other = good.index(False)
    fail(
        f"on {size} ranks, rank {rank}'s weights of share {other} are not those of one process: "
        f"{difference(found.float(), right.float(), within)}.",
        hint="AdamW with this lr, in each step. An fp32 copy is made once, and keeps what bf16 "
        "would lose; the weights are its rounded image.",
    )


def _bytes_of_adam(size: int, ran: Ran, weights_bytes: int) -> None:
    """Fails unless each step sends each rank's share of the bf16 weights once to all others."""
    right = ADAM_STEPS * (size - 1) * weights_bytes
    if sum(ran.sent_bytes) != right:
        fail(
            f"{size} ranks send {sum(ran.sent_bytes):,} bytes in {ADAM_STEPS} steps.",
            expected=f"{right:,}: each rank its share of the bf16 weights to all others, each step",
            hint="Which collective gives every rank's part to all? In which dtype?",
        )


def _same_norm(size: int, rank: int, found: Any, right: float) -> None:
    """Fails unless `found` is the norm of the whole gradient."""
    try:
        its = float(found)
    except (TypeError, ValueError):
        fail(f"rank {rank} returned {brief(found)}.", expected="the norm before clipping")
    if not math.isclose(its, right, rel_tol=1e-4):
        fail(
            f"on {size} ranks, rank {rank} finds a norm of {its:.4g}, but {right:.4g} is right.",
            expected="the norm of the whole gradient, the same on every rank",
            hint="A norm is a root: which numbers may be added over the ranks?",
        )


def _is_a_short_cut(rank: int, counts: Any, gradients: int) -> None:
    """Fails unless `counts` splits the gradients into few enough messages."""
    is_a_cut(rank, counts, gradients)
    if len(counts) > MESSAGES:
        fail(f"rank {rank} sends {len(counts)} messages.", expected=f"{MESSAGES} at most")
