"""Checks of lab 13, "Tensor parallelism"."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail
from labkit.course.ranks import Ran, alone, run

from .chain import (
    BEST_BYTES,
    BUDGETS,
    CHAIN,
    RANKS,
    WAYS,
    budget_of,
    held,
    in_turns,
    on_ranks,
    sent_bytes,
)
from .scenarios import (
    CE_TOKENS,
    TOKENS,
    WIDTH,
    right_column,
    right_cross_entropy,
    right_mlp,
    through_column,
    through_cross_entropy,
    through_mlp,
    whole_mlp,
)

WITHIN = 1e-5


def times(found: Any, right: Tensor) -> str:
    """How a tensor is wrong: "2 × the right one", if it is a multiple."""
    if isinstance(found, Tensor) and found.shape == right.shape:
        factor = float((found * right).sum() / right.square().sum())
        if factor and not difference(found, right * round(factor, 3), 1e-3):
            return f"{factor:.3g} × the right one"
    return difference(found, right, WITHIN)


# ---- Column: forward(ctx, comm, x, weight), backward(ctx, dy)


@exercise(points=3)
def Column(student: Student) -> Iterator[str]:
    """Column: a column-parallel matmul; in backward, another matmul hides the all-reduce."""
    for size in (2, 3):
        ran = run(size, through_column, student)
        for rank, its in enumerate(ran.values):
            _column_numbers(size, rank, its)
            _column_messages(rank, its)
    yield "the output's own features, dx and this rank's piece of dA, on 2 and 3 ranks"
    yield "nothing sent in forward, one all-reduce in backward"
    yield "which was under way while dA was computed"


def _column_numbers(size: int, rank: int, its: Any) -> None:
    y, dx, dweight = right_column(size, rank)
    if difference(its.y, y, WITHIN):
        fail(
            f"on {size} ranks, rank {rank}'s output is {difference(its.y, y, WITHIN)}.",
            hint="Forward sends nothing: x times this rank's piece, which lies in memory as "
            "[out/t, in].",
        )
    for name, found, right in (("x", its.dx, dx), ("the weight", its.dweight, dweight)):
        if found is None:
            fail(
                f"rank {rank} has no gradient of {name}.",
                hint="backward returns one gradient for each argument of forward: None for comm.",
            )
        if difference(found, right, WITHIN):
            hint = "Each rank's columns give a part of dx. Who adds them up?"
            if name != "x":
                hint = "dA of this rank's columns is its own: transposed, as the weight is."
            fail(
                f"on {size} ranks, rank {rank}'s gradient of {name} is {times(found, right)}.",
                hint=hint,
            )


def _column_messages(rank: int, its: Any) -> None:
    if its.forward_ops or its.backward_ops != ["all_reduce"]:
        fail(
            f"rank {rank} calls {brief(its.forward_ops)} in forward and "
            f"{brief(its.backward_ops)} in backward.",
            expected="nothing in forward, one all_reduce in backward",
        )
    started, waited = its.products[-1] if its.products else (0, 0)
    if not started or waited:
        what = "had waited for its all-reduce" if started else "had not started its all-reduce"
        fail(
            f"before rank {rank} computed its last product in backward, it {what}.",
            expected="an all-reduce of dx that is under way while dA is computed",
            hint="First dx, then comm.all_reduce(dx, async_op=True), then dA, then wait.",
        )


# ---- mlp(comm, x, up, down)


@exercise(points=3)
def mlp(student: Student) -> Iterator[str]:
    """mlp(comm, x, up, down): a sharded MLP, with f, g, and each bias once."""
    for size in (1, 2, 3):
        ran, where = run(size, through_mlp, student), f"on {size} rank{'s' * (size > 1)}"
        for rank, (y, gradients) in enumerate(ran.values):
            right_y, right = right_mlp(size, rank)
            if difference(y, right_y, WITHIN):
                fail(
                    f"{where}, rank {rank}'s output is {difference(y, right_y, WITHIN)}.",
                    hint=_why_output(y, right_y, size),
                )
            names = ["x", "up.weight", "up.bias", "down.weight", "down.bias"]
            for name, found, good in zip(names, gradients, right):
                if found is None:
                    fail(
                        f"{where}, rank {rank} has no gradient of {name}.",
                        hint="comm.all_reduce changes a tensor behind autograd's back; g does not.",
                    )
                if difference(found, good, WITHIN):
                    hint = "Which of f and g sends in backward? The gradient of y is whole already."
                    if name == "x":
                        hint = "Each rank knows its columns' part of dx. What adds them up?"
                    fail(
                        f"{where}, rank {rank}'s gradient of {name} is {times(found, good)}.",
                        hint=hint,
                    )
        _two_all_reduces(size, ran)
    yield "output and gradients of one process, on 1, 2 and 3 ranks"
    yield "two all-reduces of x, one forward and one backward"


def _why_output(y: Any, right: Tensor, size: int) -> str:
    """A hint from how the output is wrong."""
    bias = whole_mlp()[2].bias.detach()
    if isinstance(y, Tensor) and y.shape == right.shape:
        if not difference(y, right + (size - 1) * bias, 1e-4):
            return f"It is {size - 1} × the bias of `down` too large: how often is it added?"
        if not difference(y, right - bias, 1e-4):
            return "The bias of `down` is missing."
        if not difference(y, right - (size - 1) / size * bias, 1e-4):
            return "Of the bias of `down` there is one part only."
    return "Between the two products every rank is by itself; after the second, add up."


def _two_all_reduces(size: int, ran: Ran) -> None:
    wanted_bytes = 2 * 2 * (size - 1) / size * TOKENS * WIDTH * 4
    for rank, sent in enumerate(ran.sent_bytes):
        if abs(sent - wanted_bytes) > 16:
            fail(
                f"on {size} ranks, rank {rank} sends {sent:,.0f} bytes, in {ran.ops[rank]}.",
                expected=f"{wanted_bytes:,.0f}: an all-reduce of y in forward, one of dx in "
                "backward",
                hint="The ranks have all of the bias and its gradient without a message.",
            )


# ---- own_rows(heads, kv_heads, head_width, ranks, rank)

# Heads, key-value heads, head width, ranks; of each rank, the first and last rows of q, k and v.
PACKED = {
    (4, 4, 2, 2): [[(0, 4), (8, 12), (16, 20)], [(4, 8), (12, 16), (20, 24)]],
    (6, 3, 2, 3): [
        [(0, 4), (12, 14), (18, 20)], [(4, 8), (14, 16), (20, 22)], [(8, 12), (16, 18), (22, 24)],
    ],
    (8, 2, 3, 2): [[(0, 12), (24, 27), (30, 33)], [(12, 24), (27, 30), (33, 36)]],
    (2, 2, 1, 1): [[(0, 2), (2, 4), (4, 6)]],
}  # fmt: skip


@exercise(points=2)
def own_rows(student: Student) -> Iterator[str]:
    """own_rows(heads, kv_heads, head_width, ranks, rank): this rank's rows of a packed q, k, v."""
    for (heads, kv_heads, e, ranks), parts in PACKED.items():
        for rank, its in enumerate(parts):
            found = alone(student, heads, kv_heads, e, ranks, rank)
            right = [row for begin, end in its for row in range(begin, end)]
            with suppress(TypeError, ValueError):  # a tensor, an array or a range will do
                found = [int(x) for x in found]
            if found == right:
                continue
            hint = "q, k and v lie one after the other: cut each of them, by its own heads."
            if isinstance(found, list) and sorted(map(str, found)) == sorted(map(str, right)):
                hint = "The right rows, in another order: q, then k, then v, as they lie."
            fail(
                f"{heads} heads and {kv_heads} key-value heads of {e} features on {ranks} ranks: "
                f"rank {rank} has other rows.",
                expected=brief(right),
                found=brief(found),
                hint=hint,
            )
    yield "q, k and v cut by heads, and by key-value heads where these are fewer"
    yield "for 1, 2 and 3 ranks, all rows of all heads, each once"


