# %% [markdown]
# # Lab 18: Planning
#
# You can cut a model over replicas, over matrices and over layers. In this lab you decide **how much of
# each**, for up to a trillion parameters on thousands of GPUs: you add up the bill, predict a step, hold
# predictions beside what others have measured, rank all layouts on your laptop, and defend one.
#
# You need lab 06 (replay, MFU), lab 07 (ZeRO-1), lab 11 (activations), lab 13 (tensor parallelism),
# lab 16 (1F1B, chunks) and lab 17 (the mesh of three axes).

# %%
from dataclasses import replace
from functools import partial
from textwrap import fill
from time import perf_counter

import matplotlib.pyplot as plt
import torch

from labkit import DDP, GPT, Mesh, Pipeline, Sizes, World, cluster, listen, plot, split
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_18 import checks as check
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.plot.style import CATEGORIES, MEASURED, PREDICTED

# %% [markdown]
# ## 1. The question
#
# GPT-3: 96 blocks of width 12288. In float32, with Adam:

# %% tags=["nbval-check-output"]
GPT3 = Sizes(width=12288, depth=96, heads=96)  # 2,048 positions, 51,200 tokens
P = GPT3.parameters
names = ("parameters", "gradients", "optimizer state")
bill = {name: each * P / 1e9 for name, each in zip(names, formulas.FP32_ADAM)}
for name, gb in bill.items():
    print(f"{name:<16}{gb:6,.0f} GB")

# %%
_, axes = plt.subplots(figsize=(8, 1.8), layout="constrained")
left = 0
for name, gb in bill.items():
    axes.barh("GPT-3", gb, left=left, color=CATEGORIES[name], label=name)
    left += gb
for name in ("selene", "v100-cloud"):
    device = cluster(name).device
    axes.barh(device.name[7:], device.memory_bytes / 1e9, color=MEASURED)
axes.invert_yaxis()
axes.set(xlabel="GB")
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, ncols=3, loc="lower right")

# %% [markdown]
# **700 + 700 + 1,400 GB.** And the time? A token is 6 operations for each parameter (lab 06): 2 in forward,
# 4 in backward. GPT-3 saw 300 billion tokens. How long would this machine take?

# %%
x = torch.ones(1024, 1024)
best_s = float("inf")
for _ in range(4):
    began_s = perf_counter()
    x @ x
    best_s = min(best_s, perf_counter() - began_s)
here = 2 * 1024**3 / best_s
print(f"{6 * P * 300e9 / here / 86400 / 365:,.0f} years, at {here / 1e9:,.0f} GFLOP/s")

# %% [markdown]
# The authors of Megatron-LM asked the same of one V100: **288 years**. On 1,024 A100s it is weeks, at
# the speed that they reached (section 3 asks how many). Somebody has to decide what each of the 1,024
# does: say, 8 GPUs share a matrix, 8 nodes a model, 16 replicas a batch. **Why not 4, 16 and 16?**
# Nobody can try them all on 1,024 GPUs.

# %% [markdown]
# ## 2. The idea
#
# A *layout* says how many ranks are along each axis, and how many rows a micro-batch has:
#
# ```
#   1,024 GPUs = tp 8 x pp 8 x dp 16
#
#   1,536 rows    ─▶  replica 0  ...  replica 15     96 rows for each: 96 micro-batches of 1
#                         │
#   96 blocks     ─▶   stage 0  ...  stage 7         12 blocks for each
#                         │
#   each matrix   ─▶    GPU 0   ...   GPU 7          1/8 for each, in one node
# ```

# %%
from labkit import Layout

BY_RULE = Layout(tp=8, pp=8, dp=16, microbatch=1)
print(BY_RULE.ranks, "ranks,", BY_RULE.microbatches(1536), "micro-batches for each replica")

# %% [markdown]
# Each axis cuts something, and costs something:
#
# | axis | cuts | costs |
# |---|---|---|
# | `tp` | each matrix, its state and activations | all-reduces in every layer, which a stage waits for; thinner products, which run slower |
# | `pp` | the layers | the bubble, (p-1)/m of the computing; small messages |
# | `dp` | the rows | an all-reduce of gradients a step; **no memory is saved** (but with ZeRO-1 the optimizer's) |
# | `b`, rows of a micro-batch | nothing | fewer micro-batches, more activations; but larger products |
#
# And all are tied to each other: tp · pp · dp = n GPUs, and m = rows / (dp · b). Who takes more of one has
# less of another.

# %% [markdown]
# ### The trade
#
# Take tp = 1 for a moment: n GPUs, d replicas of p = n/d stages, R rows of b = 1, so m = R/d. The bubble
# over the computing is (p-1)/m = (n/d - 1)/(R/d) = **(n-d)/R**. It falls with d. And what a rank holds
# of the states is 16 P d/n bytes (lab 10's mixed precision): it grows with d.

