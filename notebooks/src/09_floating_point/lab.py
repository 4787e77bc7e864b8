# %% [markdown]
# # Lab 09: Floating point
#
# Everything that ranks compute and send is a floating-point number, and training uses ever shorter
# ones: 32 bits, 16, 8. In this lab you take them apart, bit by bit, and find out what each can hold,
# where it rounds, and what that does to gradients, sums and collectives. You need
# lab 02 (the ring), lab 05 (averaged gradients) and lab 08 (gathered weights).

# %%
import math

import matplotlib.pyplot as plt
import torch

from labkit import FORMATS, GPT, Int8Blocks, Text, World, attach, loss, plot, rounded
from labkit.course import predict, report, show
from labkit.labs.lab_09 import checks as check

# %% [markdown]
# ## 1. The question
#
# A weight of 1.0 gets 10,000 updates of 0.0001 each. It should be 2.0 afterwards.


# %%
def add_up(dtype, start=1.0, update=1e-4, times=10_000):
    x, update = torch.tensor(start, dtype=dtype), torch.tensor(update, dtype=dtype)
    seen = []
    for _ in range(times):
        x += update
        seen.append(x.item())
    return seen


dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
weights = {name: add_up(dtype) for name, dtype in dtypes.items()}
gradients = {name: add_up(dtype, start=0.0) for name, dtype in dtypes.items()}

# %% tags=["nbval-check-output"]
for name in dtypes:
    print(f"{name}: the weight is {weights[name][-1]:.4f}", end=", ")
    print(f"and 10,000 gradients of 0.0001 add up to {gradients[name][-1]:.4f}")


# %%
def draw(panels):
    _, all_axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axes, (title, lines) in zip(all_axes, panels.items()):
        for (name, y), colour in zip(lines.items(), ("#0072B2", "#E69F00", "#D55E00")):
            dashes = "--" if name == "bf16" else "-"  # it may cover another line
            axes.plot(y, dashes, color=colour, label=name, linewidth=2)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel="additions", ylabel="value of the sum")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


draw({"1 + 0.0001 + 0.0001 ...": weights, "0 + 0.0001 + 0.0001 ...": gradients})

# %% [markdown]
# In 16 bits the weight never moves, and the sum of gradients stops on its way, and never says so.
# No error, no NaN: training just does not learn. **Where do the additions go?**

# %% [markdown]
# ## 2. The idea
#
# A floating-point number is a sign, a power of two, and a fraction: as in 1.5 × 10³, but in base 2.
#
# ```
#    s eeeee ffffffffff      fp16: 1 sign, 5 exponent, 10 fraction bits
#
#    (-1)^s × 2^(E - bias) × 1.F          E, F: the fields as whole numbers; 1.F = 1 + F / 2^10
# ```
#
# The bias, 15 here, lets a field without a sign mean negative powers. The 1 before the point is not
# stored. The same number in six formats:

# %%
plot.bits(0.1, "fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3")

# %% [markdown]
# **More exponent bits: a wider range. More fraction bits: finer steps.** bf16 is the upper half of
# an fp32; fp16 spends three bits otherwise. tf32 is what the multiplier of a GPU looks at; in memory
# it is an fp32.
#
# Flip bits yourself. What does the lowest bit do, and what the lowest bit of the exponent? Then move
# the slider: the next pattern is the next number.

# %%
plot.flip_bits(1.0, "fp16")

# %% [markdown]
# Between 1 and 2 there are 2^f steps, between 2 and 4 as many, between 4 and 8 as many. So the step
# (**ulp**, unit in the last place) doubles with each power of two:
#
# ```
#    ulp(x) = 2^(e - f)        for 2^e <= x < 2^(e+1), with f fraction bits
#
#    0     1/2     1               2                               4      with f = 2
#    |.....|.|.|.|.|...|...|...|...|.......|.......|.......|.......|
# ```
#
# What lies between two numbers goes to the nearer one; what lies in the middle, to the one whose
# last bit is 0 (**ties to even**), so that halves go up as often as down. Hence the rule of this lab:
#
# **x + d = x, if d is less than half a step at x.** In bf16 the step at 1 is 1/128, and 0.0001 is
# far less than half of it.

