# %% [markdown]
# # Lab 14: Sequence and context parallelism
#
# Tensor parallelism cuts a layer, but what lies between the cuts is on every rank. In this lab you
# cut the **sequence**: first between the layers, for a quarter more bytes, then everywhere, so that a
# sequence may be longer than any rank could hold. Only attention looks across; you build both ways in
# which it can, and see when their messages hide.
#
# You need lab 02 (collectives), lab 03 (all-to-all), lab 06 (clusters), lab 11 (activations, flash attention) and lab 13 (f and g).

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from labkit import DDP, GPT, Text, World, attach, context_parallel, listen, plot, sequence_shard
from labkit import predict as formulas
from labkit.clusters import cluster
from labkit.course import predict, report, show
from labkit.labs.lab_14 import checks as check
from labkit.memory.saved import saved_by
from labkit.models import PlainAttention
from labkit.parallel.context.ring_attention import RingAttention
from labkit.parallel.context.ulysses import Ulysses
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.predict.context import (
    ring_attention_bytes,
    ring_exposed_s,
    ring_hides_from,
    ulysses_bytes,
)
from labkit.replaying import dry_run, replay

# %% [markdown]
# ## 1. The question
#
# The model of lab 13: 105 layers of width 20480, sequences of 2048, one of them at a time. The scores
# are computed again (lab 11), so a layer keeps 34 · s·b·w bytes: s positions, b rows, width w. By the
# formula, what do all layers keep on one of t tensor-parallel ranks, and how much of that has **every**
# rank?

# %% tags=["nbval-check-output"]
BIG = dict(sequence=2048, rows=1, width=20480, heads=128, recompute="selective")
for t in (1, 8, 64):
    gb = 105 * formulas.activation_bytes(**BIG, tensor_parallel=t) / 1e9
    same = 105 * 10 * 2048 * 20480 / 1e9
    print(f"{t:>2} ranks: {gb:5.0f} GB on each, of them {same:.0f} GB the same on all ranks")

# %% [markdown]
# The 10 of 34 stay, however many ranks there are. And now a long sequence: a million tokens, in a
# model of 32 layers of width 4096. Say that all of it, the 10 too, is cut over the 8 GPUs of a node:

# %% tags=["nbval-check-output"]
LONG = dict(sequence=2**20, rows=1, width=4096, heads=32, recompute="selective")
gb = 32 * formulas.activation_bytes(**LONG, tensor_parallel=8, sequence_parallel=True) / 1e9
print(f"{gb:.0f} GB on each of 8 GPUs")

# %% [markdown]
# More tensor-parallel ranks do not help: they would leave the node (lab 13). **Can ranks share one
# sequence, and each hold only its own tokens?**

# %% [markdown]
# ## 2. The idea
#
# ### Sequence parallelism
#
# A norm, a dropout and a residual sum look at one position at a time. So from the all-reduce after one
# pair of matrices (lab 13's operator g) to the next pair (its f) no rank needs all positions. And an
# all-reduce is a reduce-scatter and an all-gather (lab 02). Put the two halves **around** what lies
# between:
#
# ```
#   tensor      ─ B by rows ─ all-reduce ───────────── + ─ norm ──────────────── A by columns ─
#                                                  whole on all
#   sequence    ─ B by rows ─ reduce-scatter ───────── + ─ norm ─ all-gather ─── A by columns ─
#                                                  1/t of the positions
# ```
#
# In forward the same bytes travel as before, and the 10 become 10/t. Two things are new:
#
# - what A keeps is its **part** of the input, so backward gathers it once more, for dA;
# - a norm's weight sees 1/t of the positions on each rank, so its gradient is a **partial sum**.

# %% [markdown]
# ### Context parallelism
#
# Each rank has the **whole model**, and 1/n of each sequence, from embedding to loss.
# That is data parallelism, with tokens in the place of rows: DDP or ZeRO average the gradients. But in
# attention, each token looks at all before it. Two ways:
#
# **Ring**: queries stay; blocks of k and v go around a ring of ranks. Attention can be computed tile by
# tile (lab 11): a rank keeps its out and, for each query, L = log Σ exp(score). A new block gives
# another out and L, and the two become one.
#
# **Ulysses**: heads do not know each other. An all-to-all (lab 03) swaps "all heads of my tokens" for "all
# tokens of my heads"; each rank computes plain attention; another brings the result back.