# %%
n, rows = 64, 512
d = [1, 2, 4, 8, 16, 32, 64]
_, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
left.plot(d, [100 * (n - one) / rows for one in d], "o-", color="#D55E00")
left.set(title="bubble, % of the computing", ylim=(0, None))
for billion in (7.5, 39, 76):
    right.plot(d, [16 * billion * one / n for one in d], "o-", color="#0072B2")
    right.text(70, 16 * billion, f"{billion:g}B", va="center", clip_on=False)
right.axhline(80, color="0.4", ls="--")
right.text(1, 88, "an A100", color="0.4")
right.set(title="states on each GPU, GB", yscale="log", ylim=(1, 2000))
right.set(yticks=[1, 10, 100, 1000], yticklabels=[1, 10, 100, "1,000"])
right.minorticks_off()
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set(xlabel="replicas, of 64 GPUs", xticks=d, xticklabels=d)
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# So: **cut the model until it fits, and no further; the rest is replicas.** With what to cut, tp or pp? tp has
# no bubble, but sends 4k times as much as a boundary of k layers (lab 06): it goes as far as the fast wires
# do, and pp takes over between nodes. That is Megatron's rule. You will see where it holds.

# %% [markdown]
# ### How long is the training?
#
# For P parameters and T tokens: 2 P T in forward, 4 P T in backward, and 2 P T for a forward that is
# computed again (full recompute, lab 11), on n GPUs that reach X operations a second each:
#
# ```
#   time = 8 T P / (n X)
# ```
#
# **MFU** counts 6 of these 8, what the model needs; **HFU** counts all 8, what the hardware does. Papers
# quote either.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | layout, parallel configuration | 并行配置 | the ranks along each axis, and the rows of a micro-batch |
# | 3D parallelism, PTD-P | 三维并行 | pipeline, tensor and data parallelism combined |
# | global batch | 全局批量 | the rows of all replicas in one step |
# | micro-batch | 微批次 | the rows of a batch that one forward and backward process together |
# | model FLOPs utilization (MFU) | 模型算力利用率 | FLOPs that the model needs, divided by what the devices could do in that time |
# | hardware FLOPs utilization (HFU) | 硬件算力利用率 | as MFU, with recomputed FLOPs counted too |
# | exposed communication | 未被掩盖的通信 | communication time that no computation hides |
# | calibration | 校准 | fitting constants to measurements |
# | held out | 留出 | measurements that were not used in a fit |
# | search space | 搜索空间 | all layouts to choose from |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# First, days. The authors report 140 TFLOP/s on each of 1,024 A100s for GPT-3 (175 billion parameters, 300
# billion tokens), and 163 on each of 3,072 for 1,008 billion parameters (450 billion tokens), recomputed
# operations counted. How many days are that?

# %% stub="training = predict(gpt3_days=..., trillion_days=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
training = predict(
    gpt3_days=round(8 * 300e9 * 175e9 / (1024 * 140e12) / 86400),
    trillion_days=round(8 * 450e9 * 1008e9 / (3072 * 163e12) / 86400),
)
### END SOLUTION
training

# %% tags=["nbval-check-output"]
training.beside("reported", gpt3_days=34, trillion_days=84)

# %% [markdown]
# (Their days come from the same formula: they measured steps, and trained neither model to its end. They
# say 288 years, and not how they count. With 8 T P / X those are a V100 at 46 TFLOP/s, 37 % of its peak.)

# %% [markdown]
# Then the layout of section 2: GPT-3, tp 8, pp 8, dp 16, b = 1, 1,536 rows of s = 2,048, plain 1F1B, on
# 1,024 GPUs. How many micro-batches has a replica, and which part of the step is the bubble (of the total)? What
# does a GPU hold of the states, at 16 bytes a parameter (lab 10; take 1/64 of the model)? And what does a
# GPU of a stage in the middle send to its neighbours: two messages of b·s·w numbers of 2 bytes for each
# micro-batch, of which each of the 8 tensor ranks sends an eighth (lab 17)?

# %% stub="of_layout = predict(microbatches=..., bubble=..., states_gb=..., pipeline_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
tp, pp, dp, b, rows, s, w = 8, 8, 16, 1, 1536, 2048, 12288
m = rows // (dp * b)
of_layout = predict(
    microbatches=m,
    bubble=round((pp - 1) / (m + pp - 1), 3),
    states_gb=round(16 * P / (tp * pp) / 1e9, 1),
    pipeline_bytes=m * 2 * b * s * w * 2 // tp,
)
### END SOLUTION
of_layout

# %% [markdown]
# ## 4. Read it
#
# A trillion parameters on a laptop? A GPT has three kinds of layers: embedding, block, head. One of each is
# run dry (lab 06) as one of tp ranks, forward and backward of one micro-batch, by the code that you used
# in labs 13 and 16:

