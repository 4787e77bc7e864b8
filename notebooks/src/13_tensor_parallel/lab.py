# %% [markdown]
# # Lab 13: Tensor parallelism
#
# ZeRO keeps a layer in parts and puts it together to compute. In this lab it stays in parts: you cut
# a matrix in two ways, find the only places where something must travel, and train a GPT of which no
# rank ever has a whole layer. Then you see why its ranks belong inside one machine.
#
# You need lab 06 (dry runs), lab 07 (what a rank holds), lab 08 (ZeRO-3) and lab 11 (activations).

# %%
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, product
from textwrap import fill
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from labkit import GPT, Link, MasterWeights, Mesh, Text, World, attach, cluster, plot, record
from labkit.course import predict, report, show
from labkit.labs.lab_13 import checks as check
from labkit.models import PlainAttention
from labkit.parallel.common.conjugate import copy_to_ranks, reduce_from_ranks
from labkit.parallel.tensor import tensor_parallel as tensor
from labkit.parallel.tensor.layers import RowParallelLinear, vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.replaying import dry_run, peak_of, replay
from labkit.trace import split_of
from labkit.trace.measures import peak_memory

# %% [markdown]
# ## 1. The question
#
# A model of 530 billion parameters has 105 layers of width 20480. Take **one** of them, trained with
# Adam in mixed precision. What does one GPU hold? A dry run (lab 06) counts it. (The vocabulary is
# left tiny, so that the layer is nearly everything.)
#
# New in the code: `tensor_parallel` is this lab; it cuts a model over the ranks of `mesh.tp`.
# `gather_logits=False` leaves each rank the logits of its own part of the vocabulary, and
# `vocab_parallel_cross_entropy` makes the loss of such parts. With one rank none of it has an effect.