# %% [markdown]
# Two exponents are special. At the top: infinity (fraction 0) and NaN. At the bottom, E = 0: there
# is no leading 1, so these numbers go down to zero in equal steps. They are **subnormal**, and have
# fewer bits that count, the smaller they are. (At the right: fraction bits and the leading 1.)

# %%
plot.number_line(["fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3"])

# %% [markdown]
# e4m3, made for 8 bits, wants every pattern: it has no infinity, and one NaN for each sign. What is too large
# becomes the largest number (it *saturates*).
#
# Third way: integers. **int8 blocks** have equal steps, and one scale for each block of numbers, its
# largest: 1 byte a number, and 4 a block.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | floating point | 浮点数 | numbers stored as sign, exponent and fraction |
# | exponent, bias | 指数（阶码）、偏置 | the power of two, and the constant added to it in its bit field |
# | fraction, mantissa | 尾数 | the bits after the binary point |
# | ulp, step | 最低位单位 | the distance from one representable number to the next |
# | subnormal | 非规格化数（次正规数） | below the smallest normal number, in equal steps |
# | overflow | 上溢 | a result too large for the format: it becomes infinity |
# | underflow | 下溢 | a result too small for the format: it becomes 0 |
# | ties to even | 向偶数舍入 | a number halfway between two values rounds to the one whose last bit is 0 |
# | rounding error | 舍入误差 | the difference between a number and the nearest representable one |
# | saturation | 饱和 | a result too large becomes the largest finite number instead of infinity |
# | quantization, block | 量化、分块 | rounding to few equally spaced values; numbers that share one scale |
# | Kahan summation | Kahan 求和（补偿求和） | a sum that carries along what each addition rounds off |
# | associative, not associative | 满足结合律、不满足结合律 | whether (a + b) + c equals a + (b + c); for floating-point numbers it may not |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Before you run anything: in fp16 (5 exponent bits, 10 fraction bits), what is the step at 1024? And
# the largest number? How many different finite numbers are there? In bf16 (8 and 7 bits): which is
# the first whole number that it does not have?
#
# And where does the sum of section 1 stop in fp16? (At which sum is 0.0001 less than half a step?)

# %% stub="guess = predict(\n    fp16_step_at_1024=...,\n    fp16_largest=...,\n    fp16_how_many=...,\n    bf16_first_missing=...,\n    fp16_sum_stops_at=...,\n)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(
    fp16_step_at_1024=2**10 / 2**10,  # 1024 = 2^10, and 10 fraction bits
    fp16_largest=2**15 * (2 - 2**-10),  # the highest exponent is kept, so 30 - 15
    fp16_how_many=2 * 31 * 2**10 - 1,  # signs, exponents, fractions; +0 is -0
    bf16_first_missing=2**8 + 1,  # at 256 the step becomes 2
    fp16_sum_stops_at=2**-2,  # from 1/4 on a step is 2^-12 = 0.00024
)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# Where the three formulas stand in the library. From bits to a number, exactly, as a fraction:

# %%
show("precision/formats.py:Format.decode")

# %% [markdown]
# Back again: how many steps make x? Python's `round` takes a half to the even one. The number of
# steps is the fraction field already, and where it runs over, it carries into the exponent. That is
# why the fields lie in this order:

# %%
show("precision/formats.py:Format.rank")

# %% [markdown]
# The same for whole tensors, in fp64. The step is written into the exponent field, since that is
# exact, and fast:

# %%
show("precision/formats.py:rounded", since="exponent = ((wide", until="largest = float")

# %% [markdown]
# And the integers: divide by the largest of the block, and count in steps of 1/127.

# %%
show("precision/int8_blocks.py:Int8Blocks.encode", since="absmax = self")

# %% [markdown]
# ## 5. Run it
#
# First, your predictions. torch's own numbers are asked, by their patterns: the next number is the
# next pattern.


# %%
def next_number(x, dtype=torch.float16):
    return (torch.tensor(x, dtype=dtype).view(torch.int16) + 1).view(dtype).item()


every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
whole = torch.arange(1000.0)

# %% tags=["nbval-check-output"]
guess.beside(
    fp16_step_at_1024=next_number(1024.0) - 1024,
    fp16_largest=torch.finfo(torch.float16).max,
    fp16_how_many=len(every[every.isfinite()].float().unique()),
    bf16_first_missing=int(whole[whole.bfloat16().float() != whole][0]),
    fp16_sum_stops_at=gradients["fp16"][-1],
)