# %%
show("replaying/planning/layers.py:_micro_batch", since="stage = _Stage")

# %% [markdown]
# Gradients are there from the start, as in DDP's buckets. A hook notes when each is complete: from then on it
# may travel. The optimizer does nothing but end the step.

# %% [markdown]
# What a stage computes and waits for is a sum over its layers:

# %%
show("replaying/planning/stages.py:chunk_seconds", since="for shape in")

# %% [markdown]
# The schedule tiles that with all micro-batches. What a stage holds is the same for all: its states, and
# what its layers keep for each micro-batch in flight (here 1F1B's: of each stage its one chunk, 0, and how
# many are in flight besides the one that it works on):

# %%
show("replaying/planning/peak_memory.py:_in_flight", since="if chunks == 1", until="by_stage = []")

# %% [markdown]
# Which layouts are there? Whatever divides:

# %%
show("replaying/planning/layout.py:_of_ranks", since="for tp, pp in product")

# %% [markdown]
# And why does one lose? The seconds of a report add up to its step, so the slower one has more of
# something:

# %%
show("replaying/planning/report.py:cause")

# %% [markdown]
# ## 5. Run it
#
# ### Eight ranks
#
# First something small, that this machine can run. By a report, what does a rank of this layout send along
# each axis in a step?

# %% tags=["nbval-check-output"]
from labkit import step_report

TINY = Sizes(width=32, depth=4, heads=4, context=16, vocab=64)
CUBE = Layout(tp=2, pp=2, dp=2, microbatch=2, scatter_gather=False)
selene = cluster("selene")
told = step_report(TINY, CUBE, 16, selene).sent_bytes
print({axis: int(sent) for axis, sent in told.items()})

# %% [markdown]
# And eight real ranks, with the code of lab 17? (Each listens to its second step. `told` is of the rank
# that sends the most.)


# %%
def train():
    mesh = Mesh(pp=2, dp=2, tp=2)
    model = GPT(TINY.vocab, TINY.width, TINY.depth, TINY.heads, TINY.context).bfloat16()
    tensor_parallel(model, mesh.tp, gather_logits=False)
    stages = split(model, 2)
    stages[mesh.pp.rank] = DDP(stages[mesh.pp.rank], mesh.dp)
    loss = partial(vocab_parallel_cross_entropy, comm=mesh.tp)
    pipeline = Pipeline(stages, mesh.pp, "1f1b", CUBE.microbatches(16), loss)
    x = torch.zeros(8, TINY.context, dtype=torch.long)
    for _ in range(2):
        with listen() as events:
            pipeline.step(x, x)
    axes = {mesh.tp.ranks: "tensor", mesh.pp.ranks: "pipeline", mesh.dp.ranks: "data"}
    sent = dict.fromkeys(axes.values(), 0)
    for event in events:
        sent[axes[tuple(event.ranks)]] += event.bus_bytes
    return sent


with World(8) as eight:
    sent = eight.run(train)

# %% tags=["nbval-check-output"]
most = {f"{axis}_bytes": max(one[axis] for one in sent) for axis in told}
formulas.table(report={f"{axis}_bytes": int(one) for axis, one in told.items()}, eight_ranks=most)

# %% [markdown]
# Equal, on every axis, to the byte: it is the same code. So we may ask for what we cannot run.

# %% [markdown]
# ### One layout
#
# GPT-3 on 1,024 GPUs of Selene, the authors' cluster. Nothing of what is below needs one of them.

# %%
RECOMPUTED = replace(BY_RULE, recompute="full")
gpt3 = step_report(GPT3, RECOMPUTED, 1536, selene)

# %% tags=["nbval-check-output"]
states = ("parameters", "gradients", "optimizer state")
of_layout.beside(
    "replayed",
    microbatches=RECOMPUTED.microbatches(1536),
    bubble=round(gpt3.bubble_s / gpt3.step_s, 3),
    states_gb=round(sum(gpt3.memory_bytes[name] for name in states) / 1e9, 1),
    pipeline_bytes=int(gpt3.sent_bytes["pipeline"]),
)

# %% [markdown]
# The bytes are equal, to the last one. The states are a little more than 1/64: the first stage has the
# embedding as well. And the bubble is longer than that of equal stages, for the last stage has the
# head. Here is an eighth of the batch; each row stands for the 128 ranks of a stage:

# %%
from labkit import step_trace

