# %% [markdown]
# # Lab 10: Mixed precision
#
# Sixteen bits make products several times as fast, and activations half as large. They also lose
# numbers: small gradients become 0, small updates vanish, large sums become infinite. In this lab
# you see each of these happen to a model, and mend each with one small part: **autocast**, **master
# weights**, **loss scaling**. Then you go down to 8 bits.
#
# You need lab 05 (averaged gradients), lab 07 (the bill of 2 + 2 + 12 bytes) and lab 09 (formats).

# %%
import math
from contextlib import nullcontext
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from labkit import GPT, GradScaler, MasterWeights, Text, autocast, loss, plot
from labkit.bench import show_stored
from labkit.course import predict, report, show
from labkit.labs.lab_10 import checks as check
from labkit.parallel.common.held import held

# %% [markdown]
# ## 1. The question
#
# A large model is trained on batches of a million tokens. The loss is their mean, so one token's
# part of the gradient is a millionth. Here is a small model with such a loss: its micro-batch of 128
# tokens is one of 8192 that make the batch, and stands for all of them.

# %%
torch.set_num_threads(1)  # these tensors are small: two threads would wait for each other
SIZES = dict(vocab=256, width=32, depth=2, heads=4, context=32)
ROWS, LENGTH, TOKENS = 4, 32, 2**20
EPS, TEXT = 1e-12, Text()


def one_of_many(step):
    batch = TEXT.batch(step, rows=ROWS, length=LENGTH)
    return replace(batch, total_tokens=TOKENS)  # what `loss` divides by


# %%
def train(dtype=torch.float32, cast=None, scaler=None, masters=True, edit=None, lr=2e-3, steps=40):
    """Losses per token. The model is in `dtype`, autocast in `cast`."""
    torch.manual_seed(0)
    model, losses = GPT(**SIZES).to(dtype), []
    if edit:
        edit(model)
    if masters:
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=lr, eps=EPS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS)
    scaler = scaler or GradScaler(enabled=False)
    for step in range(steps):
        batch = one_of_many(step)
        with autocast(cast) if cast else nullcontext():
            value = loss(model(batch.x), batch)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item() * TOKENS / (ROWS * LENGTH))
    return losses


# %% [markdown]
# (`EPS` is Adam's: its usual 1e-8 is no longer small beside such gradients.)
#
# The same training twice, in fp32 and with the whole model in fp16. (The optimizer steps in fp32 in
# both: `MasterWeights`, as in lab 07.)


# %%
def draw(curves, title):
    _, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    colours = ["#525C68", "#D55E00", "#0072B2", "#009E73", "#CC79A7"]
    for (name, losses), colour in zip(curves.items(), colours):
        smooth = [sum(losses[max(0, i - 4) : i + 1]) / min(i + 1, 5) for i in range(len(losses))]
        width = 4 if name.startswith("fp32") else 1.8
        axes.plot(smooth, colour, label=f"{name}: {smooth[-1]:.3f}", linewidth=width)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# %%
curves = {"fp32": train(), "fp16": train(torch.float16)}
draw(curves, "The same model, data and optimizer")

# %% [markdown]
# No error, no warning, and fp16 learns much more slowly. Where is the rest? Look at the gradients of the
# first step, over what fp16 can hold:


# %%
def gradients(dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    model, batch = GPT(**SIZES).to(dtype), one_of_many(0)
    (loss(model(batch.x), batch) * scale).backward()
    return [p.grad for p in model.parameters()]


in_fp32 = gradients()
plot.magnitudes({"gradients, made in fp32": in_fp32})

# %%
in_fp16 = torch.cat([g.flatten() for g in gradients(torch.float16)])
zeros = (in_fp16 == 0).float().mean()
print(f"In fp16, {zeros:.0%} of all gradients are exactly 0: these weights stay as they are.")

# %% [markdown]
# That is more than the picture has left of the line: what is made from numbers that have become 0 is
# 0, too, so more and more is lost on the way from the last layer to the first.
#
# **The numbers are not too many, they are in the wrong place.** From 2⁻¹⁴ to 2¹⁶
# nearly all is empty. How do we use it?

# %% [markdown]
# ## 2. The idea
#
# Three things go wrong in 16 bits, each in another place, and each has its own part:
#
# ```
#   where           what goes wrong                          what mends it
#   forward         exp, sums, norms leave fp16's range,     autocast: each op in the type
#                   losses lose their last digits            that is good for it
#   backward        gradients below 2⁻²⁵ become 0            loss scaling: S · loss
#   step            w + 0.0002 w is w                        master weights in fp32
# ```
#
# bf16 has the range of fp32, so it needs no loss scaling. It has 3 fraction bits less than fp16,
# so it needs master weights all the more.

# %% [markdown]
# **Loss scaling.** Backward is linear: S times the loss gives S times every gradient. So move the hill
# to where fp16 has room, and move it back in fp32 before the step:
#
# ```
#   loss · S ─▶ backward ─▶ gradients · S (fp16) ─▶ / S (fp32) ─▶ clip ─▶ step
#                                  │
#                                  └─ any inf or NaN?   skip the step,   S ← S / 2
#                                     none for N steps                   S ← S · 2
# ```
#
# S should be as large as it can be. Nobody knows how large that is, so it grows until something
# overflows; that step is not taken.

# %% [markdown]
# **On many ranks** there is one more question: *whose* inf? With ZeRO a rank sees its own share of
# the gradients only. If one skips and another steps, their weights and scales part for ever. So the
# ranks agree: one number, an all-reduce with max.
#
# ```
#   rank 0   all finite       S  ┐
#   rank 1   one is inf      inf ├─ max = inf ─▶ all skip, all halve S
#   rank 2   all finite       S  ┘
# ```

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | mixed precision | 混合精度 | training with several number formats, such as a 16-bit model and a 32-bit optimizer |
# | autocast | 自动类型转换 | casts the inputs of each op to the dtype that its op policy names |
# | op policy | 算子精度策略 | which ops run in low precision, which in fp32, and which in the widest input dtype |
# | master weights | 主权重（FP32 副本） | fp32 copies of the weights, which the optimizer updates |
# | underflow | 下溢 | a result too small for the format: it becomes 0 |
# | overflow | 上溢 | a result too large for the format: it becomes infinity |
# | loss scaling | 损失缩放 | runs backward on S times the loss, so that small gradients do not underflow |
# | dynamic scaling, back-off | 动态缩放、回退 | the loss scale grows over time and is halved on overflow |
# | gradient accumulation | 梯度累积 | several backwards add up gradients before one optimizer step |
# | amax | 最大绝对值 | the largest magnitude in a tensor |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# First: bytes per parameter that stay from one step to the next (weights, gradients, Adam's two
# moments, masters), for autocast on an fp32 model, and for a bf16 model with master weights.
#
# Second: the largest gradient is about 4.1 · 10⁻⁵, and fp16 ends at 65504. A scaler begins at
# S = 2⁴⁰ and halves it after each overflow. How many steps are skipped before one is taken?

# %% stub="bill = predict(autocast=..., masters=...)\nstart = predict(skipped=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
bill = predict(autocast=4 + 4 + 8, masters=2 + 2 + 12)
start = predict(skipped=40 - math.floor(math.log2(65504 / 4.1e-5)))
### END SOLUTION
print(bill, start, sep="\n")

# %% [markdown]
# ## 4. Read it
#
# ### Which op in which type
#
# | list | ops, on a GPU | why |
# |---|---|---|
# | low | `linear`, `matmul`, convolutions, attention | nearly all the work, with sums in fp32 inside |
# | fp32 | `softmax`, `exp`, `sum`, norms, losses | leave the range, or add many small numbers |
# | promote | `addcmul`, `cross`, `dot` | several inputs, which must have one type: the widest |
# | others | `gelu`, `relu`, `add`, `reshape` | as they come |
#
# The lists are torch's own. On a CPU, where bf16 is used, `softmax` and norms run as they come.

# %%
show("precision/autocasting.py:_Casting.__torch_function__", since="match POLICIES")

# %% [markdown]
# `func` is any torch function. The cast of a weight is kept, so that a weight used twice is cast
# once, and both uses add to one gradient. `x.to(to)` is recorded by autograd: the gradient comes back
# as fp32.

# %%
show("precision/autocasting.py:_Casting._cast")

# %% [markdown]
# ### The scale
#
# After each step, one of three things happens to it:

# %%
show("precision/dynamic_scale.py:DynamicScale.after_step")

# %% [markdown]
# What a rank has found becomes one number: its scale, or inf. `max` finds an inf; and where ranks
# have different scales (which must not be), that shows, too.

# %%
show("precision/scaler.py:GradScaler.unscale_", since="nonfinite =", until="self._pending.append")

# %% [markdown]
# ### The step
#
# Gradients become fp32, the masters step, and the model gets them, rounded:

# %%
show("precision/master.py:MasterWeights.step", since="for chunk in", until="return value")

# %% [markdown]
# ## 5. Run it
#
# A scale in front of the loss, nothing else changed. First the picture of section 1 again, then with
# S = 2¹⁶:

# %%
plot.magnitudes(
    {"gradients": in_fp32, "gradients with S = 65536": gradients(torch.float32, 2.0**16)}
)

# %%
curves["fp16, scaled"] = train(torch.float16, scaler=GradScaler())
curves["bf16"] = train(torch.bfloat16)
curves["autocast, bf16"] = train(cast=torch.bfloat16)
draw(curves, "A scale, or a format with more range")

# %% [markdown]
# All of them lie on the line of fp32, but for fp16 without a scale. Now your predictions. The bytes:


# %%
def bytes_per_parameter(dtype, cast=None):
    model, batch = GPT(**SIZES).to(dtype), one_of_many(0)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)
    with autocast(cast) if cast else nullcontext():
        value = loss(model(batch.x), batch)
    value.backward()
    optimizer.step()
    its = held(model, optimizer)
    everything = its.parameter_bytes + its.gradient_bytes + its.optimizer_bytes
    return round(everything / model.parameter_count, 1)  # Adam counts its steps, too


