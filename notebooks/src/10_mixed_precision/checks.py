"""Checks of lab 10, "Mixed precision"."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, kind
from labkit.course.ranks import alone, alone_for_each, run
from labkit.precision.op_policy import CUDA

from .scales import BEST_LOST, TorchGradScaler, scales_of, total_lost
from .scenarios import (
    CASES,
    INTERVALS,
    STEPS,
    infinities,
    initial_weights,
    master_steps,
    right_dtype,
    right_gradients,
    right_masters,
    right_scales,
    run_unscale,
    runs_in_cases,
    student_scales,
)

WHY = {
    "low": "It computes matmuls, most of a step's FLOPs, and accumulates in fp32 anyway.",
    "fp32": "How large can the result become? How small are the elements that it sums?",
    "promote": "All its inputs must have the same dtype. Which dtype loses no precision?",
}
ELEMENTWISE = "It works on each element separately: a cast would only cost time."

# ---- runs_in(op, types, low)


@exercise(points=2)
def runs_in(student: Student) -> Iterator[str]:
    """runs_in(op, types, low): the dtype to which autocast casts the inputs of an op on a GPU."""
    cases = runs_in_cases()
    for (op, types, low), found in zip(cases, alone_for_each(student, cases), strict=True):
        right, same = right_dtype(op, types, low), types[0] if len(set(types)) == 1 else None
        if (right or same) != (found or same):  # casting to the input's dtype changes nothing
            fail(
                f"for {op} with {' and '.join(map(_short, types))} inputs, "
                f"you return {_short(found)}.",
                expected=_short(right),
                hint=WHY.get(CUDA.of(op), ELEMENTWISE),
            )
    yield "12 ops, in bf16 and in fp16: the same dtypes as torch's autocast on a GPU"


def _short(dtype: Any) -> str:
    return "None (no cast)" if dtype is None else str(dtype).removeprefix("torch.")


# ---- update(scale, good, found_inf, interval)


@exercise(points=2)
def update(student: Student) -> Iterator[str]:
    """update(scale, good, found_inf, interval): the scale and the count for the next step."""
    for interval in INTERVALS:
        before, steps = (2.0**16, 0), alone(student_scales, student, interval)
        for inf, found, right in zip(infinities(interval), steps, right_scales(interval)):
            if tuple(found) != right:
                what = "a step with an inf" if inf else "a good step"
                fail(
                    f"with interval={interval} and (scale, good) = {before}, after {what} "
                    f"you return {brief(found)}.",
                    expected=right,
                    hint="An inf changes both. After a good step, which one changes, and when?",
                )
            before = right
    yield "the same scales as torch.amp.GradScaler, over 60 steps for each of 3 intervals"


# ---- unscale(comm, pieces, scale)


@exercise(points=3)
def unscale(student: Student) -> Iterator[str]:
    """unscale(comm, pieces, scale): the gradients of a step in fp32, or None on all ranks."""
    for size in (2, 3):
        for case, (bad_rank, _) in CASES.items():
            ran = run(size, run_unscale, student, case)
            for rank, found in enumerate(ran.values):
                where = f"on {size} ranks, {case}: rank {rank}"
                if bad_rank >= 0 and found is not None:
                    fail(
                        f"{where} does not skip the step.",
                        expected="None, on every rank",
                        hint="How does a rank learn that another rank has an inf? Do inf and NaN "
                        "survive your reduction?",
                    )
                if bad_rank < 0:
                    _compare_gradients(where, found, right_gradients(rank, size))
            if max(ran.sent_bytes) > 2 * 8:
                fail(
                    f"{where.split(':')[0]}: rank 0 sends {ran.sent_bytes[0]:,.0f} bytes.",
                    expected="one element",
                    hint="What must other ranks know: the gradients, or whether they are finite?",
                )
    yield "with an inf, -inf or NaN on any rank, all ranks skip the step, on 2 and 3 ranks"
    yield "finite gradients are unscaled exactly in fp32, even if a rank has no gradients"
    yield "each rank sends one element"


def _compare_gradients(where: str, found: Any, right: list[torch.Tensor]) -> None:
    if found is None:
        fail(f"{where} skips the step.", expected="its gradients, divided by the scale")
    if not isinstance(found, (list, tuple)):
        fail(f"{where} returned {kind(found)}.", expected="a list of tensors, one per gradient")
    if problem := difference(list(found), right, 1e-7):
        hint = "Return a list of tensors, one per gradient." if len(found) != len(right) else ""
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in found):
            hint = "What is 2⁻⁹ / 65536 in fp16? Cast first, then divide."
        fail(f"{where} returned {problem}.", hint=hint)


# ---- master_step(parameters, masters, lr)


@exercise(points=2)
def master_step(student: Student) -> Iterator[str]:
    """master_step(parameters, masters, lr): one step of SGD on fp32 copies of bf16 weights."""
    weights, masters = alone(master_steps, student)
    for found, right, before in zip(masters, right_masters(), initial_weights()):
        if found.dtype != torch.float32:
            fail(f"after {STEPS} steps, a master is {found.dtype}.", expected="torch.float32")
        if problem := difference(found, right, 1e-6):
            hint = "In which dtype is lr · gradient computed? Is a master recomputed from p?"
            if torch.equal(found, before.float()):
                hint = "The masters have not changed: update the tensors in `masters` in place."
            fail(f"after {STEPS} steps, a master is {problem}.", hint=hint)
    for found, right in zip(weights, right_masters()):
        if problem := difference(found, right.bfloat16(), 0.0):
            fail(
                f"after {STEPS} steps, a weight is {problem}.",
                expected="the masters, rounded to bfloat16",
                hint="Which line copies the masters back to the weights?",
            )
    yield f"the masters are exact after {STEPS} steps, each too small for bf16 alone"
    yield "the weights are the masters, rounded to bf16"


# ---- Chooser()


@exercise(points=3)
def Chooser(student: Student) -> Iterator[str | Score]:
    """Chooser(): the scale for each step of a run; as few gradients as possible should be lost."""
    scales = alone(scales_of, student)
    for step, scale in enumerate(scales):
        usable = isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0
        if not usable:
            what = brief(scale) if isinstance(scale, (int, float)) else kind(scale)
            fail(f"at step {step} the scale is {what}.", expected="a finite number above 0")
    found, torchs = total_lost(scales), total_lost(scales_of(TorchGradScaler))
    if found >= torchs:
        fail(
            f"{found:,} of {10_000 * len(scales):,} gradients are lost.",
            expected=f"fewer than {torchs:,}, which GradScaler(growth_interval=20) loses",
            hint="How far is the largest gradient from 65504? How much may it grow in one step?",
        )
    yield "a scale for each of 400 steps"
    yield Score(found, BEST_LOST, "of 4,000,000 gradients lost")
