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
from time import perf_counter

import matplotlib.pyplot as plt
import torch

from labkit import cluster, plot
from labkit import predict as formulas
from labkit.check import lab_18 as check
from labkit.check import predict, report
from labkit.course import show
from labkit.planning.layout import Layout, Sizes
from labkit.plot.style import CATEGORIES

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
    axes.barh(device.name[7:], device.memory_bytes / 1e9, color="#4A5560")
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
# The authors of Megatron-LM asked the same of one V100: **288 years**. Then they trained on 1,024 A100s, and
# needed 34 days. Somebody had to decide what each of the 1,024 does: 8 GPUs share a matrix, 8 nodes a
# model, 16 replicas a batch. **Why not 4, 16 and 16?** Nobody can try them all on 1,024 GPUs.

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
BY_AUTHORS = Layout(tp=8, pp=8, dp=16, microbatch=1)
print(BY_AUTHORS.ranks, "ranks,", BY_AUTHORS.microbatches(1536), "micro-batches for each replica")

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
left.plot(d, [(n - one) / rows for one in d], "o-", color="#D55E00")
left.set(title="bubble over computing", ylim=(0, None))
for billion in (7.5, 39, 76):
    right.plot(d, [16 * billion * one / n for one in d], "o-", color="#0072B2")
    right.text(70, 16 * billion, f"{billion:g}B", va="center", clip_on=False)
right.axhline(80, color="0.4", ls="--")
right.text(1, 88, "an A100", color="0.4")
right.set(title="states on each GPU, GB", yscale="log", ylim=(1, 2000))
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
# | English | 中文 | what it is |
# |---|---|---|
# | layout, parallel configuration | 并行配置 | ranks along each axis, rows of a micro-batch |
# | 3D parallelism, PTD-P | 三维并行 | pipeline, tensor and data parallelism together |
# | global batch | 全局批量 | the rows of a step, of all replicas |
# | micro-batch | 微批次 | rows that travel together |
# | model FLOPs utilisation, MFU | 模型算力利用率 | what the model needs over what the GPUs could do |
# | hardware FLOPs utilisation, HFU | 硬件算力利用率 | the same, with what is computed again |
# | exposed | 未被掩盖的 | a rank stands still for it |
# | calibration | 校准 | constants fitted to what was measured |
# | held out | 留出 | measured rows that nothing was fitted to |
# | search space | 搜索空间 | all layouts that there are |

# %% [markdown]
# ## 3. Predict
#
# First, days. The authors report 140 TFLOP/s on each of 1,024 A100s for GPT-3 (300 billion tokens), and
# 163 on each of 3,072 for a trillion parameters (450 billion tokens), recomputed operations counted. And
# which rate has a V100 that takes 288 years?

# %% stub="training = predict(gpt3_days=..., trillion_days=..., v100_tflops=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
day_s, year_s = 86400, 86400 * 365
training = predict(
    gpt3_days=round(8 * 300e9 * 175e9 / (1024 * 140e12) / day_s),
    trillion_days=round(8 * 450e9 * 1008e9 / (3072 * 163e12) / day_s),
    v100_tflops=round(8 * 300e9 * 175e9 / (288 * year_s) / 1e12),
)
### END SOLUTION
training

# %% tags=["nbval-check-output"]
training.beside("the paper's", gpt3_days=34, trillion_days=84, v100_tflops=46)
