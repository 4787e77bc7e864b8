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
    added_up,
    codebook_error,
    gathered,
    sample,
    shard,
    uniform_levels,
)

FORMATS = [Format("fp16", 5, 10), Format("bf16", 8, 7), Format("e5m2", 5, 2), Format("mine", 3, 4)]


# ---- decode(bits, exponent_bits, fraction_bits)


@exercise(points=2)
def decode(student: Student) -> Iterator[str]:
    """decode(bits, exponent_bits, fraction_bits): the number of a pattern, as a float."""
    for one in FORMATS:
        patterns = _patterns(one)
        cases = [(p, one.exponent_bits, one.fraction_bits) for p in patterns]
        found = map(plain, alone_for_each(student, cases))
        for pattern, its in zip(patterns, found):
            right = float(one.decode(pattern))
            if not _same(its, right):
                fail(
                    f"{_named(one)}: {pattern:0{one.width_bits}b} is {_written(its)} for you.",
                    expected=_written(right),
                    hint=_hint(one, one.kind(pattern), its, right),
                )
    yield "normal numbers, subnormals, both zeros, infinities and NaN of fp16, bf16 and e5m2"
    yield "all 256 patterns of a format that nobody has"


def _patterns(one: Format) -> list[int]:
    """All patterns of 8 bits; of 16 bits, those at the edges and some thousand others."""
    f, sign = one.fraction_bits, 1 << (one.width_bits - 1)
    top = (2**one.exponent_bits - 1) << f
    edges = [0, 1, 2**f - 1, 2**f, one.bias << f, top - 1, top, top + 1, sign - 1]
    every = range(0, 2 * sign, 1 if one.width_bits == 8 else 15)
    return [*edges, *(edge + sign for edge in edges), *every]


def _hint(one: Format, what: str, found: Any, right: float) -> str:
    if not isinstance(found, (int, float)):
        return "Return a number, also for what is none: math.inf and math.nan are floats."
    if found == -right:
        return "The sign is the first bit of all, and -0.0 is a number, too."
    match what:
        case "zero" | "subnormal":
            return "Where the exponent field is 0: which bit stands before the point, which power?"
        case "infinity" | "nan":
            return (
                "The highest exponent is kept: what does a fraction of 0 mean there, what others?"
            )
    return f"The bias is half of the exponents, 2^(e-1) - 1: here {one.bias}."


# ---- nearest(x, exponent_bits, fraction_bits)


@exercise(points=2)
def nearest(student: Student) -> Iterator[str]:
    """nearest(x, exponent_bits, fraction_bits): x rounded to the format, ties to even."""
    for one in FORMATS:
        cases = [(x, one.exponent_bits, one.fraction_bits) for x in _to_round(one)]
        found = map(plain, alone_for_each(student, cases))
        for x, its in zip(_to_round(one), found):
            right = float(one.round(x))
            if not _same(its, right):
                fail(
                    f"{_named(one)}: {x!r} becomes {_written(its)} for you.",
                    expected=_written(right),
                    hint=_why(one, x, its, right),
                )
    yield "the nearest number in four formats, and the even one of two that are as near"
    yield "subnormals, what is too small, what is too large, and both signs"


def _to_round(one: Format) -> list[float]:
    """Values halfway between two numbers and beside it: at 1, at the seams, at both ends."""
    largest, normal = float(one.largest), float(one.smallest_normal)
    places = [0.75, 1.0, 1.5, 3.0, 2 - float(one.epsilon), normal * 2, normal, normal / 2, largest]
    found = [0.0, float(one.smallest_subnormal) / 2, float(one.smallest_subnormal) * 0.51]
    for place in places:
        step = float(one.ulp(place))
        found += [place + part * step for part in (0.0, 0.49, 0.5, 0.51, 1.5)]
    found += [largest * 2, math.inf]
    return [sign * x for x in found for sign in (1.0, -1.0)]


def _why(one: Format, x: float, found: Any, right: float) -> str:
    if not isinstance(found, (int, float)):
        return f"A number is wanted, not {kind(found)}."
    if math.isinf(right):
        return "Past the largest number, rounded, there is only infinity."
    if math.isnan(found):
        return "That is no number: what did you divide, or take away, there?"
    finite = math.isfinite(found)
    if finite and abs(x) < one.smallest_normal and Fraction(found) % one.smallest_subnormal:
        return "Below the smallest normal number the step gets no smaller: 2^(1 - bias - f)."
    if _same(abs(found), abs(right)):
        return "The sign: -0.0 is a number, too (math.copysign)."
    step = one.ulp(min(abs(x), float(one.largest)))
    steps = abs(x) / float(step)
    if steps % 1 == 0.5:
        return "It lies in the middle of two: take the one whose last bit is 0."
    return f"Count in steps: here one is {decimal(step)}, and {steps:.4g} of them make x."


# ---- my_sum(values, add, sub)

MOST_CALLS = 8  # 6 more calls recover what an addition loses


