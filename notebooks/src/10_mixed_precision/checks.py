"""Checks of lab 10, "Mixed precision"."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, kind
from labkit.course.ranks import alone, alone_for_each, run
from labkit.precision.op_policy import CUDA

from .scales import BEST_LOST, Torchs, lost_in_all, scales_of
from .scenarios import (
    CASES,
    INTERVALS,
    STEPS,
    all_scales,
    asked,
    infinities,
    master_steps,
    right_masters,
    right_pieces,
    right_scales,
    right_type,
    some_weights,
    unscaled,
)

WHY = {
    "low": "It is a product: nearly all of the work, and its sums are in fp32 anyway.",
    "fp32": "How large can its result become, or how small are the numbers that it adds?",
    "promote": "It needs its inputs in one type. Which loses nothing?",
    "input dtype": "It changes each number by itself, by little: a cast would only cost time.",
}

# ---- runs_in(op, types, low)


@exercise(points=2)
def runs_in(student: Student) -> Iterator[str]:
    """runs_in(op, types, low): the dtype to which autocast casts the inputs of an op on a GPU."""
    for (op, types, low), found in zip(asked(), alone_for_each(student, asked()), strict=True):
        right, same = right_type(op, types, low), types[0] if len(set(types)) == 1 else None
        if (right or same) != (found or same):  # a cast to the input's own type is none
            fail(
                f"{op}, whose inputs are {' and '.join(map(_short, types))}: {_short(found)}.",
                expected=_short(right),
                hint=WHY[CUDA.of(op)],
            )
    yield "12 ops, with bf16 and with fp16: the types of torch's autocast on a GPU"


def _short(dtype: Any) -> str:
    return "as they come" if dtype is None else str(dtype).removeprefix("torch.")


# ---- update(scale, good, found_inf, interval)


@exercise(points=2)
def update(student: Student) -> Iterator[str]:
    """update(scale, good, found_inf, interval): the scale and the count for the next step."""
    for interval in INTERVALS:
        before, steps = (2.0**16, 0), alone(all_scales, student, interval)
        for inf, found, right in zip(infinities(interval), steps, right_scales(interval)):
            if tuple(found) != right:
                what = "with an inf" if inf else "that was good"
                fail(
                    f"with interval={interval}, after a step {what}, "
                    f"from (scale, good) = {before}: {brief(found)}.",
                    expected=right,
                    hint="After an inf both change. After a good step: which of them, and when?",
                )
            before = right
    yield "the scales of torch.amp.GradScaler, for 3 intervals and 60 steps each"


# ---- unscale(comm, pieces, scale)


@exercise(points=3)
def unscale(student: Student) -> Iterator[str]:
    """unscale(comm, pieces, scale): the gradients of a step in fp32, or None on all ranks."""
    for size in (2, 3):
        for case, (bad_rank, _) in CASES.items():
            ran = run(size, unscaled, student, case)
            for rank, found in enumerate(ran.values):
                where = f"{size} ranks, {case}: rank {rank}"
                if bad_rank >= 0 and found is not None:
                    fail(
                        f"{where} would step.",
                        expected="None, on every rank",
                        hint="How does a rank learn what another has found? Does inf - and NaN - "
                        "survive the way?",
                    )
                if bad_rank < 0:
                    _finite_pieces(where, found, right_pieces(rank, size))
            if max(ran.sent_bytes) > 2 * 8:
                fail(
                    f"{where.split(':')[0]}: rank 0 sends {ran.sent_bytes[0]:,.0f} bytes.",
                    expected="one number",
                    hint="What must the others know: the gradients, or whether they are finite?",
                )
    yield "inf, -inf and NaN on any rank: no rank steps, on 2 and 3 ranks"
    yield "finite gradients exact in fp32, also beside a rank that has none"
    yield "one number sent"


def _finite_pieces(where: str, found: Any, right: list[torch.Tensor]) -> None:
    if found is None:
        fail(f"{where} skips the step.", expected="its pieces, divided by the scale")
    if not isinstance(found, (list, tuple)):
        fail(f"{where} returned {kind(found)}.", expected="a list of tensors, one for each piece")
    if problem := difference(list(found), right, 1e-7):
        hint = "A list of tensors, one for each piece." if len(found) != len(right) else ""
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in found):
            hint = "What is 2⁻⁹ / 65536 in fp16? First the type, then the division."
        fail(f"{where} returned {problem}.", hint=hint)


# ---- master_step(parameters, masters, lr)


@exercise(points=2)
def master_step(student: Student) -> Iterator[str]:
    """master_step(parameters, masters, lr): one step of SGD on fp32 copies of bf16 weights."""
    weights, masters = alone(master_steps, student)
    for found, right, first in zip(masters, right_masters(), some_weights()):
        if found.dtype != torch.float32:
            fail(f"a master is {found.dtype} after the steps.", expected="torch.float32")
        if problem := difference(found, right, 1e-6):
            hint = "In which type is lr · gradient computed? Does a master begin from p each time?"
            if torch.equal(found, first.float()):
                hint = "They are as they were: change the tensors in `masters` in place."
            fail(f"after {STEPS} steps, a master is {problem}.", hint=hint)
    for found, right in zip(weights, right_masters()):
        if problem := difference(found, right.bfloat16(), 0.0):
            fail(
                f"after {STEPS} steps, the weights are {problem}.",
                expected="the masters, rounded to bfloat16",
                hint="Who gives the model what the masters have?",
            )
    yield f"masters exact after {STEPS} steps, each too small for bf16 alone"
    yield "the weights are the masters, rounded"


# ---- Chooser()


@exercise(points=3)
def Chooser(student: Student) -> Iterator[str | Score]:
    """Chooser(): a scale for each step of a run, so that as few gradients as possible are lost."""
    scales = alone(scales_of, student)
    for step, scale in enumerate(scales):
        usable = isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0
        if not usable:
            what = brief(scale) if isinstance(scale, (int, float)) else kind(scale)
            fail(f"at step {step} the scale is {what}.", expected="a finite number above 0")
    found, torchs = lost_in_all(scales), lost_in_all(scales_of(Torchs))
    if found >= torchs:
        fail(
            f"{found:,} of each 10,000 · {len(scales)} gradients are lost.",
            expected=f"less than {torchs:,}, as GradScaler(growth_interval=20) loses",
            hint="How far is the largest gradient from 65504? How far may it jump?",
        )
    yield "a scale for each of 400 steps"
    yield Score(found, BEST_LOST, "of each 4,000,000 gradients lost")