# %% tags=["nbval-check-output"]
bill.beside(
    autocast=bytes_per_parameter(torch.float32, cast=torch.bfloat16),
    masters=bytes_per_parameter(torch.bfloat16),
)

# %% [markdown]
# Equal: **mixed precision saves no byte of the model's states.** It saves activations, which are
# half as large (lab 11), bytes on the wire, and time. And the scale:

# %% tags=["nbval-check-output"]
scaler = GradScaler(init_scale=2.0**40)
train(torch.float16, scaler=scaler, steps=12)
start.beside(skipped=scaler.skipped)

# %% [markdown]
# ### Is it torch's autocast?
#
# Ours and torch's, on this model: the same numbers, bit for bit, and the same gradients.


# %%
def logits_and_gradients(region):
    torch.manual_seed(0)
    model, batch = GPT(**SIZES), TEXT.batch(0, rows=ROWS, length=LENGTH)
    with region:
        logits = model(batch.x)
        value = loss(logits, batch)
    value.backward()
    return [logits, value, *(p.grad for p in model.parameters())]


# %% tags=["nbval-check-output"]
ours = logits_and_gradients(autocast(torch.bfloat16))
theirs = logits_and_gradients(torch.autocast("cpu", torch.bfloat16))
print(len(ours), "tensors equal:", all(torch.equal(x, y) for x, y in zip(ours, theirs)))
print("logits", ours[0].dtype, " loss", ours[1].dtype, " gradients", ours[2].dtype)

