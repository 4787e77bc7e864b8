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
    budget_elements,
    held,
    in_turns,
    run_chain,
    sent_bytes,
)
from .scenarios import (
    CE_TOKENS,
    TOKENS,
    WIDTH,
    ColumnRun,
    right_column,
    right_cross_entropy,
    right_mlp,
    run_column,
    run_cross_entropy,
    run_mlp,
    whole_mlp,
)

TOLERANCE = 1e-5


def deviation(found: Any, right: Tensor) -> str:
    """How a tensor is wrong, such as "2 × the correct tensor" for a multiple."""
    if isinstance(found, Tensor) and found.shape == right.shape:
        factor = float((found * right).sum() / right.square().sum())
        if factor and not difference(found, right * round(factor, 3), 1e-3):
            return f"{factor:.3g} × the correct tensor"
    return difference(found, right, TOLERANCE)


# ---- Column: forward(ctx, comm, x, weight), backward(ctx, dy)


@exercise(points=3)
def Column(student: Student) -> Iterator[str]:
    """Column: a column-parallel matmul; in backward, a second matmul hides the all-reduce."""
    for size in (2, 3):
        ran = run(size, run_column, student)
        for rank, result in enumerate(ran.values):
            _column_results(size, rank, result)
            _column_overlap(rank, result)
    yield "this rank's features of y, dx, and this rank's shard of dA, on 2 and 3 ranks"
    yield "no communication in forward, one all-reduce in backward"
    yield "the all-reduce overlaps the computation of dA"


def _column_results(size: int, rank: int, result: ColumnRun) -> None:
    y, dx, dweight = right_column(size, rank)
    if problem := difference(result.y, y, TOLERANCE):
        fail(
            f"on {size} ranks, rank {rank}'s output is {problem}.",
            hint="Forward sends nothing: multiply x by this rank's shard, which is stored as "
            "[out/t, in].",
        )
    for name, found, right in (("x", result.dx, dx), ("the weight", result.dweight, dweight)):
        if found is None:
            fail(
                f"rank {rank} has no gradient of {name}.",
                hint="backward returns one gradient for each argument of forward: None for comm.",
            )
        if difference(found, right, TOLERANCE):
            hint = "Each rank's columns give a partial sum of dx. Where are they summed?"
            if name != "x":
                hint = "Each rank needs only dA of its columns: transposed, like the weight."
            fail(
                f"on {size} ranks, rank {rank}'s gradient of {name} is {deviation(found, right)}.",
                hint=hint,
            )


def _column_overlap(rank: int, result: ColumnRun) -> None:
    if result.forward_ops or result.backward_ops != ["all_reduce"]:
        fail(
            f"rank {rank} calls {brief(result.forward_ops)} in forward and "
            f"{brief(result.backward_ops)} in backward.",
            expected="[] in forward, ['all_reduce'] in backward",
        )
    started, waited = result.matmuls[-1] if result.matmuls else (0, 0)
    if not started or waited:
        what = "has already waited for" if started else "has not yet started"
        fail(
            f"rank {rank} {what} its all-reduce when it computes its last matmul in backward.",
            expected="the all-reduce of dx runs while dA is computed",
            hint="First dx, then comm.all_reduce(dx, async_op=True), then dA, then wait.",
        )


# ---- mlp(comm, x, up, down)


@exercise(points=3)
def mlp(student: Student) -> Iterator[str]:
    """mlp(comm, x, up, down): a sharded MLP, with f and g; each bias is added once."""
    for size in (1, 2, 3):
        ran, where = run(size, run_mlp, student), f"on {size} rank{'s' * (size > 1)}"
        for rank, (y, gradients) in enumerate(ran.values):
            right_y, right = right_mlp(size, rank)
            if difference(y, right_y, TOLERANCE):
                fail(
                    f"{where}, rank {rank}'s output is {difference(y, right_y, TOLERANCE)}.",
                    hint=_why_output(y, right_y, size),
                )
            names = ["x", "up.weight", "up.bias", "down.weight", "down.bias"]
            for name, found, expected in zip(names, gradients, right):
                if found is None:
                    fail(
                        f"{where}, rank {rank} has no gradient of {name}.",
                        hint="autograd does not record comm.all_reduce; it does record g.",
                    )
                if difference(found, expected, TOLERANCE):
                    hint = "Which of f and g sends in backward? Each rank has all of y's gradient."
                    if name == "x":
                        hint = "Each rank has a partial sum of dx. Which operator adds them up?"
                    problem = deviation(found, expected)
                    fail(
                        f"{where}, rank {rank}'s gradient of {name} is {problem}.",
                        hint=hint,
                    )
        _two_all_reduces(size, ran)
    yield "the same output and gradients as one process, on 1, 2 and 3 ranks"
    yield "two all-reduces of x's size, one in forward and one in backward"


def _why_output(y: Any, right: Tensor, size: int) -> str:
    """A hint that depends on how the output is wrong."""
    bias = whole_mlp()[2].bias.detach()
    if isinstance(y, Tensor) and y.shape == right.shape:
        if not difference(y, right + (size - 1) * bias, 1e-4):
            return f"The excess is {size - 1} × the bias of `down`: how many ranks add the bias?"
        if not difference(y, right - bias, 1e-4):
            return "The bias of `down` is missing."
        if not difference(y, right - (size - 1) / size * bias, 1e-4):
            return f"Only 1/{size} of the bias of `down` is added."
    return "Ranks do not communicate between the matmuls; after the second, sum over the ranks."


