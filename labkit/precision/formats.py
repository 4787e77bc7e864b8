"""Binary floating-point formats, computed from their bits.

            s exponent fraction
    fp16    0 01111    1000000000     = + 2^(15 - 15) × 1.1000000000 (binary) = 1.5

    exponent field E of e bits, fraction field F of f bits, bias 2^(e - 1) - 1, here 15:

    E = 0           2^(1 - bias) × 0.F      zero and the subnormals, in equal steps
    0 < E < top     2^(E - bias) × 1.F      normal: f + 1 significant bits
    E = top         infinity where F = 0, else NaN
                    (e4m3: normal, too; no infinity; only 1111 111 is NaN)

Positive numbers sort like their bit patterns; rounding up past 1.11...1 carries into the exponent.
`Format` is exact, with Python's integers and fractions; `rounded` is fast and works on tensors.

Sources: IEEE 754-2019, section 3.4, table 3.5 (binary16 to binary128), sections 4.3.1 (ties to
even) and 7.4 (overflow); Intel 64 and IA-32 manual, volume 1, section 4.2.2 (the x87's 80 bits);
Micikevicius et al., arXiv 2209.05433, table 1 (e4m3, e5m2); NVIDIA, "A100 Tensor Core GPU
Architecture", 2020 (tf32; a GPU may round ties away from zero, as PTX's cvt.rna does).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

import torch

Exact = Fraction | float  # -0.0, inf and nan, which Fraction lacks, are floats


class Fields(NamedTuple):
    """Fields of a bit pattern. `leading`: the bit before the point, stored only in x87."""

    sign: int
    exponent: int
    leading: int
    fraction: int


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, then exponent, then fraction.

    infinities    the top exponent means infinity or NaN; if False, only the all-ones pattern is NaN
    leading_bit   the bit before the point is stored, as in x87
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    dtype: torch.dtype | None = None
    infinities: bool = True
    leading_bit: bool = False

    def __post_init__(self) -> None:
        if self.exponent_bits < 2 or self.fraction_bits < 1:
            raise ValueError(
                f"Format {self.name!r}: {self.exponent_bits} exponent bits and "
                f"{self.fraction_bits} fraction bits; use at least 2 and 1"
            )

    # ---- range and resolution

    @property
    def width_bits(self) -> int:
        return 1 + self.exponent_bits + self.leading_bit + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal numbers, and of the subnormals."""
        return 1 - self.bias

    @property
    def epsilon(self) -> Fraction:
        """The distance from 1 to the next larger number."""
        return Fraction(1, 2**self.fraction_bits)

    @property
    def largest(self) -> Fraction:
        return self.number(self._largest_rank)

    @property
    def smallest_normal(self) -> Fraction:
        return Fraction(1, 2**-self.min_exponent)

    @property
    def smallest_subnormal(self) -> Fraction:
        return self.smallest_normal * self.epsilon

    @property
    def count(self) -> int:
        """Number of finite values; +0 and -0 count once."""
        return 2 * self._largest_rank + 1

    def ulp(self, value: Exact | int) -> Fraction:
        """The unit in the last place at `value`. Raises ValueError beyond the largest number."""
        finite = not isinstance(value, float) or math.isfinite(value)
        if not finite or abs(Fraction(value)) > self.largest:
            largest = decimal(self.largest)
            raise ValueError(f"{self.name} has no ulp at {value}: its largest number is {largest}")
        return Fraction(2) ** (self._exponent(abs(Fraction(value))) - self.fraction_bits)

    def numbers(self) -> Iterator[Fraction]:
        """All `count` // 2 + 1 finite numbers from 0 up; practical only for small formats."""
        return map(self.number, range(self._largest_rank + 1))

    # ---- bits to number

    def fields(self, bits: int) -> Fields:
        """Split a bit pattern into fields. Raises ValueError if the pattern is too wide."""
        if not 0 <= bits < 2**self.width_bits:
            raise ValueError(
                f"{bits:#x} is not a bit pattern of {self.name}, which has {self.width_bits} bits: "
                f"0 to {2**self.width_bits - 1:#x}"
            )
        rest, fraction = divmod(bits, 2**self.fraction_bits)
        if self.leading_bit:
            rest, leading = divmod(rest, 2)
        sign, exponent = divmod(rest, 2**self.exponent_bits)
        return Fields(sign, exponent, leading if self.leading_bit else int(exponent > 0), fraction)

    def kind(self, bits: int) -> str:
        """ "zero", "subnormal", "normal", "infinity" or "nan"."""
        _, exponent, leading, fraction = self.fields(bits)
        if exponent == 2**self.exponent_bits - 1:
            if self.infinities:
                return "infinity" if leading and not fraction else "nan"
            if fraction == 2**self.fraction_bits - 1:
                return "nan"
        if leading:
            return "normal"
        if exponent:
            return "nan"  # x87 only: a nonzero exponent with leading bit 0 is an invalid operand
        return "subnormal" if fraction else "zero"

    def decode(self, bits: int) -> Exact:
        sign, exponent, leading, fraction = self.fields(bits)
        match self.kind(bits):
            case "nan":
                return math.nan
            case "infinity":
                return -math.inf if sign else math.inf
            case "zero" if sign:
                return -0.0
        significand = leading * 2**self.fraction_bits + fraction  # a whole number of steps
        step = Fraction(2) ** (max(exponent, 1) - self.bias - self.fraction_bits)
        return (-1) ** sign * significand * step

    # ---- number to bits

    def encode(self, value: Exact | int, saturate: bool | None = None) -> int:
        """The bit pattern of the nearest number, ties to even. Overflow gives the largest number
        with `saturate`, else infinity, or NaN if the format has no infinity. By default, only
        formats without infinity saturate (as torch's e4m3 does since 2.12; earlier: NaN)."""
        sign = int(math.copysign(1.0, value) < 0 if isinstance(value, float) else value < 0)
        beyond = self._largest_rank + (0 if self._saturates(saturate) else 1)
        if not isinstance(value, float) or math.isfinite(value):
            return self._bits(sign, min(self.rank(abs(Fraction(value))), beyond))
        if math.isinf(value):
            return self._bits(sign, beyond)
        quiet = 2 ** (self.fraction_bits - 1)  # the first bit of the fraction: a quiet NaN
        return self._bits(0, self._largest_rank + 1 + (quiet if self.infinities else 0))

    def round(self, value: Exact | int, saturate: bool | None = None) -> Exact:
        return self.decode(self.encode(value, saturate))

    def _saturates(self, saturate: bool | None) -> bool:
        return not self.infinities if saturate is None else saturate

    # ---- rank: the bit pattern of a nonnegative number, without sign and leading bit

    @property
    def _largest_rank(self) -> int:
        ones = 2 ** (self.exponent_bits + self.fraction_bits) - 1
        return ones - (2**self.fraction_bits if self.infinities else 1)

    def rank(self, size: Fraction) -> int:
        """The rank of the number nearest to `size` >= 0; ranks continue past the largest number."""
        exponent = self._exponent(size)
        steps = round(size / Fraction(2) ** (exponent - self.fraction_bits))  # ties to even
        return (exponent - self.min_exponent) * 2**self.fraction_bits + steps

    def number(self, rank: int) -> Fraction:
        exponent, fraction = divmod(rank, 2**self.fraction_bits)
        significand = fraction + (2**self.fraction_bits if exponent else 0)
        return significand * self.smallest_subnormal * 2 ** max(0, exponent - 1)

    def _exponent(self, size: Fraction) -> int:
        return max(floor_log2(size), self.min_exponent) if size else self.min_exponent

    def _bits(self, sign: int, rank: int) -> int:
        exponent, fraction = divmod(rank, 2**self.fraction_bits)
        if self.leading_bit:
            exponent = exponent * 2 + (exponent > 0)
        return (sign << (self.width_bits - 1)) + exponent * 2**self.fraction_bits + fraction


