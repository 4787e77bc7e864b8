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
    applied,
    best_plan,
    best_uniform,
    example_input,
    layers,
    right_attention,
    run_attend,
    run_offloaded,
    run_step,
    shared_inputs,
    u_shaped_costs,
)

# ---- Again: forward(ctx, layer, *inputs), backward(ctx, *gradients)


@exercise(points=3)
def Again(student: Student) -> Iterator[str]:
    """Again: a layer that keeps only its inputs and recomputes its forward in backward."""
    (right,) = run(1, run_step, lambda layer, *inputs: layer(*inputs)).values
    (found,) = run(1, run_step, applied(student)).values
    if difference(found["loss"], right["loss"], 1e-6):
        fail(
            f"the loss is {found['loss']:.6g}.",
            expected=f"{right['loss']:.6g}, as without recomputation",
            hint="forward must return the outputs of the layer.",
        )
    kept_bytes = (1 + 2 * len(layers())) * example_input().nbytes
    if found["held_bytes"] > kept_bytes + 20_000:
        fail(
            f"{found['held_bytes']:,} bytes are held between forward and backward.",
            expected=f"about {kept_bytes:,}: two tensors before and after each layer, and "
            "the state of a generator",
            hint="What else does ctx keep alive? Autograd is off inside forward: leave it off.",
        )
    if found["x"] is None or all(gradient is None for gradient in found["gradients"]):
        fail(
            f"{'the input has' if found['x'] is None else 'the weights have'} no gradient.",
            hint="backward returns one gradient for each argument of forward, None for `layer`; "
            "the weights get their gradients when torch.autograd.backward runs through the layer.",
        )
    _compare_gradients(found, right)
    if difference(found["drawn"], right["drawn"], 1e-6):
        fail(
            "after backward, the next random number is not the one drawn without recomputation.",
            expected="the generator in the state that it had before backward",
            hint="You set the generator's state: restore it, too. See torch.random.fork_rng.",
        )
    yield "three layers with dropout and two inputs: loss and gradients as without recomputation"
    yield "only the layers' inputs are held between forward and backward"
    yield "backward leaves the state of the random number generator unchanged"


def _compare_gradients(found: dict[str, Any], right: dict[str, Any]) -> None:
    names = ["the input", *(name for name, _ in layers().named_parameters())]
    all_found, all_right = ([step["x"], *step["gradients"]] for step in (found, right))
    for name, gradient, expected in reversed(list(zip(names, all_found, all_right))):
        if gradient is None:
            fail(f"the gradient of {name} is None.", expected="a gradient for every layer")
        if not (problem := difference(gradient, expected, 1e-5)):
            continue
        hint = "Which mask does dropout draw in the second forward?"
        if not difference(gradient, 2 * expected, 1e-5):
            hint = "It is twice the correct gradient: does backward run through the layer twice?"
        fail(f"the gradient of {name} is {problem}.", hint=hint)


# ---- Away(host, parameters): pack(x), unpack(kept)


@exercise(points=3)
def Away(student: Student) -> Iterator[str]:
    """Away(host, parameters): offloads saved tensors to the host, each storage once."""
    (right,) = run(1, run_offloaded, None).values
    (found,) = run(1, run_offloaded, student).values
    names = ["the input", *(name for name, _ in shared_inputs().named_parameters())]
    for name, gradient, expected in zip(names, found["gradients"], right["gradients"]):
        if problem := "None" if gradient is None else difference(gradient, expected, 1e-6):
            fail(
                f"the gradient of {name} is {problem}.",
                hint="A tensor is a view of a storage: dtype, shape, stride and offset. "
                "And once a storage is freed, another can get the same address.",
            )
    saved = saved_by(shared_inputs(), example_input())
    output_bytes = example_input().nbytes
    once_bytes = sum(tensor.nbytes for tensor in saved) + output_bytes  # the loss keeps the output
    if found["put_bytes"] > once_bytes:
        excess_bytes = found["put_bytes"] - once_bytes
        weight_bytes = sum(p.nbytes for p in shared_inputs().parameters() if p.ndim == 2)
        fail(
            f"you copied {found['put_bytes']:,} bytes to the host.",
            expected=f"{once_bytes:,}: each storage once, and no weights",
            hint="The weights stay on the device. A Linear saves weight.T: the same storage."
            if excess_bytes >= weight_bytes
            else "Three layers save the same input: three tensors share one storage.",
        )
    if found["held_bytes"] > output_bytes + 4_096:
        fail(
            f"{found['held_bytes']:,} bytes stay on the device between forward and backward.",
            expected="at most the output: pack replaces an activation with a key and metadata",
            hint="Autograd keeps everything that pack returns. Does that include the tensor?",
        )
    yield "the same gradients as without offloading"
    yield f"{once_bytes:,} bytes offloaded, each storage once; nothing stays on the device"


