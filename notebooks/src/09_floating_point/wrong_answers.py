import math

import numpy as np
import torch

from answers import right, wrong

# ---- decode(bits, exponent_bits, fraction_bits)


def fields(bits, exponent_bits, fraction_bits):
    rest, fraction = divmod(bits, 2**fraction_bits)
    sign, exponent = divmod(rest, 2**exponent_bits)
    return sign, exponent, fraction


@wrong("09.decode", "which bit stands before the point, which power?")
def without_subnormals(bits, exponent_bits, fraction_bits):
    sign, exponent, fraction = fields(bits, exponent_bits, fraction_bits)
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else (-1) ** sign * math.inf
    power = 2.0 ** (exponent - 2 ** (exponent_bits - 1) + 1)
    return (-1) ** sign * power * (1 + fraction / 2**fraction_bits)


@wrong("09.decode", "The highest exponent is kept")
def without_infinity(bits, exponent_bits, fraction_bits):
    sign, exponent, fraction = fields(bits, exponent_bits, fraction_bits)
    power = 2.0 ** (max(exponent, 1) - 2 ** (exponent_bits - 1) + 1)
    return (-1) ** sign * power * (bool(exponent) + fraction / 2**fraction_bits)


def another_bias(bits, exponent_bits, fraction_bits, bias, leading=1):
    sign, exponent, fraction = fields(bits, exponent_bits, fraction_bits)
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else (-1) ** sign * math.inf
    power = 2.0 ** (max(exponent, 1) - bias)
    return (-1) ** sign * power * ((leading if exponent else 0) + fraction / 2**fraction_bits)


@wrong("09.decode", "10 fraction bits: 0000000000000001 is")
def bias_of_all_exponents(bits, exponent_bits, fraction_bits):
    return another_bias(bits, exponent_bits, fraction_bits, 2 ** (exponent_bits - 1))


