"""Formats from their bits are those of torch, numpy and the C compiler, bit for bit."""

import math
import random
import shutil
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from command import run
from labkit.precision.formats import FORMATS, Exact, Format, decimal, floor_log2, format_of, rounded
from labkit.precision.int8_blocks import Int8Blocks
from tables import raises

INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
WITH_DTYPE = [one for one in FORMATS.values() if one.dtype is not None]
E4M3_SATURATES = not torch.tensor(1e4).to(torch.float8_e4m3fn).isnan()  # since torch 2.12
SMALL = [one for one in WITH_DTYPE if one.width_bits <= 16]
each_format, each_dtype, each_small = (
    pytest.mark.parametrize("one", some, ids=lambda one: one.name)
    for some in (FORMATS.values(), WITH_DTYPE, SMALL)
)


def same(one: Exact, other: Exact) -> bool:
    """Equal, with its sign and with NaN."""
    if one != one or other != other:
        return one != one and other != other
    return one == other and is_negative(one) == is_negative(other)


def is_negative(x: Exact) -> bool:
    return math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0


def torch_values(one: Format, patterns: list[int]) -> list[float]:
    width = one.width_bits
    signed = [p - (1 << width) if width > 8 and p >> (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGERS[width]).view(one.dtype).double().tolist()


def torch_patterns(one: Format, x: torch.Tensor) -> list[int]:
    raw = x.to(one.dtype).view(INTEGERS[one.width_bits]).tolist()
    return [p % (1 << one.width_bits) for p in raw]


def saturates(one: Format) -> bool:
    """Whether torch does, where a number is too large."""
    return bool(E4M3_SATURATES) and not one.infinities


def edges(one: Format) -> list[int]:
    """Patterns where something changes, with their neighbours, and of both signs."""
    f, e = one.fraction_bits + bool(one.leading_bit), one.exponent_bits
    places = [0, 1 << f, 1 << (f - 1), ((1 << e) - 1) << f, ((1 << e) - 2) << f, one.bias << f]
    sign = 1 << (one.width_bits - 1)
    return sorted({(p + d) % sign + s for p in places for d in range(-2, 3) for s in (0, sign)})


def drawn(one: Format, how_many: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return edges(one) + [generator.getrandbits(one.width_bits) for _ in range(how_many)]


@each_dtype
def test_patterns_are_the_numbers_that_torch_has(one: Format):
    """Each pattern of 16 bits or fewer."""
    patterns = list(range(1 << one.width_bits)) if one in SMALL else drawn(one, 2000)
    for pattern, theirs in zip(patterns, torch_values(one, patterns), strict=True):
        assert same(one.decode(pattern), theirs), f"{one.name} {pattern:#x}"


@each_dtype
def test_each_number_has_its_own_pattern(one: Format):
    for pattern in range(256) if one.width_bits == 8 else drawn(one, 2000):
        if one.kind(pattern) != "nan":
            assert one.encode(one.decode(pattern)) == pattern


@each_small
def test_all_halfway_points_and_their_neighbours_are_rounded_as_torch_does(one: Format):
    """Every number in the middle of two, and the fp32 numbers next to it on both sides."""
    ranks = range(0, one.count // 2 + 1, 1 if one.width_bits == 8 else 13)
    pairs = [(float(one.number(rank)), float(one.number(rank + 1))) for rank in ranks]
    middle = torch.tensor(pairs, dtype=torch.float64).mean(1).float()
    up = torch.full_like(middle, torch.inf)
    x = torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, -up)])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3e38, 1e-45])])
    for value, theirs in zip(x.tolist(), torch_patterns(one, x)):
        mine = one.encode(value, saturate=saturates(one))
        assert mine == theirs or one.kind(mine) == one.kind(theirs) == "nan", value


def test_fp64_is_rounded_to_fp32_as_torch_does():
    fp32, generator = FORMATS["fp32"], torch.Generator().manual_seed(0)
    bits = torch.tensor(drawn(fp32, 2000)) - (1 << 31)
    near = bits.to(torch.int32).view(torch.float32).double()
    near = near[near.isfinite()]
    half = torch.nextafter(near.float(), torch.tensor(torch.inf)).double()
    x = torch.cat([(near + half) / 2, torch.randn(2000, generator=generator).double()])
    x = torch.cat([x, x * (1 + 2**-40), x * 1e-38, x * 2.0**100])
    for value, theirs in zip(x.tolist(), torch_patterns(fp32, x)):
        mine = fp32.encode(value)
        assert mine == theirs or math.isnan(value), value


