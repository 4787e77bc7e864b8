from functools import reduce

import numpy as np
import torch

from answers import Solution, right, wrong

# ---- decode(bits, exponent_bits, fraction_bits)

Solution("09.decode").slips("""
without_subnormals: which bit is before the point, and which power of 2?
    1 if exponent else 0 -> 1
    max(exponent, 1) -> exponent
without_infinity: The highest exponent is reserved
    if exponent == 2**exponent_bits - 1: -> if False:
bias_of_all_exponents: 10 fraction bits: you decode 0000000000000001 as
    bias = 2 ** (exponent_bits - 1) - 1 -> bias = 2 ** (exponent_bits - 1)
the_leading_bit_is_forgotten: The bias is 2^(e-1) - 1
    1 if exponent else 0 -> 0
without_a_sign: The sign is the highest bit
    sign = -1.0 if -> sign = 1.0 if
none_for_nan: Return a float in every case
    return math.nan if -> return None if
""")

# ---- nearest(x, exponent_bits, fraction_bits)

Solution("09.nearest").slips("""
truncates: Count in steps
    round( -> math.floor(
halves_go_up: take the one whose last bit is 0
    round(abs(x) / step) -> math.floor(abs(x) / step + 0.5)
ever_smaller_steps: Below the smallest normal number, the step stays at
    max(math.frexp(x)[1] - 1, 1 - bias) -> math.frexp(x)[1] - 1
saturates: once rounded, is infinity
    else math.inf -> else largest
loses_the_sign_of_zero: Keep the sign, also that of -0.0
    else math.inf, x) -> else math.inf, x) or 0.0
overflows_at_the_largest: and x is 2047 steps
    size <= largest -> size < largest
overflows_before_rounding: Count in steps: a step is 32 here
    size <= largest -> abs(x) <= largest
nan_for_underflow: The result is NaN
    else math.inf, x) -> else math.inf, x) or math.nan
nan_for_overflow: once rounded, is infinity
    else math.inf -> else math.nan
# As processors do: add a number so large that the lower bits are rounded away.
by_adding_and_subtracting
    round(abs(x) / step) -> (abs(x) / step + 2.0**52 - 2.0**52)
""")

# ---- my_sum(values, add, sub)

Solution("09.my_sum").slips("""
one_after_the_other: Once the sum is so large that its step is over twice x
    x = add(x, lost) -> pass
in_fp64: is not a result of add or sub
    return math.fsum(values)
wrong_sign_of_the_error: , off by
    sub(x, sub(new, total)) -> sub(sub(new, total), x)
divides_outside_fp16: is not an fp16 number; only add and sub create new ones
    return add(sum(values) / 3, 0.0)
with_the_error_subtracted
    x = add(x, lost) -> x = sub(x, lost)
    sub(x, sub(new, total)) -> sub(sub(new, total), x)
    return total -> return sub(total, lost)
without_a_branch
    lost = sub(x, sub(new, total)) ->
        part = sub(new, total)
        lost = add(sub(total, sub(new, part)), sub(x, part))
# The errors are summed separately: in fp16, that sum has rounding errors, too.
neumaier: , off by
    x = add(x, lost) -> pass
    lost = sub(x, sub(new, total)) ->
        large, small = (total, x) if abs(total) >= abs(x) else (x, total)
        lost = add(lost, add(sub(large, new), small))
    return total -> return add(total, lost)
""")


@right("09.my_sum")
def pairwise(values, add, sub):
    while len(values) > 1:
        pairs = [add(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


@wrong("09.my_sum", "2048, then 2,000 times 1: your sum is 2048")
def naive_after_a_large_value(values, add, sub):
    """Pairwise, except for the case that begins with the largest value."""
    return pairwise(values, add, sub) if values[0] < 1 else reduce(add, values)


@wrong("09.my_sum", "at most 8 per number")
def repeats_the_sum(values, add, sub):
    for _ in range(10):
        total = pairwise(values, add, sub)
    return total


# ---- gather_int8(comm, x, block)

Solution("09.gather_int8").slips("""
truncates: A cast to int8 truncates
    .round() ->
sends_fp32: What is the dtype of the tensor that you send?
    .to(torch.int8) ->
one_level_too_many: values beyond this range wrap around
    * 127) -> * 128)
    / 127 -> / 128
    .to(torch.int8) -> .to(torch.int32).to(torch.int8)
one_scale_for_all: The scale of another block rounds it to 0
    blocks = x.view ->
        block = len(x)
        blocks = x.view
its_own_only: returned a tensor of shape (192,)
    .flatten() -> .flatten().chunk(comm.size)[comm.rank]
uses_its_own_scales: Which rank's scales do you use?
    127 * every_absmax -> 127 * absmax.repeat(comm.size, 1)
""")


@wrong("09.gather_int8", "A block may be all zero")
def divides_by_zero(comm, x, block):
    step = x.view(-1, block).abs().amax(dim=1) / 127
    steps, gathered = step.new_empty(comm.size * len(step)), x.new_empty(comm.size * len(x))
    comm.all_gather_into_tensor(steps, step)
    comm.all_gather_into_tensor(gathered, x)
    return ((gathered.view(-1, block) / steps[:, None]).round() * steps[:, None]).flatten()


# ---- codebook(sample)

Solution("09.codebook").slips("""
equal_steps: where does a level reduce the error most?
    return torch.linspace(-sample.abs().max(), sample.abs().max(), 16)
too_many: 16 levels, in a list or a tensor
    return sample[:256]
with_infinity: a level is not a finite number
    return [*range(-8, 7), math.inf]
one_number: 16 levels, in a list or a tensor
    return 16
""")


@right("09.codebook")
def quantiles(sample):
    """Quantiles, like NF4, scaled up."""
    places = torch.linspace(0, 1, 18, dtype=torch.float64)[1:-1]
    return (sample.quantile(places) * 1.5).tolist()


@right("09.codebook")
def in_numpy(sample):
    return np.asarray(quantiles(sample), dtype=np.float32)


@right("09.codebook")
def numbers_in_numpy(sample):
    return list(in_numpy(sample))