# ---- cross_entropy(comm, logits, targets)


@exercise(points=3)
def cross_entropy(student: Student) -> Iterator[str]:
    """cross_entropy(comm, logits, targets): the loss of logits that are split over the ranks."""
    for size, large in ((1, 1.0), (2, 1.0), (3, 1.0), (2, 80.0)):
        ran = run(size, through_cross_entropy, student, large)
        where = f"on {size} rank{'s' * (size > 1)}" + ", with large logits" * (large > 1)
        for rank, (value, gradient) in enumerate(ran.values):
            right, right_gradient = right_cross_entropy(size, rank, large)
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                fail(
                    f"{where}, rank {rank}'s loss is {float(value.sum()):g}.",
                    hint="exp(100) is more than float32 holds. Subtract from each token's logits "
                    "the largest: that of all ranks.",
                )
            if difference(value, right, 1e-4):
                fail(
                    f"{where}, rank {rank}'s loss is {difference(value, right, 1e-4)}.",
                    hint="log of the sum of exp over all ranks' logits, minus the target's own. "
                    "Which rank has that?",
                )
            if gradient is None or difference(gradient, right_gradient, 1e-4):
                what = "None" if gradient is None else times(gradient, right_gradient)
                fail(
                    f"{where}, the gradient of rank {rank}'s logits is {what}.",
                    hint="comm.all_reduce changes a tensor behind autograd's back; "
                    "reduce_from_ranks is g, which autograd knows.",
                )
        most = 3 * 2 * (size - 1) / size * CE_TOKENS * 4 + 32
        if max(ran.sent_bytes) > most:
            fail(
                f"{where}, a rank sends {max(ran.sent_bytes):,.0f} bytes.",
                expected=f"{most - 32:,.0f}: three numbers for each of {CE_TOKENS} tokens",
                hint="The largest logit, the sum, the target's logit. Backward sends nothing.",
            )
    yield "loss and gradients of F.cross_entropy, on 1, 2 and 3 ranks, for large logits, too"
    yield "three numbers sent for each token"