plot.timeline(step_trace(GPT3, RECOMPUTED, 1536 // 8, selene))

# %% [markdown]
# Forward and backward have tensor parallelism's all-reduces inside. `data` are the gradients, in buckets
# (lab 05): they leave while the last backward runs. `tied` is the embedding's gradient, which the first and the
# last stage sum: the last one waits for the first one's. Where do the seconds of the whole step go?


# %%
from labkit.plot.plans import COLORS
from labkit.replaying.planning.report import seconds


def bars(reports):
    """A step of each, of the parts that add up to it."""
    _, axes = plt.subplots(figsize=(8.5, 1.0 + 0.4 * len(reports)), layout="constrained")
    begin = [0.0] * len(reports)
    for part, colour in COLORS.items():
        each = [seconds(one)[part] for one in reports.values()]
        axes.barh(list(reports), each, left=begin, color=colour, edgecolor="w", label=part)
        begin = [one + more for one, more in zip(begin, each)]
    for row, end in enumerate(begin):
        axes.text(end, row, f" {end:.1f} s", va="center")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1 * max(begin)), xlabel="seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(-0.02, 1))


bars({"tp 8, pp 8, dp 16": gpt3})

# %% [markdown]
# Computing, mostly. `tensor`, `data` and `pipeline` are **exposed**: the stage stands still for a
# collective, or for a message. What would change that? One thing at a time:

# %%
variants = {
    "as it was": {},
    "4 chunks": dict(chunks=4),
    "micro-batches of 2": dict(microbatch=2),
    "pp 16, dp 8": dict(pp=16, dp=8),
    "nothing recomputed": dict(recompute="none"),
}
variants = {name: replace(RECOMPUTED, **change) for name, change in variants.items()}
found = {name: step_report(GPT3, one, 1536, selene) for name, one in variants.items()}
bars(found)

# %% tags=["nbval-check-output"]
for name, one in found.items():
    held = f"{one.peak_bytes / 1e9:.0f} GB held of 80"
    print(f"{name:<24}{one.step_s:5.1f} s, MFU {one.mfu:.0%}, {held}")

# %% [markdown]
# Four chunks make the bubble shorter, larger micro-batches make it longer. Nobody needs to recompute any more:
# this replay has flash attention, which keeps no scores (lab 11); the authors had not, in 2021. Stages of
# half the size fit too, with room to spare, and lose by their bubble. What would **you** try next?

# %% [markdown]
# ### Is it true?
#
# A replay says seconds. Others have **measured** some: vTrain's authors publish 225 steps of GPTs on 2
# to 512 A100s (Megatron-DeepSpeed, 1F1B, every block recomputed). Four constants are fitted to them,
# and frozen:
#
# | constant | meaning |
# |---|---|
# | `matmul_reached`, `memory_reached` | the part that is reached of a peak: of large products, of the GPU's memory |
# | `host_s` | what the host takes to launch an operation: small ones wait for it |
# | `microbatch_s` | what their program does around each micro-batch |

# %%
from labkit.replaying.planning.published import calibration

fitted = calibration()
for name, (value, low, high) in fitted.constants.items():
    print(f"{name:<16}{value:10.3g}   {low:.3g} to {high:.3g}")

# %% [markdown]
# Every row, measured beside predicted. The bars are intervals (nine in ten); a hollow mark is the
# honest one, where the constants come from models of **other** widths alone:

# %%
plot.calibration()

# %% tags=["nbval-check-output"]
for name in ("all rows", "each width, fitted to the others"):
    count, mean, median = fitted.summary()[name]
    print(f"{name:<34}{count} steps, off by {mean:.1%} in the mean, {median:.1%} in the median")

# %% [markdown]
# Is that good? vTrain's own simulator measures every kernel on such a machine and adds them up, fitted to no step,
# and is 8.4 % off inside one node and 14.7 % on many (arXiv 2312.12391, its validation). But whoever wants to
# know whether one layout is 3 % faster than another still has to run both.
#
# Which rows are farthest off? Nobody should leave them out to look better, and everybody should ask why:

# %%
errors = fitted.errors()
for i in sorted(range(len(errors)), key=lambda i: -abs(errors[i]))[:5]:
    row = fitted.rows[i]
    print(f"{errors[i]:+.0%}  {row.in_words}: {row.step_s:.1f} s measured")

# %% [markdown]
# The first took twice as long as its neighbours in the table, and nobody has said why. Of the steps of width
# 8,192, all that are far off are off to the same side: there the model lacks something. A prediction with an
# error is good for choosing, as long as layouts differ by more than that.

# %% [markdown]
# ### From 39 billion to a trillion
#
# Nothing was fitted to the steps of Megatron's paper. Its Table 1 has ten models, their layouts, and the TFLOP/s
# that each GPU reached, recomputed operations counted (HFU). Two of them, and GPT-3 (section 5.1
# there, which does not say its layout: ours), on Selene by its datasheets, and with the constants that
# were fitted elsewhere:

# %%
from labkit.replaying.planning.published import MEGATRON

small, large = (one for one in MEGATRON if one.billions in (39.1, 1008))
gpt3_row = replace(large, depth=96, width=12288, heads=96, pp=8, ranks=1024, batch=1536, tflops=140)
TRAINED = {"39B": small, "GPT-3": gpt3_row, "1,008B": large}
fitted_selene = cluster("selene-fitted")


def hardware_tflops(one):
    """Of each GPU, with the forward that is computed again."""
    of = one.sizes
    sizes = (of.vocab, of.width, of.depth, of.heads)
    flops = formulas.step_flops(*sizes, one.global_batch, of.context, recompute=True)
    return flops / one.step_s / one.layout.ranks / 1e12


def replayed_on(where):
    return [step_report(one.sizes, one.layout, one.batch, where) for one in TRAINED.values()]


by_datasheet, by_fit = replayed_on(selene), replayed_on(fitted_selene)

# %%
kinds = {
    "reported": [one.tflops for one in TRAINED.values()],
    "replayed, fitted": [hardware_tflops(one) for one in by_fit],
    "replayed, datasheets": [hardware_tflops(one) for one in by_datasheet],
}
_, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
for k, ((name, each), colour) in enumerate(zip(kinds.items(), (MEASURED, "#56B4E9", PREDICTED))):
    at = [place + 0.27 * (k - 1) for place in range(3)]
    axes.barh(at, each, 0.25, color=colour, label=name)
    for y, x in zip(at, each):
        axes.text(x + 2, y, f"{x:.0f}", va="center", fontsize=8)
axes.axvline(312, color="0.4", ls="--")
axes.text(309, -0.3, "peak", color="0.4", ha="right")
axes.set_yticks(range(3), [f"{x}: {one.ranks:,} GPUs" for x, one in TRAINED.items()])
axes.invert_yaxis()
axes.set(xlabel="TFLOP/s of each GPU, as hardware does them", xlim=(0, 320))
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(0.97, 0))

