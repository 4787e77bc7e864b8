# %% [markdown]
# # Lab 17: Three dimensions
#
# You have cut rows (labs 05 to 08), layers (lab 13) and the list of layers (lab 15). A model of
# hundreds of billions of parameters needs all three at once. In this lab you put eight ranks into a
# box of three axes, say to the byte what travels along each, and find out which axis belongs inside
# a node, what exists twice, and what must not be counted twice.
#
# You need lab 01 (meshes), lab 06 (replays), lab 07 (model states, clipping) and labs 13, 15 and 16.

# %%
from itertools import permutations, product
from textwrap import fill

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from labkit import DDP, GPT, Mesh, Pipeline, Text, World, attach, cluster, listen, plot, record
from labkit import predict as formulas
from labkit.comm.mesh import coordinates, lines, rank_at
from labkit.course import predict, report, show
from labkit.labs.lab_17 import checks as check
from labkit.labs.lab_17.placement import JOBS, TINY, by_rule, idle, leaving_bytes, why_not
from labkit.parallel import split
from labkit.parallel.common.clipping import clip_grad_norm
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.plot.style import BLUE, GRAY, ORANGE, PURPLE, VERMILION
from labkit.replaying.costs import Costs

# %% [markdown]
# ## 1. The question
#
# GPT-3, 1,024 GPUs of 80 GB, 8 in each node, a batch of 1,536 texts. Take each axis alone:

# %%
GPT3 = dict(vocab=51200, width=12288, depth=96, heads=96)
BATCH, TEXT, SELENE = 1536, 2048, cluster("selene")
P = formulas.parameters(**GPT3, context=TEXT)
flops = formulas.step_flops(**GPT3, rows=BATCH, sequence=TEXT)
compute_s = flops / 1024 / (0.5 * SELENE.device.peak_flops["bfloat16"])
zero_3_s = 1.5 * formulas.data_parallel_bytes(P, 1024, 2) / SELENE.between.bytes_per_s
bubble = formulas.one_f_one_b(96, BATCH // 10, 1, 2).of_total
ALONE = {  # GB of parameters, gradients and Adam's state on a GPU, and what is wrong
    "data: 1,024 copies": (16 * P / 1e9, "does not fit"),
    "tensor: 8 of a node": (16 * P / 8 / 1e9, "does not fit"),
    "pipeline: 96 stages, 10 copies": (16 * P / 96 / 1e9, f"idles {bubble:.0%} of the time"),
    "data, ZeRO-3 over 1,024": (
        16 * P / 1024 / 1e9, f"sends for {zero_3_s:.0f} s, computes for {compute_s:.0f} s",
    ),
}  # fmt: skip

# %%
_, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
for place, (gb, trouble) in enumerate(ALONE.values()):
    axes.barh(place, gb, color=VERMILION if gb > 80 else BLUE)
    words = f"{gb:,.0f} GB: {trouble}"
    axes.text(gb * 1.15, place, words, va="center", backgroundcolor="white")
axes.axvline(80, color="0.4", ls=":", zorder=0)
axes.set_xscale("log")
axes.set(xticks=(1, 10, 80, 1000), xticklabels=(1, 10, 80, 1000))
axes.set(xlabel="GB of model states (parameters, gradients, Adam's state) on each GPU, of 80")
axes.set(yticks=range(4), yticklabels=list(ALONE), xlim=(1, 2e5))
axes.minorticks_off()
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
for name, (gb, trouble) in ALONE.items():
    print(f"{name:<32}{gb:>7,.0f} GB   {trouble}")

# %% [markdown]
# Each axis has a limit of its own: a copy must fit, a node has 8 GPUs, a pipeline needs many
# micro-batches for each replica, and ZeRO-3 fetches all parameters again and again for one or two
# texts. (Its bytes can hide behind computing, but not when they take longer than that. Computing is
# taken at half of the GPUs' peak, and the wires at all of theirs.)
#
# **Can each axis do only what it is good at?** For instance 8 · 8 · 16 = 1,024:

# %% tags=["nbval-check-output"]
tp, pp, dp = 8, 8, 16
m = BATCH // dp
print(f"{16 * P / (tp * pp) / 1e9:.0f} GB of model states on a GPU, {m} micro-batches of one text,")
print(f"a bubble of {formulas.one_f_one_b(pp, m, 1, 2).of_total:.0%}")

# %% [markdown]
# ## 2. The idea
#
# Eight ranks, in a box: two stages (pp), each layer over two ranks (tp), and all that twice (dp).


# %%
SHADES = ["#D7EBF7", "#A9D3EE", "#D5EDE3", "#A0D8C1"]  # which part of the model


def draw_box(axes, rank, where):
    x, y = 5 * where["dp"] + 2 * where["pp"], 1.6 * (1 - where["tp"])
    shade = SHADES[2 * where["pp"] + where["tp"]]
    axes.add_patch(plt.Rectangle((x, y), 1.4, 1.1, facecolor=shade, edgecolor="0.3"))
    axes.text(x + 0.7, y + 0.55, f"rank {rank}", ha="center", va="center")
    return x, y


def arrow(axes, begin, end, colour, bend=0.0):
    style = dict(arrowstyle="<|-|>", color=colour, lw=2, connectionstyle=f"arc3,rad={bend}")
    axes.annotate("", end, begin, arrowprops=style)


# %%
_, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
SIZES_OF_MESH = {"pp": 2, "dp": 2, "tp": 2}
place_of = {r: draw_box(axes, r, coordinates(SIZES_OF_MESH, r)) for r in range(8)}
for a, b in lines(SIZES_OF_MESH, "tp"):
    arrow(axes, (place_of[a][0] + 0.7, 1.6), (place_of[b][0] + 0.7, 1.1), PURPLE)
for a, b in lines(SIZES_OF_MESH, "pp"):
    y = place_of[a][1] + 0.55
    arrow(axes, (place_of[a][0] + 1.4, y), (place_of[b][0], y), BLUE)
for a, b in lines(SIZES_OF_MESH, "dp"):
    (x, y), (u, _) = place_of[a], place_of[b]
    end, bend = (1.1, -0.25) if y > 1 else (0, 0.25)
    arrow(axes, (x + 0.7, y + end), (u + 0.7, y + end), ORANGE, bend)
words = (("tp: x, in each layer", PURPLE), ("pp: x at the cut", BLUE), ("dp: gradients", ORANGE))
for k, (word, colour) in enumerate(words):
    axes.text(8.9, 2.2 - 0.6 * k, word, color=colour, va="center", fontsize=11)
for k, word in enumerate(("replica 0: half of the rows", "replica 1: the other half")):
    axes.text(5 * k + 1.7, -1.25, word, ha="center")
axes.set(xlim=(-0.2, 12), ylim=(-1.5, 4.1))
_ = axes.axis("off")

# %% [markdown]
# Boxes of one shade have the same part of the model. Three things have nothing to do with each other,
# and that is why they combine:
#
# - **tp** edits the *layers*: each is cut, and its ranks see the same rows;
# - **pp** runs the *step*: it takes layers, whatever is in them, and micro-batches;
# - **dp** owns the *gradients*: it averages what a rank has with those who have the same.
#
# What one rank sends in a step, for b rows of its replica, s positions, width w, L layers, m
# micro-batches, G bytes of gradients in the model, g bytes each number:
#
# | axis | what | how often | bytes |
# |---|---|---|---|
# | tp | x | 4 times a layer and micro-batch | 8 (t-1)/t · b s w g · L/p |
# | pp | x, and its gradient | at a cut, for each micro-batch | b s w g in each direction |
# | dp | gradients | once | 2 (d-1)/d · G/(t p) |

# %% [markdown]
# ### In which order?
#
# `Mesh(pp=2, dp=2, tp=2)`: the last axis varies fastest, so its ranks are neighbours, on one node:

# %%
plot.mesh(SIZES_OF_MESH, ranks_per_node=4)

# %% [markdown]
# tp sends most, and at moments when nobody has anything else to do: inside. A cut of the pipeline sends
# little, from one rank to one other: outside.
#
# ### What exists twice
#
# - **The embedding** is on the first stage, and as the head on the last. These two form the *embedding
#   group*: after the last backward they add up. Each rank of tp and dp has such a group of its own:
#   0-4, 1-5, 2-6, 3-7.
# - **Norms, positions, and biases after a sum** are on all ranks of tp, with the same gradient on each.
# - **All** is on each replica.
#
# Who wants the length of the model's gradient, for clipping, must count each of these once.

# %% [markdown]
# ### Scatter, then gather
#
# At a cut all t ranks of a stage have the same x, and each sends all of it to its neighbour: x goes t
# times over the slow wires. So let each send a part, and put the parts together inside the node:
#
# ```
#   stage 0, on node 0                         stage 1, on node 1
#     tp 0   | a b |  ──── a ────▶   | a . |  ╲  all-gather     | a b |
#     tp 1   | a b |  ──── b ────▶   | . b |  ╱  over tp        | a b |
# ```
#
# b s w g / t over the slow wires, and (t-1)/t · b s w g more over the fast ones.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | 3D parallelism, PTD-P | 三维并行 | pipeline, tensor and data parallelism combined |
# | device mesh | 设备网格 | ranks arranged in a grid with named axes |
# | rank placement | 进程放置 | which rank runs on which node |
# | model-parallel size | 模型并行规模 | t · p, the number of ranks that share one copy of the model |
# | replica | 模型副本 | one complete copy of the model, on one rank or on the t · p ranks that share it |
# | embedding group | 嵌入层通信组 | the ranks of the first and last stage, which share the embedding |
# | scatter/gather | 分散-聚集优化 | each tensor-parallel rank sends a part over the slow link; the parts are gathered over the fast one |
# | global norm | 全局范数 | the norm of the gradient of the whole model |
# | global batch | 全局批量 | the rows of all replicas in one step |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# The GPT that you will run: v = 128 tokens in the vocabulary, tied, w = 32, L = 4 layers, s = 16
# positions, in float64 (8 bytes); a global batch of 32 rows, 4 micro-batches. p = d = t = 2.
#
# What does **rank 0** send in a step along each axis? It is on the first stage, so tp has the
# embedding's all-reduce, too: 4 a layer and 1. It has 15,456 parameters: half of the tokens' table, all
# positions, and of each of its layers (12 w² + 7 w) / t + 6 w. In the embedding group it sums up its
# rows of the table, [v/t, w].

# %%
SIZES = dict(vocab=128, width=32, depth=4, heads=4, context=16)
ROWS, MICROBATCHES = 32, 4

# %% stub="guess = predict(tensor_bytes=..., pipeline_bytes=..., data_bytes=..., embedding_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
p = d = t = 2
v, w, L, s = 128, 32, 4, 16
x_bytes = ROWS // d * s * w * 8  # all micro-batches of a replica
guess = predict(
    tensor_bytes=2 * (t - 1) // t * (4 * L // p + 1) * x_bytes,
    pipeline_bytes=x_bytes,  # activations; the first stage has nobody to give a gradient to
    data_bytes=2 * (d - 1) // d * 15456 * 8,
    embedding_bytes=v // t * w * 8,
)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# There is no class for three dimensions. It is one call for each axis:


# %%
def on_mesh(*, scatter_gather=False, **axes):
    """A mesh, and this rank's part of a GPT on it."""
    mesh = Mesh(**axes)
    torch.manual_seed(0)
    model = GPT(**SIZES).to(attach().device, torch.float64)
    tensor_parallel(model, mesh.tp, gather_logits=False)  # its layers ...

    def token_loss(logits, y):
        return vocab_parallel_cross_entropy(logits, y, mesh.tp)

    pipe = Pipeline(  # ... its step ...
        split(model, mesh.pp.size), mesh.pp, "1f1b", MICROBATCHES, token_loss,
        wrap=lambda stage: DDP(stage, mesh.dp),  # ... and its gradients
        scatter_gather=mesh.tp if scatter_gather else None,
    )  # fmt: skip
    return mesh, pipe


# %% [markdown]
# `split` takes a model whose layers are cut already: a stage does not look into its layers. `wrap` gets
# the stage that stays here, and DDP the ranks that have the same one, `mesh.dp`. It waits until the
# last backward (lab 16).
#
# Which parameters are on several stages? These ranks become a group, on every line along pp at once:

# %%
show("parallel/pipeline/grad_sync.py:owners_of", since="ranks:")

# %% [markdown]
# And after the last backward they add up. (What earlier steps have summed is with the first owner.)

# %%
show("parallel/pipeline/grad_sync.py:WholeGradient.sum_copies", since="parameter =")

# %% [markdown]
# The norm. First the sums of squares, for each group over which something is cut, and for what is
# whole; then over tp the first kind alone; then over the stages. (`comm` has ZeRO's ranks, here it is
# None; and p may be infinite, then it is the largest.)

# %%
show("parallel/common/clipping.py:norm_of_pieces", since="sums = ", until="return")

# %% [markdown]
# `gradients` are those that count on this rank. Of a tied parameter the first owner's does:

# %%
show("parallel/pipeline/stages.py:StagedModel.counts_here")

# %% [markdown]
# And scatter/gather: a part is a range of x lying flat. A message arrives in its place in the whole,
# and the others fill the rest:

# %%
show("parallel/pipeline/scatter_gather.py:ScatterGather.own_part", since="return")

# %%
show("parallel/pipeline/scatter_gather.py:ScatterGather.gather")

# %% [markdown]
# ## 5. Run it
#
# Ranks of tp and pp work on the same rows, so what a rank gets follows from its index on dp alone.
# Every event at the door knows its ranks, so it knows its axis. (Along pp go two things: messages from
# stage to stage, and the all-reduces of the embedding group.)


# %%
def axis_of(event, mesh):
    if event.ranks == mesh.tp.ranks:
        return "tensor"
    if event.ranks == mesh.dp.ranks:
        return "data"
    return "pipeline" if event.op in ("send", "recv") else "embedding"


def sent_to(event, mesh):
    """(axis, to which rank, bytes); around a ring a rank sends to the next one."""
    peer = (event.rank + 1) % len(event.ranks) if event.peer is None else event.peer
    return axis_of(event, mesh), event.ranks[peer], event.bus_bytes


# %%
def train(steps=2, **axes):
    """Losses, on the last stage; norms before clipping; what the last step sent; the weights."""
    me = attach()
    mesh, pipe = on_mesh(**axes)
    adam = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=16).slice(mesh.dp.rank, mesh.dp.size)
        batch = batch.to(me.device)
        adam.zero_grad()
        with listen() as events:
            losses.append(pipe.step(batch.x, batch.y))
        norms.append(clip_grad_norm(pipe, 1.0).item())
        adam.step()
    weights = pipe.full_state_dict()
    sent = [sent_to(event, mesh) for event in events]
    return losses, norms, sent, weights if mesh.comm.rank == 0 else None