# ---- choose_cuts(widths, ranks, budget)


@exercise(points=3)
def choose_cuts(student: Student) -> Iterator[str | Score]:
    """choose_cuts(widths, ranks, budget): "columns", "rows" or "whole" for each layer."""
    total, turns = 0, len(BUDGETS) * sent_bytes(in_turns())
    for part in BUDGETS:
        ways = alone(student, CHAIN, RANKS, budget_of(part))
        _within(ways, budget_of(part))
        ran = run(RANKS, on_ranks, list(ways))
        total += round(ran.sent_bytes[0])
    if total >= turns:
        fail(
            f"a rank sends {total:,} bytes, for all budgets together.",
            expected=f"fewer than {turns:,.0f}, which columns and rows in turns need",
            hint="Where is the chain narrow? Let what must travel travel there.",
        )
    yield "all budgets met, with fewer bytes on 2 ranks than columns and rows in turns"
    yield Score(total, BEST_BYTES, "bytes sent by a rank")


def _within(ways: Any, budget: int) -> None:
    names = isinstance(ways, Sequence) and all(way in WAYS for way in ways)
    if not names or isinstance(ways, str) or len(ways) != len(CHAIN) - 1:
        fail(
            f"for a budget of {budget:,} numbers it returned {brief(ways)}.",
            expected=f'{len(CHAIN) - 1} times "columns", "rows" or "whole"',
        )
    if (its := held(ways, CHAIN, RANKS)) > budget:
        fail(
            f"for a budget of {budget:,} numbers, a rank holds {its:,}.",
            hint='A layer that is "whole" is held whole by every rank.',
        )