# %% [markdown]
# Is the library's arithmetic torch's, too? All 256 patterns of both 8-bit formats, and 100,000
# numbers, rounded:

# %% tags=["nbval-check-output"]
x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 100
for name in ("e4m3", "e5m2"):
    theirs = torch.arange(256, dtype=torch.uint8).view(FORMATS[name].dtype).float()
    ours = torch.tensor([float(FORMATS[name].decode(bits)) for bits in range(256)])
    print(
        f"{name}: {int(((ours == theirs) | ours.isnan() & theirs.isnan()).sum())} of 256 patterns"
    )
for name in ("bf16", "fp16", "e5m2"):
    same = rounded(x, name) == x.to(FORMATS[name].dtype).float()
    print(f"{name}: {int(same.sum()):,} of {len(x):,} numbers are rounded alike")

# %% [markdown]
# ### A model's gradients
#
# A small GPT trains for a moment in fp32. How large are the gradients that backward begins with,
# those of the logits? The loss is a *mean* over all tokens of a batch, so each is divided by their
# number. Large models take half a million at a time; we have 256, and divide by the rest.


# %%
def gradients_of_logits(tokens, steps=8):
    torch.manual_seed(0)
    model, text = GPT(vocab=256, width=32, depth=1, heads=2, context=64), Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = text.batch(step, rows=4, length=64)
        optimizer.zero_grad()
        logits = model(batch.x)
        logits.retain_grad()
        loss(logits, batch).backward()
        optimizer.step()
    return logits.grad * batch.x.numel() / tokens


logits = gradients_of_logits(tokens=2**19)
plot.number_line(["fp32", "bf16", "fp16", "e5m2", "e4m3"], values=logits)

# %% [markdown]
# fp16 makes nearly all of them zero, fp8 all; bf16 keeps them. And the upper half of fp16's range,
# up to 65504, is empty! Multiply all by 65,536, which changes nothing but exponents:

# %%
plot.number_line(["fp32", "bf16", "fp16", "e5m2", "e4m3"], values=logits * 65536)

# %% [markdown]
# That is **loss scaling**, since scaling the loss scales all gradients. By how much, and what when
# it overflows? That is lab 10. bf16 has the range of fp32 and needs none of it; it pays with steps
# eight times as coarse as fp16's.

# %% [markdown]
# ### An all-reduce in fp16
#
# Four ranks hold 2048, 1, 1 and 1. Each in four places, so that the same sum is made four times. At
# 2048, a step of fp16 is 2.

# %%
world = World(4)


def sum_of(values, algorithm, dtype=torch.float16):
    comm = attach().comm
    x = torch.full((4,), values[comm.rank], dtype=dtype)
    comm.all_reduce(x, algorithm=algorithm)
    return x.tolist()


# %% tags=["nbval-check-output"]
for values in ([2048.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2048.0]):
    for algorithm in ("naive", "tree", "ring"):
        every = world.run(sum_of, values, algorithm)
        alike = all(one == every[0] for one in every)
        print(f"{values} by {algorithm:<6} {every[0]}", "on all ranks" if alike else "NOT ALIKE")

# %% [markdown]
# 2051 is not there; 2050 and 2052 are its neighbours. But 2048? Additions are **not associative**:
#
# ```
#    ((2048 + 1) + 1) + 1   = 2048       1 is half a step, and goes to the even one, each time
#    2048 + ((1 + 1) + 1)   = 2052       3 is more than a step
# ```
#
# In a ring, chunk c begins its way at rank c + 1 (lab 02), so the four places add in four orders.
# The result depends on the algorithm, on who is which rank, and on where in the tensor a number
# lies. All *ranks* have the same bits, though: each chunk was summed once, and copied. Without that,
# replicas would drift apart.
#
# In fp32 the same happens 13 bits further down: it is why losses on 4 and on 8 GPUs differ in the
# last digits, and why tests compare in fp64.

# %% [markdown]
# ### One byte a number
#
# Weights of ZeRO-3 are gathered in each forward. In int8 blocks they cost a quarter of fp32. What
# does that do to the numbers, and how does it depend on the block?

# %%
weight = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 0.02
weight[::997] *= 40  # some outliers, as large models have them