# %% [markdown]
# ### Which tokens?
#
# With a causal mask, late tokens see more. Here are 4 ranks and 8 chunks of a sequence, a colour for
# each rank, a row for each chunk of queries:

# %%
COLOURS = ["#9CCBEA", "#F5C77E", "#8FD1B8", "#D9A9C6"]
SHARDS = {"contiguous": [0, 0, 1, 1, 2, 2, 3, 3], "zig-zag": [0, 1, 2, 3, 3, 2, 1, 0]}


def draw_scores(axes, owners, title):
    for row, owner in enumerate(owners):
        for column in range(row + 1):
            axes.add_patch(plt.Rectangle((column, row), 1, 1, fc=COLOURS[owner], ec="white", lw=2))
        axes.text(-0.3, row + 0.5, f"rank {owner}", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-2, 8), ylim=(8, 0), aspect="equal", xlabel="chunks of keys")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


_, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
for axes, (name, owners) in zip((left, right), SHARDS.items()):
    draw_scores(axes, owners, name)

# %% tags=["nbval-check-output"]
for name, owners in SHARDS.items():
    counts = [sum(i + 1 for i, owner in enumerate(owners) if owner == r) for r in range(4)]
    print(f"{name:<11} squares of ranks 0 to 3: {counts}; all wait for {max(counts)}")

# %% [markdown]
# Rank r has chunks r and 2n-1-r: an early one and a late one. That is as much for all, in every step
# of the ring, too.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | sequence parallelism (SP) | 序列并行 | tensor-parallel ranks split the sequence between the sharded layers |
# | context parallelism (CP) | 上下文并行 | ranks share each sequence in all layers, attention included |
# | ring attention | 环形注意力 | blocks of keys and values travel around a ring of ranks |
# | Ulysses | Ulysses 序列并行 | all-to-alls switch between a split by tokens and a split by heads |
# | zig-zag shard | 之字形切分 | an early and a late chunk for each rank, so that all ranks have equal work |
# | causal mask | 因果掩码 | lets each token attend only to itself and earlier tokens |
# | online softmax | 在线 softmax | a softmax computed in one pass, block by block |
# | log-sum-exp | 对数求和指数 | log of the sum of exponentials; weights two partial softmax results |
# | key-value head | 键值头 | a head of k and v, which several query heads may share |
# | exposed communication | 未被掩盖的通信 | communication time that no computation hides |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# w = 96, b = 4 rows of s = 64 positions, h = 8 heads of e = 12 features.
#
# **Sequence parallelism**, t = 2 ranks. How many bytes does a rank send for **one layer**, forward
# and backward, in float32 (4 bytes)? Tensor parallelism: 4 all-reduces of b·s·w numbers. With
# sequence parallelism: how many gathers and scatters, each (t-1)/t · b·s·w? And all-reduces of partial
# gradients: 2 norms with weight and bias, the biases of `out` and `down`, w numbers each.
#
# What does a layer keep then, in 2-byte types? (Lab 11: 34 · s·b·w + 5 · h·s²·b, where it has a for
# the h heads, as its paper does.)

# %%
SIZES = dict(vocab=512, width=96, depth=2, heads=8, context=64)
ROWS = 4

# %% stub="guess = predict(tensor_bytes=..., sequence_bytes=..., kept_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
b, s, w, h, t = ROWS, 64, 96, 8, 2
half = (t - 1) * b * s * w * 4 // t  # a gather, or a scatter
guess = predict(
    tensor_bytes=4 * 2 * half,
    sequence_bytes=(4 + 4 + 2) * half + 2 * (t - 1) * 6 * w * 4 // t,
    kept_bytes=(34 * s * b * w + 5 * h * s * s * b) // t,
)
### END SOLUTION
guess

# %% [markdown]
# **Context parallelism**, n = 4 ranks, float32, as many heads of k and v as of q. What does a rank send
# for one attention?
#
# - Ring, forward: n-1 times a block, k and v of s/n tokens. Backward: blocks of k and v once more, and
#   their gradients with them.
# - Ulysses: q, k, v there and out back; of each, a rank has b·s/n·w numbers, and sends the (n-1)/n
#   that are for others.

