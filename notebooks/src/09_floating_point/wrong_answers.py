from functools import reduce

import numpy as np
import torch

from answers import Solution, right, wrong

# ---- decode(bits, exponent_bits, fraction_bits)

Solution("09.decode").slips("""
without_subnormals: which bit stands before the point, which power?
    1 if exponent else 0 -> 1
    max(exponent, 1) -> exponent
without_infinity: The highest exponent is kept
    if exponent == 2**exponent_bits - 1: -> if False:
bias_of_all_exponents: 10 fraction bits: 0000000000000001 is
    bias = 2 ** (exponent_bits - 1) - 1 -> bias = 2 ** (exponent_bits - 1)
the_leading_bit_is_forgotten: The bias is half of the exponents
    1 if exponent else 0 -> 0
without_a_sign: The sign is the first bit of all
    sign = -1.0 if -> sign = 1.0 if
nothing_for_nan: Return a number, also for what is none
    return math.nan if -> return None if
""")

# ---- nearest(x, exponent_bits, fraction_bits)

Solution("09.nearest").slips("""
cuts_off: Count in steps
    round( -> math.floor(
halves_go_up: take the one whose last bit is 0
    round(abs(x) / step) -> math.floor(abs(x) / step + 0.5)
steps_ever_smaller: Below the smallest normal number the step gets no smaller
    max(math.frexp(x)[1] - 1, 1 - bias) -> math.frexp(x)[1] - 1
saturates: there is only infinity
    else math.inf -> else largest
loses_the_sign_of_zero: -0.0 is a number, too
    else math.inf, x) -> else math.inf, x) or 0.0
the_largest_is_infinite_already: and 2047 of them make x
    size <= largest -> size < largest
infinite_from_a_little_beyond_the_largest: Count in steps: here one is 32
    size <= largest -> abs(x) <= largest
nan_for_what_is_too_small: That is no number
    else math.inf, x) -> else math.inf, x) or math.nan
nan_beyond_the_largest: there is only infinity
    else math.inf -> else math.nan
# What processors do themselves: add what leaves no room for the lower bits.
by_adding_and_taking_away
    round(abs(x) / step) -> (abs(x) / step + 2.0**52 - 2.0**52)
""")

# ---- my_sum(values, add, sub)

Solution("09.my_sum").slips("""
one_after_the_other: At some point the sum is so large that a step is over twice an x
    x = add(x, lost) -> pass
in_fp64: came out of no add or sub
    return math.fsum(values)
the_wrong_sign_of_what_is_lost: off by
    sub(x, sub(new, total)) -> sub(sub(new, total), x)
halves_by_hand: is no number of fp16; only add and sub make new ones
    return add(sum(values) / 3, 0.0)
with_what_is_left_at_the_end
    x = add(x, lost) -> x = sub(x, lost)
    sub(x, sub(new, total)) -> sub(sub(new, total), x)
    return total -> return sub(total, lost)
without_a_branch
    lost = sub(x, sub(new, total)) ->
        part = sub(new, total)
        lost = add(sub(total, sub(new, part)), sub(x, part))
# What is lost is summed apart: in fp16 that sum loses numbers itself.
neumaier: off by
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


@wrong("09.my_sum", "2048, then 2,000 times 1: you have 2048")
def the_smallest_first(values, add, sub):
    """Right for nearly all, if it did not begin with the largest."""
    return pairwise(values, add, sub) if values[0] < 1 else reduce(add, values)


@wrong("09.my_sum", "at most 8 for each")
def over_and_over(values, add, sub):
    for _ in range(10):
        total = pairwise(values, add, sub)
    return total


# ---- gather_int8(comm, x, block)

Solution("09.gather_int8").slips("""
cuts: A cast to int8 cuts towards zero
    .round() ->
sends_fp32: Which dtype has the tensor that you hand to comm?
    .to(torch.int8) ->
one_level_too_many: comes out on the other side
    * 127) -> * 128)
    / 127 -> / 128
    .to(torch.int8) -> .to(torch.int32).to(torch.int8)
one_scale_for_all: It is lost beside a number of another block
    blocks = x.view ->
        block = len(x)
        blocks = x.view
its_own_only: returns a tensor of shape (192,)
    .flatten() -> .flatten().chunk(comm.size)[comm.rank]
scales_of_its_own: Whose scales are these?
    127 * every_absmax -> 127 * absmax.repeat(comm.size, 1)
""")


@wrong("09.gather_int8", "A block may be all zero")
def divides_by_zero(comm, x, block):
    step = x.view(-1, block).abs().amax(dim=1) / 127
    steps, every = step.new_empty(comm.size * len(step)), x.new_empty(comm.size * len(x))
    comm.all_gather_into_tensor(steps, step)
    comm.all_gather_into_tensor(every, x)
    return ((every.view(-1, block) / steps[:, None]).round() * steps[:, None]).flatten()


# ---- codebook(sample)

Solution("09.codebook").slips("""
equal_steps: Where is a level worth most?
    return torch.linspace(-sample.abs().max(), sample.abs().max(), 16)
too_many: 16 levels, in a list or a tensor
    return sample[:256]
with_infinity: a level is no finite number
    return [*range(-8, 7), math.inf]
one_number: 16 levels, in a list or a tensor
    return 16
""")


@right("09.codebook")
def as_many_numbers_each(sample):
    """As NF4: quantiles, and the ends."""
    places = torch.linspace(0, 1, 18, dtype=torch.float64)[1:-1]
    return (sample.quantile(places) * 1.5).tolist()


@right("09.codebook")
def in_numpy(sample):
    return np.asarray(as_many_numbers_each(sample), dtype=np.float32)


@right("09.codebook")
def numbers_of_numpy(sample):
    return list(in_numpy(sample))