# %%
def step_on_paper(sizes, t, axes=("dp", "tp"), make=torch.optim.SGD):
    """Two training steps, with t ranks for each layer, in axes of the mesh in this order."""
    lengths = {"tp": t, "dp": attach().size // t}
    mesh = Mesh(**{axis: lengths[axis] for axis in axes})
    model = tensor_parallel(GPT(**sizes).to(torch.bfloat16), mesh.tp, gather_logits=False)
    optimizer = make(model.parameters(), lr=1e-4)
    tokens = torch.zeros(1, sizes["context"], dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(tokens), tokens, mesh.tp).backward()
        optimizer.step()


def mixed_adam(parameters, lr):
    return MasterWeights(parameters, torch.optim.AdamW, lr=lr)


# %%
LAYER = dict(vocab=128, width=20480, depth=1, heads=128, context=2048)
alone = peak_of(dry_run(step_on_paper, LAYER, 1, make=mixed_adam, ranks=1))

# %% tags=["nbval-check-output"]
gb = {name: alone[name] / 1e9 for name in ("parameters", "gradients", "optimizer state")}
print(f"{sum(gb.values()):.0f} GB:", ", ".join(f"{name} {x:.1f}" for name, x in gb.items()))
print(f"an H100 has {cluster('dgx-h100').device.memory_bytes / 1e9:.0f} GB")

# %% [markdown]
# One layer of 105 is too large, before there is a single activation. ZeRO-3 can share its states among
# many ranks. But each rank still puts the whole layer together to compute with it, and each computes
# at least one whole sequence: a thousand ranks are a batch of a thousand sequences or more.
#
# **Can several ranks compute one layer of one sequence together, and none ever hold all of it?**

# %% [markdown]
# ## 2. The idea
#
# A layer is products of matrices, y = x A. There are two ways to cut A for two ranks:


# %%
def draw_cut(axes, title, parts, words):
    for x, y, width, height, colour, name in parts:
        box = plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", lw=2)
        axes.add_patch(box)
        axes.text(x + width / 2, y + height / 2, name, ha="center", va="center")
    for x, y, word in words:
        axes.text(x, y, word, ha="center", va="center", fontsize=13)
    axes.set(xlim=(0, 11), ylim=(0.6, 3.4), aspect="equal")
    axes.set_title(title, loc="left", fontsize=10)
    axes.axis("off")


BLUE, ORANGE, GREY = "#9CCBEA", "#F5C77E", "#D9DDE2"  # rank 0, rank 1, both
_, (left, right) = plt.subplots(1, 2, figsize=(10, 1.7), layout="constrained")
draw_cut(left, "columns: each rank has other features of y", [
    (0.2, 1, 2.4, 2, GREY, "x"), (3.4, 0.8, 1.2, 2.4, BLUE, "A₁"), (4.6, 0.8, 1.2, 2.4, ORANGE, "A₂"),
    (7.2, 1, 1.2, 2, BLUE, "xA₁"), (8.4, 1, 1.2, 2, ORANGE, "xA₂"),
], [(3, 2, "·"), (6.5, 2, "=")])  # fmt: skip
draw_cut(right, "rows: each rank has a summand of y", [
    (0.2, 1, 1.2, 2, BLUE, "x₁"), (1.4, 1, 1.2, 2, ORANGE, "x₂"),
    (3.4, 2, 1.6, 1.2, BLUE, "A₁"), (3.4, 0.8, 1.6, 1.2, ORANGE, "A₂"),
    (6.2, 1, 1.6, 2, BLUE, "x₁A₁"), (8.8, 1, 1.6, 2, ORANGE, "x₂A₂"),
], [(3, 2, "·"), (5.6, 2, "="), (8.3, 2, "+")])  # fmt: skip

# %% [markdown]
# Blue is on rank 0, orange on rank 1, grey on both. Do it by hand:

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
x, A = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
A1, A2 = A.chunk(2, dim=1)
print("columns:", torch.allclose(torch.cat([x @ A1, x @ A2], dim=1), x @ A))
(A1, A2), (x1, x2) = A.chunk(2, dim=0), x.chunk(2, dim=1)
print("rows:   ", torch.allclose(x1 @ A1 + x2 @ A2, x @ A))

# %% [markdown]
# Columns need all of x, and leave features. Rows need features, and leave a sum that somebody must
# add up. So what does an MLP, gelu(x A) B, want? Two tries:

# %% tags=["nbval-check-output"]
B = torch.randn(8, 4, dtype=torch.float64)
right_y = F.gelu(x @ A) @ B
(A1, A2), (B1, B2) = A.chunk(2, dim=0), B.chunk(2, dim=1)
hidden = F.gelu(x1 @ A1) + F.gelu(x2 @ A2)
tried = torch.cat([hidden @ B1, hidden @ B2], dim=1)
print("A by rows, B by columns:", torch.allclose(tried, right_y))
(A1, A2), (B1, B2) = A.chunk(2, dim=1), B.chunk(2, dim=0)
tried = F.gelu(x @ A1) @ B1 + F.gelu(x @ A2) @ B2
print("A by columns, B by rows:", torch.allclose(tried, right_y))

# %% [markdown]
# gelu(a + b) is not gelu(a) + gelu(b): with rows first, the ranks must add up **before** the gelu, and
# then gather. With columns first each rank's features pass through the gelu by themselves, and are
# just what the rows of B want. **One sum at the end is all.**
#
# Attention has the same form: q, k and v by columns, so that **a rank has whole heads**; each head is
# computed by itself; `out` by rows. Four heads, two for each rank:


# %%
def its_heads(rank):
    """The summand of this rank: rows of `weight` are columns of A, since torch has it transposed."""
    part = deepcopy(attention)
    for layer in (part.q, part.k, part.v):
        layer.weight.data = layer.weight.data.chunk(2, dim=0)[rank]
        layer.bias.data = layer.bias.data.chunk(2, dim=0)[rank]
    part.out.weight.data = part.out.weight.data.chunk(2, dim=1)[rank]
    part.out.bias = None  # not a part of any summand
    return part(positions)


# %% tags=["nbval-check-output"]
attention = GPT(vocab=8, width=16, depth=1, heads=4, context=8).blocks[0].attn.double()
positions = torch.randn(1, 8, 16, dtype=torch.float64)
summed = its_heads(0) + its_heads(1) + attention.out.bias
print("attention by heads:", torch.allclose(summed, attention(positions)))

# %% [markdown]
# And backward? Each rank knows its own columns' part of dx: these must be added up as well, at the
# *beginning* of the pair. So two operators stand around it, each the other's mirror image:
#
# ```
#              forward      backward
#   f          nothing      all-reduce        x ─ f ─▶ A by columns ─ gelu ─▶ B by rows ─ g ─▶ y
#   g          all-reduce   nothing
# ```
#
# Norms, residual sums (x + mlp(x)) and their dropout lie outside, and every rank computes them, all the
# same.

# %% [markdown]
# ### The vocabulary
#
# For GPT-3's table of 50257 tokens the logits of a token are 50257 numbers. Cut the table by tokens.
# (**Vocabulary padding**: 50257 does not divide by 8, so rows of zeros are added, up to 50264. No loss
# counts their logits.)
#
# - **Embedding**: each rank looks up the tokens that it has, zeros for others, and all add up.
# - **Head**: each rank has the logits of its tokens. It is cut by columns, so f stands before it.
# - **Loss**: log Σ exp(logits) − the target's logit. Each rank has a part of the sum, and one rank has
#   the target. So the largest logit, the sum and the target's logit travel: **3 numbers a token**,
#   and no rank ever has all logits.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | tensor parallelism (TP) | 张量并行 | ranks share the weights and the computation of each layer |
# | column-parallel | 列并行 | each rank has some columns of A and computes those output features |
# | row-parallel | 行并行 | each rank has some rows of A and computes a partial sum of the output |
# | conjugate operators f, g | 共轭算子 | f communicates in backward only, g in forward only |
# | partial sum | 部分和 | a rank's summand of a result |
# | attention head | 注意力头 | a part of attention that is computed independently of the others |
# | replicated | 复制的 | equal on all ranks |
# | vocabulary-parallel | 词表并行 | each rank has the table rows of some tokens |
# | vocabulary padding | 词表填充 | rows of zeros that make the vocabulary divisible by the number of ranks |
# | random state | 随机数状态 | the state of the generator, which determines the next dropout mask |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Here is the model that you will run: v = 512 tokens in the vocabulary, w = 96, L = 2 layers, batches
# of b = 4 rows of s = 64 positions, in float32 (4 bytes), on t = 4 ranks.
#
# - What does a rank send in a step for **the layers**, forward and backward? And for **the
#   vocabulary**: the embedding's sum, the head's f, and the loss with its 3 numbers a token? (An
#   all-reduce of S bytes sends 2(t-1)/t · S.)
# - A layer has 12 w² + 13 w parameters: q, k, v, out [w, w], up [4w, w], down [w, 4w]; biases w, w, w,
#   w, 4w, w; two norms, 4 w. How many of them has a rank?

# %%
SIZES = dict(vocab=512, width=96, depth=2, heads=8, context=64)
ROWS = 4

# %% stub="guess = predict(layers_bytes=..., vocabulary_bytes=..., parameters_of_a_layer=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
v, w, L, b, s, t = 512, 96, 2, ROWS, 64, 4
one_x = 2 * (t - 1) * b * s * w * 4 // t  # an all-reduce of [b, s, w]
three_numbers = 2 * (t - 1) * 3 * b * s * 4 // t
cut = 12 * w**2 + 3 * w + 4 * w  # matrices, biases of q, k, v and of up
whole = 2 * w + 4 * w  # biases of out and down, norms
guess = predict(
    layers_bytes=L * 4 * one_x,
    vocabulary_bytes=one_x + one_x + three_numbers,
    parameters_of_a_layer=cut // t + whole,
)
### END SOLUTION
guess

# %% [markdown]
# What if the loss were computed from all logits, gathered? (t-1)/t · b s v numbers would travel in
# place of 2(t-1)/t · 3 b s. With a vocabulary of 50257:

# %% tags=["nbval-check-output"]
print(f"{50257 / (2 * 3):,.0f} times as much")

# %% [markdown]
# ## 4. Read it
#
# f is nothing in forward. (`_Copy` takes several tensors, to send their gradients in one message;
# `once_differentiable` says that there is no derivative of the derivative.)

# %%
show("parallel/common/conjugate.py:_Copy.backward")

# %% [markdown]
# And g is nothing in backward: the gradient of a sum is that of each summand. (`Exchange.apply` is
# given both ways: what forward sends, and what backward does with the gradient.)

# %%
show("parallel/common/conjugate.py:reduce_from_ranks")

# %% [markdown]
# A GPT of `labkit` knows nothing of ranks. `tensor_parallel` finds attention and MLPs by the names of
# their layers, and puts cut ones in their place:

# %%
show("parallel/tensor/tensor_parallel.py:_shard_layer", since="for name")

# %% [markdown]
# A rank's piece is a part of what all ranks have drawn with the same seed: so any number of ranks
# trains the same model. The mark `Shard` says which part it is; clipping and checkpoints ask for it.

# %%
show("parallel/tensor/layers.py:shard_parameter", since="shape[dim] = ")

# %% [markdown]
# q, k and v have one input. Without `ShardedForward` there would be three f, and three all-reduces
# in backward; so the first that is called computes for all three.
#
# Attention takes its number of heads from the width of what it gets. So nothing in it has to be told
# that only some heads are here:

# %%
show("models/gpt.py:Attention.heads")

# %% [markdown]
# The embedding. `_local_rows` says which tokens are mine, and which of my rows they are:

# %%
show(
    "parallel/tensor/layers.py:VocabParallelEmbedding.forward",
    since="rows, is_own",
    until="if self",
)

# %% [markdown]
# Last, dropout. Between f and g each rank has other heads, and should drop other elements. Outside,
# all ranks have the same x, and must drop **the same**, or they have the same x no more. So between
# f and g (above, `ShardedForward` sees to it) a rank draws from a stream of its own:

# %%
show("parallel/tensor/tensor_parallel.py:per_rank_rng", since="with no_modes")

# %% [markdown]
# ## 5. Run it
#
# The same loop for any number of ranks. All get the **same** batch: they compute it together.


# %%
def train(steps=2, dtype=torch.float32, edit=None):
    me = attach()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(me.device, dtype)
    tensor_parallel(model, me.comm, gather_logits=False)
    if edit:
        edit(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text, losses = Text(), []
    for step in range(steps):
        batch = text.batch(step, rows=ROWS, length=64).to(me.device)
        adam.zero_grad()
        value = vocab_parallel_cross_entropy(model(batch.x), batch.y, me.comm)
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses


# %%
one, four = World(1), World(4)
runs = {}
for name, world in {"1 rank": one, "4 ranks": four}.items():
    with record(detail_step=1) as runs[name]:
        world.run(train)

# %% [markdown]
# All messages of a step, in their order. Forward goes from the embedding to the loss, backward back:

# %% tags=["nbval-check-output"]
events = [event for event in runs["4 ranks"].ranks[0].comms if event.step == 1]
layers = 2 * SIZES["depth"] * ["layers"]
names = ["embedding", *layers, "loss", "loss", "head", *layers]
sent = dict.fromkeys(names, 0)
for name, event in zip(names, events, strict=True):
    sent[name] += event.bus_bytes
    print(f"{name:<10} {event.op:<16} {list(event.shape)!s:<13} {event.bus_bytes:>8,} bytes")

# %% [markdown]
# Your predictions beside what was counted:


# %%
def pieces_of_a_layer():
    model = tensor_parallel(GPT(**SIZES), attach().comm)
    return sum(p.numel() for p in model.blocks[0].parameters())


# %% tags=["nbval-check-output"]
guess.beside(
    "counted",
    layers_bytes=sent["layers"],
    vocabulary_bytes=sent["embedding"] + sent["head"] + sent["loss"],
    parameters_of_a_layer=four.run(pieces_of_a_layer)[0],
)

# %% [markdown]
# Four all-reduces of b s w numbers a layer, 8(t-1)/t · b s w: the size of the matrices does not occur.
# It is the batch that travels, again and again.
#
# Is it the same training? In float64, on 1, 2 and 4 ranks:

# %%
two = World(2)
curves = {n: world.run(train, 4, torch.float64)[0] for n, world in ((1, one), (2, two), (4, four))}
print("1 rank:", ", ".join(f"{loss:.6f}" for loss in curves[1]))

# %% tags=["nbval-check-output"]
for n in (2, 4):
    several, alone_ = (torch.tensor(curves[k], dtype=torch.float64) for k in (n, 1))
    print(f"{n} ranks equal: {torch.allclose(several, alone_, rtol=1e-10)}")

# %% [markdown]
# Now what a rank holds:

# %%
plot.step_memory(runs)

# %% tags=["nbval-check-output"]
for category in ("parameters", "optimizer state", "activations"):
    before, after = (peak_memory(run.ranks[0])[category] for run in runs.values())
    # In kB: some attention kernels keep a few bytes more.
    sizes_kb = f"{before / 1e3:5,.0f} to {after / 1e3:5,.0f} kB"
    print(f"{category:<16} {sizes_kb}: {after / before:.2f}")

# %% [markdown]
# A quarter would be 0.25. Parameters are nearly there: what is whole is small. Activations are not:
# what lies outside of f and g (the inputs of norms and of the cut layers, dropout masks) is kept t
# times, by every rank. By the terms of lab 11, in units of s·b·w bytes: 10 of the 34 are whole, 24 are
# cut, and so are the scores. (That is a formula; here the recorder has counted all that lives at the
# peak. Lab 14 asks autograd, by `saved_by`, and finds the formula to the byte.) Lab 14 cuts the 10, too. The rest
# of the peaks is "other": gradients of activations, and tensors that were there before the step.

# %% [markdown]
# When do the messages travel? On a paced wire (the ranks share few cores: read the order, not the
# lengths):

# %%
paced = World(2, link=Link(gbps=1, latency_us=100))
with record() as on_wire:
    paced.run(train, 4)
plot.timeline(on_wire, step=3)

# %% [markdown]
# DDP's messages hide behind backward. **These cannot hide**: the next operation needs their result.
# Only backward has something to do meanwhile: f's all-reduce of dx runs while dA is computed. (You
# will write that.) So the wire must be fast.

# %% [markdown]
# ### Why it stays inside the node
#
# A layer of GPT-3, between an embedding and a head of few tokens, on 8 ranks of 64 GPUs in 8 nodes.
# These 8 may be neighbours, or stand one in each node. That is the order of the mesh's axes: ranks
# along the last one are neighbours. (What data parallelism would send is left out here.)
#
# ```
#   Mesh(dp=8, tp=8)    ranks  0  1  2  3  4  5  6  7  share a layer     inside a node
#   Mesh(tp=8, dp=8)    ranks  0  8 16 24 32 40 48 56  share a layer     across 8 nodes
# ```
#
# Recorded on paper, and replayed:

# %%
GPT3 = dict(vocab=128, width=12288, depth=1, heads=96, context=2048)
DGX = cluster("dgx-h100")
inside = dry_run(step_on_paper, GPT3, 8, ("dp", "tp"), ranks=64)
across = dry_run(step_on_paper, GPT3, 8, ("tp", "dp"), ranks=64)

# %% tags=["nbval-check-output"]
for name, trace in {"inside a node ": inside, "across 8 nodes": across}.items():
    ranks = trace.ranks[0].comms[0].ranks
    print(f"{name} {ranks!s:<32} {split_of(replay(trace, DGX))}")
ports = (DGX.inside.bytes_per_s / 1e9, DGX.between.bytes_per_s / 1e9)
print("GB/s of a GPU, inside and between: {:.0f} and {:.0f}".format(*ports))

# %% [markdown]
# The same computing, the same bytes, another wire. Here is what a rank does inside the node:

# %%
plot.timeline(replay(inside, DGX))

# %% [markdown]
# From the left: the embedding's message, g after attention and after the MLP, two short ones of the
# loss, the head's f. The rank waits for all of these: so small a vocabulary leaves the head's f no
# product to run beside. The last two are the layer's f, in backward: they run beside the products of dA,
# and nobody waits.
#
# And more ranks? What each computes becomes less, but
# what it sends does not: 2(t-1)/t · b s w grows to 2 b s w. From 16 on a group spans nodes. We replay
# on three kinds of wire between them; `perfect` is a wire without cost.

# %%
sizes = (2, 4, 8, 16, 32)
records = {t: dry_run(step_on_paper, GPT3, t, ranks=64) for t in sizes if t != 8} | {8: inside}
between = {
    "InfiniBand, 8 ports a node": DGX,
    "InfiniBand, 1 port a node": replace(DGX, between=replace(DGX.between, ports=1)),
    "25 Gb/s Ethernet": replace(DGX, between=cluster("v100-cloud").between),
}
splits = {name: [split_of(replay(records[t], one)) for t in sizes] for name, one in between.items()}

# %%
_, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for (name, its), colour in zip(splits.items(), ("#0072B2", "#E69F00", "#D55E00")):
    axes.plot(sizes, [1e3 * one.step_s for one in its], "o-", color=colour, label=name)
perfect = [1e3 * one.compute_s for one in splits["InfiniBand, 8 ports a node"]]
axes.plot(sizes, perfect, "--", color="0.5", label="perfect")
axes.axvline(8, color="0.7", ls=":")
axes.text(8.3, 150, "one node", color="0.4")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xticks=sizes, xticklabels=sizes, xlabel="ranks that share a layer", ylabel="ms of a step")
axes.set(yticks=(5, 10, 50, 100, 500), yticklabels=(5, 10, 50, 100, 500))
axes.minorticks_off()
axes.legend(frameon=False, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
for name, its in splits.items():
    faster = [one.step_s / other.step_s for one, other in pairwise(its)]
    print(f"{name:<27}" + "".join(f"{t:>4} ranks: {x:4.2f} x" for t, x in zip(sizes[1:], faster)))

# %% [markdown]
# This is how much faster a step is with twice the ranks; 2 would be perfect. Inside the node it pays.
# Beyond it, twice the ranks for a layer bring less on the best network (and each group has half of the
# GPUs' sequences), and on the others the second node makes the step slower. So tensor parallelism goes up to the GPUs of a node, and over nodes go those who send less:
# data parallelism, and pipelines (lab 15).

# %% [markdown]
# ## 6. Break it
#
# ### Three MLPs
#
# Three colleagues wrote the pair of layers, gelu(x A) B. Each has one mistake. Which, and
# what would you see of it in training? (`hidden` is the width between A and B.)


# %%
def mlp_1(comm, x, A, B):  # A [w, hidden/t], B [hidden/t, w] are this rank's pieces
    return copy_to_ranks(F.gelu(reduce_from_ranks(x, comm) @ A) @ B, comm)


def mlp_2(comm, x, A, B):
    return reduce_from_ranks(F.gelu(x @ A) @ B, comm)


class SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, y):
        ctx.comm, y = comm, y.clone()
        comm.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return None, SumOfAll.forward(ctx, ctx.comm, dy)  # an all-reduce, there and back


def mlp_3(comm, x, A, B):
    return SumOfAll.apply(comm, F.gelu(copy_to_ranks(x, comm) @ A) @ B)


# %% [markdown]
# How large are the output and the gradients, on each rank, of those of one process? 1.00 is right:


# %%
def hunt(mlp):
    comm, width = attach().comm, 8
    torch.manual_seed(0)
    x, A, B, dy = (torch.randn(n, m) for n, m in ((5, width), (width, 16), (16, width), (5, width)))
    x.requires_grad_()
    cut = [A.chunk(comm.size, 1)[comm.rank], B.chunk(comm.size, 0)[comm.rank]]
    cut = [piece.clone().requires_grad_() for piece in cut]
    y = mlp(comm, x, *cut)
    mine = [y.detach(), *torch.autograd.grad(y, [x, cut[0]], dy)]
    A.requires_grad_()
    whole = F.gelu(x @ A) @ B
    dx, dA = torch.autograd.grad(whole, [x, A], dy)
    pairs = zip(mine, [whole.detach(), dx, dA.chunk(comm.size, 1)[comm.rank]])
    return [f"{float((m * r).sum() / r.square().sum()):.2f}" for m, r in pairs]


# %% tags=["nbval-check-output"]
print("                y      dx     dA")
for mlp_ in (mlp_1, mlp_2, mlp_3):
    for rank, sizes_of in enumerate(two.run(hunt, mlp_)):
        print(f"{mlp_.__name__}, rank {rank}  ", "   ".join(sizes_of))

# %% [markdown] tags=["answer"]
# - **mlp_1** has f and g swapped: x becomes t times x, and y stays a summand, another on each rank. The
#   loss is wrong at once.
# - **mlp_2** has no f. The loss is right, and so is dA. But dx is a part, another on each rank (the two
#   add up to 1.00): all layers *before* get wrong gradients, and replicas there (norms, biases)
#   **drift apart**.
# - **mlp_3** sends in both directions. The first loss is right; gradients in this layer and of its x are t
#   times too large. In x + mlp(x), right and too large ones mix: a wrong direction before it, which
#   Adam does not mend, and the loss shows little. (So does torch's
#   `torch.distributed.nn.functional.all_reduce`.)

# %% [markdown]
# ### The bias
#
# Somebody finds an `F.linear` with a bias shorter, and adds it before the sum:


# %%
def bias_inside(model):
    def forward(layer, x):
        return reduce_from_ranks(F.linear(x, layer.weight, layer.bias), layer.comm)

    for layer in model.modules():
        if isinstance(layer, RowParallelLinear):
            layer.forward = forward.__get__(layer)


wrong_curve = four.run(train, 4, torch.float64, bias_inside)[0]

for step, (wrong, fine) in enumerate(zip(wrong_curve, curves[4])):
    print(f"step {step}: {wrong:.6f} instead of {fine:.6f}")

# %% tags=["nbval-check-output"]
print("equal:", [abs(wrong - fine) < 1e-10 for wrong, fine in zip(wrong_curve, curves[4])])

# %% [markdown] tags=["answer"]
# Every rank adds the whole bias, so it is added t times. Biases begin at **zero**: in the first step
# nothing is wrong, and then the model has another function for each number of ranks. It trains, and
# nobody notices until a checkpoint is loaded with another t. (The check of exercise 2 begins with
# biases that are not zero.)

# %% [markdown]
# ### The masks
#
# Dropout of 0.5, on 2 ranks. We look at two masks in each: of the scores of attention, where a rank
# has heads of its own, and of x after attention, which both have. How much of them is the same on both
# ranks? With labkit's random numbers, and without `per_rank_rng`:


# %%
def masks(with_per_rank_rng):
    me, found = attach(), {}
    torch.manual_seed(0)
    model = GPT(**SIZES, dropout=0.5).to(me.device)
    block = model.blocks[0]
    block.attn.core = PlainAttention(dropout=0.5)
    tensor_parallel(model, me.comm)

    def look(module, _, out):
        found.setdefault(module, out != 0)  # the first call: after attention, not after the MLP

    for module in (block.attn.core.dropout, block.dropout):
        module.register_forward_hook(look)
    numbers = tensor.per_rank_rng if with_per_rank_rng else nullcontext  # which does nothing
    with patch.object(tensor, "per_rank_rng", numbers):
        model(Text().batch(0, rows=2, length=64).x.to(me.device))
    return dict(zip(("heads", "x"), found.values()))


# %% tags=["nbval-check-output"]
for with_own in (True, False):
    first, second = two.run(masks, with_own)
    lower = torch.ones(64, 64).tril().bool()
    heads = (first["heads"] == second["heads"])[..., lower].float().mean()
    both = (first["x"] == second["x"]).float().mean()
    print(f"own numbers: {with_own!s:<6} heads {heads:.1f} the same, x {both:.1f} the same")

# %% [markdown] tags=["answer"]
# With p = 0.5, masks that know nothing of each other agree in half of their elements. Without
# `per_rank_rng`, head 0 of rank 0 and head 0 of rank 1 drop the same positions, in all steps: a
# model with t ranks has 1/t of the randomness that it should have. No loss curve and no error shows it.

# %% [markdown]
# The other mistake, ranks with different seeds, would let x differ between the ranks. A world that
# checks (the default) finds it, and others like it:


# %%
def with_its_own_seed():
    me = attach()
    model = tensor_parallel(GPT(**SIZES, dropout=0.5).to(me.device), me.comm)
    torch.manual_seed(me.rank)
    model(Text().batch(0, rows=2, length=64).x.to(me.device))


def with_its_own_rows():
    me = attach()
    model = tensor_parallel(GPT(**SIZES).to(me.device), me.comm)
    model(Text().batch(0, rows=2, length=64).slice(me.rank, 2).x.to(me.device))


def too_few_heads():
    tensor_parallel(GPT(**SIZES | dict(heads=3)), attach().comm)


# %% tags=["nbval-check-output"]
for mistake in (with_its_own_seed, with_its_own_rows, too_few_heads):
    try:
        two.run(mistake)
    except Exception as error:
        line = next(text for text in str(error).splitlines() if "ValueError" in text)
        print(fill(f"{mistake.__name__}: {line.split('ValueError: ')[1]}", 100), end="\n\n")

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: Columns
#
# Write the column-parallel product with its own backward. `weight` is this rank's piece, [out/t, in] as
# torch has it; `x` is [n, in], the same on all ranks; return this rank's features, [n, out/t].
# `backward` gets the gradient of these. It returns one gradient for each argument of forward, None for
# `comm`. **While dA is computed, the all-reduce of dx is to be under way.**
#
# Useful: `ctx.save_for_backward`, `comm.all_reduce(dx, async_op=True)`, which returns a handle.


# %%
class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, x, weight):
        ### BEGIN SOLUTION
        ctx.comm = comm
        ctx.save_for_backward(x, weight)
        return x @ weight.T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        sending = ctx.comm.all_reduce(dx, async_op=True)
        dweight = dy.T @ x
        sending.wait()
        return None, dx, dweight
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.Column(Column)