# %% stub="sends = predict(ring_forward_bytes=..., ring_backward_bytes=..., ulysses_forward_bytes=..., ulysses_backward_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
n = 4
mine = b * s // n * w * 4  # bytes of q, of k, of v, of out
sends = predict(
    ring_forward_bytes=(n - 1) * 2 * mine,
    ring_backward_bytes=(n - 1) * 2 * 2 * mine,
    ulysses_forward_bytes=4 * (n - 1) * mine // n,
    ulysses_backward_bytes=4 * (n - 1) * mine // n,
)
### END SOLUTION
sends

# %% [markdown]
# ## 4. Read it
#
# The two halves are a pair, as f and g are. Each rank makes something else of the gathered sequence,
# so in backward the ranks' gradients are added up, and each gets its part (`own_sum`):

# %%
show("parallel/common/conjugate.py:all_gather_sequence")

# %%
show("parallel/common/conjugate.py:Exchange")

# %% [markdown]
# A norm's parameters go through f where they are used, all in one message. So their gradients are
# summed in backward, and the norm knows nothing of it:

# %%
show("parallel/tensor/layers.py:SummedGradients.__call__")

# %% [markdown]
# Context parallelism. The shards of all ranks:

# %%
show("parallel/context/zigzag.py:split_zigzag")

# %% [markdown]
# The ring. `ring_exchange` sends a block to the next rank, and takes one from the rank before. `yield`
# hands a block to the loop that computes with it; meanwhile it travels on.

# %%
show("parallel/context/ring_attention.py:_circulate")

# %% [markdown]
# Only with its own block does a rank need a mask. Of all others, either all its queries see the early
# half, or its late queries see the whole. In the order queries, keys, causal or not:

# %%
show("parallel/context/ring_attention.py:_visible")

# %% [markdown]
# Two parts become one. Each out was divided by its own Σ exp(score), which is exp L; so exp(L - L')
# is its share of the whole sum:

# %%
show("parallel/context/ring_attention.py:_merge")

# %% [markdown]
# Ulysses is shorter:

# %%
show("parallel/context/ulysses.py:to_heads")

# %%
show("parallel/context/ulysses.py:Ulysses.forward", since="q, k, v = ")

# %% [markdown]
# ## 5. Run it
#
# One training loop for all ways, and the loss. With context parallelism each rank takes its shard of
# tokens **and** targets, and DDP stands around the model. (`gather_logits=False`: each rank keeps the
# logits of its part of the vocabulary, as in lab 13.)


# %%
def train(how, steps=3, dtype=torch.float64, edit=None):
    me = attach()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(me.device, dtype)
    if how in ("tensor", "sequence"):
        tensor_parallel(model, me.comm, sequence=how == "sequence", gather_logits=False)
    if edit:
        edit(model)
    if how in ("ring", "ulysses"):
        model = DDP(context_parallel(model, me.comm, way=how), me.comm)
    adam, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=64).to(me.device)
        adam.zero_grad()
        value = loss_of(model, batch.x, batch.y, how, me.comm)
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses


# %%
def loss_of(model, x, y, how, comm):
    if how in ("tensor", "sequence"):
        return vocab_parallel_cross_entropy(model(x), y, comm)
    if how in ("ring", "ulysses"):
        x, y = sequence_shard(x, comm), sequence_shard(y, comm)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# %%
one, two, four = (World(size) for size in (1, 2, 4))
alone = torch.tensor(one.run(train, "one")[0], dtype=torch.float64)
print("1 rank:", ", ".join(f"{loss:.6f}" for loss in alone.tolist()))

# %% tags=["nbval-check-output"]
for how, world in (("sequence", two), ("ring", two), ("ring", four), ("ulysses", four)):
    losses = torch.tensor(world.run(train, how), dtype=torch.float64).mean(0)  # of all ranks
    print(f"{world.size} ranks, {how:<9} equal: {torch.allclose(losses, alone, rtol=1e-10)}")

# %% [markdown]
# All are the training of one process.
#
# ### What a layer sends and keeps


# %%
def one_layer(how):
    """What one block sends: (forward or backward, operation, shape, bytes)."""
    me = attach()
    model = tensor_parallel(GPT(**SIZES).to(me.device), me.comm, sequence=how == "sequence")
    length = 64 // (me.size if how == "sequence" else 1)
    x = torch.randn(ROWS, length, 96, device=me.device, requires_grad=True)
    with listen() as events:
        y = model.blocks[0](x)
        forward = len(events)
        y.sum().backward()
    when = ["forward"] * forward + ["backward"] * (len(events) - forward)
    return [(name, one.op, list(one.shape), one.bus_bytes) for name, one in zip(when, events)]


