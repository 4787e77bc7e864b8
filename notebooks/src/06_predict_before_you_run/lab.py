# %% [markdown]
# # Lab 06: Predict before you run
#
# Few people own 64 GPUs, and nobody wants to find out on 64 GPUs that half of them wait. In this lab
# you record one rank of many on your laptop, without data and without GPUs; you give what it does
# the times of a cluster; and you learn the three formulas with which you could have known before:
# alpha-beta, roofline, overlap.
#
# You need lab 02 (the ring), lab 03 (bandwidth) and lab 05 (DDP).

# %%
from dataclasses import replace
from functools import cache

import matplotlib.pyplot as plt
import torch
from torch import nn

from labkit import DDP, GPT, Comm, Link, Mesh, Text, World, attach, cluster, loss, plot, record
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_06 import checks as check
from labkit.replaying import dry_run, replay
from labkit.trace import split_of

# %% [markdown]
# ## 1. The question
#
# The training loop of lab 05, on any GPT. Only `losses.append(value.item())` is gone; section 6
# shows why.

# %%
GPT2 = dict(vocab=50257, width=768, depth=12, heads=12, context=1024)


def train(sizes, rows, steps=2):
    me = attach()
    torch.manual_seed(0)
    model = DDP(GPT(**sizes).to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Text()
    for step in range(steps):
        batch = text.batch(step, rows=rows * me.size, length=sizes["context"])
        batch = batch.slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        loss(model(batch.x), batch).backward()
        optimizer.step()


# %% [markdown]
# `dry_run` runs this function as rank 0 of 64, on tensors that have shapes and no numbers. `replay`
# gives what it did the times of a cluster: here V100 GPUs, 8 in each machine, rented, with 25 Gb/s
# of Ethernet between machines.

# %% tags=["nbval-check-output"]
gpt2 = dry_run(train, GPT2, rows=2, ranks=64)
cloud = replay(gpt2, cluster("v100-cloud"))
print(split_of(cloud))

# %%
plot.timeline(cloud)

# %% [markdown]
# GPT-2 small on 64 GPUs, and more than half of each step nobody computes. Somebody pays for that by
# the hour. The same record on machines that were built for the purpose:

# %% tags=["nbval-check-output"]
for name in ("v100-cloud", "selene", "dgx-h100"):
    there = cluster(name)
    print(f"{there.title:<40} {split_of(replay(gpt2, there))}")

# %% [markdown]
# Deterministic: the same to the last digit, every time, on every laptop. **How can one know this
# without the machine?**

# %% [markdown]
# ## 2. The idea
#
# First: what a rank does is a list of three kinds of things. **Compute** takes time. **Issue** hands
# something to the wire and goes on. **Wait** stands still until that has arrived. A wire carries one
# thing after the other.
#
# ```
#   program   compute 3 s, issue A (4 s), compute 2 s, issue B (2 s), wait A, wait B
#
#   seconds   0    1    2    3    4    5    6    7    8    9
#   rank      [   compute   ][compute ][ wait A ][ wait B ]
#   issue                    A         B
#   wire                     [        A         ][   B    ]
# ```
#
# 6 s of communication, 2 s hidden, 4 s **exposed**. No real time passes: it is a **virtual clock**,
# which adds, and takes the latest of what must be over.

# %% [markdown]
# Second: what sending takes. A message takes a latency **α**, and **β** seconds for each byte. A
# ring all-reduce is 2(n-1) messages of S/n bytes (lab 02):
#
# ```
#   T = 2(n-1) · (α + S/n · β)
# ```
#
# Third: what computing takes. A device does so many operations per second, and moves so many bytes
# per second to and from its memory. An operation needs both, at the same time, so the slower one
# decides. That is the **roofline**:
#
# ```
#   T = max(operations / rate, bytes / memory bandwidth)
#
#   log speed  |          ___________  rate
#              |        /
#              |      /   memory bandwidth × intensity
#              |    /
#              +------------------------  log intensity = operations / bytes
# ```

# %% [markdown]
# Left of the ridge an operation is *memory-bound*: adding two tensors makes 1 operation for 12
# bytes. Right of it it is *compute-bound*: products of large matrices. For a V100 in float32 the
# ridge is at 15.7e12 / 0.9e12 = 17 operations per byte.
#
# Fourth: what of it one sees. With perfect **overlap** a step takes the longer of computing and
# communicating; without, their sum. Every strategy is somewhere between.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | dry run | 试运行（无数据） | runs the real code on tensors without data |
# | replay | 回放 | a recorded run with the times of another machine |
# | virtual clock | 虚拟时钟 | adds up modeled times instead of waiting |
# | alpha-beta model | α-β 通信模型 | time of a message = latency + bytes / bandwidth |
# | roofline | 屋顶线模型 | time = arithmetic or memory traffic, whichever takes longer |
# | arithmetic intensity | 算术强度 | FLOPs per byte of memory traffic |
# | compute-bound, memory-bound | 计算受限、访存受限 | limited by FLOP/s (right of the ridge) or by memory bandwidth (left of it) |
# | exposed communication | 未被掩盖的通信 | communication time that no computation hides |
# | model FLOPs utilization (MFU) | 模型算力利用率 | FLOPs that the model needs, divided by what the devices could do in that time |
# | tensor parallelism (TP) | 张量并行 | ranks share the weights and the computation of each layer |
# | pipeline parallelism (PP) | 流水线并行 | ranks have different layers and pass micro-batches on |
# | pipeline bubble | 流水线气泡 | the time in which a stage is idle |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# You have pen and paper, and:
#
# - GPT-2 small: w = 768, L = 12 layers, vocabulary V = 50257, s = 1024 positions, b = 2 rows on each
#   of n = 64 ranks, float32 (4 bytes);
# - each layer has 12 w² + 13 w parameters; then V w + s w for the tables, 2 w for the last norm;
# - a product of [m, k] by [k, n] is 2 m k n operations, and its backward is two such products.

# %% [markdown]
# Forward of a layer, for b s positions: q, k, v and out are 4 products with w × w, up and down 2 with
# w × 4w, together 2 · 12 b s w². Scores q kᵀ and their product with v are 2 b s² w each. The head:
# 2 b s w V.
#
# ```
#   forward    L (24 b s w² + 4 b s² w) + 2 b s w V
#   step       3 × forward + L · 2 b s² w        (backward computes q kᵀ once more)
# ```
#
# What does a rank send? And what takes how long **at least**, at 15.7e12 operations and 3.125e9
# bytes per second?

# %% stub="guess = predict(parameters=..., sent_bytes=..., flops=...)\nguess_least = predict(compute_ms=..., communication_ms=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
w, L, V, s, b, n = 768, 12, 50257, 1024, 2, 64
P = L * (12 * w**2 + 13 * w) + V * w + s * w + 2 * w
sent = 2 * (n - 1) * 4 * P // n
forward = L * (24 * b * s * w**2 + 4 * b * s**2 * w) + 2 * b * s * w * V
flops = 3 * forward + L * 2 * b * s**2 * w
guess = predict(parameters=P, sent_bytes=sent, flops=flops)
guess_least = predict(
    compute_ms=round(1e3 * flops / 15.7e12), communication_ms=round(1e3 * sent / 3.125e9)
)
### END SOLUTION
print(guess, guess_least, sep="\n")

# %% [markdown]
# The dry run has counted. These must be equal, to the byte and to the operation:

# %% tags=["nbval-check-output"]
from labkit.replaying import peak_of

counted = peak_of(gpt2)["parameters"] // 4  # float32
rank = gpt2.ranks[0]
guess.beside(
    "counted",
    parameters=counted,
    sent_bytes=sum(event.bus_bytes for event in rank.comms),
    flops=sum(operation.flops for operation in rank.operations),
)

# %% [markdown]
# The times are lower bounds. So the replay may take longer, never less:

# %% tags=["nbval-check-output"]
of_cloud = split_of(cloud)
on_wire_s = sum(event.ended_s - event.began_s for event in cloud.ranks[0].comms)
guess_least.beside(
    "replayed",
    compute_ms=round(1e3 * of_cloud.compute_s),
    communication_ms=round(1e3 * on_wire_s),
)

# %% [markdown]
# ## 4. Read it
#
# Four pieces make a replay. First, recording without data: torch's *fake tensors* know their shape,
# dtype and place in autograd's graph. The process group is a fake one, in which every collective is
# over at once. The strategy's code does not know.

# %%
show("replaying/dry_runs.py:dry_run", since="with on_paper", until="if step not in")

# %% [markdown]
# One rank is run; the argument `alike` of `dry_run` names the ranks that it represents. So 1,024
# ranks cost no more than one.
#
# Second, the roofline of one operation:

# %%
show("replaying/costs.py:Costs.compute_s")

# %% [markdown]
# `matmul_flops_per_s` is below the peak: a kernel cuts matrices into tiles, so thin ones run slower.
# And a kernel takes some µs, however little it does (`launch_s`).
#
# Third, alpha-beta, for a group of ranks that stand on several nodes:

# %%
show("replaying/costs.py:_Placement.seconds")

# %% [markdown]
# `steps` and `sent_bytes` are those of the algorithms of lab 02. Steps inside a node have a smaller α
# than those between nodes. Fourth, the clock. Here an operation begins: when all its ranks have
# issued it, and the wire is free.

# %%
show("replaying/engine.py:_Run.begin", since="free_s = max", until="for rank in members")

# %% [markdown]
# The picture of section 2, by that clock. When does each thing begin and end?

# %% tags=["nbval-check-output"]
from labkit.replaying import Compute, Issue, Wait, run

A, B = (Issue(name, ranks=(0,), seconds=s) for name, s in (("A", 4.0), ("B", 2.0)))
program = [Compute(3.0), A, Compute(2.0), B, Wait("A"), Wait("B")]
for thing, times in zip(program, run({0: program})[0]):
    print(f"{times.began_s:3.0f} to {times.ended_s:.0f} s  {thing}")

# %% [markdown]
# A cluster is plain data, and every number has its source. What nobody has measured says so:

# %%
for number, source in cluster("v100-cloud").between.sources.items():
    print(f"{number:<12} {source}")

# %% [markdown]
# ## 5. Run it
#
# ### Formula beside replay
#
# The whole step in closed form: forward, then the longer of what k equal buckets make backward and
# the wire do.

# %%
show("predict/steps.py:ddp_step_s", since="check_counts(buckets")

# %% tags=["nbval-check-output"]
P = formulas.parameters(**GPT2)
flops = sum(operation.flops for operation in rank.operations)
compute_s = formulas.compute_s(flops, 15.7e12 * 0.85)
wire_s = formulas.least_s("all_reduce", 64, 4 * P, 3.125e9 * 0.75)
step_s = formulas.ddp_step_s(compute_s / 3, compute_s * 2 / 3, wire_s, buckets=len(rank.comms))
formulas.table(
    formula=dict(compute_s=compute_s, communication_s=wire_s, step_s=step_s),
    replayed=dict(compute_s=of_cloud.compute_s, communication_s=on_wire_s, step_s=of_cloud.step_s),
)

# %% [markdown]
# (0.85 and 0.75 are what programs reach of a peak.) On the wire the formula is nearly right: 25 MB
# are long against α. Computing is off most. Where does the time go?

# %%
from labkit.replaying import Costs

device, costs = cluster("v100-cloud").device, Costs(cluster("v100-cloud"))
products = [operation for operation in rank.operations if operation.flops]
fig, axes = plt.subplots(figsize=(7, 3))
intensity = torch.logspace(0, 3.5, 50)
roof = (device.memory_bytes_per_s * intensity).clamp(max=device.peak_flops["float32"])
axes.loglog(intensity, roof / 1e12, color="0.3")
for kind, colour in {"attention": "#D55E00", "weights": "#0072B2"}.items():
    some = [one for one in products if ("attention" in one.name) == (kind == "attention")]
    x = [one.flops / one.moved_bytes for one in some]
    speed = [one.flops / costs.compute_s(one) / 1e12 for one in some]
    axes.plot(x, speed, "o", color=colour, label=kind)
axes.text(1.1, 8, "memory-bound", color="0.3")
axes.text(25, 18, "compute-bound: the peak, 15.7", color="0.3")
axes.set(xlabel="operations per byte", ylabel="TFLOP/s", ylim=(1, 40))
axes.set_title("Products of GPT-2 on a V100, in the replay", loc="left", fontsize=10)
axes.legend(frameon=False, loc="lower right")
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
product_s = sum(costs.compute_s(one) for one in products)
all_s = sum(costs.compute_s(one) for one in rank.operations)
print(f"{len(products)} products take {product_s * 1e3:.0f} ms,")
print(f"{len(rank.operations) - len(products)} others {(all_s - product_s) * 1e3:.0f} ms")

# %% [markdown]
# Products are all right of the ridge, and below the roof: a side of 768 fills tiles of 128 to
# 768 / (768 + 128), a head of attention is only 64 wide. The others (norms, GELUs, sums, the
# optimizer) compute next to nothing: memory-bound. No formula of section 3 knew of either.
#
# And the last of the 16 buckets is large: the table of 50,257 tokens, whose gradient is finished last.
# Nothing can hide it.

# %% [markdown]
# ### Measured on real ranks
#
# Two ranks without a modelled wire: what this machine computes. The same two ranks on a paced wire.
# The replay takes the recorded computing of the first, and from a cluster only the wires.

# %%
from labkit.bench.replay import cluster_of

LINK = Link(gbps=0.25, latency_us=500)  # that of lab 05
SMALL = dict(vocab=256, width=132, depth=4, heads=12, context=64)

fast = World(2)
paced = World(2, link=LINK)
with record() as without_wire:
    fast.run(train, SMALL, rows=8, steps=4)
with record() as measured:
    paced.run(train, SMALL, rows=8, steps=4)

# %%
replayed = replay(without_wire, cluster_of(LINK, ranks=2), computing="measured")
plot.timeline(replayed, step=3)

# %%
plot.timeline(measured, step=3)

# %% [markdown]
# Bytes must be equal. Times have a machine in between; on a quiet one they differ by a few percent:


# %%
def quickest_step_s(trace):  # the one that the rest of the machine disturbed least
    return min(split_of(trace, step).step_s for step in trace.steps()[1:])


def sent_in_step(trace, step):
    return sum(event.bus_bytes for event in trace.step(step).ranks[0].comms)


# %% tags=["nbval-check-output"]
small_sent = formulas.data_parallel_bytes(formulas.parameters(**SMALL), ranks=2)
formulas.table(
    formula=dict(sent_bytes=small_sent),
    replayed=dict(sent_bytes=sent_in_step(replayed, 3)),
    measured=dict(sent_bytes=sent_in_step(measured, 3)),
)

# %%
free = replay(without_wire, cluster_of(Link(gbps=1e9), ranks=2), computing="measured")
alone_s = quickest_step_s(free)
formulas.table(
    formula=dict(step_s=alone_s + 2 * (LINK.latency_us * 1e-6 + LINK.seconds(small_sent / 2))),
    replayed=dict(step_s=quickest_step_s(replayed)),
    measured=dict(step_s=quickest_step_s(measured)),
)

# %% [markdown]
# ### What if?
#
# Sliders, in your notebook: how fast must the wire be until all is hidden? How much does latency
# matter?

# %%
from labkit import what_if

what_if(gpt2, cluster("v100-cloud"), ranks=2)

# %% [markdown]
# ### From 8 to 1,024 ranks
#
# Nothing that one rank does depends on their number, except the ranks of each all-reduce. So one
# record is enough for all sizes:


# %%
def on_ranks(trace, n):
    """The same rank, among n that are alike."""
    one = trace.ranks[0]
    comms = [replace(event, ranks=tuple(range(n))) for event in one.comms]
    return replace(trace, ranks={0: replace(one, size=n, comms=comms, alike=tuple(range(1, n)))})


# %%
sizes = [8, 16, 64, 256, 1024]
fig, panels = plt.subplots(1, 2, figsize=(9, 2.8))
for name, colour in {"v100-cloud": "#D55E00", "selene": "#0072B2", "dgx-h100": "#009E73"}.items():
    there = replace(cluster(name), nodes=128)
    splits = [split_of(replay(on_ranks(gpt2, n), there)) for n in sizes]
    panels[0].plot(sizes, [one.step_s * 1e3 for one in splits], "o-", color=colour)
    panels[0].text(1024, splits[-1].step_s * 1e3 + 30, name, color=colour, ha="right")
    peak = there.device.peak_flops_of("float32")
    panels[1].plot(sizes, [one.mfu(peak) for one in splits], "o-", color=colour)
for axes, title, top in zip(panels, ("step, ms", "MFU"), (700, 0.5)):
    axes.set_xscale("log", base=2)
    axes.set(xlabel="ranks", title=title, ylim=(0, top), xticks=sizes, xticklabels=sizes)
    axes.spines[["top", "right"]].set_visible(False)
fig.tight_layout()

# %% [markdown]
# 2(n-1)/n is nearly 2 for any n, so after the first machine is left not much changes. That is the
# ring's gift to data parallelism. (A real cluster of 1,024 has other troubles: rank 517 is late.)
#
# ### Does it fit?
#
# A dry run counts memory, too, with the code that would run. How many of GPT-3's 96 layers fit on
# an H100 of 80 GB, with DDP and Adam in float32, on however many GPUs?

# %% tags=["nbval-check-output"]
from labkit.replaying import largest_that_fits

GPT3 = dict(vocab=50257, width=12288, heads=96, context=2048)


@cache  # a depth that was recorded once is there
def gpt3(depth):
    return dry_run(train, {**GPT3, "depth": depth}, rows=1, ranks=1024)


print(largest_that_fits(gpt3, sizes=[1, 2, 3, 4], memory_bytes=80e9), "of 96 layers fit")

# %%
two_layers = gpt3(2)
plot.memory(replay(two_layers, cluster("dgx-h100")))

# %% tags=["nbval-check-output"]
held = {name: nbytes / 1e9 for name, nbytes in peak_of(two_layers).items()}
print(f"{sum(held.values()):.1f} GB:", ", ".join(f"{n} {x:.1f}" for n, x in held.items() if x))

# %% [markdown]
# Two layers hold 68 GB, and still do not fit: AdamW computes with all parameters at once, and for a
# moment has one more copy of them (`other`). More ranks do not help: each holds all of it. So large
# models are *cut*. Labs 07 and 08 cut what
# DDP holds twice, lab 13 cuts matrices (tensor parallelism), lab 15 cuts between layers (pipeline
# parallelism). What will these cost?

# %% [markdown]
# ### Three ways to share a model: what travels
#
# ```
#   data                     tensor                    pipeline
#   [ 96 layers ] rows 0     [ left  half | of all ]   [ layers  0 to 47 ]
#         |                     |  |  |  |  |  |              x |  ^ its gradient
#   gradients, once           x, after each block               v  |
#         |                     |  |  |  |  |  |       [ layers 48 to 95 ]
#   [ 96 layers ] rows 1     [ right half | of all ]
# ```
#
# | way | what travels in a step | one rank sends | grows as |
# |---|---|---|---|
# | data | the gradients of 12 w² parameters a layer, once | 2(n-1)/n · 12 L w² g | w² L |
# | tensor | x, in 4 all-reduces a layer | 2(n-1)/n · 4 L b s w g | b s w L |
# | pipeline | x to the next rank, its gradient to the one before | 2 b s w g | all together b s w L / k |
#
# Legend: w width, L layers, b rows of a step, s positions, g bytes of a number; n ranks share; in a
# pipeline each has k layers.

# %% [markdown]
# Why 4? Ranks that share each matrix get a part of a *sum* from the last matrix of attention, and of
# the MLP: two all-reduces of x, [b, s, w], in forward, and two in backward.

# %% [markdown]
# Tensor over data is 8 L b s w / 24 L w² = **b s / 3w**. Tensor over pipeline is 8 k / 2 = **4k**
# (2(n-1)/n taken as 2). So what sends most depends on the tokens b s of a step, against the width:

# %%
w, k = 12288, 12
tokens = torch.logspace(3, 7, 60)
fig, axes = plt.subplots(figsize=(7, 3.2))
for name, sent, colour in [
    ("tensor", 8 * k * tokens * w * 2, "#D55E00"),
    ("data", torch.full_like(tokens, 24 * k * w**2 * 2), "#0072B2"),
    ("pipeline", 2 * tokens * w * 2, "#009E73"),
]:
    axes.loglog(tokens, sent / 1e9, color=colour, lw=2.5)
    axes.text(1.1e7, sent[-1] / 1e9, name, color=colour, va="center")
for turn, label in ((3 * w, "3w"), (12 * k * w, "12kw")):
    axes.axvline(turn, color="0.6", ls=":")
    axes.text(turn * 1.06, 0.06, label, color="0.4")
axes.set(xlabel="tokens of a step, b s", ylabel="GB sent by a rank", ylim=(0.04, None))
axes.set_title(f"{k} layers of GPT-3 on a rank, 2 bytes a number", loc="left", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# | tokens of a step | order of what a rank sends |
# |---|---|
# | below 3w | data > tensor > pipeline |
# | 3w to 12kw | **tensor > data > pipeline**, as the textbooks have it |
# | above 12kw | tensor > pipeline > data |
#
# GPT-3 was trained with 3.2 million tokens a step. On 16 replicas these are 200,000 for each, between
# 3w = 36,864 and 12kw. (Gradients of 4 bytes beside activations of 2 move both turns: 6w, 24kw.)
#
# Tensor parallelism sends the most, and little can hide it: the next product needs the sum. So it
# belongs on the fastest wires, *inside* a node. Data can hide behind backward. A pipeline sends so
# little that it crosses between nodes.

# %% [markdown]
# ### Replayed at scale
#
# The real strategies come in their own labs. What they *send* needs only a skeleton: functions that
# call the collectives and compute nothing. (`end_step`: an optimizer's step ends a step of the
# record.)

# %%
w, L, b, s, bf16 = 12288, 96, 32, 2048, torch.bfloat16


def end_step():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()


def data():
    comm = Comm()
    for _ in range(L):
        comm.all_reduce(torch.empty(12 * w * w, dtype=bf16))
    end_step()


def tensor(**axes):
    comm = Mesh(Comm(), **axes)["gpu"]
    for _ in range(4 * L):
        comm.all_reduce(torch.empty(b, s, w, dtype=bf16))
    end_step()


# %%
def pipeline():
    comm = Mesh(Comm(), stage=4, gpu=8)["stage"]  # one GPU of each of 4 nodes
    x = torch.empty(b, s, w, dtype=bf16)
    if comm.rank > 0:
        comm.recv(x, comm.rank - 1)
    if comm.rank < 3:
        comm.send(x, comm.rank + 1)  # x
        comm.recv(x, comm.rank + 1)  # its gradient
    if comm.rank > 0:
        comm.send(x, comm.rank - 1)
    end_step()


stages = {8 * k: range(8 * k, 8 * k + 8) for k in range(4)}  # ranks of a node do the same
skeletons = {
    "data": dry_run(data, ranks=32, step=0),
    "tensor": dry_run(tensor, node=4, gpu=8, ranks=32, step=0),  # the 8 GPUs of a node
    "pipeline": dry_run(pipeline, ranks=32, step=0, alike=stages),
}

# %% tags=["nbval-check-output"]
bytes_of = dict(
    data_bytes=formulas.data_parallel_bytes(12 * L * w**2, ranks=32, element_bytes=2),
    tensor_bytes=formulas.tensor_parallel_bytes(s, b, w, L, ranks=8),
    pipeline_bytes=2 * formulas.stage_boundary_bytes(s, b, w),
)
counted = {  # of rank 8: a stage in the middle
    f"{name}_bytes": sum(event.bus_bytes for event in trace.expanded([8]).ranks[8].comms)
    for name, trace in skeletons.items()
}
formulas.table(formula=bytes_of, counted=counted)

# %% [markdown]
# And on Selene, whose GPUs have 300 GB/s inside a node, 25 between? The last row has the mesh the
# other way round: neighbours in tensor parallelism stand on different nodes.

# %% tags=["nbval-check-output"]
skeletons["tensor, across nodes"] = dry_run(tensor, gpu=8, node=4, ranks=32, step=0)
for name, trace in skeletons.items():
    one = replay(trace, cluster("selene")).expanded([8]).ranks[8]
    sends = [event for event in one.comms if event.op != "recv"]
    seconds = sum(event.ended_s - event.began_s for event in sends)
    print(f"{name:<21}{sum(e.bus_bytes for e in sends) / 1e9:8.1f} GB  {seconds:6.2f} s")

# %% [markdown]
# Inside a node tensor parallelism sends 1.6 times the bytes of data parallelism in about the same
# time; across nodes it takes six times as long. The mesh decides which wire carries what.
#
# ### A pipeline from one micro-batch
#
# One stage with one micro-batch is enough of a record. A *schedule* says in which order forwards and
# backwards come: here 1F1B on 4 stages of 3 layers, for 8 micro-batches. (Lab 16 takes schedules up.)


# %%
from labkit.models.gpt import Block
from labkit.replaying import bubble, pipeline_trace, stage_seconds
from labkit.schedules import one_f_one_b


def stage():
    layers = nn.Sequential(*(Block(768, heads=12, kv_heads=12, dropout=0.0) for _ in range(3)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    layers(torch.empty(2, 1024, 768, requires_grad=True)).sum().backward()
    optimizer.step()


phase_s = stage_seconds(dry_run(stage, ranks=1, step=0), cluster("dgx-h100"))
schedule = one_f_one_b(stages=4, microbatches=8)
pipe = pipeline_trace(schedule, lambda stage, action: phase_s[action.phase])
plot.timeline(pipe)

# %% [markdown]
# The number in a bar is its micro-batch. The strokes in the `pipeline` rows are messages between
# stages, which take no time here. Backward runs from the last stage to the first, so ranks 1 to 3
# end before rank 0. The time in which ranks wait, or have already ended, is the pipeline
# **bubble**:

# %% tags=["nbval-check-output"]
formula = formulas.one_f_one_b(4, 8, phase_s["forward"], phase_s["backward"])
step_s = pipe.ranks[0].steps[0].ended_s
replayed_bubble = bubble(schedule, step_s, lambda stage, action: phase_s[action.phase])
formulas.table(
    formula=dict(step_s=formula.step_s, bubble=formula.of_total),
    replayed=dict(step_s=step_s, bubble=replayed_bubble),
)

# %% [markdown]
# ## 6. Break it
#
# ### A hang, without hanging
#
# Every rank receives from the one before, then sends to the next. On real ranks: silence, until a
# timeout. On the virtual clock:


# %%
def ring():
    comm, x = Comm(), torch.ones(4)
    comm.recv(x, (comm.rank - 1) % comm.size)
    comm.send(x, (comm.rank + 1) % comm.size)
    end_step()


stuck = dry_run(ring, ranks=3, step=0, alike={0: [0], 1: [1], 2: [2]})

# %% tags=["nbval-check-output"]
from labkit.replaying import Deadlock

try:
    replay(stuck, cluster("dgx-h100"))
except Deadlock as deadlock:
    print("Deadlock:", *str(deadlock).split("; "), sep="\n  ")
    print("the cycle:", deadlock.cycle)

# %% [markdown]
# In milliseconds, with the cycle. That is how you look for a hang of 1,024 ranks on a laptop.

# %% [markdown]
# ### Four napkins
#
# Four predictions somebody made over lunch. Each has one classical mistake. Find it before you run
# the next cell.


# %%
def operations():  # of a step of GPT-2 small on one rank
    return 2 * 124_439_808 * (2 * 1024)  # 2 for each parameter and token


def wire_s():  # all gradients over 25 Gb/s
    return 2 * 63 / 64 * 4 * 124_439_808 / 25e9


def gather_s():  # all-gather of 1 MiB over 64 machines on the internet: 50 ms, 12.5 MB/s
    return 50e-3 + 63 / 64 * 2**20 / 12.5e6


def idle_s():  # of a pipeline of 4 stages, 8 micro-batches, in a step of step_s
    return (4 - 1) / 8 * step_s


# %% tags=["nbval-check-output"]
def gather():
    Comm().all_gather_into_tensor(torch.empty(2**18), torch.empty(2**18 // 64))
    end_step()


internet = replay(dry_run(gather, ranks=64, step=0), cluster("internet"))
formulas.table(
    replayed=dict(
        operations=flops, wire_s=on_wire_s, gather_s=split_of(internet).exposed_s,
        idle_s=replayed_bubble * step_s,
    ),
    napkin=dict(operations=operations(), wire_s=wire_s(), gather_s=gather_s(), idle_s=idle_s()),
)  # fmt: skip

# %% [markdown] tags=["answer"]
# - **operations** forgot backward, which is twice the forward: 2 P per token is forward alone, a step
#   is 6 P. (And attention comes on top.)
# - **wire_s** took bits for bytes: 25 Gb/s are 3.125 GB/s. Nobody reaches all of it, either.
# - **gather_s** paid the latency once. A ring of 64 has 63 steps, one after the other.
# - **idle_s** mixed two definitions: (p-1)/m is the bubble over the *computing*, of the whole step it
#   is (p-1)/(m+p-1). Papers use both, often without saying which.

# %% [markdown]
# ### A number that is not there


# %%
def train_and_print():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = model(torch.ones(8, 4)).mean()
    value.backward()
    optimizer.step()
    print(value.item())


# %% tags=["nbval-check-output"]
try:
    dry_run(train_and_print, ranks=8, step=0)
except ValueError as error:
    print(error)

# %% [markdown]
# Fake tensors have no numbers. It is a useful error: on a GPU each `.item()` makes the program wait
# until all that was computed before is done. Code that runs dry does not stop for it.

# %% [markdown]
# ## 7. Build it
#
# Five formulas that stand for a cluster. Each is held to counts and replays that you have not seen.

# %% [markdown]
# ### Exercise 1: Alpha-beta
#
# Seconds of a ring all-reduce of `nbytes` over `n` ranks.


# %%
def ring_s(nbytes, n, latency_s, bytes_per_s):
    ### BEGIN SOLUTION
    return 2 * (n - 1) * (latency_s + nbytes / n / bytes_per_s)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.ring_s(ring_s)

# %% [markdown]
# ### Exercise 2: The roofline
#
# Seconds of the product of an [m, k] by a [k, n] matrix, on a device with so many operations per
# second and so many bytes per second of memory. Both factors are read and the product is written,
# each once.


# %%
def matmul_s(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    ### BEGIN SOLUTION
    moved_bytes = element_bytes * (m * k + k * n + m * n)
    return max(2 * m * n * k / flops_per_s, moved_bytes / bytes_per_s)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.matmul_s(matmul_s)

# %% [markdown]
# ### Exercise 3: Volumes
#
# Bytes that one rank sends in a step, when `n` ranks share a transformer in each of the three ways:
# `(data, tensor, pipeline)`. Count the 12 w² parameters of each layer and nothing else; in the
# pipeline, a rank in the middle. `tokens` is b s.


# %%
def volumes(width, depth, tokens, n, element_bytes):
    ### BEGIN SOLUTION
    around = 2 * (n - 1) / n
    x_bytes = tokens * width * element_bytes
    data = around * 12 * depth * width**2 * element_bytes
    tensor = around * 4 * depth * x_bytes
    return data, tensor, 2 * x_bytes
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.volumes(volumes)

# %% [markdown]
# ### Exercise 4: The virtual clock
#
# One rank, one wire. `program` is a list of:
#
# - `("compute", seconds)`
# - `("send", seconds)`: hands a message to the wire and goes on; the wire sends one after the other
# - `("wait", i)`: stands still until message i (0 is the first sent) has left
#
# When is the rank done with its program?


# %%
def done_s(program):
    ### BEGIN SOLUTION
    now_s, ends = 0.0, []
    for what, how in program:
        if what == "compute":
            now_s += how
        elif what == "send":
            free_s = ends[-1] if ends else 0.0
            ends.append(max(now_s, free_s) + how)
        else:
            now_s = max(now_s, ends[how])
    return now_s
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.done_s(done_s)

# %% [markdown]
# ### Exercise 5, open: A step in closed form
#
# `facts` of a DDP step, on a cluster:

# %%
show("labs/lab_06/scenarios.py:Facts")

# %% [markdown]
# Return the seconds of the step. Your score is the mean error against the replay of 3 models on 4
# clusters, in permille (tenths of a percent). Perfect overlap, as a beginning:


# %%
def overlap_s(facts):
    return facts.forward_s + max(facts.backward_s, sum(facts.bucket_s)) + facts.optimizer_s


# %%
def step_in_closed_form_s(facts):
    ### BEGIN SOLUTION
    early = facts.bucket_bytes[:-1]
    filled_bytes, wire_free_s = 0, 0.0
    for nbytes, seconds in zip(early, facts.bucket_s):
        filled_bytes += nbytes
        full = facts.head_part + (1 - facts.head_part) * filled_bytes / (sum(early) + 1)
        wire_free_s = max(wire_free_s, full * facts.backward_s) + seconds
    wire_free_s = max(wire_free_s, facts.backward_s) + facts.bucket_s[-1]
    return facts.forward_s + wire_free_s + facts.optimizer_s
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.step_in_closed_form_s(step_in_closed_form_s)

# %% tags=["nbval-check-output"]
report("06")

# %% [markdown]
# ## 8. In the wild
#
# | tool | what it predicts | how |
# |---|---|---|
# | torch `FakeTensorMode`, `FlopCounterMode` | shapes, dtypes, operations | tensors without data: what `dry_run` stands on |
# | torch `FSDPMemTracker` and TorchTitan's `estimation.py` | peak memory under FSDP | fake tensors, fake process group |
# | Megatron-LM `--log-throughput` | TFLOP/s of each GPU | operations in closed form, over measured time |
# | Megatron-LM `report_theoretical_memory` | memory of weights, optimizer, activations | closed formulas |
# | DeepSpeed `deepspeed --autotuning tune` | ZeRO stage, micro-batch | memory in closed form, then short real runs |
# | Calculon | step time, memory, best layout of an LLM | closed formulas for each layer |
# | vTrain | training time and cost | profiled kernels, replayed as a graph |
# | ASTRA-sim | collectives on many topologies | simulation of events |
# | labkit | bytes, memory, step time | the strategy's own code, recorded and replayed |

# %% [markdown]
# What they add: kernels measured one by one instead of a roofline, networks that congest, a search
# over all layouts. What none of them spares you is to know what to expect.
#
# Sources: Williams et al., *Roofline*, CACM 52(4), 2009; Thakur et al., *Optimization of Collective
# Communication Operations in MPICH*, 2005; Narayanan et al., *Efficient Large-Scale Language Model
# Training on GPU Clusters*, 2021 (arXiv 2104.04473); Isaev et al., *Calculon*, SC 2023; Bang et al.,
# *vTrain*, 2023 (arXiv 2312.12391); Brown et
# al., *GPT-3*, 2020 (arXiv 2005.14165), Table 2.1.

# %% [markdown]
# **You can now** say what a step will send, compute, hold and take, on a cluster you have never
# touched; check it against a replay; and know which way to share a model belongs on which wire.