# %% tags=["nbval-check-output"]
print("             bytes a number   error, part of the weights' size")
for block in (2**16, 1024, 64, 16):
    blocks = Int8Blocks(block)
    error = float((blocks.rounded(weight) - weight).norm() / weight.norm())
    print(f"int8, {block:>6}   {blocks.nbytes(2**16) / 2**16:<14.3f}   {error:.4f}")
for name in ("e4m3", "e5m2", "bf16"):
    error = float((rounded(weight, name) - weight).norm() / weight.norm())
    print(f"{name:<12}   {FORMATS[name].width_bits / 8:<14.3f}   {error:.4f}")

# %% [markdown]
# One scale for everything: the outliers set the step, and the small ones vanish in it. Small blocks
# cost bytes, and win. In exercise 4 you send them.

# %% [markdown]
# ## 6. Break it
#
# ### Replicas that drift apart
#
# Somebody averages bf16 gradients by hand: gather all, then add them up, beginning with one's own,
# since that is there first. Every rank adds the same four numbers. It trains; after a while, the
# losses of the ranks differ. Why?


# %%
def my_average(comm, gradient):
    others = [torch.empty_like(gradient) for _ in range(comm.size)]
    comm.all_gather(others, gradient)
    total = gradient.clone()
    for step in range(1, comm.size):
        total += others[(comm.rank + step) % comm.size]
    return total / comm.size


def weights_after(steps, average):
    comm = attach().comm
    generator = torch.Generator().manual_seed(comm.rank)
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    for _ in range(steps):
        gradient = torch.randint(-500, 500, (1000,), generator=generator).bfloat16() / 500
        weight -= 0.1 * average(comm, gradient)
    return weight


# %% tags=["nbval-check-output"]
def differ(average):
    first, *others = world.run(weights_after, 20, average)
    return [int((other != first).sum()) for other in others]


print("of 1,000 weights, so many differ from rank 0's after 20 steps:", differ(my_average))

# %% [markdown] tags=["answer"]
# Each rank adds in another order: rank 0 makes ((g0 + g1) + g2) + g3, rank 1 ((g1 + g2) + g3) + g0.
# The sums differ in their last bit, so do the weights, and nothing ever brings them together again.
# Add in the order of the ranks on every rank, or leave it to `comm.all_reduce`, which gives all ranks
# the same bits. (A rule for all of parallel training: **what must be equal is computed once, and
# copied, or computed alike to the last bit.**)


# %% tags=["answer", "nbval-check-output"]
def average_in_order(comm, gradient):
    every = [torch.empty_like(gradient) for _ in range(comm.size)]
    comm.all_gather(every, gradient)
    total = torch.zeros_like(gradient)
    for one in every:
        total += one
    return total / comm.size


differ(average_in_order)

# %% [markdown]
# ### Divide when?
#
# Four ranks average in fp16. Divide the sum, or each gradient first? Predict what `after` and
# `before` give for large gradients, and for tiny ones.


# %%
def after(comm, gradient):
    comm.all_reduce(gradient)
    return gradient / comm.size


def before(comm, gradient):
    gradient = gradient / comm.size
    comm.all_reduce(gradient)
    return gradient


def average_of(value, how):
    return how(attach().comm, torch.tensor([value], dtype=torch.float16)).item()


# %% tags=["nbval-check-output"]
for value in (30_000.0, 1.0, 1e-7):
    found = {how.__name__: world.run(average_of, value, how)[0] for how in (before, after)}
    print(f"the mean of four times {value:g}: {found}")

# %% [markdown] tags=["answer"]
# `after` overflows: 4 × 30,000 is beyond 65,504, and infinity stays infinity. `before` underflows:
# 1e-7 / 4 is less than half of the smallest subnormal, 6e-8. torch's DDP divides before; its fp16
# hook, too. With a loss scaled well there is room on both sides. Others sum in fp32, for twice the
# bytes.

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: From bits to a number
#
# `bits` is a whole number, the pattern: sign, exponent, fraction, as in section 2. Return the float
# that it stands for: normal numbers, subnormals, both zeros (`-0.0`!), `math.inf`, `math.nan`.
# All formats here keep their highest exponent for infinity and NaN.