@exercise(points=2)
def my_sum(student: Student) -> Iterator[str]:
    """my_sum(values, add, sub): the sum of fp16 numbers, with fp16 additions only."""
    for name, values in CASES.items():
        found, made, calls = run(1, added_up, student, values).values[0]
        if not isinstance(found, (int, float)):
            fail(f"{name}: you return {kind(found)}.", expected="one of the numbers of add or sub")
        exact, size = math.fsum(values), math.fsum(map(abs, values))
        if not made:
            fail(
                f"{name}: {brief(found)} came out of no add or sub.",
                expected="a result of add(a, b) or sub(a, b), which round to fp16 as a GPU does",
                hint="Python's own + is fp64: then there is nothing to solve.",
            )
        if calls > MOST_CALLS * len(values):
            fail(
                f"{name}: {calls:,} additions for {len(values):,} numbers.",
                expected=f"at most {MOST_CALLS} for each, so {MOST_CALLS * len(values):,}",
            )
        allowed = math.log2(len(values)) * 2**-11 * size
        if not abs(found - exact) <= allowed:
            hint = "What an addition loses is sub(sub(new, old), x): keep it for the next one."
            if abs(found) < abs(exact) / 2:
                hint = "At some point the sum is so large that a step is over twice an x. " + hint
            fail(
                f"{name}: you have {found:g}, off by {abs(found - exact):.3g}.",
                expected=f"{exact:.6g}, off by {allowed:.2g} at most: log2(n) · 2^-11 · sum of |x|",
                hint=hint,
            )
    yield f"{len(CASES)} sums of thousands of fp16 numbers, to log2(n) · 2^-11 of their sizes"
    yield f"with nothing but additions and subtractions in fp16, {MOST_CALLS} a number at most"


# ---- gather_int8(comm, x, block)


@exercise(points=3)
def gather_int8(student: Student) -> Iterator[str]:
    """gather_int8(comm, x, block): all ranks' x, sent as one byte per element."""
    for size, block in ((3, 16), (2, 64)):
        ran = run(size, gathered, student, block)
        whole = torch.cat([shard(rank) for rank in range(size)])
        absmax = whole.view(-1, block).abs().amax(dim=1).repeat_interleave(block)
        for rank, found in enumerate(ran.values):
            if not isinstance(found, torch.Tensor) or found.shape != whole.shape:
                fail(
                    f"on {size} ranks, rank {rank} returns {kind(found)}.",
                    expected=f"a tensor of shape {tuple(whole.shape)}: all ranks' numbers",
                )
            if found.dtype != torch.float32:
                fail(f"rank {rank} returns {found.dtype}.", expected="torch.float32")
            off = (found - whole).abs() / absmax.clamp(min=1e-30)
            worst = int(off.nan_to_num(torch.inf).argmax())
            if not off[worst] <= 1 / 254 * 1.001:
                fail(
                    f"on {size} ranks, rank {rank}: {float(whole[worst]):g} became "
                    f"{float(found[worst]):g}.",
                    expected=f"an error of half a step at most: {float(absmax[worst]):g} / 254",
                    hint=_int8_hint(found[worst], whole[worst], absmax[worst], size),
                )
        numel = len(shard(0))
        right = (size - 1) * (numel + 4 * numel // block)
        if max(ran.sent_bytes) > right:
            fail(
                f"a rank sends {max(ran.sent_bytes):,.0f} bytes to {size - 1} others.",
                expected=f"{right:,}: a byte for each number, 4 for each block; fp32 would be "
                f"{(size - 1) * 4 * numel:,}",
                hint="Which dtype has the tensor that you hand to comm?",
            )
    yield "every number within half a step of its block, on 2 and 3 ranks"
    yield "(n-1) · (numel + 4 · blocks) bytes sent by a rank: about a quarter of fp32"


def _int8_hint(found: torch.Tensor, right: torch.Tensor, absmax: torch.Tensor, size: int) -> str:
    if found.isnan():
        return "Where does a NaN come from? A block may be all zero."
    if found == 0 and absmax > 0:
        return "It is lost beside a number of another block: each block has a scale of its own."
    if (found - right).abs() < absmax / 100:
        return "Rounded to the nearest level? A cast to int8 cuts towards zero. How many levels?"
    if found * right < 0:
        return "An int8 goes from -128 to 127; what is beyond comes out on the other side."
    return f"Whose scales are these? There are blocks of {size} ranks in the result."


# ---- codebook(sample)


@exercise(points=3)
def codebook(student: Student) -> Iterator[str | Score]:
    """codebook(sample): 16 levels for 4-bit numbers."""
    found = alone(student, sample(seed=0))
    listed = isinstance(found, (list, tuple, torch.Tensor, np.ndarray)) and np.shape(found)
    levels = [plain(x) for x in found] if listed else []
    if len(levels) != 2**BITS:
        fail(
            f"you return {brief(found)}.",
            expected=f"{2**BITS} levels, in a list or a tensor: what {BITS} bits can tell apart",
        )
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in levels):
        fail("a level is no finite number.", found=brief(levels))
    error, equal = codebook_error(levels), codebook_error(uniform_levels(sample(seed=0)))
    if error > 0.95 * equal:
        fail(
            f"the mean squared error is {error * 1e6:,.0f} millionths.",
            expected=f"clearly less than the {equal * 1e6:,.0f} of 16 equal steps",
            hint="Most of the numbers are small. Where is a level worth most?",
        )
    yield f"less error than {2**BITS} equal steps, on numbers that you have not seen"
    yield Score(round(error * 1e6), BEST_MILLIONTHS, "millionths of the variance lost")


# ---- what these have in common


def _named(one: Format) -> str:
    return f"{one.exponent_bits} exponent bits, {one.fraction_bits} fraction bits"


def _written(x: Any) -> str:
    return repr(float(x)) if isinstance(x, (int, float)) else brief(x)


def _same(one: Any, other: Any) -> bool:
    """Whether two numbers are equal, including the sign; NaN equals NaN."""
    if not isinstance(one, (int, float)) or not isinstance(other, (int, float)):
        return False
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other and math.copysign(1, one) == math.copysign(1, other)