def _two_all_reduces(size: int, ran: Ran) -> None:
    expected_bytes = 2 * 2 * (size - 1) / size * TOKENS * WIDTH * 4
    for rank, sent in enumerate(ran.sent_bytes):
        if abs(sent - expected_bytes) > 16:
            fail(
                f"on {size} ranks, rank {rank} sends {sent:,.0f} bytes, with {ran.ops[rank]}.",
                expected=f"{expected_bytes:,.0f}: an all-reduce of y in forward, one of dx in "
                "backward",
                hint="The bias's gradient needs no communication: every rank has y's gradient.",
            )


# ---- own_rows(heads, kv_heads, head_width, ranks, rank)

# (heads, key-value heads, head width, ranks): per rank, (begin, end) of the rows of q, k and v.
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
    for (heads, kv_heads, e, ranks), rows_of_ranks in PACKED.items():
        for rank, ranges in enumerate(rows_of_ranks):
            found = alone(student, heads, kv_heads, e, ranks, rank)
            right = [row for begin, end in ranges for row in range(begin, end)]
            with suppress(TypeError, ValueError):  # accept a tensor, an array or a range
                found = [int(x) for x in found]
            if found == right:
                continue
            hint = "q, k and v follow one another: split each one separately, by its heads."
            if isinstance(found, list) and sorted(map(str, found)) == sorted(map(str, right)):
                hint = "These are the right rows in the wrong order: q, then k, then v."
            fail(
                f"with {heads} heads and {kv_heads} key-value heads of {e} features on {ranks} "
                f"ranks, rank {rank} has the wrong rows.",
                expected=brief(right),
                found=brief(found),
                hint=hint,
            )
    yield "q split by heads, k and v by key-value heads, even if there are fewer of the latter"
    yield "each row of each head is on exactly one rank, for 1, 2 and 3 ranks"


# ---- cross_entropy(comm, logits, targets)


@exercise(points=3)
def cross_entropy(student: Student) -> Iterator[str]:
    """cross_entropy(comm, logits, targets): the loss of logits that are sharded over the ranks."""
    for size, large in ((1, 1.0), (2, 1.0), (3, 1.0), (2, 80.0)):
        ran = run(size, run_cross_entropy, student, large)
        where = f"on {size} rank{'s' * (size > 1)}" + ", with large logits" * (large > 1)
        for rank, (value, gradient) in enumerate(ran.values):
            right, right_gradient = right_cross_entropy(size, rank, large)
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                fail(
                    f"{where}, rank {rank}'s loss is {float(value.sum()):g}.",
                    hint="exp(100) overflows float32. Subtract each token's largest logit over all "
                    "ranks.",
                )
            if problem := difference(value, right, 1e-4):
                fail(
                    f"{where}, rank {rank}'s loss is {problem}.",
                    hint="The loss is the log of the sum of exp over all ranks' logits, minus the "
                    "target's logit. Which rank has the target's logit?",
                )
            if gradient is None or difference(gradient, right_gradient, 1e-4):
                what = "None" if gradient is None else deviation(gradient, right_gradient)
                fail(
                    f"{where}, the gradient of rank {rank}'s logits is {what}.",
                    hint="autograd does not record comm.all_reduce; it does record g, "
                    "reduce_from_ranks.",
                )
        most = 3 * 2 * (size - 1) / size * CE_TOKENS * 4 + 32
        if max(ran.sent_bytes) > most:
            fail(
                f"{where}, a rank sends {max(ran.sent_bytes):,.0f} bytes.",
                expected=f"{most - 32:,.0f}: three elements for each of {CE_TOKENS} tokens",
                hint="The largest logit, the sum, the target's logit. Backward sends nothing.",
            )
    yield "the loss and gradients of F.cross_entropy on 1, 2 and 3 ranks, even for large logits"
    yield "three elements sent per token"


# ---- choose_cuts(widths, ranks, budget)


@exercise(points=3)
def choose_cuts(student: Student) -> Iterator[str | Score]:
    """choose_cuts(widths, ranks, budget): "columns", "rows" or "whole" for each layer."""
    total, alternating = 0, len(BUDGETS) * sent_bytes(in_turns())
    for part in BUDGETS:
        ways = alone(student, CHAIN, RANKS, budget_elements(part))
        _check_budget(ways, budget_elements(part))
        ran = run(RANKS, run_chain, list(ways))
        total += round(ran.sent_bytes[0])
    if total >= alternating:
        fail(
            f"for all budgets together, a rank sends {total:,} bytes.",
            expected=f"fewer than {alternating:,.0f}, which alternating columns and rows send",
            hint="Where is the chain narrow? Communicate there.",
        )
    yield "all budgets met, with fewer bytes on 2 ranks than alternating columns and rows"
    yield Score(total, BEST_BYTES, "bytes sent by a rank")


def _check_budget(ways: Any, budget: int) -> None:
    names = isinstance(ways, Sequence) and all(way in WAYS for way in ways)
    if not names or isinstance(ways, str) or len(ways) != len(CHAIN) - 1:
        fail(
            f"for a budget of {budget:,} elements, choose_cuts returned {brief(ways)}.",
            expected=f'a list of {len(CHAIN) - 1}, each "columns", "rows" or "whole"',
        )
    if (elements := held(ways, CHAIN, RANKS)) > budget:
        fail(
            f"for a budget of {budget:,} elements, a rank holds {elements:,} elements.",
            hint='Every rank holds all elements of a layer that is "whole".',
        )
