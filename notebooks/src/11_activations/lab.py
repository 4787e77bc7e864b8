# %% [markdown]
# # Lab 11: Activations
#
# ZeRO (labs 07 and 08) cuts what a rank keeps from step to step. In this lab you look at what comes
# and goes within a step: what forward keeps for backward. You count it term by term, and then make
# it go: compute it again, move it away, or never store it. Each has a price, and you find the least.
#
# You need lab 06 (operations of a transformer), lab 07 (memory by category) and lab 10 (16 bits).

# %%
import weakref
from functools import partial
from itertools import product
from textwrap import fill
from time import monotonic

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labkit import GPT, Link, Recompute, Text, choose_activations, loss, offload_activations, plot
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_11 import checks as check
from labkit.memory.chooser import plan_of
from labkit.memory.edits import CHOICES, Choices, recompute
from labkit.memory.flash_attention import FlashAttention
from labkit.memory.saved import saved_by
from labkit.models import PlainAttention
from labkit.trace.measures import peak_memory
from labkit.trace.recording import record

# %% [markdown]
# ## 1. The question
#
# A small GPT in bf16, with attention written out and with dropout, as models are trained. One step,
# recorded in detail:

# %%
SIZES = dict(width=128, heads=8)
S, B, DEPTH = 256, 2, 4  # sequence, rows, layers


def plain():
    return PlainAttention(dropout=0.1)