# %% [markdown]
# ### Exercise 2: The MLP
#
# `up` and `down` are plain `nn.Linear` of this rank: `up` has its columns of A and its part of A's
# bias, `down` its rows of B and **all** of B's bias, as every rank has. (torch keeps both matrices
# transposed.) Return gelu(x A + bias of A) B + bias of B, on all ranks, with the gradients of one
# process for x and for all four parameters. f is `copy_to_ranks(x, comm)`, g is `reduce_from_ranks(y, comm)`.


# %%
def mlp(comm, x, up, down):
    ### BEGIN SOLUTION
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    return reduce_from_ranks(F.linear(hidden, down.weight), comm) + down.bias
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.mlp(mlp)

# %% [markdown]
# ### Exercise 3: Whose heads?
#
# Many models keep q, k and v in one matrix, one below the other: `heads * head_width` rows of q, then
# `kv_heads * head_width` of k, then as many of v. (With grouped queries several heads share a
# key-value head, and stand beside each other.) Which rows does `rank` have, with equally many heads on
# each of `ranks` ranks? Return a list of row numbers: of q, of k, of v, each in order.
#
# For 4 heads, 2 key-value heads, 1 feature each, 2 ranks: rank 1 has `[2, 3, 5, 7]`.


# %%
def own_rows(heads, kv_heads, head_width, ranks, rank):
    ### BEGIN SOLUTION
    rows, begin = [], 0
    for count in (heads, kv_heads, kv_heads):
        share = count // ranks * head_width
        rows += range(begin + rank * share, begin + (rank + 1) * share)
        begin += count * head_width
    return rows
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.own_rows(own_rows)