# %% [markdown]
# ### Many micro-batches
#
# With k micro-batches, autograd adds k gradients up in the type of the weight. In bf16 the sum soon
# is so large that what comes is rounded away. `Fp32Gradients` takes each gradient as soon as it is
# there, adds it to a sum in fp32, and frees it. That costs 4 bytes a parameter instead of 2.

# %%
from labkit import Fp32Gradients

show("precision/accumulation.py:Fp32Gradients._add", since="if not self._arrived")


# %%
def error_of_sum(k, in_fp32):
    """How far the sum of k gradients is from exact, as a share of it."""
    lot = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
    parts = [torch.rand(2000, generator=lot).bfloat16() / k for _ in range(k)]
    keeper = Fp32Gradients([p]) if in_fp32 else None
    for part in parts:
        (p * part).sum().backward()
    if keeper:
        keeper.hand_over()
    exact = torch.stack(parts).double().sum(0)
    return float((p.grad - exact).norm() / exact.norm())


# %%
ks = [2, 8, 32, 128, 512]
_, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
for name, in_fp32_, colour in [("bf16", False, "#D55E00"), ("Fp32Gradients", True, "#0072B2")]:
    errors = [max(error_of_sum(k, in_fp32_), 1e-9) for k in ks]  # there is no log of 0
    axes.loglog(ks, errors, "o-", color=colour, label=name)
axes.set(xlabel="micro-batches", ylabel="relative error of the sum")
axes.set_title("Sums of k gradients in bf16, kept in bf16 and in fp32", loc="left", fontsize=10)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ### Eight bits
#
# e4m3 ends at 448, e5m2 at 57344. So little range that one scale for the loss is not enough: **each
# tensor has its own**, from its largest magnitude, *amax*. Weights and activations are e4m3,
# gradients e5m2. Products are added up in fp32.

# %%
from labkit import use_fp8

show("precision/fp8.py:Fp8Cast.forward")

# %% [markdown]
# To know amax, the tensor must be read once more before it is cast. *Delayed scaling* takes the
# largest amax of the last calls instead (`history=4`). The linear layers of the blocks in 8 bits,
# all else in bf16:

# %%
in_8_bits = {"fp32": curves["fp32"][:20]}
for name, history in {"fp8, own amax": 0, "fp8, amax of 4 calls before": 4}.items():

    def edit(model, history=history):
        use_fp8(model, only="blocks.*", history=history)

    in_8_bits[name] = train(cast=torch.bfloat16, edit=edit, steps=20)
draw(in_8_bits, "Linear layers in 8 bits (simulated: rounded to 8 bits, multiplied in fp32)")

# %% [markdown]
# A GPU with compute capability 8.9 or more multiplies 8 bits itself. What `labkit bench precision`
# has measured on such machines:

# %%
show_stored("precision")

# %% [markdown]
# 16 bits take a sixth of the time of 32 bits, for tensor cores multiply them faster and half as many
# bytes move. Eight bits lose here. Their matmuls are faster still, but labkit rounds each operand in
# several passes over memory (largest value, scale, cast), which costs more than matmuls of this width
# save. Libraries for training in fp8 do all of that in one kernel, and the matmuls are larger.
# `recompute`, in fp32, runs every block's forward twice: a fifth more time and half the memory of fp32.

# %% [markdown]
# ## 6. Break it
#
# ### Without master weights
#
# bf16 has 7 fraction bits (8 with the leading 1). An update of less than 1/512 of its weight is rounded away. Late in
# training learning rates are small; so here, on one batch:


# %%
def fit_one_batch(dtype, masters):
    torch.manual_seed(0)
    model, batch = GPT(**SIZES).to(dtype), TEXT.batch(0, rows=ROWS, length=LENGTH)
    if masters:
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    before, losses = [p.detach().clone() for p in model.parameters()], []
    for _ in range(30):
        value = loss(model(batch.x), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    same = sum(int((p == q).sum()) for p, q in zip(model.parameters(), before))
    print(f"{dtype}: {same / model.parameter_count:.0%} of the weights never moved")
    return losses


# %%
small_steps = {
    "fp32": fit_one_batch(torch.float32, False),
    "bf16 alone": fit_one_batch(torch.bfloat16, False),
    "bf16 with masters": fit_one_batch(torch.bfloat16, True),
}
draw(small_steps, "Learning rate 3e-5: updates that vanish")

# %% [markdown]
# ### All in fp16
#
# Adam itself in fp16, and softmax written out by somebody who had only fp32 in mind:

# %%
print("losses of 4 steps:", [round(x, 2) for x in train(torch.float16, masters=False, steps=4)])

# %% tags=["nbval-check-output"]
scores = torch.tensor([12.0, 0.0])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = scores.to(dtype).exp()
    print(f"{dtype!s:<15} exp {x.tolist()}  softmax {(x / x.sum()).tolist()}")
print("eps of Adam in fp16: 1e-8 is", torch.tensor(1e-8).half().item())

# %% [markdown]
# The first is Adam's `m / (√v + eps)` with v and eps both 0 in fp16: 0/0 is NaN, and one step later
# so is everything. The second is why `exp` and `softmax` are on the fp32 list of a GPU, and why torch's
# own softmax first takes the maximum away.

# %% [markdown]
# ### A bug hunt: two ranks, one infinity
#
# Somebody wrote a sharded step (lab 07) for fp16 by hand: reduce-scatter, look for an inf, step on the
# share, all-gather. Weights are equal on both ranks after every step, they are gathered after all.
# Read it; what happens when **one** share has an inf?


# %%
from labkit import World, attach


def gradient_of(step, scale):
    """8 gradients of 1; in step 2 the last one is larger than fp16 can hold, once scaled."""
    g = torch.ones(8)
    g[7] = 3.0 if step == 2 else 1.0
    return (g * scale).half()


def by_hand(steps=5):
    comm = attach().comm
    weights, scale, report = torch.zeros(8), 2.0**15, []
    share = weights.chunk(comm.size)[comm.rank]
    for step in range(steps):
        mine = torch.empty(4)
        comm.reduce_scatter_tensor(mine, gradient_of(step, scale).float() / comm.size)
        if mine.isfinite().all():
            share -= mine / scale
        else:
            scale /= 2
        comm.all_gather_into_tensor(weights, share.clone())
        report.append((scale, weights.tolist()))
    return report


# %%
world = World(2)

# %% tags=["nbval-check-output"]
for step, ((scale_0, weights), (scale_1, _)) in enumerate(zip(*world.run(by_hand))):
    print(f"step {step}: scales {scale_0:g}, {scale_1:g}   weights {weights[0]:g} | {weights[7]:g}")

# %% [markdown]
# After 5 steps, one of them skipped, every weight should be -4. What is each, and why does it get
# worse with every step?

# %% [markdown] tags=["answer"]
# In step 2 rank 1 alone skips: its half of the weights is one step behind. That is only the beginning.
# From then on rank 0 scales its loss by 32768 and rank 1 by 16384; the reduce-scatter adds both; and
# each divides by its *own* scale. Rank 0 sees 0.75 of the gradient, rank 1 sees 1.5 times as much.
# No error, no NaN, weights equal on all ranks, and a loss that looks nearly right.
#
# `GradScaler` guards against it in two ways: the decision travels, and if scales differ all the same (a
# checkpoint loaded on one rank only), the shared number is neither the scale nor inf: ValueError.

# %% [markdown]
# Now with labkit's, on the same two ranks. `ZeroOptimizer` makes the shares; in step 2 rank 1 has an
# inf in its gradient:


# %%
def with_labkits(steps=5):
    from labkit import ZeroOptimizer

    me = attach()
    p = torch.nn.Parameter(torch.zeros(8).half())
    optimizer = ZeroOptimizer([p], torch.optim.SGD, stage=2, lr=1.0)
    scaler, report = GradScaler(init_scale=2.0**15), []
    for step in range(steps):
        optimizer.zero_grad()
        bad = torch.ones(8)
        bad[7] = 3.0 if step == 2 and me.rank == 1 else 1.0
        scaler.scale((p * bad.half()).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        report.append((scaler.get_scale(), p.tolist()))
    return report


# %% tags=["nbval-check-output"]
for step, ((scale_0, weights), (scale_1, _)) in enumerate(zip(*world.run(with_labkits))):
    print(f"step {step}: scales {scale_0:g}, {scale_1:g}   weights {weights[0]:g} | {weights[7]:g}")

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: The op policy
#
# Into which type does autocast on a GPU cast the inputs of `op`? `types` are the types that they have
# (bf16 or fp16, called `low`, and fp32); return `low`, `torch.float32`, or `None` where they stay as
# they come. The ops are `linear`, `matmul`, `conv2d`, `softmax`, `layer_norm`, `exp`, `sum`,
# `cross_entropy_loss`, `addcmul`, `gelu`, `relu`, `add`.


# %%
def runs_in(op, types, low):
    ### BEGIN SOLUTION
    if op in ("linear", "matmul", "conv2d"):
        return low
    if op in ("softmax", "layer_norm", "exp", "sum", "cross_entropy_loss"):
        return torch.float32
    if op == "addcmul":
        return torch.float32 if torch.float32 in types else low
    return None
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.runs_in(runs_in)

# %% [markdown]
# ### Exercise 2: The scale
#
# `scale` is the present one, `good` counts steps without inf since it last changed. A step is over:
# return the next `(scale, good)`. The scale is halved after an inf, doubled after `interval` good
# steps in a row.


# %%
def update(scale, good, found_inf, interval):
    ### BEGIN SOLUTION
    if found_inf:
        return scale / 2, 0
    if good + 1 == interval:
        return scale * 2, 0
    return scale, good + 1
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.update(update)

# %% [markdown]
# ### Exercise 3: The shared decision
#
# `pieces` are this rank's gradients, scaled, in fp16; a rank may have none. Return them divided by
# `scale`, in fp32, in a list. If **any** rank has an inf or NaN: return `None` on **all** ranks. Send
# one number.
#
# Useful: `torch.isfinite`, `comm.all_reduce(x, op="max")`. What is the maximum of 1 and NaN?


# %%
def unscale(comm, pieces, scale):
    ### BEGIN SOLUTION
    finite = all(bool(torch.isfinite(x).all()) for x in pieces)
    bad = torch.tensor(0.0 if finite else 1.0)
    comm.all_reduce(bad, op="max")
    return None if bad else [x.float() / scale for x in pieces]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.unscale(unscale)

# %% [markdown]
# ### Exercise 4: The step on master weights
#
# `parameters` are in bf16 and have a `.grad` in bf16, `masters` are their fp32 copies. Do one step of
# plain SGD, w ← w - lr · g: change both in place.


# %%
def master_step(parameters, masters, lr):
    ### BEGIN SOLUTION
    with torch.no_grad():
        for p, master in zip(parameters, masters):
            master -= lr * p.grad.float()
            p.copy_(master)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.master_step(master_step)

# %% [markdown]
# ### Exercise 5, open: The best scale
#
# `GradScaler` learns from overflow only, and pays a step for it. You may look at the gradients: after
# each step `after_step(amax)` is told the largest of them, unscaled, or inf where the step overflowed
# and was skipped. `self.scale` is what the next step takes. The score: gradients lost in 400 steps, to
# underflow or in skipped steps.

# %%
show("labs/lab_10/scales.py:lost")


# %%
class Chooser:
    def __init__(self):
        self.scale = 2.0**16

    def after_step(self, amax):
        ### BEGIN SOLUTION
        if math.isfinite(amax):
            self.scale = 65504 / (2 * amax)
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.Chooser(Chooser)

# %%
from labkit.labs.lab_10.scales import TorchGradScaler, gradients_of_a_run, scales_of


def draw_scales(ways):
    run = gradients_of_a_run()
    _, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    limits = [math.log2(65504) - step.largest for step in run]
    axes.fill_between(range(len(run)), limits, max(limits) + 2, color="#FBE3D5", label="overflow")
    for (name, make), colour in zip(ways.items(), ("#525C68", "#0072B2")):
        axes.step(range(len(run)), [math.log2(x) for x in scales_of(make)], colour, label=name)
    axes.set(xlabel="step", ylabel="log2 of the scale", xlim=(0, len(run)), ylim=(14, max(limits)))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


draw_scales({"GradScaler, growth_interval=20": TorchGradScaler, "yours": Chooser})

# %% [markdown]
# Ideas for more: how fast does the largest gradient wander, and how far does it jump? A step lost
# costs everything, one bit of room costs a little in every step.

# %% tags=["nbval-check-output"]
report("10")

# %% [markdown]
# ## 8. In the wild
#
# | tool | 16 bits | the scale | 8 bits |
# |---|---|---|---|
# | torch | `torch.autocast("cuda", torch.bfloat16)` | `torch.amp.GradScaler()` | `torch._scaled_mm`; torchao's `convert_to_float8_training(model)` |
# | DeepSpeed | `"bf16": {"enabled": true}` | `"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}` | |
# | Megatron | `--bf16` | `--fp16 --initial-loss-scale 4294967296` | `--fp8-format hybrid` |
# | Accelerate | `Accelerator(mixed_precision="bf16")` | `mixed_precision="fp16"` | `mixed_precision="fp8"` |
# | Transformer Engine | | | `te.autocast(recipe=DelayedScaling(...))`, once `fp8_autocast(fp8_recipe=...)` |
# | labkit | `autocast(torch.bfloat16)`, `MasterWeights` | `GradScaler()` | `use_fp8(model, history=...)` |

# %% [markdown]
# Where to find each idea of this lab:
#
# | here | there |
# |---|---|
# | `OpPolicy`, three lists | torch: `aten/src/ATen/autocast_mode.cpp` |
# | `DynamicScale.after_step` | Megatron: `DynamicGradScaler`; DeepSpeed: `DynamicLossScaler` |
# | the shared number | torch FSDP: `ShardedGradScaler`; Megatron and DeepSpeed: an all-reduce of the overflow, max |
# | `growth_interval` | DeepSpeed: `"loss_scale_window"`; Megatron: `--loss-scale-window` |
# | `MasterWeights` | Megatron: `Float16OptimizerWithFloat16Params`; DeepSpeed: `FP16_Optimizer`, `BF16_Optimizer` |
# | `Fp32Gradients` | Megatron: `--accumulate-allreduce-grads-in-fp32`; DeepSpeed: `"grad_accum_dtype": "fp32"` |
# | `Fp8Cast(history=n)` | Transformer Engine: `DelayedScaling(amax_history_len=n, amax_compute_algo="max")` |
#
# What they add: `hysteresis` (Megatron, DeepSpeed): back off only after the second overflow, so that
# one unlucky batch costs a step and not the scale. Transformer Engine shares amax over the ranks
# that hold parts of one tensor.

# %% [markdown]
# Sources: Micikevicius et al., *Mixed Precision Training*, 2018 (arXiv 1710.03740), section 3;
# Micikevicius et al., *FP8 Formats for Deep Learning*, 2022 (arXiv 2209.05433), section 3;
# Rajbhandari et al., *ZeRO*, 2020 (arXiv 1910.02054), section 3.1; the documentation of the tools.
#
# **You can now** say which numbers each format loses and where, and write what keeps them: the casts,
# the scale, the masters, and a decision that ranks take together.