def gpt(core=plain, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = GPT(vocab=256, depth=DEPTH, context=1024, dropout=0.1, **SIZES).to(dtype)
    for block in model.blocks:
        block.attn.core = core()
    return model


model, batch = gpt(), Text().batch(0, rows=B, length=S)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step():
    return loss(model(batch.x), batch)


# %%
def one_step(optimizer):
    step().backward()
    optimizer.step()
    optimizer.zero_grad()


with record(detail_step=1) as trace:
    one_step(adam)
    one_step(adam)
plot.memory(trace)

# %% tags=["nbval-check-output"]
held = peak_memory(trace.ranks[0])
states = held["parameters"] + held["optimizer state"]
print(f"{held['activations'] / 1e6:.0f} MB of activations, {states / 1e6:.0f} MB of states")

# %% [markdown]
# The mountain is not the model: **it is what forward leaves behind**. More ranks make the states
# smaller. This they leave as it is, and it grows with the batch and, faster, with the sequence.
# **Must all of it be kept?**

# %% [markdown]
# ## 2. The idea
#
# Why is anything kept? The gradient of a product needs both factors. For `y = x @ w`, backward is
# `dw = x.T @ dy`: it needs x, so forward keeps it. What can be done instead?
#
# ```
#               forward                     backward
#   none        keep all                    use it
#   full        keep a layer's input        run the layer again, then use it
#   selective   keep all but the scores     run the core of attention again
#   offload     send it to the host         have it back in time
#   flash       never make the scores       make them again, a tile at a time
# ```
#
# The first pays with memory, the next two with operations, offload with a bus.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | activations | 激活值 | tensors that forward computes and backward needs |
# | activation recomputation (checkpointing) | 激活重计算（激活检查点） | drop activations in forward and compute them again in backward |
# | selective recomputation | 选择性重计算 | recomputes only activations that are large to keep and cheap to compute |
# | saved tensor | 反向保存张量 | a tensor that autograd keeps for the backward of an operation |
# | offload | 卸载（到主机内存） | keep tensors in CPU memory until the device needs them |
# | pinned (page-locked) memory | 锁页内存 | host memory that the system does not move, so that a GPU can copy it by DMA |
# | prefetch | 预取 | fetch data before it is needed |
# | online softmax | 在线 softmax | a softmax computed in one pass, block by block |
# | Pareto front | 帕累托前沿 | choices for which no other choice is better in both quantities |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Write s for the sequence, b for the rows, w for the width, a for the heads. All numbers take 2
# bytes, a dropout's mask 1. What does one layer keep, in units of s·b·w bytes?
#
# ```
#   norm1    its input          2          norm2     its input     2
#   q, k, v  one input          2          mlp.up    its input     2
#   core     q, k, v            6          GELU      its input     8
#            softmax's result  2as/w       mlp.down  its input     8
#            its mask           as/w       dropout   a mask        1
#            after the mask    2as/w
#   out      its input          2
#   dropout  a mask             1
# ```
#
# Each score is there for each head and each **pair** of positions: a·s·s·b numbers, that is as/w
# times s·b·w. Add up: 34 + 5as/w.

# %% [markdown]
# Here s = 256, b = 2, w = 128 and a = 8. How many bytes does one layer keep if nothing is computed
# again; if the core is (the scores go, q, k and v stay); if the whole layer is, from its input?

# %% stub="kept = predict(none_bytes=..., selective_bytes=..., full_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
s, b, w, a = S, B, SIZES["width"], SIZES["heads"]
sbw = s * b * w
kept = predict(
    none_bytes=sbw * 34 + 5 * a * s * s * b,
    selective_bytes=sbw * 34,
    full_bytes=sbw * 2,
)
### END SOLUTION
kept

# %% [markdown]
# And the price, in operations? Backward takes twice a forward. If **every** layer runs forward once
# more, by how many percent does the step grow? (Leave the head out. Selective: of a layer's forward,
# 24bsw² + 4bs²w operations, the core is 4bs²w.)

# %% stub="price = predict(full_percent=..., selective_percent=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
layer, core = 24 * B * S * w**2 + 4 * B * S**2 * w, 4 * B * S**2 * w
price = predict(
    full_percent=round(100 * layer / (3 * layer), 1),
    selective_percent=round(100 * core / (3 * layer), 1),
)
### END SOLUTION
price

# %% [markdown]
# ## 4. Read it
#
# Everything hangs on one door. Autograd hands each tensor that it wants to keep to a hook, `pack`,
# and keeps what that returns. In backward it calls `unpack` to have the tensor back. Look through:


# %%
def look(x):
    print(f"  keeps {list(x.shape)}, {x.nbytes:,} bytes")
    return x.detach()  # x itself would lead to its graph, and keep it alive for ever


with saved_tensors_hooks(look, lambda x: x):
    print("norm1"), model.blocks[0].norm1(torch.ones(B, S, w, dtype=torch.bfloat16))
    print("down"), model.blocks[0].mlp.down(torch.ones(B, S, 4 * w, dtype=torch.bfloat16))

# %% [markdown]
# (norm1 keeps its weights, too; but they are there anyway.) Now recomputation. In forward, autograd
# gets an empty **slot** for each tensor:

# %%
show("memory/recompute.py:Recomputed.__call__")

# %%
show("memory/recompute.py:_Call.save")

# %% [markdown]
# The first slot that backward asks for runs the function again. The n-th tensor saved then goes into
# the n-th slot. What if the second run saves other tensors than the first? `_next_slot` compares.

# %%
show("memory/recompute.py:_Call.wanted")

# %%
show("memory/recompute.py:_Call.run_again", since="args, kwargs", until="if len(filled) <")

# %% [markdown]
# `conditions.again()` is the difficult part: random numbers. Between a layer's forward and its
# backward others draw, so a second run would draw **other dropout masks**. The generators are set
# back for the run, and then set to where they were:

# %%
show("memory/conditions.py:Conditions.again")

# %% [markdown]
# Offload is the same door: `pack` starts a copy to the host and returns a ticket. At most
# `in_flight` tensors are under way, or memory would not be bounded.

# %%
show("memory/offload.py:Offload._moved", since="while ")

# %% [markdown]
# `unpack` asks for its own, and for those that backward will want next: the ones **before** it.

# %%
show("memory/offload.py:Offload._unpack", since="moved = ")

# %% [markdown]
# And flash attention: why keep scores at all, if one tile of them at a time is enough? A row's
# softmax needs the row's largest score and its sum. Both can be corrected when a larger one comes:

# %%
show("memory/flash_attention.py:flash_forward", since="for columns", until="out[")

# %% [markdown]
# ## 5. Run it
#
# First the bill: what the real block keeps, tensor by tensor as autograd saves it, beside the
# formula's terms. `Choices` edits the model from outside, by name.

# %%
bills, x = {}, torch.randn(B, S, w, dtype=torch.bfloat16, requires_grad=True)
for how in ("none", "selective", "full"):
    with Choices(model, how):
        saved = saved_by(model.blocks[0], x)
    bills[how] = formulas.activation_bill(saved, sequence=S, rows=B, recompute=how, **SIZES)
plot.bill(bills)

# %% tags=["nbval-check-output"]
bills["none"]

# %% [markdown]
# Every term is there, to the byte. What no term counts: each norm keeps two numbers for every
# position. Your predictions, and the bill without those:


# %%
def counted(bill):
    norms = sum(x.measured_bytes for x in bill.lines if "statistics" in x.term)
    return bill.measured_bytes - norms


# %% tags=["nbval-check-output"]
kept.beside(**{f"{how}_bytes": counted(bills[how]) for how in bills})

# %% [markdown]
# Now steps, one for each choice. The gradients must be those without, bit for bit, dropout and all:

# %%
del adam, trace
sgd = torch.optim.SGD(model.parameters(), lr=0.0)  # all start from the same weights
away = offload_activations(model)


def gradients(how, seed=1):
    torch.manual_seed(seed)
    with Choices(model, how, offload=away):
        step().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


# %% tags=["nbval-check-output"]
right = gradients("none")
for how in CHOICES[1:]:
    same = all(torch.equal(one, other) for one, other in zip(gradients(how), right))
    print(f"{how:<9} the same gradients: {same}")

# %%
runs = {}
for how in CHOICES:
    with Choices(model, how, offload=away), record(detail_step=0) as runs[how]:
        one_step(sgd)
plot.step_memory(runs)

# %% [markdown]
# `none` climbs all the way through forward. `selective` climbs a third as fast: the scores are gone.
# `full` falls back to its level after each layer: the humps in forward are one layer's scores while
# it computes, and those in backward one layer that is there as a whole. `offload` has such humps, too,
# and between them only the few tensors that are under way.

# %% [markdown]
# ### What it costs
#
# Operations are counted. Seconds are this machine's, here in float32, each choice in turn.

# %%
timed, text = gpt(dtype=torch.float32), batch


def seconds(how):
    with Choices(timed, how):
        begin = monotonic()
        loss(timed(text.x), text).backward()
    timed.zero_grad()
    return monotonic() - begin


took = {how: [] for how in ("none", "selective", "full")}
for _ in range(5):
    for how in took:
        took[how].append(seconds(how))
here = {how: 100 * (min(took[how]) / min(took["none"]) - 1) for how in took}

# %%
# ms of one layer of a model of 22 billion on 8 A100: arXiv 2205.05198, Table 4
layer_ms = {"none": 7.7 + 11.9, "selective": 7.7 + 13.2, "full": 7.7 + 19.5}
theirs = {how: 100 * (ms / layer_ms["none"] - 1) for how, ms in layer_ms.items()}


def by_operations(width, heads, sequence):
    """Percent more, by the formulas."""
    layer = formulas.layer_forward_flops(width, heads, 1, sequence)
    return {"selective": 100 * (4 * sequence**2 * width) / (3 * layer), "full": 100 / 3}


# %%
panels = {
    "22B on A100": {"operations": by_operations(6144, 64, 2048), "published": theirs},
    "here": {"operations": by_operations(sequence=S, **SIZES), "measured": here},
}
_, both = plt.subplots(1, 2, figsize=(10, 2.2), sharex=True, layout="constrained")
for axes, (title, sources) in zip(both, panels.items()):
    for i, (name, percent) in enumerate(sources.items()):
        width = [percent[how] for how in ("selective", "full")]
        colour = ("#B4BAC2", "#0072B2")[i]
        bars = axes.barh([0.4 * i, 1 + 0.4 * i], width, 0.36, color=colour, label=name)
        axes.bar_label(bars, fmt=" %.0f %%")
    axes.set(yticks=[0.2, 1.2], yticklabels=["selective", "full"])
    axes.set_xlabel("% more than a step without")
    axes.set_title(title, loc="left")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# On the A100, full recomputation costs a little more than a third. Selective gives back most of the
# bytes, here 80 of 114, for a fraction of that. (With GPT-3's sizes, a = 96, s = 2048, w = 12288,
# it is 80 of 114, too.) So the paper recommends it.
#
# There, both cost more than the operations say: softmax and dropout have few of them, but take
# time, too. Here the seconds are those of a small model on a CPU, and scatter with whatever else it
# does. (Its core has a larger part of the operations: the layer is narrow.)

# %% [markdown]
# ### The bus
#
# Offload computes nothing again. It needs a bus that is fast enough. Here is one that we pace, as
# the `Link` of lab 05: a thread copies, and no byte is there sooner than bytes / bandwidth. What
# travels while what computes?

# %%
paced = offload_activations(timed, link=Link(gbps=16))
with Choices(timed, "offload", offload=paced):
    begin = monotonic()
    value = loss(timed(text.x), text)
    turn = monotonic()
    value.backward()
    end = monotonic()
timed.zero_grad()

# %%
trips = [(t.began_s - begin, t.ended_s - t.began_s) for t in paced.bus.events]
out = [trip for trip in trips if trip[0] < turn - begin]
_, axes = plt.subplots(figsize=(10, 2), layout="constrained")
for row, parts, colour in [
    (0, [(0, turn - begin)], "#56B4E9"), (0, [(turn - begin, end - turn)], "#E69F00"),
    (1, out, "#0072B2"), (1, trips[len(out):], "#D55E00"),
]:  # fmt: skip
    spans = [(1e3 * x, 1e3 * width) for x, width in parts]
    axes.broken_barh(spans, (row - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.5)
axes.set(yticks=[0, 1], yticklabels=["computing", "bus (paced)"], xlabel="ms")
axes.set_title("blue: forward, and out  ·  orange: backward, and back", loc="left", fontsize=10)
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The bus is busy in forward and in backward alike, beside the computing. Its trips back go in reverse
# order. Where the bus is too slow, forward waits: at most two tensors may be under way.

# %% [markdown]
# ### The scores, never made
#
# The same block with two cores. What does it keep, for longer and longer sequences?


# %%
def kept_mb(core, sequence):
    x = torch.randn(1, sequence, w, dtype=torch.bfloat16, requires_grad=True)
    block = gpt(core).blocks[0]
    return sum(one.nbytes for one in saved_by(block, x)) / 1e6


lengths = (128, 256, 512, 1024)
for name, core in {"plain": plain, "flash": FlashAttention}.items():
    mb = [kept_mb(core, sequence) for sequence in lengths]
    print(f"{name:<6}" + "".join(f"{x:>8.2f}" for x in mb) + "   MB")

# %% [markdown]
# Twice the sequence: four times the scores. With flash attention all is linear in s: **the 5as/w
# term is gone**, and nothing of it is computed again but q kᵀ. That is why selective recomputation
# is rarely needed today, and full recomputation still is.

# %% [markdown]
# ### All choices
#
# Four blocks, three things to do for each: 81 ways. `choose_activations` measures one step of each
# kind, and takes the one with the least recomputation below a budget.

# %%
del timed, paced, value  # the fp32 model would count, too
budget = 28 * 10**6
chosen = choose_activations(model, step, budget)
print(chosen.plan)
plans = [plan_of(chosen.costs, ways) for ways in product(CHOICES[:3], repeat=DEPTH)]
plot.front(plans, chosen.plan, budget)

# %% [markdown]
# It says what it expects. Does it hold? The recorder, which knows nothing of it:

# %%
with record(detail_step=0) as confirmed:
    one_step(sgd)
measured = sum(peak_memory(confirmed.ranks[0]).values())
print(f"expected {chosen.plan.peak_bytes:,}, recorded {measured:,}, budget {budget:,} bytes")
chosen.remove()

# %% tags=["nbval-check-output"]
print("within the budget:", measured <= budget)
print("as expected or less:", measured <= chosen.plan.peak_bytes)

# %% [markdown]
# ## 6. Break it
#
# ### Other masks
#
# Somebody switches the bookkeeping of random numbers off: it costs time.


# %%
def with_new_masks():
    torch.manual_seed(1)
    with Recompute(model, preserve_rng=False):
        value = step()
        value.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return value.item(), found


# %% tags=["nbval-check-output"]
value, wrong = with_new_masks()
torch.manual_seed(1)
print("the loss is the same:", value == step().item())
cosine = nn.functional.cosine_similarity(
    *(torch.cat([g.flatten().float() for g in its]) for its in (wrong, right)), dim=0
)
print("the gradient is the same:", bool(cosine > 0.999))

# %% [markdown] tags=["answer"]
# Forward dropped some elements, backward pretends that it was others. No error, no strange loss: the
# gradient is that of another network than the one that made the loss. It is noise that never
# averages out to what you train. torch's `checkpoint` has the same switch, `preserve_rng_state`.

# %% [markdown]
# ### A function that is not the same twice
#
# This layer skips itself now and then ("layer drop"). It counts its calls:


# %%
class Sometimes(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).relu() if self.calls % 2 else x * 1.0


def of_layer(**options):
    torch.manual_seed(0)
    layer = Sometimes(nn.Linear(8, 8))
    x = torch.ones(2, 8, requires_grad=True)
    recompute(layer, x, **options).sum().backward()
    return x.grad.norm().item()


# %% tags=["nbval-check-output"]
try:
    of_layer()
except ValueError as error:
    print(fill(str(error), 100))

# %% [markdown] tags=["answer"]
# In forward the layer ran, and autograd saved its tensors. When backward called it again, the count
# was even, and it saved fewer. Whatever decides must come in as an argument, or from torch's generator.
# `check="values"` would also find a second run that saves tensors of the same shapes with other
# numbers; it reads them all, so it is for hunting.

# %% [markdown]
# ### Three by hand
#
# Three colleagues wrote recomputation themselves. One of them is right. Which, and what is wrong with
# the others?


# %%
class A(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer, ctx.rng = layer, torch.get_rng_state()
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        torch.set_rng_state(ctx.rng)
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


# %%
class B_(A):
    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.rng)
            y = ctx.layer(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


class C(A):
    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.rng)
            y = ctx.layer(x)
        dx, *_ = torch.autograd.grad(y, x, dy)
        return None, dx


# %% tags=["nbval-check-output"]
def tried(function):
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
    masks = []  # step 1: layers 0 and 1; step 2: layers 0 and 1
    for _ in range(2):
        y = torch.ones(4, 8, requires_grad=True)
        for layer in layers:
            y = function.apply(layer, y)
            masks.append(y == 0)
        y.sum().backward()
    trained = layers[0][0].weight.grad is not None
    again = torch.equal(masks[2], masks[1])
    return f"weights have gradients: {trained}, step 2 layer 0 has step 1 layer 1's mask: {again}"


for name, function in {"A": A, "B": B_, "C": C}.items():
    print(name, tried(function))

# %% [markdown] tags=["answer"]
# **A** sets the generator back and leaves it there. The last layer to run again is layer 0, so the
# next step begins where forward was after layer 0: with masks that this step has used already. One
# layer would not show it. **C** asks for the gradient of x only, and the weights get none: they stay
# as they were made. **B** is right.

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: Recompute
#
# Real layers have more than one input. Write recomputation for a `layer` with dropout that takes any
# number of tensors and returns a tuple of tensors. `forward` keeps the inputs and what else is needed
# to run the layer again; inside it autograd is off. `backward` gets a gradient for each output and
# returns one for each argument of forward: None for `layer`.
#
# Useful: `ctx.save_for_backward(*tensors)`, and from above `torch.random.fork_rng`,
# `torch.enable_grad`. `torch.autograd.backward` takes many outputs with their gradients, too.


# %%
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, *inputs):
        ### BEGIN SOLUTION
        ctx.layer, ctx.rng = layer, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return layer(*inputs)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, *gradients):
        ### BEGIN SOLUTION
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.rng)
            outputs = ctx.layer(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, *(x.grad for x in inputs)
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.Again(Again)

# %% [markdown]
# ### Exercise 2: Offload
#
# Autograd calls `pack(x)` for what it keeps, and `unpack(...)` with what `pack` returned. Have the
# memory of each tensor wait on the host: `host.put(storage)` copies a storage there and returns a
# number, `host.get(number)` makes a new storage of it. **Each memory goes once**, though several
# tensors may see it in different ways; and parameters stay.
#
# Useful: `x.untyped_storage()`, which can be a key of a `weakref.WeakKeyDictionary`; its
# `data_ptr()`; `torch.empty(0, dtype=...).set_(storage, offset, shape, stride)`.


# %%
class Away:
    def __init__(self, host, parameters):
        self.host = host
        ### BEGIN SOLUTION
        self.own = {p.untyped_storage().data_ptr() for p in parameters}  # these live on
        self.numbers = weakref.WeakKeyDictionary()
        ### END SOLUTION

    def pack(self, x):
        ### BEGIN SOLUTION
        storage = x.untyped_storage()
        if storage.data_ptr() in self.own:
            return x
        if storage not in self.numbers:
            self.numbers[storage] = self.host.put(storage)
        return self.numbers[storage], x.dtype, x.storage_offset(), x.shape, x.stride()
        ### END SOLUTION

    def unpack(self, kept):
        ### BEGIN SOLUTION
        if isinstance(kept, torch.Tensor):
            return kept
        number, dtype, *seen = kept
        return torch.empty(0, dtype=dtype).set_(self.host.get(number), *seen)
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.Away(Away)

# %% [markdown]
# ### Exercise 3: The online softmax
#
# `q` [r, e] has r queries. `tiles` gives pairs of keys and values, [c, e] each, one pair after the
# other; they are made when you ask for them, and there may be many. Return
# softmax(q kᵀ / √e) v over **all** keys, [r, e], with one tile in memory at a time. Scores may be
# large: exp(100) is more than float32 holds.
#
# Keep for each row its largest score so far m, its sum so far ℓ, its result so far o (not divided
# yet). A tile brings a larger m: by which factor are ℓ and o too large now?


# %%
def attend(q, tiles):
    ### BEGIN SOLUTION
    largest = q.new_full((len(q), 1), -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for k, v in tiles:
        scores = q @ k.T / q.shape[1] ** 0.5
        larger = torch.maximum(largest, scores.amax(1, keepdim=True))
        weights, smaller = (scores - larger).exp(), (largest - larger).exp()
        total = smaller * total + weights.sum(1, keepdim=True)
        out = smaller * out + weights @ v
        largest = larger
    return out / total
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.attend(attend)

# %% [markdown]
# ### Exercise 4, open: The least recomputation
#
# A model of 13 layers whose sequences become shorter and longer again, 4096 to 512 and back, by the
# formulas. `blocks[i]` has for "none", "selective" and "full" what layer i keeps (`kept_bytes`), what
# it needs for a moment above what the layers before it keep (`need_bytes`), and what is computed
# twice (`again_flops`). Choose for each layer, so that the peak is within `budget_bytes`:

# %%
show("memory/chooser.py:plan_of", since="chosen =", until="return")

# %% [markdown]
# (`before_bytes` and `after_bytes` are 0 here, and nothing moves.) Your score is the sum of what is
# computed twice, for three budgets.


# %%
def choose(blocks, budget_bytes):
    ### BEGIN SOLUTION
    reached = {0: (0, [])}  # level -> the least work that leads there, and how
    for block in blocks:
        following = {}
        for level, (flops, names) in reached.items():
            for name, cost in block.items():
                if level + cost.need_bytes > budget_bytes:
                    continue
                there = level + cost.kept_bytes
                work = flops + cost.again_flops
                if there not in following or work < following[there][0]:
                    following[there] = work, [*names, name]
        reached = following
    return min(reached.values())[1]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose(choose)

# %% [markdown]
# Ideas for more: which layers give back the most bytes for an operation? Does it matter where in the
# model a layer stands? What does the last layer save by being computed again?

# %% tags=["nbval-check-output"]
report("11")

# %% [markdown]
# ## 8. In the wild
#
# | tool | full | selective | offload |
# |---|---|---|---|
# | torch | `checkpoint(layer, x, use_reentrant=False)` | `context_fn=partial(create_selective_checkpoint_contexts, policy)` | `with save_on_cpu(pin_memory=True):` |
# | torchtitan | `--activation_checkpoint.mode full` | `selective`: by operation, or each n-th layer | |
# | Megatron | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | `--recompute-granularity selective` | `--cpu-offloading-num-layers N` |
# | DeepSpeed | `"activation_checkpointing": {...}`, then `deepspeed.checkpointing.checkpoint` | | `"cpu_checkpointing": true` |
# | Transformers | `model.gradient_checkpointing_enable()` | | |
# | labkit | `Recompute(model)` | `Recompute(model, "selective")` | `with offload_activations(model):` |

# %% [markdown]
# What they add:
#
# - DeepSpeed's `partition_activations` cuts each layer's input over the ranks of tensor parallelism,
#   which would all keep the same one, and gathers it in backward. That is P_a of ZeRO-R.
# - Its `contiguous_memory_optimization` puts these inputs into one block of memory, so that what
#   lives long leaves no holes (M_D). labkit's offload has such a block on the host, `ConstantBuffer`.
# - Buffers of **constant size** (C_B): what is fused for the wire must not grow with the model.
#   labkit's buckets have `bucket_mb`, DeepSpeed's `"reduce_bucket_size"`.
# - In Megatron, `uniform` keeps the input of each N layers; `block` runs N layers of a stage again and
#   leaves the others: the knob that you turned in exercise 4.

# %% [markdown]
# torch's own, here, beside ours, on the same layer:

# %% tags=["nbval-check-output"]
from torch.utils.checkpoint import checkpoint

for name, again in {"torch": partial(checkpoint, use_reentrant=False), "labkit": recompute}.items():
    x = torch.randn(B, S, w, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(5)
    again(model.blocks[0], x).float().square().sum().backward()
    mine, x.grad = x.grad, None
    torch.manual_seed(5)
    model.blocks[0](x).float().square().sum().backward()
    print(f"{name:<7} the gradient of the layer without it: {torch.equal(mine, x.grad)}")

# %% [markdown]
# Sources: Korthikanti et al., *Reducing Activation Recomputation*, 2022 (arXiv 2205.05198), sections
# 4 and 5; Chen et al., *Sublinear Memory Cost*, 2016 (arXiv 1604.06174); Rajbhandari et al., *ZeRO*,
# 2020 (arXiv 1910.02054), section 6; Dao, *FlashAttention-2*, 2023 (arXiv 2307.08691); Milakov and
# Gimelshein, *Online normalizer calculation for softmax*, 2018 (arXiv 1805.02867).

# %% [markdown]
# **You can now** say what each term of 34 + 5as/w is and which tensor keeps it, write recomputation,
# offload and the online softmax, and buy memory at the lowest price.