# %% [markdown]
# Who cuts this packed matrix into t pieces, as any other, gives rank 0 nothing but queries.

# %% [markdown]
# ### Exercise 4: The loss
#
# `logits` [n, v/t] are this rank's, of tokens `rank * v/t` and following; `targets` [n] are the same on
# all ranks. Return the mean of log Σ exp(logits) − the target's logit, on all ranks, with its gradient.
# Logits may be large, so subtract from each token's the largest on **any** rank; that it is one number
# or another does not change the loss, so it needs no gradient. Send three numbers a token.
#
# Useful: `comm.all_reduce(x, op="max")`, `reduce_from_ranks`, `torch.stack`, `logits.gather`.


# %%
def cross_entropy(comm, logits, targets):
    ### BEGIN SOLUTION
    width = logits.shape[1]
    peak = logits.detach().amax(dim=1)
    comm.all_reduce(peak, op="max")
    shifted = logits - peak[:, None]
    at = targets - comm.rank * width
    mine = (at >= 0) & (at < width)
    picked = shifted.gather(1, at.clamp(0, width - 1)[:, None])[:, 0] * mine
    both = torch.stack([shifted.exp().sum(dim=1), picked])
    total, picked = reduce_from_ranks(both, comm)
    return (total.log() - picked).mean()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.cross_entropy(cross_entropy)

