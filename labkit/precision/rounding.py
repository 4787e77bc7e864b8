"""A tensor rounded to any number format, on the CPU or a GPU, without a loop.

    x       1.3  = 2^0 × 1.3         its exponent, read from the bits of fp64
    step    2^(0 - 2) = 0.25         with 2 fraction bits: a power of two, so that dividing is exact
    1.3 / 0.25 = 5.2  ->  5 steps  ->  1.25

fp64 has room for every number of the formats that are shorter. Exactly the same by fractions, one
number at a time: `Format.round` (formats.py).
"""

import math

import torch

from labkit.precision.formats import Format, format_of


def rounded(x: torch.Tensor, format: Format | str, saturate: bool | None = None) -> torch.Tensor:
    """`x`, each number the nearest of the format (ties to even), in the dtype that `x` has.

    As `Format.round`, for tensors: also for formats without a dtype (tf32, or one of your own).
    fp64 and those with more bits change nothing. Raises ValueError for a tensor that is not
    floating-point, and for a format with the range of fp64 and fewer fraction bits.
    """
    chosen = format_of(format)
    if not x.is_floating_point():
        raise ValueError(f"rounded({x.dtype}): only floating-point tensors; convert it: x.float()")
    if chosen.exponent_bits >= 11 and chosen.fraction_bits >= 52:
        return x.detach().clone()
    if chosen.exponent_bits >= 11:
        raise ValueError(
            f"rounded: {chosen.name} has {chosen.exponent_bits} exponent bits, and its steps may "
            "be too small for fp64; take at most 10, or Format.round for single numbers"
        )
    wide = x.detach().double()
    exponent = ((wide.view(torch.int64) >> 52) & 0x7FF) - 1023
    step = _power_of_two(exponent.clamp(min=chosen.min_exponent) - chosen.fraction_bits)
    y = torch.round(wide / step) * step  # torch rounds halves to even
    largest = float(chosen.largest)
    beyond = largest if chosen._saturates(saturate) else math.inf if chosen.infinities else math.nan
    return torch.where(y.abs() > largest, y.sign() * beyond, y).to(x.dtype)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp64, exactly: written into the exponent field of 1.0."""
    return ((exponent + 1023) << 52).view(torch.float64)