# %% tags=["nbval-check-output"]
for (name, row), one, tokens in zip(TRAINED.items(), by_fit, (300e9, 300e9, 450e9)):
    days = tokens / (row.batch * 2048) * one.step_s / 86400
    held = f"{one.peak_bytes / 1e9:.0f} GB held"
    step = f"a step of {one.step_s:.1f} s"
    of = f"{days:.0f} days for {tokens / 1e9:.0f} billion tokens"
    print(f"{name:<8}{step:<18} MFU {one.mfu:.0%}, {held}, {of}")

# %% [markdown]
# The larger the model, the better it uses each GPU, though 3,072 share it: tensor parallelism's all-reduces grow
# with w, and computing with w². And 288 years have become weeks.
#
# The replay is too fast: by 4 to 18 % with the fitted constants, by 16 to 27 % with datasheets. Its GPUs are
# never late and never fail, and nobody else uses its network. (The micro-batches are not in the table
# either: 2 rows for 39B, 1 for the others, and plain 1F1B, are ours.)

# %% [markdown]
# ### All layouts
#
# Now the question of section 1: why not 4, 16 and 16? `plan` replays every layout that divides and fits. So
# that it takes seconds here, some choices are made for it, as the authors made them:

# %%
from labkit import plan

planned = plan(
    GPT3, fitted_selene, 1536, gpus=1024, tp=[4, 8, 16], microbatch=[1, 2],
    recompute="full", sequence=False, zero=0,
)  # fmt: skip
plot.plan(planned, top=8)

# %% tags=["nbval-check-output"]
from labkit.replaying.planning.layout import described

print(len(planned.reports), "layouts fit,", len(planned.too_large), "do not")
for one in planned.reports[:5]:
    print(f"{one.step_s:.2f} s  {described(one.layout)}")

# %% [markdown]
# On the left the seconds of the fastest, on the right the map of tp and pp: dark is fast. For each value of
# each axis, the fastest layout that has it, and what it loses on:

# %%
planned.trades(1)

# %% [markdown]
# These are Megatron's takeaways (arXiv 2104.04473, section 3), found and not just believed:
#
# 1. tensor parallelism up to the size of a node, then pipeline parallelism across nodes;
# 2. tp · pp just so large that the model fits; data parallelism for all other GPUs;
# 3. the best micro-batch is a compromise: larger products against a longer bubble.
#
# And now you know what they are worth. What breaks the first rule is 19 % behind. But 4, 16 and 16? It is
# second, by 1 %, and a replay is off by more than that: whoever has the GPUs should run a few steps of both.

# %% [markdown]
# Move it yourself, and see what each choice gains and loses:

# %%
plot.plan_view(planned)

# %% [markdown]
# In a terminal: `labkit plan --model gpt3-175b --cluster selene-fitted --gpus 1024 --batch 1536`; with `--fits`
# or `--largest` it answers whether a model fits at all, and what the largest is that does.

# %% [markdown]
# ## 6. Break it
#
# ### Four plans
#
# Four numbers from somebody's plan for GPT-3 in the layout of section 2. Each has one classical mistake. Find
# it before you run the next cell.

# %%
P, tp, pp, dp, m = GPT3.parameters, 8, 8, 16, 96