# %% [markdown]
# ### Exercise 5, open: The fewest bytes
#
# A chain of 9 layers, gelu between them, of very different widths. Cut each by `"columns"`, by
# `"rows"`, or leave it `"whole"` on every rank. What goes in and what comes out is whole. What must
# travel between two layers follows from their cuts, in halves of an all-reduce, forward and backward
# together:

# %%
show("labs/lab_13/chain.py", since="TRAVELS = {", until="def travels")

# %%
from labkit.labs.lab_13.chain import CHAIN, WAYS, held, in_turns, travels

print("widths:", CHAIN)
print("in turns:", travels(in_turns(), CHAIN), "numbers for a token;", end=" ")
print("held by a rank:", held(in_turns(), CHAIN, ranks=2))

# %% [markdown]
# A rank may hold `budget` numbers: half of the matrices, or a little more. Return a way for each layer.
# Your score is what a rank sends, on real ranks, for three budgets.


# %%
def choose_cuts(widths, ranks, budget):
    ### BEGIN SOLUTION
    fitting = [
        ways
        for ways in product(WAYS, repeat=len(widths) - 1)
        if held(ways, widths, ranks) <= budget
    ]
    return min(fitting, key=lambda ways: travels(ways, widths))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose_cuts(choose_cuts)

# %% [markdown]
# Ideas for more: there are 3⁹ ways here, and 3⁹⁶ for a deep model. What must you know of the layers
# before, to choose the next one? Where does a whole layer pay, although all ranks compute it?