FORMATS = {
    format.name: format
    for format in (
        Format("binary128", 15, 112),
        Format("x87", 15, 63, leading_bit=True),
        Format("fp64", 11, 52, torch.float64),
        Format("fp32", 8, 23, torch.float32),
        Format("tf32", 8, 10),  # the tensor cores' input format; stored as fp32
        Format("bf16", 8, 7, torch.bfloat16),
        Format("fp16", 5, 10, torch.float16),
        Format("e5m2", 5, 2, torch.float8_e5m2),
        Format("e4m3", 4, 3, torch.float8_e4m3fn, infinities=False),
    )
}


def format_of(format: Format | str) -> Format:
    """Look up a format by name. Raises ValueError for an unknown name."""
    if isinstance(format, str) and format not in FORMATS:
        raise ValueError(f"no format {format!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[format] if isinstance(format, str) else format


def floor_log2(size: Fraction) -> int:
    """The exponent e with 2^e <= size < 2^(e+1)."""
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    return exponent if size >= Fraction(2) ** exponent else exponent - 1


def decimal(value: Exact | int, digits: int = 4) -> str:
    """Format a number, even beyond the range of Python's floats: "1.19e+4932"."""
    if isinstance(value, float) and (not math.isfinite(value) or not value):
        return f"{value:g}"
    exact = Fraction(value)
    with localcontext() as context:
        context.prec = digits
        short = (Decimal(exact.numerator) / Decimal(exact.denominator)).normalize()
    return f"{short:f}" if -5 < short.adjusted() < max(digits, 4) else f"{short:e}"


def rounded(x: torch.Tensor, format: Format | str, saturate: bool | None = None) -> torch.Tensor:
    """Round each element of `x` as `Format.round` does, on any device, keeping the dtype of `x`:

        x       1.3  = 2^0 × 1.3         the exponent 0, read from the bits of fp64
        step    2^(0 - 2) = 0.25         with 2 fraction bits: a power of two, so dividing is exact
        1.3 / 0.25 = 5.2  ->  5 steps  ->  1.25

    A format needs no torch dtype (tf32 has none). fp64 and wider formats change nothing. Raises
    ValueError if `x` is not floating-point, or the format has fp64's range but less precision."""
    chosen = format_of(format)
    if not x.is_floating_point():
        raise ValueError(f"rounded({x.dtype}): expected floating-point elements; use x.float()")
    if chosen.exponent_bits >= 11 and chosen.fraction_bits >= 52:
        return x.detach().clone()
    if chosen.exponent_bits >= 11:
        raise ValueError(
            f"rounded: {chosen.name} has {chosen.exponent_bits} exponent bits, and its steps may "
            "be too small for fp64; use at most 10, or Format.round for single numbers"
        )
    wide = x.detach().double()
    exponent = ((wide.view(torch.int64) >> 52) & 0x7FF) - 1023
    exponent = exponent.clamp(min=chosen.min_exponent) - chosen.fraction_bits
    step = ((exponent + 1023) << 52).view(torch.float64)  # 2^exponent, exactly
    y = torch.round(wide / step) * step  # torch rounds ties to even
    largest = float(chosen.largest)
    beyond = largest if chosen._saturates(saturate) else math.inf if chosen.infinities else math.nan
    return torch.where(y.abs() > largest, y.sign() * beyond, y).to(x.dtype)