layers = {how: two.run(one_layer, how)[0] for how in ("tensor", "sequence")}

# %% tags=["nbval-check-output"]
for how, events in layers.items():
    print(f"{how} parallelism: {sum(event[-1] for event in events):,} bytes")
    for when, op, shape, sent in events:
        print(f"  {when:<9} {op:<15} {shape!s:<13} {sent:>8,.0f} bytes")

# %% [markdown]
# In backward, two gathers without a partner: those are the inputs of q, k, v and of `up`, kept as
# parts. Four small sums are the partial gradients.
#
# And what does a layer keep, in bfloat16, with the scores stored, as the formula has it? `saved_by`
# counts (lab 11): autograd tells it each tensor that it saves. The black line is the formula's. (In the
# picture and the table, which names the narrow parts too, a stands for the h heads.)


# %%
def kept(how):
    me = attach()
    model = GPT(**SIZES, dropout=0.1).to(me.device, torch.bfloat16)
    model.blocks[0].attn.core = PlainAttention(0.1)
    tensor_parallel(model, me.comm, sequence=how == "sequence")
    length = 64 // (me.size if how == "sequence" else 1)
    like = dict(dtype=torch.bfloat16, device=me.device)
    x = torch.randn(ROWS, length, 96, **like, requires_grad=True)
    return saved_by(model.blocks[0], x)


LAYER = dict(sequence=64, rows=ROWS, width=96, heads=8)
ways = {"one rank": (one, "tensor"), "tensor, 2": (two, "tensor"), "sequence, 2": (two, "sequence")}
bills = {}
for name, (world, how) in ways.items():
    cut = dict(tensor_parallel=world.size, sequence_parallel=how == "sequence")
    bills[name] = formulas.activation_bill(world.run(kept, how)[0], **LAYER, **cut)
display(plot.bill(bills))
bills["one rank"]


# %% tags=["nbval-check-output"]
def counted(bill):  # without the norms' statistics, which no term counts
    return sum(x.measured_bytes for x in bill.lines if "statistics" not in x.term)


for name, bill in bills.items():
    print(f"{name:<12} kept {counted(bill):>9,} bytes, by the formula {bill.formula_bytes:>9,.0f}")

# %% [markdown]
# Your predictions:

# %% tags=["nbval-check-output"]
guess.beside(
    "counted",
    tensor_bytes=sum(event[-1] for event in layers["tensor"]),
    sequence_bytes=sum(event[-1] for event in layers["sequence"]),
    kept_bytes=counted(bills["sequence, 2"]),
)

# %% [markdown]
# ### What attention sends
#
# Attention alone, on 4 ranks, the way of the ring and of Ulysses:


# %%
def attention(way):
    me = attach()
    core = RingAttention(me.comm) if way == "ring" else Ulysses(PlainAttention(), me.comm)
    shape, like = (ROWS, 8, 64 // me.size, 12), dict(device=me.device, requires_grad=True)
    q, k, v = (torch.randn(shape, **like) for _ in range(3))
    with listen() as forward:
        out = core(q, k, v)
    with listen() as backward:
        out.sum().backward()
    return [[one.bus_bytes for one in events] for events in (forward, backward)]


found = {}
for way in ("ring", "ulysses"):
    for name, events in zip(("forward", "backward"), four.run(attention, way)[0]):
        found[f"{way}_{name}_bytes"] = sum(events)

# %% tags=["nbval-check-output"]
sends.beside("counted", **found)

# %% [markdown]
# And with more ranks? A sequence of 8192 tokens, 32 heads of 128 features, bfloat16, forward and
# backward. In many models several heads share one head of k and v, a **key-value head** (lab 13,
# exercise 3): then blocks are smaller.

# %%
MORE = dict(sequence=8192, rows=1, head_width=128)
counts = (2, 4, 8, 16, 32)


def megabytes(way, **how):
    if way == "ulysses":
        return 2 * ulysses_bytes(**MORE, **how, heads=32) / 1e6
    there_and_back = (ring_attention_bytes(**MORE, **how, backward=back) for back in (False, True))
    return sum(there_and_back) / 1e6


_, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for way, colour in (("ring", "#0072B2"), ("ulysses", "#D55E00")):
    for kv_heads, style in ((32, "o-"), (4, "o--")):
        fits = [n for n in counts if way == "ring" or kv_heads % n == 0]
        ys = [megabytes(way, kv_heads=kv_heads, ranks=n) for n in fits]
        axes.plot(fits, ys, style, color=colour, label=f"{way}, {kv_heads} key-value heads")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
ticks = (20, 50, 100, 200, 500)
axes.set(xticks=counts, xticklabels=counts, xlabel="ranks", ylabel="MB sent by a rank")
axes.set(yticks=ticks, yticklabels=ticks)
axes.minorticks_off()
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Ulysses sends less with more ranks, the ring soon neither more nor less: (n-1)/n of all k and v. But
# few key-value heads stop Ulysses in this plain form (they must divide), and make the ring's blocks
# small.

# %% [markdown]
# ### When does the ring hide?
#
# All of Ulysses' messages are exposed: attention waits for them. A block of the ring travels while
# the rank computes with the one before. A block has m = s/n tokens; with as many key-value heads as
# heads, and 4 bytes a number:
#
# ```
#   computing   m²/2 scores, each 4e operations, b·h times     2 b h e m² / FLOPS   seconds
#   travelling  m tokens of k and v, 4 bytes a number          8 b h e m / WIRE     seconds
#   hidden      from m = 4 · FLOPS / WIRE on, whatever b, h and e are
# ```

# %% [markdown]
# Twice as many tokens are twice the way, but four times the work. So a long sequence hides its own
# messages. (With fewer key-value heads a block is smaller, and it hides from a smaller m on.)
#
# FLOPS (operations a second) and WIRE (bytes a second) are those of `workstation`, one of labkit's
# clusters (lab 06): 4 RTX 4090 on PCIe 4.0. `labkit/clusters/known.toml` has the source of each
# number. As in the formula, only products take time here, and messages have no latency:

# %%
known, free = cluster("workstation"), float("inf")
at_peak = dict(launch_s=0, memory_bytes_per_s=free, matmul_reached=1, tile=0)
wire = replace(known.inside, latency_s=0, start_s=0, reached=1)
machine = replace(known, device=replace(known.device, **at_peak), inside=wire)
FLOPS, WIRE, HEADS = machine.device.peak_flops["float32"], wire.bytes_per_s, 8


def attend(block):
    q, k, v = (torch.zeros(1, HEADS, block, 64, requires_grad=True) for _ in range(3))
    RingAttention(attach().comm, tile=block // 4)(q, k, v).sum().backward()


BLOCKS = (4096, 8192, 16384)
replays = {block: replay(dry_run(attend, block, ranks=4, step=0), machine) for block in BLOCKS}

# %% tags=["nbval-check-output"]
shape = dict(heads=HEADS, kv_heads=HEADS, head_width=64, element_bytes=4)
rates = dict(flops_per_s=FLOPS, bytes_per_s=WIRE)
print(f"{FLOPS / 1e12:.1f} Tflop/s, {WIRE / 1e9:.1f} GB/s")
print(f"hides from m = {ring_hides_from(**shape, **rates):,.0f} tokens a block on")

# %%
plot.timeline(replays[4096], step=0)

# %%
plot.timeline(replays[16384], step=0)

# %% [markdown]
# With 4096 tokens a block, ranks wait for blocks; with 16384, only for the last message of all: a
# gradient on its way home has nothing to hide behind. What the replays wait in forward, beside the formula:


# %%
def waited_ms(trace):
    events = trace.ranks[0].comms[:3]  # forward's: 3 blocks
    return 1e3 * sum(event.wait_ended_s - event.wait_began_s for event in events)


def formula_ms(block):
    return 1e3 * ring_exposed_s(block, rows=1, ranks=4, **shape, **rates)


# %% tags=["nbval-check-output"]
for block, trace in replays.items():
    waited, right_ms = waited_ms(trace), formula_ms(block)
    print(f"m = {block:>5}: waited {waited:.2f} ms, by the formula {right_ms:.2f}")

# %% [markdown]
# (Where they differ: tiles on the diagonal compute what the mask then hides; the formula does not.)

# %% [markdown]
# ## 6. Break it
#
# ### Three colleagues with a shard
#
# Each gives a rank its tokens, targets and positions (None: `context_parallel` fills them in). All
# programs run. What is wrong in each, and would the loss tell?


# %%
def shard_1(tokens, targets, comm):
    x, y = (whole.chunk(comm.size, dim=1)[comm.rank] for whole in (tokens, targets))
    return x, y, None


def shard_2(tokens, targets, comm):
    x, y = (sequence_shard(whole, comm) for whole in (tokens, targets))
    return x, y, torch.arange(x.shape[1], device=x.device)


def shard_3(tokens, targets, comm):
    return sequence_shard(tokens, comm), targets.chunk(comm.size, dim=1)[comm.rank], None


# %%
def hunt(cut, steps=10):
    me = attach()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(me.device, torch.float64)
    model = DDP(context_parallel(model, me.comm), me.comm)
    adam, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=64).to(me.device)
        x, y, positions = cut(batch.x, batch.y, me.comm)
        adam.zero_grad()
        given = {} if positions is None else dict(positions=positions)
        value = F.cross_entropy(model(x, **given).flatten(0, 1), y.flatten())
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses


def right(tokens, targets, comm):
    return sequence_shard(tokens, comm), sequence_shard(targets, comm), None


CUTS = (right, shard_1, shard_2, shard_3)
curves = {cut.__name__: torch.tensor(two.run(hunt, cut), dtype=torch.float64) for cut in CUTS}
curves = {name: losses.mean(0) for name, losses in curves.items()}  # of all ranks

# %%
_, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for (name, losses), style in zip(curves.items(), ("k-", "C0--", "C1-.", "C3:")):
    axes.plot(losses, style, label=name)
axes.set(xlabel="step", ylabel="loss", xticks=range(10))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %%
truth = torch.tensor(one.run(hunt, right)[0], dtype=torch.float64)
for name, losses in curves.items():
    print(f"{name:<7} off by {(losses - truth)[2].abs():.4f} in step 2")

# %% tags=["nbval-check-output"]
for name, losses in curves.items():
    print(f"{name:<7} has the loss of one process: {torch.allclose(losses, truth, rtol=1e-10)}")

# %% [markdown] tags=["answer"]
# - **shard_1** has contiguous shards, but the ring and the positions are those of zig-zag shards: tokens
#   get other places, and some see tokens that come **after** them.
# - **shard_2** has the right shard, and says that it stands at 0, 1, 2, ... The mask is right, the positions are
#   not: late tokens have the position vectors of early ones.
# - **shard_3** cuts tokens and targets in two ways: most targets belong to other tokens.
#
# The loss falls, and all curves look alike: even shard_3 learns how often each token comes, as every young
# model does first. A comparison with one process, in float64, shows the mistake within a few steps.
# `context_parallel` fills in positions by itself, and knows one kind of shard: cut everything with
# `sequence_shard`.

# %% [markdown]
# ### The norms
#
# Sequence parallelism, and somebody takes `SummedGradients` off the norms: the forward is the same
# without. Look at one norm's gradient, first three numbers:


# %%
def norm_gradient(how, summed=True):
    me = attach()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(me.device, torch.float64)
    if how != "one":
        tensor_parallel(model, me.comm, sequence=True, gather_logits=False)
    norm = model.blocks[0].norm1
    if not summed:
        del norm.forward  # the class's own is back
    batch = Text().batch(0, rows=ROWS, length=64).to(me.device)
    value = loss_of(model, batch.x, batch.y, how, me.comm)
    value.backward()
    return value.item(), norm.weight.grad[:3]


cases = {
    "one process": one.run(norm_gradient, "one"),
    "summed": two.run(norm_gradient, "sequence"),
    "not summed": two.run(norm_gradient, "sequence", summed=False),
}

# %%
for name, ranks in cases.items():
    for rank, (value, gradient) in enumerate(ranks):
        numbers = ", ".join(f"{1e3 * float(x):6.2f}" for x in gradient)
        print(f"{name:<12} rank {rank}: loss {value:.6f}, gradient: {numbers} · 10⁻³")

# %% tags=["nbval-check-output"]
((alone_loss, right),) = cases["one process"]
for name in ("summed", "not summed"):
    for rank, (value, gradient) in enumerate(cases[name]):
        same_loss, same = abs(value - alone_loss) < 1e-9, torch.allclose(gradient, right)
        print(f"{name:<12} rank {rank}: the same loss: {same_loss}, the same gradient: {same}")

# %% [markdown] tags=["answer"]
# The loss is right, and no message is missing that anyone would wait for. Each rank has the gradient
# of its own positions; the right one is their sum. After a step the ranks have **different** norm
# weights: they are replicas no more, and drift apart. So it is with biases of `out` and `down`, and
# with whatever is whole but sees only a part: the table of positions, too.

# %% [markdown]
# ### The masks
#
# In lab 13, x was the same on all ranks, so its dropout had to drop the same. And now?


# %%
def masks(own_numbers):
    me, found = attach(), []
    torch.manual_seed(0)
    model = GPT(**SIZES, dropout=0.5).to(me.device)
    tensor_parallel(model, me.comm, sequence=True)
    dropout = model.blocks[0].dropout
    if not own_numbers:
        del dropout.forward
    dropout.register_forward_hook(lambda module, args, out: found.append(out != 0))
    model(Text().batch(0, rows=ROWS, length=64).x.to(me.device))
    return found[0]


# %% tags=["nbval-check-output"]
for own in (True, False):
    first, second = two.run(masks, own)
    print(f"own numbers: {own!s:<6} {(first == second).float().mean():.0%} of the masks the same")

# %% [markdown] tags=["answer"]
# x is in parts now: other positions on each rank, and they should be dropped independently (half of
# the elements agree by chance). Without its own numbers, position 0 of rank 0 and position 0 of rank
# 1, 32 places on, drop the same features, in all steps. As in lab 13 no error and no curve shows it.
# The rule: **replicas draw the same, parts draw their own.**

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: The gather and its backward
#
# Write the all-gather of sequence parallelism. `x` [b, s/t, w] is this rank's part; forward returns
# [b, s, w], the ranks' parts in order along dim 1. `backward` gets the gradient [b, s, w] of what
# **this** rank made of it, and returns one gradient for each argument of forward. Send
# (t-1)/t of the whole in each direction.
#
# Useful: `comm.all_gather(list_of_tensors, x)`, `comm.reduce_scatter(own, list_of_tensors)`;
# `x.contiguous()` for pieces that lie apart.


# %%
class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, x):
        ### BEGIN SOLUTION
        ctx.comm = comm
        parts = [torch.empty_like(x) for _ in range(comm.size)]
        comm.all_gather(parts, x)
        return torch.cat(parts, dim=1)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        ### BEGIN SOLUTION
        parts = [part.contiguous() for part in dy.chunk(ctx.comm.size, dim=1)]
        dx = torch.empty_like(parts[0])
        ctx.comm.reduce_scatter(dx, parts)
        return None, dx
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.GatherSequence(GatherSequence)