@wrong("09.decode", "The bias is half of the exponents")
def the_leading_bit_is_forgotten(bits, exponent_bits, fraction_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    return another_bias(bits, exponent_bits, fraction_bits, bias, leading=0)


@wrong("09.decode", "The sign is the first bit of all")
def without_a_sign(bits, exponent_bits, fraction_bits):
    bits %= 2 ** (exponent_bits + fraction_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    return abs(another_bias(bits, exponent_bits, fraction_bits, bias))


@wrong("09.decode", "Return a number, also for what is none")
def nothing_for_nan(bits, exponent_bits, fraction_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    found = another_bias(bits, exponent_bits, fraction_bits, bias)
    return None if math.isnan(found) else found


# ---- nearest(x, exponent_bits, fraction_bits)


def to_steps(x, exponent_bits, fraction_bits, whole=round, subnormals=True, overflow=math.inf):
    if not math.isfinite(x):
        return x
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = math.frexp(x)[1] - 1
    step = 2.0 ** ((max(exponent, 1 - bias) if subnormals else exponent) - fraction_bits)
    size = whole(abs(x) / step) * step
    largest = 2.0**bias * (2 - 2.0**-fraction_bits)
    return math.copysign(size if size <= largest else overflow, x)


@wrong("09.nearest", "Count in steps")
def cuts_off(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits, whole=math.floor)


@wrong("09.nearest", "take the one whose last bit is 0")
def halves_go_up(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits, whole=lambda y: math.floor(y + 0.5))


@wrong("09.nearest", "Below the smallest normal number the step gets no smaller")
def steps_ever_smaller(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits, subnormals=False)


@wrong("09.nearest", "there is only infinity")
def saturates(x, exponent_bits, fraction_bits):
    largest = 2.0 ** (2 ** (exponent_bits - 1) - 1) * (2 - 2.0**-fraction_bits)
    return to_steps(x, exponent_bits, fraction_bits, overflow=largest)


@wrong("09.nearest", "-0.0 is a number, too")
def loses_the_sign_of_zero(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits) or 0.0


@wrong("09.nearest", "and 2047 of them make x")
def the_largest_is_infinite_already(x, exponent_bits, fraction_bits):
    largest = 2.0 ** (2 ** (exponent_bits - 1) - 1) * (2 - 2.0**-fraction_bits)
    return math.copysign(math.inf, x) if abs(x) >= largest else to_steps(x, 5, 10)


@wrong("09.nearest", "Count in steps: here one is 32")
def infinite_from_a_little_beyond_the_largest(x, exponent_bits, fraction_bits):
    largest = 2.0 ** (2 ** (exponent_bits - 1) - 1) * (2 - 2.0**-fraction_bits)
    return math.copysign(math.inf, x) if abs(x) > largest else to_steps(x, 5, 10)


@wrong("09.nearest", "That is no number")
def nan_for_what_is_too_small(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits) or math.nan


@wrong("09.nearest", "there is only infinity")
def nan_beyond_the_largest(x, exponent_bits, fraction_bits):
    return to_steps(x, exponent_bits, fraction_bits, overflow=math.nan)


@right("09.nearest")
def by_adding_and_taking_away(x, exponent_bits, fraction_bits):
    """What processors do themselves: add what leaves no room for the lower bits."""
    return to_steps(x, exponent_bits, fraction_bits, whole=lambda y: (y + 2.0**52) - 2.0**52)


# ---- my_sum(values, add, sub)


@wrong("09.my_sum", "At some point the sum is so large that a step is over twice an x")
def one_after_the_other(values, add, sub):
    total = 0.0
    for x in values:
        total = add(total, x)
    return total


@wrong("09.my_sum", "came out of no add or sub")
def in_fp64(values, add, sub):
    return math.fsum(values)


@wrong("09.my_sum", "2048, then 2,000 times 1: you have 2048")
def the_smallest_first(values, add, sub):
    """Right for nearly all, if it did not begin with the largest."""
    if values[0] < 1:
        return pairwise(values, add, sub)
    return one_after_the_other(values, add, sub)


@wrong("09.my_sum", "off by")
def the_wrong_sign_of_what_is_lost(values, add, sub):
    total, lost = 0.0, 0.0
    for x in values:
        x = add(x, lost)
        new = add(total, x)
        lost = sub(sub(new, total), x)
        total = new
    return total


@wrong("09.my_sum", "is no number of fp16; only add and sub make new ones")
def halves_by_hand(values, add, sub):
    return add(sum(values) / 3, 0.0)


@right("09.my_sum")
def pairwise(values, add, sub):
    while len(values) > 1:
        pairs = [add(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


@right("09.my_sum")
def with_what_is_left_at_the_end(values, add, sub):
    total = lost = 0.0
    for x in values:
        x = sub(x, lost)
        new = add(total, x)
        lost = sub(sub(new, total), x)
        total = new
    return sub(total, lost)


@wrong("09.my_sum", "off by")
def neumaier(values, add, sub):
    """What is lost is summed apart: in fp16 that sum loses numbers itself."""
    total = lost = 0.0
    for x in values:
        new = add(total, x)
        if abs(total) >= abs(x):
            lost = add(lost, add(sub(total, new), x))
        else:
            lost = add(lost, add(sub(x, new), total))
        total = new
    return add(total, lost)


@right("09.my_sum")
def without_a_branch(values, add, sub):
    """Knuth's TwoSum: 7 calls a number."""
    total = lost = 0.0
    for x in values:
        x = add(x, lost)
        new = add(total, x)
        part = sub(new, total)
        lost = add(sub(total, sub(new, part)), sub(x, part))
        total = new
    return total


@wrong("09.my_sum", "at most 8 for each")
def over_and_over(values, add, sub):
    for _ in range(10):
        total = pairwise(values, add, sub)
    return total


# ---- gather_int8(comm, x, block)


def in_int8(comm, x, block, levels=127, whole=torch.round, wire=torch.int8, scales=torch.float32):
    blocks = x.view(-1, block)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    q = whole(blocks / absmax.clamp(min=1e-30) * levels).to(torch.int32).to(wire)
    all_q = q.new_empty(comm.size * len(q), block)
    all_absmax = absmax.to(scales).new_empty(comm.size * len(q), 1)
    comm.all_gather_into_tensor(all_q, q)
    comm.all_gather_into_tensor(all_absmax, absmax.to(scales))
    return (all_q.float() / levels * all_absmax.float()).flatten()


@wrong("09.gather_int8", "A cast to int8 cuts towards zero")
def cuts(comm, x, block):
    return in_int8(comm, x, block, whole=torch.trunc)


@wrong("09.gather_int8", "Which dtype has the tensor that you hand to comm?")
def sends_fp32(comm, x, block):
    return in_int8(comm, x, block, wire=torch.float32)


@wrong("09.gather_int8", "comes out on the other side")
def one_level_too_many(comm, x, block):
    return in_int8(comm, x, block, levels=128)


@wrong("09.gather_int8", "It is lost beside a number of another block")
def one_scale_for_all(comm, x, block):
    return in_int8(comm, x, len(x))


@wrong("09.gather_int8", "A block may be all zero")
def divides_by_zero(comm, x, block):
    step = x.view(-1, block).abs().amax(dim=1) / 127
    steps, every = step.new_empty(comm.size * len(step)), x.new_empty(comm.size * len(x))
    comm.all_gather_into_tensor(steps, step)
    comm.all_gather_into_tensor(every, x)
    return ((every.view(-1, block) / steps[:, None]).round() * steps[:, None]).flatten()


@wrong("09.gather_int8", "returns a tensor of shape (192,)")
def its_own_only(comm, x, block):
    return in_int8(comm, x, block).chunk(comm.size)[comm.rank]


@wrong("09.gather_int8", "Whose scales are these?")
def scales_of_its_own(comm, x, block):
    blocks = x.view(-1, block)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    q = (blocks / absmax.clamp(min=1e-30) * 127).round().to(torch.int8)
    every = q.new_empty(comm.size * len(q), block)
    comm.all_gather_into_tensor(every, q)
    return (every / 127 * absmax.repeat(comm.size, 1)).flatten()


# ---- codebook(sample)


@wrong("09.codebook", "Where is a level worth most?")
def equal_steps(sample):
    return torch.linspace(-sample.abs().max(), sample.abs().max(), 16)


@wrong("09.codebook", "16 levels, in a list or a tensor")
def too_many(sample):
    return sample[:256]


@wrong("09.codebook", "a level is no finite number")
def with_infinity(sample):
    return [*range(-8, 7), math.inf]


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


@wrong("09.codebook", "16 levels, in a list or a tensor")
def one_number(sample):
    return 16
