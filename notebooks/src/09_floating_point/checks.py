"""Checks of lab 09, "Floating point"."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, fail, kind, plain
from labkit.course.ranks import alone, alone_for_each, run
from labkit.precision.formats import Format, decimal

from .scenarios import (
    BEST_MILLIONTHS,
    BITS,
    CASES,
    codebook_error,
    run_gather,
    run_sum,
    sample,
    shard,
    uniform_levels,
)

FORMATS = [Format("fp16", 5, 10), Format("bf16", 8, 7), Format("e5m2", 5, 2), Format("e3m4", 3, 4)]


# ---- decode(bits, exponent_bits, fraction_bits)


@exercise(points=2)
def decode(student: Student) -> Iterator[str]:
    """decode(bits, exponent_bits, fraction_bits): the value of a bit pattern, as a float."""
    for fmt in FORMATS:
        patterns = _patterns(fmt)
        cases = [(p, fmt.exponent_bits, fmt.fraction_bits) for p in patterns]
        returned = map(plain, alone_for_each(student, cases))
        for pattern, value in zip(patterns, returned):
            expected = float(fmt.decode(pattern))
            if not _same(value, expected):
                fail(
                    f"{_format_text(fmt)}: you decode {pattern:0{fmt.width_bits}b} as "
                    f"{_value_text(value)}.",
                    expected=_value_text(expected),
                    hint=_decode_hint(fmt, fmt.kind(pattern), value, expected),
                )
    yield "normal numbers, subnormals, both zeros, infinities and NaN of fp16, bf16 and e5m2"
    yield "all 256 patterns of e5m2 and of e3m4"


def _patterns(fmt: Format) -> list[int]:
    """All 8-bit patterns; for 16 bits, the edge cases and every 15th pattern."""
    f, sign = fmt.fraction_bits, 1 << (fmt.width_bits - 1)
    top = (2**fmt.exponent_bits - 1) << f
    edges = [0, 1, 2**f - 1, 2**f, fmt.bias << f, top - 1, top, top + 1, sign - 1]
    every = range(0, 2 * sign, 1 if fmt.width_bits == 8 else 15)
    return [*edges, *(edge + sign for edge in edges), *every]


def _decode_hint(fmt: Format, category: str, returned: Any, expected: float) -> str:
    if not isinstance(returned, (int, float)):
        return "Return a float in every case: math.inf and math.nan are floats."
    if returned == -expected:
        return "The sign is the highest bit; in -0.0 it is set, too."
    match category:
        case "zero" | "subnormal":
            return "If the exponent is 0, which bit is before the point, and which power of 2?"
        case "infinity" | "nan":
            return "The highest exponent is reserved: what do zero and nonzero fractions mean?"
    return f"The bias is 2^(e-1) - 1, here {fmt.bias}."


# ---- nearest(x, exponent_bits, fraction_bits)


@exercise(points=2)
def nearest(student: Student) -> Iterator[str]:
    """nearest(x, exponent_bits, fraction_bits): x rounded to the format, ties to even."""
    for fmt in FORMATS:
        cases = [(x, fmt.exponent_bits, fmt.fraction_bits) for x in _values_to_round(fmt)]
        returned = map(plain, alone_for_each(student, cases))
        for x, value in zip(_values_to_round(fmt), returned):
            expected = float(fmt.round(x))
            if not _same(value, expected):
                fail(
                    f"{_format_text(fmt)}: you round {x!r} to {_value_text(value)}.",
                    expected=_value_text(expected),
                    hint=_nearest_hint(fmt, x, value, expected),
                )
    yield "the nearest number in four formats, ties to even"
    yield "subnormals, underflow, overflow, and both signs"


def _values_to_round(fmt: Format) -> list[float]:
    """Values at and near midpoints of neighbors: near 1, powers of 2 and both ends of the range."""
    largest, normal = float(fmt.largest), float(fmt.smallest_normal)
    places = [0.75, 1.0, 1.5, 3.0, 2 - float(fmt.epsilon), normal * 2, normal, normal / 2, largest]
    values = [0.0, float(fmt.smallest_subnormal) / 2, float(fmt.smallest_subnormal) * 0.51]
    for place in places:
        step = float(fmt.ulp(place))
        values += [place + part * step for part in (0.0, 0.49, 0.5, 0.51, 1.5)]
    values += [largest * 2, math.inf]
    return [sign * x for x in values for sign in (1.0, -1.0)]


def _nearest_hint(fmt: Format, x: float, returned: Any, expected: float) -> str:
    if not isinstance(returned, (int, float)):
        return f"Return a number, not {kind(returned)}."
    if math.isinf(expected):
        return "A result that is beyond the largest number, once rounded, is infinity."
    if math.isnan(returned):
        return "The result is NaN: which division or subtraction gives it?"
    finite = math.isfinite(returned)
    if finite and abs(x) < fmt.smallest_normal and Fraction(returned) % fmt.smallest_subnormal:
        return "Below the smallest normal number, the step stays at 2^(1 - bias - f)."
    if _same(abs(returned), abs(expected)):
        return "Keep the sign, also that of -0.0 (math.copysign)."
    step = fmt.ulp(min(abs(x), float(fmt.largest)))
    steps = abs(x) / float(step)
    if steps % 1 == 0.5:
        return "x is halfway between two numbers: take the one whose last bit is 0."
    return f"Count in steps: a step is {decimal(step)} here, and x is {steps:.4g} steps."


# ---- my_sum(values, add, sub)

MOST_CALLS = 8  # 6 more calls recover the rounding error of an addition


@exercise(points=2)
def my_sum(student: Student) -> Iterator[str]:
    """my_sum(values, add, sub): the sum of fp16 numbers, with only fp16 add and sub."""
    for name, values in CASES.items():
        total, is_result, calls = run(1, run_sum, student, values).values[0]
        if not isinstance(total, (int, float)):
            fail(f"{name}: you returned {kind(total)}.", expected="a result of add or sub")
        exact, size = math.fsum(values), math.fsum(map(abs, values))
        if not is_result:
            fail(
                f"{name}: {brief(total)} is not a result of add or sub.",
                expected="a result of add(a, b) or sub(a, b), which round to fp16 like a GPU",
                hint="Python's + computes in fp64: use add and sub.",
            )
        if calls > MOST_CALLS * len(values):
            fail(
                f"{name}: {calls:,} calls of add and sub for {len(values):,} numbers.",
                expected=f"at most {MOST_CALLS} per number, so {MOST_CALLS * len(values):,}",
            )
        allowed = math.log2(len(values)) * 2**-11 * size
        if not abs(total - exact) <= allowed:
            hint = "The error of an addition is sub(sub(new, old), x): correct the next x by it."
            if abs(total) < abs(exact) / 2:
                hint = "Once the sum is so large that its step is over twice x, x is lost. " + hint
            fail(
                f"{name}: your sum is {total:g}, off by {abs(total - exact):.3g}.",
                expected=f"{exact:.6g}, off by at most {allowed:.2g}: log2(n) · 2^-11 · sum of |x|",
                hint=hint,
            )
    yield f"{len(CASES)} sums of thousands of fp16 numbers, within log2(n) · 2^-11 · sum of |x|"
    yield f"with fp16 additions and subtractions only, at most {MOST_CALLS} per number"


# ---- gather_int8(comm, x, block)


@exercise(points=3)
def gather_int8(student: Student) -> Iterator[str]:
    """gather_int8(comm, x, block): all ranks' x, sent as one byte per element."""
    for size, block in ((3, 16), (2, 64)):
        ran = run(size, run_gather, student, block)
        whole = torch.cat([shard(rank) for rank in range(size)])
        absmax = whole.view(-1, block).abs().amax(dim=1).repeat_interleave(block)
        for rank, returned in enumerate(ran.values):
            if not isinstance(returned, torch.Tensor) or returned.shape != whole.shape:
                fail(
                    f"on {size} ranks, rank {rank} returned {kind(returned)}.",
                    expected=f"a tensor of shape {tuple(whole.shape)}: all ranks' elements",
                )
            if returned.dtype != torch.float32:
                fail(f"rank {rank} returned {returned.dtype}.", expected="torch.float32")
            off = (returned - whole).abs() / absmax.clamp(min=1e-30)
            worst = int(off.nan_to_num(torch.inf).argmax())
            if not off[worst] <= 1 / 254 * 1.001:
                fail(
                    f"on {size} ranks, rank {rank} turned {float(whole[worst]):g} into "
                    f"{float(returned[worst]):g}.",
                    expected=f"an error of at most half a step: {float(absmax[worst]):g} / 254",
                    hint=_int8_hint(returned[worst], whole[worst], absmax[worst], size),
                )
        numel = len(shard(0))
        expected_bytes = (size - 1) * (numel + 4 * numel // block)
        if max(ran.sent_bytes) > expected_bytes:
            fail(
                f"a rank sends {max(ran.sent_bytes):,.0f} bytes to {size - 1} other ranks.",
                expected=f"{expected_bytes:,}: 1 byte per element, 4 per block; fp32 would take "
                f"{(size - 1) * 4 * numel:,}",
                hint="What is the dtype of the tensor that you send?",
            )
    yield "every element within half a step of its block, on 2 and 3 ranks"
    yield "each rank sends (n-1) · (numel + 4 · blocks) bytes: about a quarter of fp32"


def _int8_hint(
    returned: torch.Tensor, expected: torch.Tensor, absmax: torch.Tensor, size: int
) -> str:
    if returned.isnan():
        return "Where does a NaN come from? A block may be all zero."
    if returned == 0 and absmax > 0:
        return "The scale of another block rounds it to 0: use a separate scale for each block."
    if (returned - expected).abs() < absmax / 100:
        return (
            "Do you round to the nearest level? A cast to int8 truncates. And how many levels are "
            "there?"
        )
    if returned * expected < 0:
        return "An int8 ranges from -128 to 127; values beyond this range wrap around."
    return f"Which rank's scales do you use? The blocks come from {size} ranks."


# ---- codebook(sample)


@exercise(points=3)
def codebook(student: Student) -> Iterator[str | Score]:
    """codebook(sample): 16 levels for 4-bit numbers."""
    returned = alone(student, sample(seed=0))
    listed = isinstance(returned, (list, tuple, torch.Tensor, np.ndarray)) and np.shape(returned)
    levels = [plain(x) for x in returned] if listed else []
    if len(levels) != 2**BITS:
        fail(
            f"codebook returned {brief(returned)}.",
            expected=f"{2**BITS} levels, in a list or a tensor: as many as {BITS} bits can encode",
        )
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in levels):
        fail("a level is not a finite number.", found=brief(levels))
    error, equal_error = codebook_error(levels), codebook_error(uniform_levels(sample(seed=0)))
    if error > 0.95 * equal_error:
        fail(
            f"the mean squared error is {error * 1e6:,.0f} millionths of the variance.",
            expected=f"at most 95% of the error of 16 equal steps, {equal_error * 1e6:,.0f} "
            "millionths",
            hint="Most values are small: where does a level reduce the error most?",
        )
    yield f"less error than {2**BITS} equal steps, on values that you have not seen"
    yield Score(round(error * 1e6), BEST_MILLIONTHS, "millionths of the variance lost")


# ---- shared by these checks


def _format_text(fmt: Format) -> str:
    return f"{fmt.exponent_bits} exponent bits, {fmt.fraction_bits} fraction bits"


def _value_text(x: Any) -> str:
    return repr(float(x)) if isinstance(x, (int, float)) else brief(x)


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers are equal, including the sign; NaN equals NaN."""
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return False
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)