# %%
def train_alone(steps=2):
    torch.manual_seed(0)
    model = GPT(**SIZES).double()
    adam, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=16)
        adam.zero_grad()
        losses.append(F.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten()))
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        adam.step()
    return torch.stack(losses).detach(), norms, model.state_dict()


alone_losses, alone_norms, alone_weights = train_alone()
eight = World(8)
print("one process, losses:", ", ".join(f"{loss:.6f}" for loss in alone_losses.tolist()))
print("norms, clipped to 1:", ", ".join(f"{norm:.6f}" for norm in alone_norms))

# %% [markdown]
# Four ways to put eight ranks into a box. Each replica has the mean loss of its own rows, so the
# loss of all is the mean over the replicas:


# %%
def compared(ran):
    """Whether a run has the losses, norms and weights of one process."""
    of_last = [losses for losses, *_ in ran if losses[0] is not None]
    mean = torch.stack([torch.stack(losses) for losses in of_last]).mean(0)
    apart = [(ran[0][-1][k] - x).abs().max() for k, x in alone_weights.items()]
    same = torch.allclose(mean, alone_losses, rtol=1e-10) and all(off < 1e-10 for off in apart)
    return same and torch.allclose(torch.tensor(ran[5][1]), torch.tensor(alone_norms))


MESHES = [
    dict(pp=2, dp=2, tp=2), dict(tp=2, dp=2, pp=2), dict(pp=1, dp=8, tp=1), dict(pp=4, dp=2, tp=1),
]  # fmt: skip