# %% tags=["nbval-check-output"]
report("13")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the flag or call |
# |---|---|
# | Megatron-LM | `--tensor-model-parallel-size 8`, `--make-vocab-size-divisible-by 128` |
# | torch | `parallelize_module(model, mesh["tp"], {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})` |
# | torchtitan | `--parallelism.tensor_parallel_degree 8` |
# | DeepSpeed (AutoTP) | `"tensor_parallel": {"autotp_size": 8}`, then `deepspeed.initialize` |
# | Accelerate, on Megatron | `MegatronLMPlugin(tp_degree=8)` |
# | labkit | `tensor_parallel(model, mesh.tp)` |

# %% [markdown]
# Where to find each idea in Megatron-LM, `megatron/core/tensor_parallel/`:
#
# | here | there |
# |---|---|
# | f, `copy_to_ranks` | `mappings.py`, `copy_to_tensor_model_parallel_region` |
# | g, `reduce_from_ranks` | `mappings.py`, `reduce_from_tensor_model_parallel_region` |
# | the two ways to cut | `layers.py`, `ColumnParallelLinear`, `RowParallelLinear` |
# | the all-reduce behind dA | `layers.py`, `LinearWithGradAccumulationAndAsyncCommunication` |
# | the embedding | `layers.py`, `VocabParallelEmbedding` |
# | the loss | `cross_entropy.py`, `vocab_parallel_cross_entropy` |
# | `per_rank_rng` | `random.py`, `get_cuda_rng_tracker().fork()` |

