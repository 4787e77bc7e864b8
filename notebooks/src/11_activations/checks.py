"""Checks of lab 11, "Activations"."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail
from labkit.course.ranks import alone, run
from labkit.memory.chooser import plan_of
from labkit.memory.saved import saved_by

from .scenarios import (
    BUDGETS_BYTES,
    SEQUENCES,
    TILE,
    attended,
    best,
    in_backward,
    layers,
    one_step,
    right_attention,
    sharing,
    some_input,
    the_same_for_all,
    through,
    u_shaped,
)

# ---- Again: forward(ctx, layer, *inputs), backward(ctx, *gradients)


@exercise(points=3)
def Again(student: Student) -> Iterator[str]:
    """Again: a layer that keeps its inputs, and runs again in backward."""
    (right,) = run(1, one_step, lambda layer, *inputs: layer(*inputs)).values
    (mine,) = run(1, one_step, through(student)).values
    if difference(mine["value"], right["value"], 1e-6):
        fail(
            f"the loss is {mine['value']:.6g}.",
            expected=f"{right['value']:.6g}, as without",
            hint="forward returns what the layer returns.",
        )
    kept_bytes = (1 + 2 * len(layers())) * some_input().nbytes
    if mine["held_bytes"] > kept_bytes + 20_000:
        fail(
            f"{mine['held_bytes']:,} bytes are held between forward and backward.",
            expected=f"about {kept_bytes:,}: two tensors before and after each layer, and "
            "the state of a generator",
            hint="What else hangs on ctx? Inside forward, autograd is off: keep it so.",
        )
    if mine["x"] is None or all(gradient is None for gradient in mine["gradients"]):
        fail(
            "no gradient has come to " + ("the input." if mine["x"] is None else "the weights."),
            hint="backward returns one gradient for each argument of forward, None for `layer`; "
            "the weights get theirs when torch.autograd.backward runs through the layer.",
        )
    _gradients(mine, right)
    if difference(mine["drawn"], right["drawn"], 1e-6):
        fail(
            "after backward, other random numbers are drawn than without recomputation.",
            expected="the generator as it was when backward began",
            hint="You set its state. Who sets it back? Look at torch.random.fork_rng.",
        )
    yield "loss and gradients of three layers with dropout and two inputs, the same as without"
    yield "between forward and backward only the layers' inputs are held"
    yield "afterwards the generator goes on where it was"


def _gradients(mine: dict[str, Any], right: dict[str, Any]) -> None:
    names = ["the input", *(name for name, _ in layers().named_parameters())]
    found = [mine["x"], *mine["gradients"]]
    for name, its, good in reversed(list(zip(names, found, [right["x"], *right["gradients"]]))):
        if its is None:
            fail(f"the gradient of {name} is None.", expected="every layer's, as without")
        if not difference(its, good, 1e-5):
            continue
        hint = "Which mask does dropout draw the second time?"
        if not difference(its, 2 * good, 1e-5):
            hint = "It is twice the right one: how often does backward run through the layer?"
        fail(f"the gradient of {name} is not right: {difference(its, good, 1e-5)}.", hint=hint)


# ---- Away(host, parameters): pack(x), unpack(kept)


@exercise(points=3)
def Away(student: Student) -> Iterator[str]:
    """Away(host, parameters): saved tensors wait on the host, each storage once."""
    (right,) = run(1, in_backward, None).values
    (mine,) = run(1, in_backward, student).values
    names = ["the input", *(name for name, _ in sharing().named_parameters())]
    for name, its, good in zip(names, mine["gradients"], right["gradients"]):
        if its is None or difference(its, good, 1e-6):
            what = "is None" if its is None else f"is not right: {difference(its, good, 1e-6)}"
            fail(
                f"the gradient of {name} {what}.",
                hint="A tensor is its memory, and how it is looked at: type, shape, stride, offset."
                " And an address is free for another tensor as soon as its memory is.",
            )
    saved = saved_by(sharing(), some_input())
    own_bytes = some_input().nbytes
    once_bytes = sum(one.nbytes for one in saved) + own_bytes  # the loss keeps the output
    if mine["put_bytes"] > once_bytes:
        more = mine["put_bytes"] - once_bytes
        parameters = sum(p.nbytes for p in sharing().parameters() if p.ndim == 2)
        fail(
            f"{mine['put_bytes']:,} bytes went to the host.",
            expected=f"{once_bytes:,}: each memory once, and no weights",
            hint="The weights are on the device anyway. A Linear saves weight.T: the same memory."
            if more >= parameters
            else "Three layers save the same input: one memory, three tensors.",
        )
    if mine["held_bytes"] > own_bytes + 4_096:
        fail(
            f"{mine['held_bytes']:,} bytes stay on the device between forward and backward.",
            expected="the output at most: what autograd keeps is to be a ticket",
            hint="Whatever pack returns, autograd keeps. Does the ticket hold the tensor?",
        )
    yield "the gradients are those without"
    yield f"between forward and backward nothing stays; {once_bytes:,} bytes went, each memory once"


# ---- attend(q, tiles)


@exercise(points=3)
def attend(student: Student) -> Iterator[str]:
    """attend(q, tiles): softmax(q kᵀ / √e) v, from one tile of keys and values at a time."""
    peaks = {}
    for count, large in ((1, 1.0), (4, 1.0), (4, 60.0), (16, 1.0)):
        ((out, peaks[count]),) = run(1, attended, student, count, large).values
        right = right_attention(count, large)
        where = f"with {count} tile{'s' * (count > 1)}" + " of large scores" * (large > 1)
        if isinstance(out, Tensor) and not bool(torch.isfinite(out).all()):
            fail(
                f"{where}, there are numbers that are none (inf or nan).",
                hint="exp of 100 is more than float32 holds. Subtract the largest score of the row"
                " that is known so far.",
            )
        if problem := difference(out, right, 1e-4):
            fail(
                f"{where}, the result is {problem}.",
                hint="One tile is a softmax. With a second one that has a larger score, what was "
                "summed before is too large: by which factor?"
                if count > 1
                else "softmax(q @ k.T / sqrt(e)) @ v, with e numbers in a row of q.",
            )
    if peaks[16] > peaks[4] + 512:
        fail(
            f"with 16 tiles {peaks[16]:,} bytes are held at once, with 4 it is {peaks[4]:,}.",
            expected="as many: one tile at a time",
            hint=f"Scores, keys and values of one tile ({TILE} keys), then the next: nothing of it"
            " may be collected.",
        )
    yield "the numbers of softmax(q kᵀ / √e) v, for 1, 4 and 16 tiles, also of large scores"
    yield "no more memory for 16 tiles than for 4"


# ---- choose(blocks, budget_bytes)


@exercise(points=3)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(blocks, budget_bytes): "none", "selective" or "full" for each layer."""
    costs, total, least, plain = u_shaped(), 0, 0, 0
    for budget_bytes in BUDGETS_BYTES:
        found = alone(student, [dict(block) for block in costs.blocks], budget_bytes)
        named = isinstance(found, (list, tuple)) and all(
            isinstance(name, str) and name in costs.blocks[0] for name in found
        )
        if not named or len(found) != len(SEQUENCES):
            fail(
                f"for a budget of {budget_bytes / 1e9:g} GB it returned {brief(found)}.",
                expected=f"{len(SEQUENCES)} times one of {', '.join(costs.blocks[0])}",
            )
        plan = plan_of(costs, found)
        if plan.peak_bytes > budget_bytes:
            fail(
                f"for a budget of {budget_bytes / 1e9:g} GB the peak is "
                f"{plan.peak_bytes / 1e9:.2f} GB.",
                hint="Above what the layers before it keep, each layer needs its need_bytes.",
            )
        total, least = total + plan.again_flops, least + best(budget_bytes).again_flops
        plain += the_same_for_all(budget_bytes).again_flops
    if total >= plain:
        fail(
            f"{total / 1e9:,.0f} billion operations are computed twice, for three budgets.",
            expected=f"fewer than {plain / 1e9:,.0f}, which one choice for all layers needs",
            hint="Which layer gives back the most bytes for an operation? Take that one first.",
        )
    yield "three budgets met"
    yield Score(round(total / 1e9), round(least / 1e9), "billion operations computed twice")