# %% [markdown]
# ### Exercise 2: Merge
#
# `out` [b, h, queries, e] and `L` [b, h, queries] are attention to some keys: out is divided by its
# own Σ exp(score), and L is the logarithm of that sum. `more_out` and `more_L` are attention to others.
# Return out and L of all of them. Scores may be large.


# %%
def merge(out, L, more_out, more_L):
    ### BEGIN SOLUTION
    both = torch.logaddexp(L, more_L)
    old, new = (L - both).exp(), (more_L - both).exp()
    return out * old[..., None] + more_out * new[..., None], both
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.merge(merge)

# %% [markdown]
# ### Exercise 3: Whose tokens?
#
# Return the positions of `rank`'s zig-zag shard, as a list, the early chunk first. For 8 tokens on 2
# ranks, rank 1 has `[2, 3, 4, 5]`. `length` divides by 2 · `ranks`.


# %%
def own_positions(length, ranks, rank):
    ### BEGIN SOLUTION
    chunk = length // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return [*range(early, early + chunk), *range(late, late + chunk)]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.own_positions(own_positions)

# %% [markdown]
# ### Exercise 4, open: Rings of groups
#
# Both ways go together. Of n ranks, groups of u neighbours swap tokens for heads, as Ulysses does; then
# rings of n/u ranks pass on blocks, of u times as many tokens and 1/u of the heads. u = 1 is only a
# ring, u = n only Ulysses. A group that fits into a node uses the fast wire. A ring has one rank of each group: it uses
# the fast wire only where all n ranks are in one node.