# %% [markdown]
# What they add: Megatron keeps a second generator for what is drawn between f and g, adds up weight
# gradients in fp32, and can overlap the parts of one product with the parts of its message
# (`--tp-comm-overlap`). torch's DTensor knows for each tensor how it lies on the ranks (`Shard(0)`,
# `Replicate()`, `Partial()`), and finds the messages from that: a column-parallel output is a `Shard`,
# a row-parallel one a `Partial`, and to make it a `Replicate` is the all-reduce.

# %% [markdown]
# torch's own, on the same MLP, beside the library's:


# %%
def with_dtensor(width=96):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel as tp

    me = attach()
    torch.manual_seed(0)
    theirs, ours = (GPT(**SIZES).blocks[0].to(me.device) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    plan = {"mlp.up": tp.ColwiseParallel(), "mlp.down": tp.RowwiseParallel()}
    tp.parallelize_module(theirs, init_device_mesh(me.device.type, (me.size,)), plan)
    tensor_parallel(ours, me.comm)
    placed = theirs.mlp.up.weight.placements, theirs.mlp.down.weight.placements
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1)).to(me.device)
    same = torch.allclose(theirs.mlp(x), ours.mlp(x), atol=1e-5)
    return [*map(str, placed), list(theirs.mlp.up.weight.to_local().shape), same]


# %% tags=["nbval-check-output"]
up, down, piece, same = paced.run(with_dtensor)[0]
print(f"up {up}, a piece {piece}; down {down}; the same output: {same}")

# %% [markdown]
# `Shard(dim=0)` is the *columns* of A: torch keeps the matrix transposed, [out, in].
#
# Sources: Shoeybi et al., *Megatron-LM*, 2019 (arXiv 1909.08053), section 3; Korthikanti et al.,
# *Reducing Activation Recomputation*, 2022 (arXiv 2205.05198), section 4.2.1; Narayanan et al., 2021
# (arXiv 2104.04473), section 3.2; Smith et al., *Megatron-Turing NLG 530B*, 2022 (arXiv 2201.11990),
# for the sizes of section 1.

# %% [markdown]
# **You can now** cut any chain of matrices over ranks, say where f and g must stand and what they send,
# cut heads, vocabulary and loss, and say how far tensor parallelism should go.