# ---- attend(q, tiles)


@exercise(points=3)
def attend(student: Student) -> Iterator[str]:
    """attend(q, tiles): softmax(q kᵀ / √e) v, with one tile of keys and values at a time."""
    peaks = {}
    for count, large in ((1, 1.0), (4, 1.0), (4, 60.0), (16, 1.0)):
        ((out, peaks[count]),) = run(1, run_attend, student, count, large).values
        right = right_attention(count, large)
        where = f"with {count} tile{'s' * (count > 1)}" + " of large scores" * (large > 1)
        if isinstance(out, Tensor) and not bool(torch.isfinite(out).all()):
            fail(
                f"{where}, the result has elements that are inf or nan.",
                hint="exp(100) overflows float32. Subtract the largest score seen so far in the "
                "row.",
            )
        if problem := difference(out, right, 1e-4):
            fail(
                f"{where}, the result is {problem}.",
                hint="If the second tile has a larger score, the sums of the first tile are too "
                "large: by which factor?"
                if count > 1
                else "softmax(q @ k.T / sqrt(e)) @ v, where e is the number of columns of q.",
            )
    if peaks[16] > peaks[4] + 512:
        fail(
            f"16 tiles need a peak memory of {peaks[16]:,} bytes, but 4 tiles only {peaks[4]:,}.",
            expected="the same peak memory: one tile at a time",
            hint=f"Keep no scores, keys or values of a tile ({TILE} keys) when the next tile "
            "begins.",
        )
    yield "equal to softmax(q kᵀ / √e) v, for 1, 4 and 16 tiles and for large scores"
    yield "the same peak memory for 16 tiles as for 4"


# ---- choose(blocks, budget_bytes)


@exercise(points=3)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(blocks, budget_bytes): "none", "selective" or "full" for each layer."""
    costs, total, least, uniform = u_shaped_costs(), 0, 0, 0
    for budget_bytes in BUDGETS_BYTES:
        found = alone(student, [dict(block) for block in costs.blocks], budget_bytes)
        named = isinstance(found, (list, tuple)) and all(
            isinstance(name, str) and name in costs.blocks[0] for name in found
        )
        if not named or len(found) != len(SEQUENCES):
            fail(
                f"for a budget of {budget_bytes / 1e9:g} GB, choose returned {brief(found)}.",
                expected=f"a list of {len(SEQUENCES)} names, each of {', '.join(costs.blocks[0])}",
            )
        plan = plan_of(costs, found)
        if plan.peak_bytes > budget_bytes:
            fail(
                f"for a budget of {budget_bytes / 1e9:g} GB, peak memory is "
                f"{plan.peak_bytes / 1e9:.2f} GB.",
                hint="Each layer needs need_bytes on top of the kept_bytes of all earlier layers.",
            )
        total, least = total + plan.again_flops, least + best_plan(budget_bytes).again_flops
        uniform += best_uniform(budget_bytes).again_flops
    if total >= uniform:
        fail(
            f"for three budgets, {total / 1e9:,.0f} GFLOPs are recomputed.",
            expected=f"fewer than {uniform / 1e9:,.0f}, which one choice for all layers needs",
            hint="Which layer frees the most bytes per recomputed FLOP? Choose that layer first.",
        )
    yield "the plans stay within all three budgets"
    yield Score(round(total / 1e9), round(least / 1e9), "GFLOPs recomputed")