# %% tags=["nbval-check-output"]
with record() as recorded:
    ran = [eight.run(train, **MESHES[0])]
ran += [eight.run(train, **axes) for axes in MESHES[1:]]
for axes, its in zip(MESHES, ran):
    print(f"{axes!s:<29} losses, norms, weights equal: {compared(its)}")

# %% [markdown]
# The second step of the first run, on rank 0 and on the stage behind it. (Eight ranks fight for your
# cores: read the order, not the lengths.)

# %%
plot.timeline(recorded, step=1, ranks=(0, 4))

# %% [markdown]
# On rank 0, all the time tp's all-reduces (ranks 0, 1): many, short, and the rank waits for each. Between
# them the messages of pp (0, 4), for which it waits where its schedule has nothing before it: after F1,
# 1F1B does B0, and the gradient for that must come first. And once, at the end, the gradients of dp
# (0, 2), the embedding group's, and a number for clipping. Rank 4 has the same three partners: 0, 5
# and 6.

# %% [markdown]
# ### What travels
#
# Rank 0 of the first run, in the same step:


# %% tags=["nbval-check-output"]
def bytes_along(axis, sent):
    return sum(count for its, _, count in sent if its == axis)


sent_by = [sent for *_, sent, _ in ran[0]]
guess.beside("counted", **{
    f"{axis}_bytes": bytes_along(axis, sent_by[0])
    for axis in ("tensor", "pipeline", "data", "embedding")
})  # fmt: skip

# %% [markdown]
# All ranks at once: a row for each sender, a column for each receiver; the lines are nodes of four.

# %%
COLOURS = {"tensor": PURPLE, "pipeline": BLUE, "embedding": GRAY, "data": ORANGE}
_, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
for rank, its in enumerate(sent_by):
    for axis, colour in COLOURS.items():
        count, to = bytes_along(axis, its), {peer for name, peer, _ in its if name == axis}
        for peer in to:
            top = rank + (0.5 * (axis == "embedding"))
            height = 0.5 if axis in ("pipeline", "embedding") else 1
            axes.add_patch(plt.Rectangle((peer, top), 1, height, color=colour, alpha=0.85))
            ink = "black" if axis in ("tensor", "data") else "white"
            style = dict(ha="center", va="center", color=ink, fontsize=8)
            axes.text(peer + 0.5, top + height / 2, f"{count / 1e3:.0f}", **style)
for k in range(9):
    for line in (axes.axhline, axes.axvline):
        line(k, color="0.2" if k == 4 else "0.85", lw=1.5 if k == 4 else 0.6)
axes.set(xlim=(0, 8), ylim=(8, 0), xlabel="to rank", ylabel="from rank", aspect="equal")
axes.set(xticks=[k + 0.5 for k in range(8)], xticklabels=range(8))
axes.set(yticks=[k + 0.5 for k in range(8)], yticklabels=range(8), title="KB of a step")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
_ = axes.legend(handles, COLOURS, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)

# %% [markdown]
# Every rank talks to three others, one for each axis. (0 sends activations to 4; 4 sends gradients
# back, and the lower half of these two cells is their embedding group.) With tp innermost all the
# purple stays inside its node, and dp as well. Only blue and grey leave it.
#
# Other boxes, other bytes: rank 0 in each of the four runs.

# %%
_, axes = plt.subplots(figsize=(8, 1.9), layout="constrained")
for place, its in enumerate(ran):
    begin = 0.0
    for axis, colour in COLOURS.items():
        count = bytes_along(axis, its[0][2]) / 1e3
        axes.barh(place, count, left=begin, color=colour, label="" if place else axis)
        begin += count
names = [", ".join(f"{axis} {n}" for axis, n in one.items()) for one in MESHES]
axes.set(yticks=range(4), yticklabels=names, xlabel="KB that rank 0 sends in a step")
axes.invert_yaxis()
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The first two differ in the order of their axes only: the bytes are the same, but who gets them is not.
# The last sends least: no layer is cut, and a rank has a quarter of the gradients. It pays in idling: with
# 4 micro-batches four stages have a bubble of 3/7, and two of 1/5.
#
# Your formulas, for any box, stand in `labkit.predict`. For the first stage:


# %%
def formula(**axes):
    gpt = {name: SIZES[name] for name in ("vocab", "width", "depth", "context")}
    how = dict(sequence=16, microbatches=MICROBATCHES, gather_logits=False, element_bytes=8)
    return formulas.bytes_by_axis(**gpt, **how, rows=ROWS // axes["dp"], **axes)[0]


# %% tags=["nbval-check-output"]
for axes, its in zip(MESHES, ran):
    counted = {axis: bytes_along(axis, its[0][2]) for axis in COLOURS}
    print(f"{axes!s:<29} every axis as predicted: {counted == formula(**axes)}")

# %% [markdown]
# ### What it holds
#
# A rank should have 1/(t p) of the model, and a little more:


# %%
def parameters_here():
    attach()
    return sum(p.numel() for p in on_mesh(pp=2, dp=2, tp=2)[1].parameters())


# %% tags=["nbval-check-output"]
model = formulas.parameters(**SIZES)
here = eight.run(parameters_here)
print(f"the model: {model:,} parameters, a quarter {model / 4:,.0f}")
print("ranks 0 to 7:", ", ".join(f"{count:,}" for count in here))

# %% [markdown]
# Norms, positions and some biases are whole on both ranks of tp, and the table is there twice: on the
# first stage and on the last. In GPT-3 that is next to nothing.
#
# ### What does an order cost?
#
# Now the real sizes: tp 8, pp 8, dp 16 on 128 nodes of 8. What one GPU sends is the same in each of six
# orders, but not the wires that it goes over. Before you look: which orders are cheap, and how many times
# as much do the others cost?

# %% tags=["nbval-check-output"]
SHAPE = {"tp": 8, "pp": 8, "dp": 16}
x = TEXT * 12288 * 2  # bytes of one micro-batch of one text
messages = {  # operation, bytes of each, how many in a step
    "tp": ("all_reduce", x, 4 * 96 // 8 * m),
    "pp": ("send", x, 2 * m),
    "dp": ("all_reduce", 2 * P / 64, 1),
}
for axis, (op, each, count) in messages.items():
    factor = formulas.bus_factor(op, SHAPE[axis]) if op == "all_reduce" else 1
    print(
        f"{axis}: {count:>5} x {op:<10} of {each / 1e6:>7,.0f} MB, {factor * each * count / 1e9:.0f} GB"
    )


# %%
def seconds_of(axis, sizes):
    """What the messages of an axis take on Selene's wires, one after another."""
    op, each, count = messages[axis]
    line = tuple(next(lines(sizes, axis)))
    if op == "all_reduce":
        return count * Costs(SELENE).collective(op, int(each), line).seconds
    level = SELENE.level_of(line)
    return count * each / (SELENE.share_bytes_per_s(level) * level.reached)


PRICES = {}
for order in permutations(("pp", "dp", "tp")):
    sizes = {axis: SHAPE[axis] for axis in order}
    PRICES[", ".join(order)] = {axis: seconds_of(axis, sizes) for axis in ("tp", "pp", "dp")}

# %%
_, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
for place, price in enumerate(PRICES.values()):
    begin = 0.0
    for axis, colour in (("tp", PURPLE), ("pp", BLUE), ("dp", ORANGE)):
        axes.barh(place, price[axis], left=begin, color=colour, label="" if place else axis)
        begin += price[axis]
axes.axvline(compute_s, color="0.4", ls=":")
axes.text(compute_s, -0.9, "computing", color="0.4", ha="center")
axes.set(yticks=range(6), yticklabels=list(PRICES), xlabel="seconds on the wires, in a step")
axes.invert_yaxis()
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
for order, price in PRICES.items():
    print(f"{order}   " + "   ".join(f"{axis} {s:5.1f} s" for axis, s in price.items()))

# %% [markdown]
# With tp last it costs the least, with tp anywhere else more than all the computing. Which of pp and dp is
# next matters little here: neither is inside a node. (These are sums. What hides, and what does not,
# is a replay's affair, as in lab 13; and of dp most hides behind the last backward.)
#
# Now pp again, with scatter/gather. A rank of the first stage and one of the second; what will change
# in `pipeline`, and what in `tensor`?

# %% tags=["nbval-check-output"]
gathered = eight.run(train, scatter_gather=True, pp=2, dp=2, tp=2)
for name, its in {"whole": ran[0], "scatter/gather": gathered}.items():
    for rank in (0, 4):
        parts = {axis: f"{bytes_along(axis, its[rank][2]):,.0f}" for axis in ("pipeline", "tensor")}
        print(f"{name:<15} rank {rank}: {parts}")
print("still the same training:", compared(gathered))

# %% [markdown]
# 1/t over the cut, in each direction, and (t-1)/t of it more inside: rank 4 gathers activations, and
# rank 0 gradients. With t = 8 that is an eighth: of GPT-3's 0.5 s between nodes, 0.07 are left.

# %% [markdown]
# ## 6. Break it
#
# ### Four synchronisations
#
# Below, nobody synchronises: no DDP, and two tables that are equal but not tied. Each colleague writes
# what must happen after the last backward. `gradients` has a rank's, by name; `TABLES` are the names of
# the embedding and of the head. Who is right, and what is wrong with the others?

# %%
TABLES = ("embed.tokens.weight", "head.weight")


def mean(comm, g):
    comm.all_reduce(g)
    g /= comm.size


def a(mesh, gradients):  # first the embedding, then the replicas
    for name in TABLES:
        if name in gradients:
            mesh.pp.all_reduce(gradients[name])
    for g in gradients.values():
        mean(mesh.dp, g)


# %%
def b_(mesh, gradients):  # in one go, over all that have the same layers
    for g in gradients.values():
        mean(mesh["dp", "tp"], g)
    for name in TABLES:
        if name in gradients:
            mesh.pp.all_reduce(gradients[name])


def c(mesh, gradients):
    for g in gradients.values():
        mean(mesh.dp, g)


def d_(mesh, gradients):
    for name, g in gradients.items():
        mean(mesh["dp", "pp"] if name in TABLES else mesh.dp, g)


# %% [markdown]
# We hold each against one process: how much of the right gradient is in it? All of it is 1.00. `shard_of`
# says which rows or columns of the whole a rank has.


# %%
def untied(mesh):
    """A pipeline in which nobody synchronises, and the same model in one process, with its tie."""
    torch.manual_seed(0)
    like = dict(device=attach().device, dtype=torch.float64)
    alone, model = GPT(**SIZES).to(**like), GPT(**SIZES, tied=False).to(**like)
    model.load_state_dict(alone.state_dict())
    stages = split(tensor_parallel(model, mesh.tp, gather_logits=False), mesh.pp.size)

    def token_loss(logits, y):
        return vocab_parallel_cross_entropy(logits, y, mesh.tp)

    return Pipeline(stages, mesh.pp, "1f1b", MICROBATCHES, token_loss), alone


def part_of(whole, p):
    """Of a gradient of the whole model, what belongs to this rank's `p`."""
    shard = shard_of(p)
    if shard is None:
        return whole
    return whole.narrow(shard.dim, shard.start, shard.stop - shard.start)


# %%
def raw_step():
    """The mesh, this rank's parameters with gradients of its own, and the right ones, by name."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    pipe, alone = untied(mesh)
    batch = Text().batch(0, rows=ROWS, length=16).to(attach().device)
    mine = batch.slice(mesh.dp.rank, mesh.dp.size)
    pipe.step(mine.x, mine.y)
    F.cross_entropy(alone(batch.x).flatten(0, 1), batch.y.flatten()).backward()
    right = dict(alone.named_parameters(remove_duplicate=False))
    own = {name.removeprefix("module."): p for name, p in pipe.named_parameters()}
    return mesh, own, {name: part_of(right[name].grad, p) for name, p in own.items()}


# %%
def hunt(programs):
    attach()
    mesh, own, right = raw_step()
    found = []
    for program in programs:
        gradients = {name: p.grad.clone() for name, p in own.items()}
        program(mesh, gradients)
        ratios = {}
        for kind in ("tables", "cut", "norms"):
            names = [n for n in own if kind == kind_of(n)]
            g, r = (torch.cat([x[n].flatten() for n in names]) for x in (gradients, right))
            ratios[kind] = float((g * r).sum() / r.square().sum())
        ratios["length"] = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        found.append(ratios)
    return found


def kind_of(name):
    if name in TABLES:
        return "tables"
    return "norms" if "norm" in name else "cut" if name.endswith("q.weight") else ""


# %%
PROGRAMS = (a, b_, c, d_)
hunted = eight.run(hunt, PROGRAMS)
print("          the table, rank 0 and 4    q, rank 0 and 1    norms")
for k, program in enumerate(PROGRAMS):
    zero, one, four = (hunted[rank][k] for rank in (0, 1, 4))
    print(
        f"{program.__name__.strip('_'):<10}{zero['tables']:>12.2f} {four['tables']:>5.2f}"
        f"{zero['cut']:>17.2f} {one['cut']:>5.2f}{zero['norms']:>12.2f}"
    )

# %% tags=["nbval-check-output"]
for k, program in enumerate(PROGRAMS):
    parts = [its[k][kind] for its in hunted for kind in ("tables", "cut", "norms")]
    print(program.__name__.strip("_"), "is right:", all(abs(x - 1) < 1e-9 for x in parts))

# %% [markdown] tags=["answer"]
# - **a** is right: sums in any order are the same.
# - **b** averages over tp as well. What is whole there stays right. But of what is cut, each rank gets the
#   mean of two **different** shards, of the same shape: no error, and noise in all large matrices.
# - **c** forgets the embedding. Each copy moves by its own part (about a fifth by looking up, the rest by scoring):
#   from now on the "tied" table is two. The loss still falls, and a checkpoint has one of them.
# - **d** averages where a sum is due. The two gradients are not of the same thing seen twice, but two
#   parts of one. Half as long: with Adam you will not see it, until you clip.

# %% [markdown]
# ### Eight lengths
#
# A rank knows the gradients that it has. If it clips by their length, with which one? After the right
# one of the four, each rank's own, and that of the model:

# %%
own = [its[0]["length"] for its in hunted]
print("ranks 0 to 7:", ", ".join(f"{length:.4f}" for length in own))
squares = sum(length**2 for length in own)
print(f"the root of all eight squares: {squares**0.5:.4f}")
print(f"of the four of one replica:    {(squares / 2) ** 0.5:.4f}")
print(f"one process:                   {alone_norms[0]:.4f}")

# %% [markdown] tags=["answer"]
# By its own norm each stage and each rank of tp would take a step of another scale: the direction is wrong,
# and what both ranks of tp have **comes apart**. Replicas agree, so a test with dp alone finds nothing.
# All eight squares count everything at least twice. Those of one replica are still too many: tp has norms
# and biases twice, and pp the table. You will write the right one.

# %% [markdown]
# ### The wrong axis
#
# Four lines with one wrong word each. What would happen, and what does the library say?


# %%
def ddp_over_stages(mesh, model):
    DDP(split(model, 2)[mesh.pp.rank], mesh.pp)


def ddp_over_shards(mesh, model):
    DDP(split(model, 2)[mesh.pp.rank], mesh.tp)


def too_many(mesh, model):
    Mesh(pp=2, dp=3, tp=2)


def rows_by_rank(mesh, model):
    batch = Text().batch(0, rows=ROWS, length=16).slice(mesh.comm.rank, 8)
    model(batch.x.to(attach().device))


def try_it(mistake):
    attach()
    mesh = Mesh(pp=2, dp=2, tp=2)
    mistake(mesh, tensor_parallel(GPT(**SIZES).to(attach().device), mesh.tp))


def told_by(error):
    return next(x for x in str(error).splitlines() if "ValueError: " in x).split("ValueError: ")[1]


# %% tags=["nbval-check-output"]
def no_harm(mistake):
    """All ranks raise at the same place, and none waits for another: they may live on."""
    try:
        try_it(mistake)
    except ValueError as error:
        return f"ValueError: {error}"


for mistake in (ddp_over_stages, ddp_over_shards, too_many):
    print(fill(f"{mistake.__name__}: {told_by(eight.run(no_harm, mistake)[0])}", 100), end="\n\n")

# %% tags=["nbval-check-output"]
try:
    eight.run(try_it, rows_by_rank)
except Exception as error:
    print(fill(f"rows_by_rank: {told_by(error)}", 100))

# %% [markdown] tags=["answer"]
# Stages have other layers, ranks of tp other parts: whoever averages over them mixes what has nothing to
# do with each other. In plain `torch.distributed` the first hangs or crashes where shapes differ, and
# is silent where they are the same, as in two stages in the middle of a GPT.

# %%
eight.close()  # eight processes less

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: Who is who
#
# `axes` are sizes, outermost first, as `{"pp": 2, "dp": 2, "tp": 2}`, in any order; `rows` is the global
# batch. Return for `rank` four things:
#
# - `(begin, end)`: its rows, as in `x[begin:end]`; all replicas have equally many, the first the first ones
# - the rank to which it sends activations, or None
# - the ranks with which it averages gradients, in order (it is one of them)
# - the two ranks of its embedding group, or None
#
# Useful: `coordinates(axes, rank)`, `rank_at(axes, where)`, `lines(axes, axis)`, as in lab 01.


# %%
def place(rank, axes, rows):
    ### BEGIN SOLUTION
    at, last, share = coordinates(axes, rank), axes["pp"] - 1, rows // axes["dp"]

    def other(**where):
        return rank_at(axes, at | where)

    after = other(pp=at["pp"] + 1) if at["pp"] < last else None
    averaged = [other(dp=k) for k in range(axes["dp"])]
    ends = last > 0 and at["pp"] in (0, last)
    tied = [other(pp=0), other(pp=last)] if ends else None
    return (at["dp"] * share, (at["dp"] + 1) * share), after, averaged, tied
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.place(place)

# %% [markdown]
# ### Exercise 2: What travels
#
# `training` is what four ranks will do, a GPT in float64 with a tied embedding:

# %%
show("labs/lab_17/scenarios.py:Training")

# %% [markdown]
# Return what one rank of `stage` sends in a step, as a dict: `"tensor"`, `"pipeline"`, `"data"`,
# `"embedding"`. On the last stage tp has more than layers: the head's f, an all-reduce of x, and for the
# loss three numbers a token (lab 13). With one stage, first and last are the same. Without
# scatter/gather.


# %%
def sent_bytes(training, stage):
    ### BEGIN SOLUTION
    t, p, d = (training.axes[axis] for axis in ("tp", "pp", "dp"))
    first, last = stage == 0, stage == p - 1
    tokens = training.rows // d * training.context
    x = tokens * training.width * 8
    all_reduces = (4 * training.layers[stage] + first + last) * x + last * 3 * tokens * 8
    table = training.vocab // t * training.width * 8
    return {
        "tensor": 2 * (t - 1) / t * all_reduces,
        "pipeline": x * ((not first) + (not last)),
        "data": 2 * (d - 1) / d * training.parameters[stage] * 8,
        "embedding": table if first != last else 0,
    }
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.sent_bytes(sent_bytes)

# %% [markdown]
# ### Exercise 3: The global norm
#
# `gradients` are this rank's, averaged over replicas, and the embedding's summed: each has a tensor `.g`
# and says `.is_cut` (over tp; else it is whole, and the same, on all its ranks) and `.is_tied` (the
# embedding, on the first and on the last stage). Return the norm of the gradient of the **model**, on
# all ranks. Send a few numbers.
#
# Useful: `mesh.tp.all_reduce(x)`, `mesh.pp.rank`, `one.g.square().sum()`.


# %%
def global_norm(mesh, gradients):
    ### BEGIN SOLUTION
    cut, whole = torch.zeros(2, dtype=torch.float64)
    for one in gradients:
        if one.is_tied and mesh.pp.rank > 0:
            continue  # the first stage has it
        if one.is_cut:
            cut += one.g.square().sum()
        else:
            whole += one.g.square().sum()
    mesh.tp.all_reduce(cut)
    total = cut + whole
    mesh.pp.all_reduce(total)
    return total.sqrt()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.global_norm(global_norm)

# %% [markdown]
# ### Exercise 4: Scatter, then gather
#
# Two stages. On stage 0, x [b, s, w] is the same on all ranks of `mesh.tp`; on stage 1 it is room to
# receive into. Send x to stage 1, only 1/t of it from each rank, and return it there, whole. (t divides
# the numbers of x.)
#
# Useful: `x.view(-1).chunk(t)`, which are views; `mesh.pp.send(part, 1)`, `mesh.pp.recv(part, 0)`,
# `mesh.tp.all_gather(parts, part)`.


# %%
def hand_on(mesh, x):
    ### BEGIN SOLUTION
    parts = list(x.view(-1).chunk(mesh.tp.size))
    mine = parts[mesh.tp.rank]
    if mesh.pp.rank == 0:
        mesh.pp.send(mine, 1)
    else:
        mesh.pp.recv(mine, 0)
        mesh.tp.all_gather(parts, mine.clone())
    return x
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.hand_on(hand_on)

# %% [markdown]
# ### Exercise 5, open: Which box, in which order?
#
# Five jobs, each with its nodes, its memory, and a part of the time that may be bubble. Return the
# axes, **outermost first**, as `{"pp": 4, "dp": 2, "tp": 8}`. tp divides the heads, pp the layers, dp the
# rows; all GPUs are used. What counts is the bytes that leave nodes, of all ranks together:

# %%
for name, job in {**JOBS, "4 ranks in 2 nodes": TINY}.items():
    rule = by_rule(job)
    print(f"{name}: {job.nodes} nodes of {job.gpus}, {job.memory_gb:g} GB, {job.depth} layers of "
          f"{job.width}, {job.rows} rows of {job.context}, idle at most {job.most_idle:.0%}")  # fmt: skip
    print(
        f"   rule of thumb {rule}: {leaving_bytes(job, rule) / 1e9:,.4g} GB leave, "
        f"idle {idle(job, rule):.0%}"
    )

# %%
show("labs/lab_17/placement.py:sent_by_a_rank", since="x = ")

# %%
show("labs/lab_17/placement.py:leaving_bytes", since="sent, total")

# %% [markdown]
# The rule of thumb: tp over a node, then the shortest pipeline that fits, and dp with the rest, in this
# order. Let fewer bytes leave than it does, in the mean over the four large jobs (for one of them it is the
# best already). Before you search: where is the rule wasteful? The smallest job runs on four ranks.
#
# Useful: `leaving_bytes(job, axes)`; `why_not(job, axes)` says what is wrong with them, or "";
# `itertools.permutations`, `itertools.product`.


# %%
def choose(job):
    ### BEGIN SOLUTION
    gpus = job.nodes * job.gpus
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    every = (
        dict(order)
        for sizes in product(divisors, repeat=3)
        for order in permutations(zip(("pp", "dp", "tp"), sizes))
    )
    allowed = (axes for axes in every if not why_not(job, axes))
    return min(allowed, key=lambda axes: leaving_bytes(job, axes))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose(choose)

# %%
for name, job in JOBS.items():
    print(f"{name}: {choose(job)}, idle {idle(job, choose(job)):.0%}")

# %% [markdown] tags=["answer"]
# Several stages may lie inside one node: then only the last of them sends out. And with a long pipeline a
# rank has few layers, so a smaller tp is enough. It is paid in bubble, and in bytes that stay inside,
# which this score does not see: lab 18 prices all of it in seconds.

# %% tags=["nbval-check-output"]
report("17")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the flag or call |
# |---|---|
# | Megatron-LM | `--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8`; dp is what is left of the GPUs |
# | Megatron-LM, batch | `--micro-batch-size 1 --global-batch-size 1536`; m follows |
# | torch | `init_device_mesh("cuda", (8, 16, 8), mesh_dim_names=("pp", "dp", "tp"))`, then `mesh["tp"]` |
# | torchtitan | `--parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree 8` |
# | DeepSpeed | `PipelineModule(layers, topology=PipeModelDataParallelTopology(num_pp=8, num_mp=8, num_dp=16))` |
# | nanotron | `parallelism: {dp: 16, pp: 8, tp: 8}` in its YAML |
# | picotron | `"distributed": {"tp_size": 8, "pp_size": 8, "dp_size": 16}` |
# | labkit | `Mesh(pp=8, dp=16, tp=8)`, and one call for each axis |

# %% [markdown]
# Where to find each idea in Megatron-LM, `megatron/core/`:
#
# | here | there |
# |---|---|
# | the order of axes | `parallel_state.py`, `initialize_model_parallel(order="tp-cp-ep-dp-pp")`: the first varies fastest |
# | embedding group | `parallel_state.py`, `get_embedding_group`; `distributed/finalize_model_grads.py`, `_allreduce_word_embedding_grads` |
# | the global norm | `optimizer/clip_grads.py`, `get_grad_norm_fp32`; `param_is_not_tensor_parallel_duplicate` |
# | scatter/gather | in `megatron/p2p_communication.py` of 2021; today's `core` sends x as it is: with sequence parallelism a rank has 1/t of it anyway |
#
# All have tensor ("model" in DeepSpeed) innermost; Megatron writes it from the inside out. Next to it most
# have dp, and pp outermost. picotron has dp outermost, and Megatron with `--use-tp-pp-dp-mapping`.

# %% [markdown]
# torch's `init_device_mesh` numbers the box by `torch.arange`. Its groups are those of `lines`:

# %% tags=["nbval-check-output"]
ranks = torch.arange(8).view(2, 2, 2)  # of ("pp", "dp", "tp")
for place_, axis in enumerate(SIZES_OF_MESH):
    theirs = ranks.movedim(place_, -1).reshape(-1, 2).tolist()
    print(f"{axis}: {theirs}, the same: {theirs == list(lines(SIZES_OF_MESH, axis))}")

# %% [markdown]
# What they add: context and expert parallelism as further axes of the same box; FSDP on dp in place of
# DDP (torchtitan); overlap of dp's messages with the pipeline's backwards; and groups that are made
# once, for whole training, because each costs memory on the GPU.
#
# Sources: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM*, 2021 (arXiv 2104.04473), sections 3 and 4.1, and 5.1 for 1,024 GPUs and the batch
# of 1,536; Shoeybi et al., 2019 (arXiv 1909.08053), section 3; for ZeRO-3's bytes Rajbhandari et al., 2019
# (arXiv 1910.02054), section 7.

# %% [markdown]
# **You can now** put ranks into a box of three axes, say who has which rows, layers and shards, what
# travels along each axis to the byte, which axis goes inside a node, and keep embedding and norm
# right when a parameter is in several places.