def exact_results(one: Format, a: int, b: int) -> list[int]:
    """Patterns of a + b, a × b and a / b; finite and not zero, both of them."""
    x, y = Fraction(one.decode(a)), Fraction(one.decode(b))
    total, product, quotient = (one.encode(exact) for exact in (x + y, x * y, x / y))
    sign = (x < 0) != (y < 0)  # what is rounded to zero keeps it
    assert product >> (one.width_bits - 1) == quotient >> (one.width_bits - 1) == sign
    return [total, product, quotient]


def operands(one: Format, how_many: int = 500) -> list[tuple[int, int]]:
    """Pairs of numbers, half of them close to each other."""
    generator, near = random.Random(1), one.fraction_bits + one.leading_bit + 4
    choice = generator.choice

    def is_number(pattern: int) -> bool:  # a register never holds a leading bit without exponent
        regular = one.kind(pattern) in ("normal", "subnormal")
        return regular and one.encode(one.decode(pattern)) == pattern

    first = [pattern for pattern in drawn(one, how_many) if is_number(pattern)]
    second = [choice([a ^ generator.getrandbits(near), choice(first)]) for a in first]
    return [(a, b) for a, b in zip(first, second) if is_number(b)]


def test_the_processor_computes_so_in_80_bits():
    if np.finfo(np.longdouble).nmant != 63:
        pytest.skip("numpy's longdouble is not x87's here")
    x87 = FORMATS["x87"]

    def number(pattern: int) -> np.longdouble:
        return np.frombuffer(pattern.to_bytes(16, "little"), np.longdouble)[0]

    def pattern_of(x: np.longdouble) -> int:
        return int.from_bytes(np.asarray(x).tobytes()[:10], "little")

    pairs = operands(x87)
    assert len(pairs) >= 200
    with np.errstate(all="ignore"):
        for a, b in pairs:
            x, y = number(a), number(b)
            assert exact_results(x87, a, b) == [pattern_of(z) for z in (x + y, x * y, x / y)]


QUAD_C = """
#include <stdio.h>
typedef unsigned long long word;
typedef union { __float128 x; word w[2]; } quad;
static void say(__float128 x) { quad q; q.x = x; printf("%016llx%016llx ", q.w[1], q.w[0]); }
int main(void) {
    quad a, b;
    while (scanf("%16llx%16llx %16llx%16llx", &a.w[1], &a.w[0], &b.w[1], &b.w[0]) == 4) {
        say(a.x + b.x); say(a.x * b.x); say(a.x / b.x); printf("\\n");
    }
}
"""


@pytest.mark.skipif(
    not shutil.which("gcc") or sys.byteorder != "little", reason="needs gcc and its __float128"
)
def test_the_c_compiler_computes_so_in_128_bits(tmp_path: Path):
    source, program = tmp_path / "quad.c", tmp_path / "quad"
    source.write_text(QUAD_C)
    if run("gcc", "-O1", source, "-o", program, status=None).returncode:
        pytest.skip("this gcc has no __float128")
    quad = FORMATS["binary128"]
    pairs = operands(quad)
    assert len(pairs) >= 200
    lines = "".join(f"{a:032x} {b:032x}\n" for a, b in pairs)
    for (a, b), line in zip(pairs, run(program, input=lines).stdout.splitlines(), strict=True):
        assert [f"{x:032x}" for x in exact_results(quad, a, b)] == line.split(), f"{a:#x} {b:#x}"


@each_dtype
def test_the_range_is_that_of_torch(one: Format):
    theirs = torch.finfo(one.dtype)
    assert float(one.largest) == theirs.max
    assert float(one.smallest_normal) == theirs.smallest_normal
    assert float(one.epsilon) == theirs.eps
    assert float(one.smallest_subnormal) == torch_values(one, [1])[0]