# %%
def decode(bits, exponent_bits, fraction_bits):
    ### BEGIN SOLUTION
    fraction = bits % 2**fraction_bits
    exponent = bits // 2**fraction_bits % 2**exponent_bits
    sign = -1.0 if bits // 2 ** (fraction_bits + exponent_bits) else 1.0
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else sign * math.inf
    leading = 1 if exponent else 0
    power = 2.0 ** (max(exponent, 1) - bias)
    return sign * power * (leading + fraction / 2**fraction_bits)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.decode(decode)

# %% [markdown]
# ### Exercise 2: The nearest number
#
# The other way, without the bits: return the number of the format that is nearest to the float `x`,
# ties to even. Subnormals have the step of the smallest normal number; what is beyond the largest
# number, once it is rounded, is infinity.
#
# Useful: `math.frexp(x)` gives m and e with x = m · 2^e and 0.5 <= |m| < 1. `round` takes halves to
# even. `math.copysign(size, x)` keeps the sign, that of zero, too.


# %%
def nearest(x, exponent_bits, fraction_bits):
    ### BEGIN SOLUTION
    if not math.isfinite(x):
        return x
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(math.frexp(x)[1] - 1, 1 - bias)
    step = 2.0 ** (exponent - fraction_bits)
    size = round(abs(x) / step) * step
    largest = 2.0**bias * (2 - 2.0**-fraction_bits)
    return math.copysign(size if size <= largest else math.inf, x)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.nearest(nearest)

# %% [markdown]
# ### Exercise 3: A sum that does not stall
#
# `values` are thousands of fp16 numbers. You have `add(a, b)` and `sub(a, b)`, which work in fp16, as
# a processor does, and nothing else. Return their sum, off by a few steps at most. Two ways: add in
# pairs, then pairs of pairs, so that what is added is of like size (**pairwise**). Or find out what
# each addition has lost, which is a number of fp16 itself, and add that next time (**Kahan**).


# %%
def my_sum(values, add, sub):
    ### BEGIN SOLUTION
    total, lost = 0.0, 0.0
    for x in values:
        x = add(x, lost)
        new = add(total, x)
        lost = sub(x, sub(new, total))
        total = new
    return total
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_sum(my_sum)

# %% [markdown]
# Tensor cores help in the same way: they multiply in 16 or 8 bits, and add up in fp32.

# %% [markdown]
# ### Exercise 4: All-gather in int8
#
# `x` is this rank's fp32 numbers, flat, of the same length on all ranks; `block` divides it. Return
# all ranks' numbers, one after the other, in fp32. Send a byte for each number, and 4 for each block;
# an error may be half a step, absmax / 254. There is a block that is all zero.
#
# Useful: `x.view(-1, block)`, `.amax(dim=1, keepdim=True)`, `.to(torch.int8)`,
# `comm.all_gather_into_tensor(all, mine)`.


# %%
def gather_int8(comm, x, block):
    ### BEGIN SOLUTION
    blocks = x.view(-1, block)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    q = (blocks / absmax.clamp(min=1e-30) * 127).round().to(torch.int8)
    every_q = q.new_empty(comm.size * len(q), block)
    every_absmax = absmax.new_empty(comm.size * len(q), 1)
    comm.all_gather_into_tensor(every_q, q)
    comm.all_gather_into_tensor(every_absmax, absmax)
    return (every_q / 127 * every_absmax).flatten()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.gather_int8(gather_int8)

# %% [markdown]
# For a reduce-scatter it is not as easy: the sum of two int8 blocks is none. ZeRO++ has an
# all-to-all of int8 blocks instead, and each rank adds in fp32.

# %% [markdown]
# ### Exercise 5, open: Sixteen levels
#
# Four bits a number. `sample` has 4,096 numbers, distributed as weights are: many small ones, a few
# large. Return the 16 levels that a number may have. The check quantizes 4,096 *other* numbers, each
# to the nearest of your levels. Your score is the mean squared error, in millionths of the variance.
# Two to begin with:


# %%
def equal_steps(sample):
    return torch.linspace(-sample.abs().max(), sample.abs().max(), 16)


def four_bit_float(sample):
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # 2 exponent bits, 1 fraction bit
    scale = float(sample.abs().max()) / 6
    return [scale * sign * x for x in half for sign in (-1, 1)]