def mfu():  # the paper: 140 TFLOP/s on each GPU; an A100 has 312
    return 140 / 312


def idle_days():  # of 34 days of training, in the bubble of plain 1F1B
    return 34 * (pp - 1) / m


def gradients_s():  # a GPU's bf16 gradients, over its 200 Gb/s
    return 2 * (dp - 1) / dp * 2 * P / (tp * pp) / 200e9


def held_gb():  # states, and 12 layers of one row, on a GPU of the first stage
    layer = formulas.activation_bytes(2048, 1, 12288, 96, tp, recompute="selective")
    return (16 * P / (tp * pp) + 12 * layer) / 1e9


# %% tags=["nbval-check-output"]
layer = formulas.activation_bytes(2048, 1, 12288, 96, tp, recompute="selective")
pipe = formulas.one_f_one_b(pp, m, 1, 2)
formulas.table(
    plan=dict(mfu=mfu(), idle_days=idle_days(), gradients_s=gradients_s(), held_gb=held_gb()),
    right=dict(
        mfu=140 / 312 * 72 / 96,
        idle_days=34 * pipe.of_total,
        gradients_s=formulas.least_s("all_reduce", dp, 2 * P / (tp * pp), 25e9),
        held_gb=(16 * P / (tp * pp) + 12 * pipe.peak_microbatches * layer) / 1e9,
    ),
)

# %% [markdown] tags=["answer"]
# - **mfu** took the paper's TFLOP/s, which count the forward that is computed again: 96 b s L w² instead of
#   72. That is HFU. (Whoever divides 6 T P by these 140 trains in 25 days, on paper.)
# - **idle_days** took (p-1)/m, the bubble over the *computing*, of the whole time. Of that it is
#   (p-1)/(m+p-1).
# - **gradients_s** took bits for bytes: 200 Gb/s are 25 GB/s.
# - **held_gb** counted one micro-batch. The first stage of 1F1B holds p of them.

# %% [markdown]
# ### The other mesh
#
# A colleague writes `Mesh(tp=8, dp=16, pp=8)`, the last axis innermost: the layout is the same, the loss
# is the same, to the bit. But neighbours in tp stand 128 ranks apart, each on another node. To tp,
# that is a cluster whose nodes have one GPU (messages of pp would now stay inside, but they are few):

# %% tags=["nbval-check-output"]
apart = replace(selene, nodes=1024, devices_per_node=1)
for name, where in (("Mesh(pp, dp, tp)", selene), ("Mesh(tp, dp, pp)", apart)):
    one = step_report(GPT3, BY_RULE, 1536, where)
    waits = f"{one.tensor_s / one.step_s:.0%} of it for tensor parallelism"
    print(f"{name}: {one.step_s:5.1f} s, {waits}, MFU {one.mfu:.0%}")

# %% [markdown]
# Nothing fails, and nothing warns. The bill tells, and the replay, before anybody pays.
#
# ### Sizes that do not go together

# %% tags=["nbval-check-output"]
for gpus in (1000, 8):
    try:
        plan(GPT3, selene, 1536, gpus=gpus, microbatch=1, chunks=1)
    except ValueError as error:
        print(fill(f"{gpus} GPUs: {error}", 100), end="\n\n")

# %% [markdown]
# ## 7. Build it
#
# A planner of your own: what a layout holds, how long its step is, what that means in days, and whether
# it can run at all. Then you choose.

# %% [markdown]
# ### Exercise 1: What does a GPU hold?
#
# Bytes on a GPU of the **first** stage, at its peak: a dict with `"parameters"`, `"gradients"`,
# `"optimizer state"` and `"activations"`.
#
# - A layer has 12 w² numbers; the first stage has the embedding, v w, as well. Leave out the rest.
# - Adam in mixed precision: 2 + 2 + 12 bytes (lab 10). `layout.zero` is 0 or 1 (lab 07).
# - `layer_bytes`: what **one** layer keeps for **one** micro-batch on one GPU (labs 11, 13, 14).
# - Schedules are those of lab 16: 1F1B holds min(p, m) micro-batches; with v > 1 chunks,
#   p (1 + (p-1)/(p v)) of them, or m if there are fewer.


# %%
def held_bytes(sizes, layout, global_batch, layer_bytes):
    ### BEGIN SOLUTION
    p, v, m = layout.pp, layout.chunks, layout.microbatches(global_batch)
    layers = sizes.depth // p
    numbers = (12 * sizes.width**2 * layers + sizes.vocab * sizes.width) / layout.tp
    in_flight = min(m, p if v == 1 else p * (1 + (p - 1) / (p * v)))
    return {
        "parameters": 2 * numbers,
        "gradients": 2 * numbers,
        "optimizer state": 12 * numbers / (layout.dp if layout.zero else 1),
        "activations": layers * in_flight * layer_bytes,
    }
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.held_bytes(held_bytes)