# %%
from labkit.labs.lab_14.hybrid import JOBS

for name, job in JOBS.items():
    words = f"{job.sequence:,} tokens, {job.heads} heads, {job.kv_heads} key-value heads"
    print(f"{name}: {words}, {job.ranks} ranks, {job.node} in a node")

# %% [markdown]
# Return u, for the least exposed time of forward and backward. It must divide the ranks, the heads and
# the key-value heads. `job.flops_per_s` is what a rank computes; `job.inside` and `job.between` are
# (bytes per second, latency in seconds) of the two wires. All of Ulysses is exposed: 4 messages in
# forward, 4 in backward; all 4 together send
# `ulysses_bytes(sequence_of_the_group, rows, heads, kv_heads, head_width, u)` bytes. For the ring ask
# `ring_exposed_s(block, rows, heads, kv_heads, head_width, ranks, flops_per_s, bytes_per_s, latency_s,
# backward=...)`, with the heads and ranks of the ring.


# %%
def choose(job):
    ### BEGIN SOLUTION
    def exposed_s(u):
        ring, heads, kv_heads = job.ranks // u, job.heads // u, job.kv_heads // u
        block = job.sequence // ring
        total = 0.0
        if u > 1:
            speed, latency = job.inside if u <= job.node else job.between
            shape = (block, job.rows, job.heads, job.kv_heads, job.head_width, u)
            total += 2 * (4 * latency + ulysses_bytes(*shape) / speed)
        speed, latency = job.inside if job.ranks <= job.node else job.between
        shape = (block, job.rows, heads, kv_heads, job.head_width, ring, job.flops_per_s)
        for backward in (False, True):
            total += ring_exposed_s(*shape, speed, latency, backward=backward)
        return total

    of = (job.ranks, job.heads, job.kv_heads)
    fits = [u for u in range(1, job.ranks + 1) if not any(number % u for number in of)]
    return min(fits, key=exposed_s)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose(choose)