def test_the_range_is_that_of_the_standards():
    """IEEE 754-2019, table 3.5; Micikevicius et al., table 1; the x87 and tf32 by their makers."""
    assert {name: decimal(one.largest) for name, one in FORMATS.items()} == {
        "binary128": "1.19e+4932", "x87": "1.19e+4932", "fp64": "1.798e+308",
        "fp32": "3.403e+38", "tf32": "3.401e+38", "bf16": "3.39e+38", "fp16": "6.55e+4",
        "e5m2": "5.734e+4", "e4m3": "448",
    }  # fmt: skip
    assert [one.width_bits for one in FORMATS.values()] == [128, 80, 64, 32, 19, 16, 16, 8, 8]
    for name, exponent in {"e4m3": 9, "e5m2": 16, "binary128": 16494, "x87": 16445}.items():
        assert FORMATS[name].smallest_subnormal == Fraction(1, 2**exponent)


@each_small
def test_the_numbers_are_counted(one: Format):
    values = {x for x in torch_values(one, list(range(1 << one.width_bits))) if math.isfinite(x)}
    assert one.count == len(values)
    if one.width_bits == 8:
        assert list(one.numbers()) == sorted(x for x in values if x >= 0)


@each_format
def test_the_step_leads_to_the_next_number(one: Format):
    sign = 1 << (one.width_bits - 1)
    finite = [p for p in drawn(one, 40) if p < sign and one.kind(p) not in ("nan", "infinity")]
    for value in map(Fraction, map(one.decode, finite)):
        if value < one.largest:
            assert one.round(value + one.ulp(value)) == value + one.ulp(value)
            assert one.round(value + one.ulp(value) / 3) == value
    assert one.ulp(1) == one.ulp(-1.5) == one.epsilon
    assert one.ulp(0) == one.ulp(one.smallest_normal) == one.smallest_subnormal


def test_beyond_the_largest_number_comes_infinity_or_nan_or_the_largest():
    for one in FORMATS.values():
        beyond = one.largest + one.ulp(one.largest) / 2
        within = one.largest + one.ulp(one.largest) / 3
        assert one.round(within) == one.largest
        right = math.inf if one.infinities else math.nan
        if one.infinities:  # the largest number is odd, so the tie goes up
            assert one.round(beyond) == right and one.round(-beyond) == -right
        assert same(one.round(math.inf, saturate=False), right)
        assert same(one.round(beyond * 2, saturate=False), right)
        by_default = right if one.infinities else one.largest
        assert one.round(beyond * 2) == one.round(math.inf) == by_default
        assert one.round(math.inf, saturate=True) == one.largest
        assert one.round(-beyond * 2, saturate=True) == -one.largest
    e4m3 = FORMATS["e4m3"]  # here it is even: 464 goes down to 448
    assert e4m3.round(464, saturate=False) == 448
    assert math.isnan(e4m3.round(464.001, saturate=False))


def test_a_nan_has_many_patterns_and_one_is_made():
    for one in FORMATS.values():
        made = one.encode(math.nan)
        assert one.kind(made) == "nan" and math.isnan(one.decode(made))
        assert math.isnan(one.round(math.nan, saturate=True))
    fp16 = FORMATS["fp16"]
    assert [fp16.kind(0x7C00 + payload) for payload in (0, 1, 0x200, 0x3FF)] == [
        "infinity", "nan", "nan", "nan",
    ]  # fmt: skip
    assert fp16.encode(math.nan) == torch_patterns(fp16, torch.tensor([math.nan]))[0]
    assert FORMATS["x87"].kind(1 << 64) == "nan"  # an exponent without its leading bit


def test_what_cannot_be_is_refused():
    fp16, mine = FORMATS["fp16"], Format("mine", 11, 20)
    raises("choose one of binary128, x87", format_of, "half")
    raises("0x100 is not a bit pattern of e4m3, which has 8 bits", FORMATS["e4m3"].decode, 256)
    raises("fp16 has no ulp at inf: its largest number is 6.55e", fp16.ulp, math.inf)
    raises("fp16 has no ulp at 70000", fp16.ulp, 70000)
    raises("use at least 2 and 1", Format, "mine", 1, 4)
    raises("expected floating-point elements", rounded, torch.arange(3), "fp16")
    too_fine = "mine has 11 exponent bits, and its steps may be too"
    raises(too_fine, rounded, torch.ones(3), mine)


def test_the_logarithm_is_exact():
    for value in (Fraction(1), Fraction(2**60 - 1), Fraction(1, 2**60 + 1), Fraction(2**20000)):
        exponent = floor_log2(value)
        assert Fraction(2) ** exponent <= value < Fraction(2) ** (exponent + 1)