# %% [markdown]
# ### Exercise 2: How long is a step?
#
# Seconds of a step, from two numbers: a stage computes `forward_s` in the forward of a micro-batch (all
# its chunks together), twice that in backward; in each of the two it stands still for `tensor_s`,
# waiting for tensor parallelism. With `layout.recompute == "full"` (otherwise it is `"none"`), backward
# begins with the forward, once more, and waits as that did. Messages are free, and gradients and the
# optimizer take no time.


# %%
def step_s(layout, global_batch, forward_s, tensor_s):
    ### BEGIN SOLUTION
    forward = forward_s + tensor_s
    backward = 2 * forward_s + tensor_s
    if layout.recompute == "full":
        backward += forward
    m = layout.microbatches(global_batch)
    return (m + (layout.pp - 1) / layout.chunks) * (forward + backward)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.step_s(step_s)

# %% [markdown]
# ### Exercise 3: MFU, and days
#
# From the seconds of a step: the MFU, 0 to 1, and the days for so many tokens. The operations that the
# **model** needs for a step (lab 06, with R = `global_batch` rows of s = `sizes.context` positions):
#
# ```
#   3 · (L (24 R s w² + 4 R s² w) + 2 R s w v)
# ```


# %%
def mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens):
    ### BEGIN SOLUTION
    w, L, s, v = sizes.width, sizes.depth, sizes.context, sizes.vocab
    positions = global_batch * s
    flops = 3 * positions * (L * (24 * w**2 + 4 * s * w) + 2 * w * v)
    mfu = flops / (layout.ranks * peak_flops_per_s * step_s)
    return mfu, tokens / positions * step_s / 86400
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.mfu_and_days(mfu_and_days)

# %% [markdown]
# ### Exercise 4: Can it run?
#
# True or False. What must divide what: ranks, heads, blocks in v chunks on each of p stages, rows? With
# chunks, micro-batches go in groups of p (lab 16). And it must fit: what your `held_bytes` says, all
# categories together, may be no more than `budget_bytes`.


# %%
def can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes):
    ### BEGIN SOLUTION
    if layout.ranks != gpus or sizes.heads % layout.tp:
        return False
    if sizes.depth % (layout.pp * layout.chunks):
        return False
    if global_batch % (layout.dp * layout.microbatch):
        return False
    if layout.chunks > 1 and layout.microbatches(global_batch) % layout.pp:
        return False
    held = held_bytes(sizes, layout, global_batch, layer_bytes)
    return sum(held.values()) <= budget_bytes
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.can_run(can_run)

# %% [markdown]
# ### Exercise 5, open: Choose
#
# Three jobs that the authors did not have:

# %%
from labkit.labs.lab_18.scenarios import JOBS, layer_bytes
from labkit.replaying.planning.layout import layouts

for name, job in JOBS.items():
    print(f"{name}: {job}\n")

# %% [markdown]
# Return a `Layout` for each `job` (`job.sizes`, `job.cluster`, `job.global_batch`): all of its GPUs, within
# the memory of each. You may choose all that a layout has: chunks, ZeRO (0, 1), `sequence`,
# `recompute`. Your score is the time of its step beside that of the best known, a mean over the jobs, in
# per mille; more than 1.2 times as long in any job does not pass.
#
# `step_report(job.sizes, layout, job.global_batch, job.cluster)` tells you about a layout by hand. In a
# program you have formulas: yours. Here are the candidates that your `can_run` lets through, with 3 % of
# the memory left for what formulas forget:


# %%
def candidates(job):
    gpus, rows = job.cluster.size, job.global_batch
    room = 0.97 * job.cluster.device.memory_bytes
    some = dict(tp=[1, 2, 4, 8], microbatch=[1, 2, 4], zero=1)
    for one in layouts(job.sizes, gpus, rows, **some):
        if can_run(job.sizes, one, gpus, rows, layer_bytes(job.sizes, one), room):
            yield one


# %% [markdown]
# An estimate of a step in seconds. `device.peak_flops["bfloat16"]` is what a GPU could do, `matmul_reached` the
# part of it that large products reach, a side d of a product reaches d / (d + `tile`) of that (lab 06);
# `inside` and `between` are the wires, with `bytes_per_s` and `reached`. Between nodes, the GPUs of a node
# share its ports: `job.cluster.share_bytes_per_s(job.cluster.between)` is what each has. Take any of it, or
# less:


# %%
def estimate_s(job, layout):
    ### BEGIN SOLUTION
    of, tp, there = job.sizes, layout.tp, job.cluster
    device, w, tokens = there.device, of.width, layout.microbatch * of.context
    layers = of.depth / layout.pp + of.vocab / (12 * w)  # the last stage has the head
    flops = layers * formulas.layer_forward_flops(w, of.heads, layout.microbatch, of.context)
    rate = device.peak_flops["bfloat16"] * device.matmul_reached
    for side in (w / tp, tokens):
        rate *= side / (side + device.tile)
    inside_s = there.inside.bytes_per_s * there.inside.reached
    tensor_s = 2 * layers * formulas.least_s("all_reduce", tp, 2 * tokens * w, inside_s)
    # A ring over the replicas leaves each node once: those that stand on it share its ports.
    near = min(layout.dp, there.devices_per_node // tp)
    across_s = there.share_bytes_per_s(there.between) * there.between.reached * near
    gradients = 2 * 12 * w**2 * layers / tp
    wire_s = across_s if layout.dp > near else inside_s
    data_s = formulas.least_s("all_reduce", layout.dp, gradients, wire_s)
    return step_s(layout, job.global_batch, flops / tp / rate, tensor_s) + data_s
    ### END SOLUTION


# %%
def choose(job):
    ### BEGIN SOLUTION
    return min(candidates(job), key=lambda one: estimate_s(job, one))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose(choose)

# %% [markdown]
# **Defend it.** Somebody asks: why not half the tp, or twice? Half the stages? The planner's words, for
# neighbours of your choice ("the best" is yours):


# %%
from labkit.replaying.planning.report import why


def defend(job, mine):
    best = job.report(mine)
    for change in (dict(tp=2, pp=0.5), dict(tp=0.5, pp=2), dict(pp=0.5, dp=2), dict(pp=2, dp=0.5)):
        axes = {axis: int(getattr(mine, axis) * times) for axis, times in change.items()}
        other = replace(mine, chunks=1, **axes)
        if other.ranks != mine.ranks:
            continue
        try:
            one = job.report(other)
        except ValueError:
            continue  # it does not divide
        words = why(best, one, job.cluster) if one.step_s > best.step_s else "faster than mine"
        fits = "" if one.peak_bytes <= job.cluster.device.memory_bytes else "(does not fit) "
        print(f"{other.in_words:<28}{one.step_s:6.2f} s  {fits}{words}")


# %%
job = JOBS["a slow network"]
mine = choose(job)
print(f"{mine.in_words:<28}{job.report(mine).step_s:6.2f} s  mine")
defend(job, mine)

# %% [markdown]
# Ideas for more: replay the five best of your estimate, and take the fastest. Or leave `zero=1` and
# `tp=[1, 2, 4, 8]` away from the candidates.

# %% tags=["nbval-check-output"]
report("18")

# %% [markdown]
# ## 8. In the wild
#
# | tool | a layout is |
# |---|---|
# | Megatron-LM | `--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 1536`; dp is what is left of the GPUs |
# | its other choices | `--num-layers-per-virtual-pipeline-stage`, `--sequence-parallel`, `--use-distributed-optimizer` (ZeRO-1), `--recompute-granularity full` |
# | torch | `init_device_mesh("cuda", (8, 16, 8), mesh_dim_names=("pp", "dp", "tp"))` |
# | torchtitan | `--parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree 8` |
# | labkit | `Layout(tp=8, pp=8, dp=16)`, `plan(...)`, `labkit plan` |

# %% [markdown]
# Who chooses it?
#
# | tool | how it finds a layout |
# |---|---|
# | people | the three takeaways, then some runs of a few steps |
# | DeepSpeed, `deepspeed --autotuning tune` | short real runs over ZeRO stages and micro-batches, on the machines themselves |
# | Alpa | a search: integer programming inside a stage, dynamic programming between stages |
# | vTrain | profiled kernels, replayed for each layout: what `labkit plan` does with a roofline |
#
# Llama 3 405B (arXiv 2407.21783, Table 4), by people: 16,384 H100s, tp 8, pp 16, dp 128, sequences of 8,192, 400
# TFLOP/s on each GPU, an MFU of 41 %. For sequences of 131,072: context parallelism 16 (lab 14), and dp 8; 38 %.
# The order of the axes, innermost first, is tp, cp, pp, dp: what waits most has the fastest wires.

# %% [markdown]
# What a plan leaves out: what fails (Llama 3's training was interrupted every three hours), slow GPUs,
# a network with other users, the kernels of next year. So measure a few steps of the best three, and
# keep the fastest.
#
# Sources: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, 2021 (arXiv
# 2104.04473): the introduction for 288 years, section 3 for the takeaways, section 5.1 for 8 T P / (n X), Table
# 1 for layouts and TFLOP/s; Bang et al., *vTrain*, 2023 (arXiv 2312.12391), for measured steps;
# Zheng et al., *Alpa*, 2022 (arXiv 2201.12023); the Llama team, 2024 (arXiv 2407.21783); Brown et al., *GPT-3*,
# 2020 (arXiv 2005.14165).

# %% [markdown]
# **You can now** say what a model costs before anybody buys GPUs, predict a step of any layout and hold it to
# what was measured, rank all layouts, and say in one sentence why each of the others loses.