# %% [markdown]
# Ideas for more: the ring could be inside a node and Ulysses between. When would that be better? And
# what if the ring sent k and v in 8 bits (lab 10)?

# %% tags=["nbval-check-output"]
report("14")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the flag or call |
# |---|---|
# | Megatron-LM | `--sequence-parallel`, with `--tensor-model-parallel-size 8` |
# | Megatron-LM | `--context-parallel-size 4 --cp-comm-type p2p` (a ring), `a2a` (Ulysses), `all_gather`, `a2a+p2p` (both, with `--hierarchical-context-parallel-sizes`) |
# | DeepSpeed | `DistributedAttention(local_attention, group)`, of `deepspeed/sequence/layer.py` |
# | torch | `SequenceParallel()` in `parallelize_module`; `context_parallel(mesh, buffers=..., buffer_seq_dims=...)`, of `torch.distributed.tensor.experimental` |
# | torchtitan | `--parallelism.context_parallel_degree 8` |
# | labkit | `tensor_parallel(model, mesh.tp, sequence=True)`; `context_parallel(model, comm, way="ring")` |

# %% [markdown]
# Where to find each idea:
#
# | here | there |
# |---|---|
# | `all_gather_sequence` | Megatron's `mappings.py`, `gather_from_sequence_parallel_region` |
# | `reduce_scatter_sequence` | the same, `reduce_scatter_to_sequence_parallel_region` |
# | `SummedGradients` | Megatron's `finalize_model_grads.py`: once, at the end of the step |
# | `sequence_shard` | Megatron's `get_batch_on_this_cp_rank`: the same two chunks |
# | the ring | Transformer Engine; torch's `_templated_ring_attention` |
# | `to_heads`, `to_sequence` | DeepSpeed's `_SeqAllToAll` |

# %% [markdown]
# What they add: Megatron marks a norm's weight with `sequence_parallel = True`, and sums all marked
# gradients in one message at the end of the step. Llama 3 gathers all k and v at once in place of a
# ring: with few key-value heads that is cheap, and any mask is possible. Packed documents of
# several lengths need shards of each document.
#
# Sources: Korthikanti et al., 2022 (arXiv 2205.05198), section 4.2; Liu, Zaharia, Abbeel, *Ring
# Attention*, 2023 (arXiv 2310.01889); Jacobs et al., *DeepSpeed Ulysses*, 2023 (arXiv 2309.14509);
# Llama Team, 2024 (arXiv 2407.21783), section 3.3.2; Fang, Zhao, *USP*, 2024 (arXiv 2405.07719), for
# rings of groups.

# %% [markdown]
# **You can now** cut activations along the sequence, between layers or all the way; say which gradients
# become partial sums; merge two parts of a softmax; and say when a ring hides its messages.