# %%
def draw_levels(ways):
    from labkit.labs.lab_09.scenarios import codebook_error, sample

    _, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    axes.hist(sample(0).numpy(), bins=200, color="#C9CED6", density=True)
    colours = ("#0072B2", "#E69F00", "#D55E00")
    for row, ((name, choose), colour) in enumerate(zip(ways.items(), colours)):
        levels = [float(x) for x in choose(sample(0))]
        lost = round(codebook_error(levels) * 1e6)
        y = -0.1 - 0.12 * row
        axes.plot(levels, [y] * 16, "|", color=colour, markersize=11, markeredgewidth=2)
        axes.text(7.2, y, f"{name}: {lost:,}", va="center")
    axes.set(xlim=(-7, 7), ylim=(-0.1 - 0.12 * len(ways), None), yticks=[], xlabel="value")
    axes.spines[["top", "right", "left"]].set_visible(False)


examples = {"equal steps": equal_steps, "four-bit float": four_bit_float}
draw_levels(examples)


# %%
def codebook(sample):
    ### BEGIN SOLUTION
    x = sample.sort().values
    levels = x[torch.linspace(40, len(x) - 41, 16).long()].clone()
    for _ in range(100):  # each number to its nearest level, each level to the mean of its numbers
        which = (x[:, None] - levels).abs().argmin(dim=1)
        levels = torch.stack([x[which == k].mean() for k in range(16)])
    return levels
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.codebook(codebook)

# %%
draw_levels(examples | {"yours": codebook})

# %% [markdown]
# Ideas: a level is worth most where there are many numbers, but a large error counts more than a
# small one. If the levels are given, which number goes where? If that is given, where should a level
# lie?

# %% tags=["nbval-check-output"]
report("09")

# %% [markdown]
# ## 8. In the wild
#
# | what | where |
# |---|---|
# | what a format holds | `torch.finfo(torch.bfloat16)`: `max`, `smallest_normal`, `eps` (the step at 1) |
# | tf32 products of fp32 matrices | `torch.set_float32_matmul_precision("high")` |
# | DDP that sends 16 bits | `model.register_comm_hook(None, bf16_compress_hook)`; labkit: `DDP(module, hook=bf16_compress_hook)` |
# | FSDP2 that adds up in fp32 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` |
# | Megatron that adds up in fp32 | `--bf16 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed, the dtype of collectives | `"communication_data_type": "fp32"` |
# | int8 weights in ZeRO++ | DeepSpeed: `"zero_quantized_weights": true`, `"zero_quantized_gradients": true` |
# | fp8 | Transformer Engine: `Format.HYBRID`, e4m3 forward, e5m2 backward |
# | 16 levels | bitsandbytes: `bnb_4bit_quant_type="nf4"` |

# %% [markdown]
# What they add: Transformer Engine has a scale for each tensor, from the largest values of the last
# steps. ZeRO++ quantizes on the GPU while it sends. NF4 lays its levels so that each gets as many
# numbers of a normal distribution.
#
# torch's own table, beside what the bits say:

# %% tags=["nbval-check-output"]
for name in ("fp32", "bf16", "fp16", "e5m2", "e4m3"):
    info, one = torch.finfo(FORMATS[name].dtype), FORMATS[name]
    equal = [info.max, info.smallest_normal, info.eps] == [
        float(x) for x in (one.largest, one.smallest_normal, one.epsilon)
    ]
    print(f"{name:<5} max {info.max:<11.5g} eps {info.eps:<9.3g} as by the bits: {equal}")

# %% [markdown]
# Sources: IEEE 754-2019; Goldberg, "What Every Computer Scientist Should Know About Floating-Point
# Arithmetic", 1991; Micikevicius et al., *Mixed Precision Training* (arXiv 1710.03740), figure 3 for
# the histogram, and *FP8 Formats for Deep Learning* (arXiv 2209.05433), table 1; Kahan, 1965;
# Dettmers et al., *8-bit Optimizers via Block-wise Quantization* (arXiv 2110.02861) and *QLoRA*
# (arXiv 2305.14314), NF4; Wang et al., *ZeRO++* (arXiv 2306.10209).

# %% [markdown]
# **You can now** say of any format what it holds and where it rounds, see which addition will be
# lost, and know why ranks add in one order.