def tensors(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** torch.randint(-160, 130, (4000,), generator=generator)
    x = torch.randn(4000, generator=generator).double() * size
    ties = [1 + n * 2.0**-k for k in range(2, 26) for n in (1, 3, 5)]
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 464.0, 465.0, 65519.99, 65520.0, 1e300, 2e-45]
    return torch.cat([x, torch.tensor(ties + odd, dtype=torch.float64)]).to(dtype)


def check_rounded(one: Format, before: torch.Tensor, after: torch.Tensor, *saturate: bool) -> None:
    for x, y in zip(before.tolist(), after.tolist(), strict=True):
        assert same(one.round(x, *saturate), y), (one.name, x)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("saturate", [False, True])
def test_a_tensor_is_rounded_as_its_numbers_are(one: Format, dtype: torch.dtype, saturate: bool):
    x = tensors(dtype)
    y = rounded(x, one.name, saturate)
    assert y.dtype == dtype and y.data_ptr() != x.data_ptr()
    if one.fraction_bits >= 52:
        assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))
    else:
        check_rounded(one, x[-250:], y[-250:], saturate)


@each_small
def test_a_tensor_is_rounded_as_torch_does(one: Format):
    x = tensors(torch.float32)
    mine, theirs = rounded(x, one, saturates(one)), x.to(one.dtype).float()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num().view(torch.int32), theirs.nan_to_num().view(torch.int32))


def test_a_tensor_is_rounded_to_custom_formats():
    x = tensors(torch.float64)
    for one in (Format("e2m1", 2, 1), Format("e10m40", 10, 40), Format("e5m60", 5, 60)):
        check_rounded(one, x[-100:], rounded(x, one)[-100:])


def test_tf32_keeps_10_bits_of_the_fraction_of_fp32():
    x = tensors(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    bits = x.view(torch.int32)
    nearest = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF  # the carry goes into the exponent
    assert torch.equal(rounded(x, "tf32").view(torch.int32), nearest)


@pytest.mark.gpu
def test_a_gpu_rounds_as_the_cpu_does():
    x = tensors(torch.float32)
    for one in FORMATS.values():
        mine, theirs = rounded(x.cuda(), one).cpu(), rounded(x, one)
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_blocks_keep_their_bound_and_their_bytes():
    generator = torch.Generator().manual_seed(0)
    for shape, block in (((1000,), 64), ((7, 33), 16), ((5,), 256), ((3, 4), 1), ((0,), 8)):
        x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
        blocks = Int8Blocks(block)
        quantized = blocks.encode(x)
        assert quantized.q.dtype == torch.int8 and quantized.q.shape == x.shape
        assert quantized.nbytes == blocks.nbytes(x.numel())
        error = (blocks.decode(quantized) - x).abs()
        assert (error <= blocks.step(x) / 2 * (1 + 1e-5)).all()
        for i, one in enumerate(x.view(-1).split(block) if x.numel() else []):
            assert quantized.absmax[i] == one.abs().max()
            largest = one.abs().argmax()
            assert blocks.rounded(x).view(-1)[i * block + largest] == one[largest]


def test_blocks_are_the_nearest_levels_ties_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -127.0, 126.6, -3.2])
    assert Int8Blocks(8).encode(x).q.tolist() == [127, 0, 2, 2, 0, -127, 127, -3]
    assert Int8Blocks(8).step(x).unique().tolist() == [1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_spoils_its_block_and_is_detected(bad: float):
    x = torch.ones(12)
    x[5] = bad
    assert Int8Blocks(4).encode(x).absmax.isnan().tolist() == [False, True, False]
    y = Int8Blocks(4).rounded(x)
    assert y.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_blocks_of_zeros_and_of_tiny_numbers():
    assert torch.equal(Int8Blocks(4).rounded(torch.zeros(6)), torch.zeros(6))
    tiny = torch.full((4,), 1e-44)
    assert torch.equal(Int8Blocks(4).rounded(tiny), tiny)
    assert Int8Blocks(4).rounded(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    raises("at least 1 element", Int8Blocks, 0)
    raises("expected floating-point elements", Int8Blocks(4).encode, torch.arange(4))
