# %% [markdown]
# # Lab 15: Pipelines
#
# A model is layers, one after another. In this lab each rank gets some of them, and you find out why
# that alone makes nothing faster; cut the batch as well, predict how much of the time ranks still wait
# (the bubble), and write the loop that hands activations on and gradients back.
#
# You need lab 02 (send and receive), lab 06 (replays), lab 11 (activations, recompute) and lab 13
# (tensor parallelism).

# %%
from itertools import accumulate, combinations, pairwise
from textwrap import fill

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from labkit import GPT, PacedStage, Text, World, attach, cluster, listen, plot, record, split
from labkit.course import predict, report, show
from labkit.labs.lab_15 import checks as check
from labkit.labs.lab_15.plans import Plan, divisors, held_mb, step_ms
from labkit.parallel import Pipeline
from labkit.parallel.splitting import balance, layers_of, measure_costs
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.replaying import bubble, pipeline_step_s, pipeline_trace
from labkit.replaying.pipeline import by_microbatch
from labkit.schedules import check as check_rules
from labkit.schedules import gpipe, naive, parse, received, sent
from labkit.trace import CATEGORIES

# %% [markdown]
# ## 1. The question
#
# GPT-3 has 96 layers of width 12288. With Adam in mixed precision a parameter is 16 bytes (lab 07).

# %% tags=["nbval-check-output"]
states_gb = 16 * 96 * 12 * 12288**2 / 1e9
gpu_gb = cluster("dgx-h100").device.memory_bytes / 1e9
for gpus in (8, 64):
    print(f"{states_gb:,.0f} GB; on {gpus} GPUs {states_gb / gpus:.0f} GB each, of {gpu_gb:.0f}")

# %% [markdown]
# One node is too small, and tensor parallelism should not leave it (lab 13). But layers come one after
# another: give the first 12 to one node, the next 12 to another, and so on over 8 nodes. Between two
# nodes only one tensor travels, there and back.
#
# Here are four ranks with a quarter of a model each. (More ranks than cores would disturb each other's
# computing, so each rank **sleeps** where it would compute, and the times are those of the schedule. Such
# a stage is called paced.)

# %%
four = World(4)


def paced_step(schedule, microbatches, forward_s):
    """One step of four stages; backward takes twice as long as forward."""
    me = attach()
    stages = [PacedStage(forward_s).to(me.device) for _ in range(4)]
    pipe = Pipeline(stages, me.comm, schedule, microbatches, lambda y, _: y.mean())
    x = torch.ones(16, 8, device=me.device)
    pipe.step(x, x)


four.run(paced_step, "naive", 1, 0.0)  # all are awake
with record() as run:
    four.run(paced_step, "naive", 1, 0.08)
plot.schedule(naive(4, 1), recorded=run, name="a batch through 4 ranks")

# %% [markdown]
# Four times the hardware, and no faster than one rank with enough memory: **three of four ranks wait, at
# any time**. With p ranks it is p - 1 of p. How can they all work, though each needs what the one
# before has made?

# %% [markdown]
# ## 2. The idea
#
# ### Cut the batch, too
#
# A batch is rows, and rows do not need each other. So cut it into m **micro-batches**. While stage 1 has
# the first, stage 0 goes on with the second. That is GPipe: all forwards, then all backwards. Above,
# micro-batches that do not overlap; below, GPipe:

# %%
plot.schedules({"naive": naive(4, 4), "GPipe": gpipe(4, 4)})

# %% [markdown]
# What is left is the **bubble**. Stage 0 is busy for m micro-batches, m (F + B). The last stage begins
# p - 1 forwards later, and at the end p - 1 backwards follow its last one:
#
# ```
#   the step     (m + p - 1) (F + B)
#   the bubble       (p - 1) (F + B)          of the total: (p - 1) / (m + p - 1)
# ```
#
# So it is small where m is large **against p**; faster layers do not change its part.

# %% [markdown]
# ### One batch, one gradient
#
# Nothing is updated before the last backward. Gradients of micro-batches are added up in `.grad`, so
# each micro-batch has the weights that all others have, and the step is that of the whole batch, if the
# loss is right: the batch's mean is Σ (rows of k / rows) · mean of k.
#
# ### The price
#
# Backward needs what forward has kept. With GPipe, a stage has done m forwards before its first
# backward: it holds the activations of **m** micro-batches, m on the right of the picture above. With
# recompute (lab 11) only their inputs.

# %% [markdown]
# ### What travels
#
# Over each boundary between stages, for each micro-batch: its activations [rows, s, w] forward, and as
# much gradient back. In all, **b · s · w numbers in each direction**, whatever m is and whatever is in
# the stages.
#
# One more thing: the head of a GPT often *is* its embedding, one matrix for both (tied). The
# embedding is on the first rank and the head on the last, so each has a copy, and a part of its
# gradient. After the last backward these two ranks add up: one all-reduce.

# %% [markdown]
# ### Where to cut
#
# The slowest stage is what each micro-batch waits for. Here is a GPT of 8 blocks, with a head that
# costs as much as 3: cut by number of blocks, and by cost.

# %%
COSTS = [0.1, *[1.0] * 8, 3.0]  # ms of a forward: embedding, blocks, norm and head


def by_layers(sizes):
    """Seconds of an action, where stage s has sizes[s] layers."""
    ends = [0, *accumulate(sizes)]
    forward_s = [1e-3 * sum(COSTS[begin:end]) for begin, end in pairwise(ends)]
    return lambda stage, action: forward_s[stage] * (1 if action.phase == "forward" else 2)


CUTS = {"by number": [3, 2, 2, 3], "by cost": balance(COSTS, 4)}
plot.schedules(
    {name: pipeline_trace(gpipe(4, 6), by_layers(sizes)) for name, sizes in CUTS.items()}
)

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | pipeline parallelism (PP) | 流水线并行 | ranks have different layers and pass micro-batches on |
# | pipeline stage | 流水线阶段 | the layers that one rank of a pipeline has |
# | micro-batch | 微批次 | the rows of a batch that one forward and backward process together |
# | pipeline bubble | 流水线气泡 | the time in which a stage is idle |
# | schedule | 调度 | the order in which each stage runs its forwards and backwards |
# | in flight | 在途 | a micro-batch between its forward and its backward |
# | gradient accumulation | 梯度累积 | several backwards add up gradients before one optimizer step |
# | flush | 流水线排空 | waiting until no micro-batch is in flight |
# | load balancing | 负载均衡 | splitting work so that all stages take the same time |
# | point-to-point communication | 点对点通信 | one rank sends, another receives |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# First, time. p = 4 stages, m = 8 micro-batches, a forward takes 1 and a backward 2. How long is a
# step, naive and with GPipe? How long does a stage idle with GPipe? And how many micro-batches make
# the bubble at most a tenth of the total?

# %% stub="times = predict(naive_step=..., gpipe_step=..., gpipe_idle=..., microbatches_for_a_tenth=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
p, m = 4, 8
times = predict(
    naive_step=m * p * 3,
    gpipe_step=(m + p - 1) * 3,
    gpipe_idle=(p - 1) * 3,
    microbatches_for_a_tenth=9 * (p - 1),  # (p - 1) / (m + p - 1) <= 1 / 10
)
### END SOLUTION
times

# %% tags=["nbval-check-output"]
UNITS = {"forward": 1.0, "backward": 2.0}


def replayed(schedule):
    """The length of a step, and the part of it in which stages idle."""
    step = pipeline_step_s(pipeline_trace(schedule, UNITS))
    return step, bubble(schedule, step, UNITS)


enough = next(m for m in range(1, 100) if replayed(gpipe(4, m))[1] <= 0.1 + 1e-9)
step, idle = replayed(gpipe(4, 8))
times.beside(
    "replayed", naive_step=replayed(naive(4, 8))[0], gpipe_step=step,
    gpipe_idle=round(step * idle, 9), microbatches_for_a_tenth=enough,
)  # fmt: skip

# %% [markdown]
# Then, bytes. The GPT that you will run: w = 48, L = 4 blocks, v = 256 tokens in the vocabulary, tied;
# a batch of b = 10 rows of s = 32 positions, in float64 (8 bytes), on p = 4 ranks. What does each of these
# send in a step?
#
# - rank 1: activations to rank 2, gradients to rank 0;
# - rank 0: activations to rank 1, and its part of the tied gradient [v, w] in an all-reduce of two ranks
#   (2 (2-1)/2 of it);
# - for comparison, any of 4 ranks in tensor parallelism, for its layers: 4 all-reduces of b·s·w numbers a
#   layer (lab 13), each 2 (t-1)/t.

# %%
SIZES = dict(vocab=256, width=48, depth=4, heads=4, context=32)
ROWS = 10
MICROBATCHES = 4

# %% stub="sends = predict(rank_1_bytes=..., rank_0_bytes=..., tensor_parallel_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
b, s, w, v, L = ROWS, 32, 48, 256, 4
boundary = b * s * w * 8
sends = predict(
    rank_1_bytes=2 * boundary,
    rank_0_bytes=boundary + v * w * 8,
    tensor_parallel_bytes=L * 4 * 2 * 3 * boundary // 4,
)
### END SOLUTION
sends

# %% [markdown]
# ## 4. Read it
#
# A schedule is data: for each stage a list of what it does, in order. GPipe is the same list for all.

# %%
show("schedules/catalogue.py:gpipe", since="check_sizes")

# %% [markdown]
# What travels follows from it. Before an action, a stage waits for at most one message:

# %%
show("schedules/actions.py:received", since="virtual =")

# %% [markdown]
# (With one piece of the model on each rank, "virtual stage" is just the stage; lab 16 has more.) So one
# loop runs any schedule: wait for what the action needs, compute, let the result leave.

# %%
show("parallel/pipeline/pipeline.py:Pipeline.step", since="self._begin(x, y, scaler)")

# %% [markdown]
# Backward begins at the loss, or at the stage's output with the gradient that came. The gradient of the
# stage's input is what the stage before waits for. (`flight.root` is the place of y in the graph: y itself has
# been sent, and its memory is free. `NOTHING` is for
# recordings of stages that train nothing, `versions` for lab 16, `scaler` and `_without_sync` for
# lab 17.)

# %%
show("parallel/pipeline/virtual_stage.py:VirtualStage._backward")

# %% [markdown]
# The loss of a micro-batch counts by its rows. (`_optimizer` is for lab 16's PipeDream, which updates
# after each micro-batch: there its loss counts whole.)

# %%
show("parallel/pipeline/pipeline.py:Pipeline._loss_of", since="self._loss +=")

# %% [markdown]
# And the tied embedding, after the last backward, on each of its owners (the gradients of earlier
# steps, summed already, were put aside before the step):

# %%
show("parallel/pipeline/grad_sync.py:WholeGradient.sum_copies")

# %% [markdown]
# ## 5. Run it
#
# 10 rows in 4 micro-batches are 3, 3, 2 and 2. All ranks get the whole batch; the first looks at x, the
# last at the targets. `split` cuts the GPT, and its pieces keep their names.


# %%
def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(microbatches=MICROBATCHES, schedule="gpipe", steps=3):
    me = attach()
    torch.manual_seed(0)
    stages = split(GPT(**SIZES).to(me.device, torch.float64), me.size)
    pipe = Pipeline(stages, me.comm, schedule, microbatches, token_loss)
    adam, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=32).to(me.device)
        adam.zero_grad()
        losses.append(pipe.step(batch.x, batch.y))
        adam.step()
    return losses


# %%
def train_alone(steps=3):
    torch.manual_seed(0)
    model = GPT(**SIZES).double()
    adam, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        batch = Text().batch(step, rows=ROWS, length=32)
        adam.zero_grad()
        losses.append(token_loss(model(batch.x), batch.y))
        losses[-1].backward()
        adam.step()
    return torch.stack(losses).detach()


alone, two = train_alone(), World(2)
print("one process:", ", ".join(f"{loss:.6f}" for loss in alone.tolist()))

# %% tags=["nbval-check-output"]
for world, schedule, m in ((two, "naive", 1), (two, "gpipe", 3), (four, "gpipe", 4)):
    losses = torch.stack(world.run(train, m, schedule)[-1])  # of the last rank
    same = torch.allclose(losses, alone, rtol=1e-10)
    print(f"{world.size} ranks, {schedule}, m = {m}: equal: {same}")

# %% [markdown]
# ### What travels


# %%
def traffic(m):
    """What a rank sends in a second step: [operation, shape, to whom, bytes]."""
    me = attach()
    torch.manual_seed(0)
    stages = split(GPT(**SIZES).to(me.device, torch.float64), me.size)
    pipe = Pipeline(stages, me.comm, "gpipe", m, token_loss)
    batch = Text().batch(0, rows=ROWS, length=32).to(me.device)
    pipe.step(batch.x, batch.y)
    with listen() as events:
        pipe.step(batch.x, batch.y)
    return [(e.op, list(e.shape), e.peer, e.bus_bytes) for e in events if e.bus_bytes]


lists = four.run(traffic, MICROBATCHES)

# %% tags=["nbval-check-output"]
for rank in (0, 1):
    print(f"rank {rank} sends {sum(event[-1] for event in lists[rank]):,.0f} bytes")
    for op, shape, peer, sent_bytes in lists[rank]:
        print(
            f"  {op:<11}{'' if peer is None else f'to {peer}':<5} {shape!s:<12} {sent_bytes:>8,.0f} bytes"
        )


# %% tags=["nbval-check-output"]
def tensor_traffic():
    me, like = attach(), dict(dtype=torch.float64, device=attach().device)
    model = tensor_parallel(GPT(**SIZES).to(**like), me.comm)
    x = torch.randn(ROWS, 32, 48, **like, requires_grad=True)
    with listen() as events:
        for block in model.blocks:
            x = block(x)
        x.sum().backward()
    return sum(event.bus_bytes for event in events)


sends.beside(
    "counted",
    rank_1_bytes=sum(event[-1] for event in lists[1]),
    rank_0_bytes=sum(event[-1] for event in lists[0]),
    tensor_parallel_bytes=four.run(tensor_traffic)[0],
)

# %% [markdown]
# Twelve times as much for 4 layers; for 96 layers it would be 288 times, since a boundary does not care
# how many layers are on each side. So a pipeline goes **over nodes**.

# %% [markdown]
# ### The bubble, measured
#
# On the paced stages. Above, what the schedule predicts; below, what was recorded:

# %%
SECONDS = {"forward": 0.02, "backward": 0.04}


def measured(m):
    """A recorded step of m micro-batches, a span for each action."""
    with record() as run:
        four.run(paced_step, "gpipe", m, SECONDS["forward"])
    return by_microbatch(run, gpipe(4, m))


steps = {m: measured(m) for m in (1, 2, 4, 8)}
plot.schedules({"predicted": pipeline_trace(gpipe(4, 8), SECONDS), "measured, paced": steps[8]})


# %%
def idle_in(trace):
    """The part of a recorded step, of all ranks, in which nothing was computed."""
    spans = [x for one in trace.ranks.values() for x in one.spans if x.kind == "microbatch"]
    busy_s = sum(x.ended_s - x.began_s for x in spans)
    return 1 - busy_s / (len(trace.ranks) * pipeline_step_s(trace))


print("micro-batches   predicted: ms, bubble     measured: ms, bubble")
for m, trace in steps.items():
    right_ms, found_ms = 60 * (m + 3), 1e3 * pipeline_step_s(trace)
    print(f"{m:>8}{right_ms:>19.0f} {3 / (m + 3):>7.1%}{found_ms:>19.0f} {idle_in(trace):>7.1%}")

# %% [markdown]
# (What a message takes, and when a rank wakes up, is measured with it: nobody predicts this to a
# millisecond.)

# %% [markdown]
# ### What it holds
#
# Micro-batches of 2 rows, and more and more of them: a smaller bubble, and more in flight. What rank 1
# holds at most, with its activations kept, and with recompute:


# %%
def two_steps(m, recompute):
    me = attach()
    torch.manual_seed(0)
    stages = split(GPT(**SIZES).to(me.device), me.size)
    pipe = Pipeline(stages, me.comm, "gpipe", m, token_loss, recompute=recompute)
    sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        batch = Text().batch(step, rows=2 * m, length=32).to(me.device)
        pipe.step(batch.x, batch.y)
        sgd.step()
        sgd.zero_grad()


def most_held(m, recompute):
    with record(detail_step=1) as run:
        four.run(two_steps, m, recompute)
    place = CATEGORIES.index("activations")
    return max(point.held_bytes[place] for point in run.ranks[1].memory)


counts = (1, 4, 8)
held = {kind: [most_held(m, kind) for m in counts] for kind in (False, True)}

# %%
_, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for kind, colour in ((False, "#0072B2"), (True, "#E69F00")):
    name = "recompute: inputs, and one micro-batch" if kind else "all activations"
    axes.plot(counts, [x / 1e3 for x in held[kind]], "o-", color=colour, label=name)
axes.set(xlabel="micro-batches of 2 rows", ylabel="KB of activations", xticks=counts)
axes.set_ylim(0)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %%
for kind, (*_, at_4, at_8) in held.items():
    each = (at_8 - at_4) / 4
    print(f"recompute {kind!s:<5}: one more micro-batch is {each:>9,.0f} bytes more")
print(f"an input, [2, 32, 48] in float32: {2 * 32 * 48 * 4:>12,} bytes")

# %% [markdown]
# With recompute, one more micro-batch is one more input. Lab 16 has an
# order with the same bubble in which at most p micro-batches are in flight, however many there are.

# %% [markdown]
# ### Over nodes
#
# GPT-3 on 8, 16 and 32 nodes, 8 tensor-parallel GPUs in each, that compute at half of their peak;
# micro-batches of one row. A message is as long as its bytes take over one port. How much of the GPUs'
# time is bubble?

# %%
DGX = cluster("dgx-h100")
flops = 96 * 2048 * (24 * 12288**2 + 4 * 2048 * 12288)  # forward, one row, all layers
forward_s = flops / 8 / (0.5 * DGX.device.peak_flops["bfloat16"])
message_s = 2048 * 12288 * 2 / DGX.between.bytes_per_s
counts = (4, 8, 16, 32, 64)


def idle_part(p, m):
    seconds = {"forward": forward_s / p, "backward": 2 * forward_s / p}
    step_s = pipeline_step_s(pipeline_trace(gpipe(p, m), seconds, message_s))
    return bubble(gpipe(p, m), step_s, seconds)


idle = {p: [idle_part(p, m) for m in counts] for p in (8, 16, 32)}

# %%
_, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for (p, parts), colour in zip(idle.items(), ("#0072B2", "#E69F00", "#D55E00")):
    axes.plot(counts, [100 * part for part in parts], "o-", color=colour, label=f"{p} stages")
axes.set_xscale("log", base=2)
axes.set(xticks=counts, xticklabels=counts, xlabel="micro-batches", ylabel="% of the time idle")
axes.set_ylim(0)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
ms = 1e3 * forward_s / 8
print(f"8 stages: a forward takes {ms:.0f} ms, its message {1e3 * message_s:.1f} ms")
print("bubble with 32 micro-batches:", {p: f"{parts[3]:.0%}" for p, parts in idle.items()})
print("by the formula:              ", {p: f"{(p - 1) / (p + 31):.0%}" for p in idle})

# %% [markdown]
# Messages add little. But more stages want more micro-batches, so larger batches; and data-parallel
# replicas of the pipeline share the batch among them. That is what limits p.

# %% [markdown]
# ### Which layer costs what?
#
# `measure_costs` runs each layer forward and backward, here on a GPT with many tokens and few blocks:


# %%
def lopsided():
    torch.manual_seed(0)
    return GPT(vocab=4096, width=48, depth=6, heads=4, context=32)


model = lopsided()
costs = measure_costs(model, Text().batch(0, rows=4, length=32).x, repeats=20)
for name, cost in zip(layers_of(model), costs):
    print(f"{name:<9} {1e3 * cost:6.2f} ms")
for what, cut in {"by number": split(model, 3), "by cost": split(model, 3, costs)}.items():
    print(what, [list(stage.layers) for stage in cut])

# %% [markdown]
# ## 6. Break it
#
# ### Three losses
#
# Three colleagues hand `Pipeline` a loss. All write what they always write. In whose training is a
# gradient wrong, and for which number of micro-batches? The third one's rows are texts of different
# lengths, filled up with -100, which `F.cross_entropy` leaves out.


# %%
def a(m):
    return lambda logits, y: token_loss(logits, y) / m  # gradients add up, so divide by m


def b_(m):
    def summed(logits, y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (ROWS * 32)

    return summed


def c(m):
    return token_loss


def padded(y):
    for row, length in enumerate(torch.linspace(2, 32, len(y)).long()):
        y[row, length:] = -100
    return y


# %%
def gradients(make, m, pad=False, schedule="gpipe"):
    me = attach()
    torch.manual_seed(0)
    stages = split(GPT(**SIZES, tied=False).to(me.device, torch.float64), me.size)
    pipe = Pipeline(stages, me.comm, schedule, m, make(m))
    batch = Text().batch(0, rows=ROWS, length=32).to(me.device)
    pipe.step(batch.x, padded(batch.y) if pad else batch.y)
    return torch.cat([p.grad.flatten() for p in pipe.parameters()])


one = World(1)
CASES = {"a": (a, False), "b": (b_, False), "c": (c, True)}


def compared(found, right):
    cosine = float(F.cosine_similarity(found, right, dim=0))
    return f"{float(found.norm() / right.norm()):.3f} x as long, cosine {cosine:.4f}"


# %%
equal = {}
for name, (make, pad) in CASES.items():
    right = one.run(gradients, c, 1, pad)[0]  # one process, one micro-batch, the plain mean
    for m in (1, 4):
        found = torch.cat(two.run(gradients, make, m, pad))
        case = f"{name} with {m} micro-batch{'es' * (m > 1)}"
        equal[case] = torch.allclose(found, right)
        print(f"{case}: {compared(found, right)}")

# %% tags=["nbval-check-output"]
print("the right gradient:", "; ".join(case for case, same in equal.items() if same))

# %% [markdown] tags=["answer"]
# - **a** divides what is divided already: **averaged twice**. Gradients are m times too small. Adam
#   divides that out again, so its curve is fine; with SGD, or where gradients are clipped, it is not.
# - **b** sums and divides by the whole batch, which is right where nobody else divides. Here it counts
#   each micro-batch twice by its rows. With one micro-batch all is right: tests with m = 1 find nothing.
# - **c** is right, and its data is not: each micro-batch's mean is over its own tokens, and counts by
#   its *rows*. A token in a short row counts more, and how much more changes with m. Transformers, and
#   others, had this mistake in gradient accumulation until October 2024.

# %% [markdown] tags=["answer"]
# The way out for c: every token counts the same, so divide by the tokens of the **whole batch**, and
# take back the weight that the pipeline gives:


# %% tags=["answer"]
def by_tokens(m):
    tokens = int((padded(Text().batch(0, rows=ROWS, length=32).y) != -100).sum())

    def loss(logits, y):
        summed = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return summed / tokens * ROWS / len(y)

    return loss


# %% tags=["answer", "nbval-check-output"]
right = one.run(gradients, c, 1, True)[0]
print(
    "by tokens, 4 micro-batches:",
    compared(torch.cat(two.run(gradients, by_tokens, 4, True)), right),
)

# %% [markdown]
# ### Three orders
#
# Three more colleagues write a pipeline of two stages by hand. These are their lists; each stage does
# its own, in order. Where does it hang, and where is something wrong though it does not hang?

# %% tags=["nbval-check-output"]
ORDERS = {
    "eager": ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"],
    "mixed": ["F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2"],
    "last first": ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B2 B1 B0"],
}
LISTS = {name: [parse(line) for line in lines] for name, lines in ORDERS.items()}
for name, lines in ORDERS.items():
    print(f"{name:<11} stage 0: {lines[0]}    stage 1: {lines[1]}")


# %% [markdown]
# Nothing is computed; the messages carry the number of their micro-batch. `wait`: whether a stage waits
# until its message is gone before it goes on, as a plain `send` does.


# %%
def follow(lists, wait):
    """Where a message came of another micro-batch than the action needs."""
    comm, sending, wrong = attach().comm, [], []
    for action in lists[comm.rank]:
        needed, leaving = (f(action, comm.rank, 2) for f in (received, sent))
        if needed:
            comm.recv(number := torch.empty(1), needed.source)
            if number != action.microbatch:
                wrong.append(f"{action} got that of micro-batch {int(number)}")
        if leaving:
            sending.append(comm.isend(torch.full((1,), float(action.microbatch)), leaving.target))
            if wait:
                sending[-1].wait()
    for handle in sending:
        handle.wait()
    return wrong


short = World(2, timeout_s=2)

# %% tags=["nbval-check-output"]
messages = {}
for name, lists in LISTS.items():
    for wait in (True, False):
        try:
            wrong = short.run(follow, lists, wait)
            told = f"runs; wrong: {', '.join(wrong[0] + wrong[1]) or 'nothing'}"
        except Exception as error:
            told, messages[name, wait] = "HANGS", str(error)
        print(f"{name:<11} {'send, and wait' if wait else 'send, and go on':<16} {told}")

# %% tags=["nbval-check-output"]
lines = messages["eager", True].splitlines()
print("\n".join(line.split(", at ")[0] for line in lines[:4]))

# %% [markdown]
# Both stand in a send. And before anything runs, the rules of a schedule say some of it:

# %% tags=["nbval-check-output"]
for name, lists in LISTS.items():
    try:
        check_rules(lists)
        print(f"{name:<11} keeps all rules")
    except ValueError as error:
        print(fill(f"{name:<11} {error}", 100, subsequent_indent=12 * " "))

# %% [markdown] tags=["answer"]
# - **eager** is a good schedule: the last stage goes back as soon as it can. But with sends that wait,
#   stage 0 wants to be rid of an activation while stage 1 wants to be rid of a gradient: **both send,
#   and none receives**. On a wire with buffers small tensors pass, and large ones hang.
# - **mixed** is none: stage 0 waits for a gradient that stage 1 makes only after an activation that stage 0
#   has not made yet. No way to send helps; the rules name the circle.
# - **last first** is GPipe's own order on one stage and ours on the other. Each is fine alone. Together
#   every message has the right shape, and the gradient of micro-batch 2 goes backward through
#   micro-batch 0.

# %% [markdown] tags=["answer"]
# What `Pipeline` does about it: it sends and goes on; it knows the lists of all ranks, holds them to the
# rules, and posts its receives **in the order in which they are sent**. So it runs both others right:

# %% tags=["answer", "nbval-check-output"]
right = one.run(gradients, c, 1)[0]
for name in ("eager", "last first"):
    found = torch.cat(two.run(gradients, c, 3, schedule=LISTS[name]))
    print(f"{name:<11} {compared(found, right)}, equal: {torch.allclose(found, right)}")

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: Where to cut
#
# `costs` are those of the layers. Return how many layers each of `stages` stages gets, in order, each at
# least one, so that the slowest stage takes as little as it can. `cut([5, 1, 1, 1, 4], 3)` is
# `[1, 3, 1]`.
#
# Useful: `itertools.combinations`, `itertools.pairwise`.


# %%
def cut(costs, stages):
    ### BEGIN SOLUTION
    def slowest(ends):
        return max(sum(costs[begin:end]) for begin, end in pairwise(ends))

    inner = combinations(range(1, len(costs)), stages - 1)
    best = min(((0, *ends, len(costs)) for ends in inner), key=slowest)
    return [end - begin for begin, end in pairwise(best)]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.cut(cut)

# %% [markdown]
# ### Exercise 2: Forward
#
# The first half of a GPipe runner. `stage` is this rank's module; `xs` are m micro-batches [rows, w], of
# unequal rows. **Only rank 0 has the batch**: the others' `xs` are tensors of the same shapes to receive
# into. All stages hand on what has the shape of x. Send each on before you compute the next. Return a
# list of pairs (x, y), what the stage computed with and what came out, ready for backward.
#
# Useful: `comm.recv(x, rank)`, `comm.send(y.detach(), rank)`, `x.requires_grad_()`.


# %%
def forward(comm, stage, xs):
    ### BEGIN SOLUTION
    kept = []
    for x in xs:
        if comm.rank > 0:
            comm.recv(x, comm.rank - 1)
            x.requires_grad_()
        y = stage(x)
        if comm.rank < comm.size - 1:
            comm.send(y.detach(), comm.rank + 1)
        kept.append((x, y))
    return kept
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.forward(forward)

# %% [markdown]
# ### Exercise 3: Backward
#
# The second half. `kept` are the pairs of forward. On the last rank, `losses` has the mean loss of each
# micro-batch (elsewhere it is empty), and `rows` says everywhere how many rows each has. Send each
# gradient back before you compute the next. Afterwards each rank's `.grad` are those of the whole
# batch's mean.
#
# Useful: `y.backward(dy)`, `torch.empty_like(y)`, `x.grad`.


# %%
def backward(comm, kept, losses, rows):
    ### BEGIN SOLUTION
    for k, (x, y) in enumerate(kept):
        if comm.rank == comm.size - 1:
            (losses[k] * rows[k] / sum(rows)).backward()
        else:
            dy = torch.empty_like(y)
            comm.recv(dy, comm.rank + 1)
            y.backward(dy)
        if comm.rank > 0:
            comm.send(x.grad, comm.rank - 1)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.backward(backward)

# %% [markdown]
# These sends wait. Why does nothing hang here, as it did with **eager**?

# %% [markdown] tags=["answer"]
# On every stage all forwards come before all backwards. So at any time all messages between two
# neighbours go the same way, and one of them receives.

# %% [markdown]
# ### Exercise 4: The step of unequal stages
#
# Stage k takes `forward_ms[k]` and `backward_ms[k]` for one micro-batch; messages take nothing. How long
# is a step of GPipe, and which part of it, of all stages together, is bubble? Return both.


# %%
def step(forward_ms, backward_ms, microbatches):
    ### BEGIN SOLUTION
    behind = microbatches - 1  # each is behind the one before by what the slowest stage takes
    length = sum(sum(ms) + behind * max(ms) for ms in (forward_ms, backward_ms))
    busy = microbatches * (sum(forward_ms) + sum(backward_ms))
    return length, 1 - busy / (len(forward_ms) * length)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.step(step)

# %% [markdown]
# ### Exercise 5, open: Plan a pipeline
#
# Small micro-batches make a small bubble. But each action also takes `start_ms`, however few rows it
# has. Keeping activations is fast. But all micro-batches of GPipe are in flight, and a stage has
# `budget_mb`. Here is what a job says:

# %%
show("labs/lab_15/plans.py:Job")

# %% [markdown]
# And what a plan takes and holds. (`_of_stages` adds up the layers of each stage.) `step_ms(job, plan)`
# is exercise 4's length of a step, of these times; `held_mb` is below.

# %%
show("labs/lab_15/plans.py:times_ms")

# %%
show("labs/lab_15/plans.py:held_mb")

# %% [markdown]
# Return `Plan(layers, microbatches, recompute)` for a job: how many layers each stage has, an m that
# divides the rows (`divisors(job.rows)` are all), and whether to recompute. No stage may hold more than the
# budget. Your score is `step_ms`, of four jobs together.


# %%
def plan(job):
    ### BEGIN SOLUTION
    layers, fits = len(job.row_ms), []
    for inner in combinations(range(1, layers), job.stages - 1):
        sizes = [end - begin for begin, end in pairwise((0, *inner, layers))]
        for m in divisors(job.rows):
            for recompute in (False, True):
                one = Plan(sizes, m, recompute)
                if held_mb(job, one) <= job.budget_mb:
                    fits.append(one)
    return min(fits, key=lambda one: step_ms(job, one))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.plan(plan)

# %% [markdown]
# Ideas for more: what if every stage could decide for itself whether to recompute? Look at the first and
# the last stage of GPipe's picture: which of them could hold less, in another order?

# %% tags=["nbval-check-output"]
report("15")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the flag or call |
# |---|---|
# | DeepSpeed | `PipelineModule(layers=..., num_stages=4, partition_method="parameters")`, then `engine.train_batch(data_iter)`; m is `gradient_accumulation_steps` |
# | torch | `ScheduleGPipe(PipelineStage(module, rank, p, device), n_microbatches=8, loss_fn=...)`, of `torch.distributed.pipelining` |
# | Megatron-LM | `--pipeline-model-parallel-size 4 --micro-batch-size 1`; m follows from `--global-batch-size` |
# | torchtitan | `--parallelism.pipeline_parallel_degree 4` |
# | Transformers, Accelerate | `device_map="auto"`: the naive schedule |
# | labkit | `Pipeline(split(model, p), mesh.pp, "gpipe", microbatches=8, loss_fn=...)` |

# %% [markdown]
# Where to find each idea in DeepSpeed, `deepspeed/runtime/pipe/`:
#
# | here | there |
# |---|---|
# | a schedule, lists of actions | `schedule.py`: `TrainSchedule` gives lists of `ForwardPass`, `SendActivation`, `RecvGrad`, ... |
# | the loop of `step` | `engine.py`, `_exec_schedule` |
# | `split`, `balance` | `module.py`, `_partition_layers`: "uniform", "parameters", or "type:" of layers |
# | tied parameters | `TiedLayerSpec`; `ReduceTiedGrads` |
# | recompute | `activation_checkpoint_interval` of `PipelineModule` |
#
# Its sends wait. So of two neighbours one receives first: the stage behind sends a gradient and then
# receives an activation, the one in front receives that gradient and then sends. A stage is the one
# behind in one step, and the one in front in the next.

# %% [markdown]
# torch's own, on the same batch with the same weights. (It counts all micro-batches alike, so we give it
# rows that divide.)


# %%
def beside_torch(m=4):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    me, rows = (
        attach(),
        Text().batch(0, rows=8, length=32),
    )  # on the CPU, as torch's sends over gloo
    torch.manual_seed(0)
    ours, theirs = (split(GPT(**SIZES, tied=False).double(), me.size) for _ in range(2))
    for one, other in zip(ours, theirs):
        other.load_state_dict(one.state_dict())
    pipe = Pipeline(ours, me.comm, "gpipe", m, token_loss)
    loss = pipe.step(rows.x, rows.y)
    stage = PipelineStage(theirs[me.rank], me.rank, me.size, torch.device("cpu"))
    schedule, losses = ScheduleGPipe(stage, n_microbatches=m, loss_fn=token_loss), []
    last = me.rank == me.size - 1
    schedule.step(*[rows.x] * (me.rank == 0), target=rows.y if last else None, losses=losses)
    pairs = zip(pipe.parameters(), theirs[me.rank].parameters())
    same = all(torch.allclose(p.grad, q.grad) for p, q in pairs)
    return same, (loss.item(), torch.stack(losses).mean().item()) if last else None


# %% tags=["nbval-check-output"]
ranks = two.run(beside_torch)
print("the same gradients:", [same for same, _ in ranks])
ours, theirs = ranks[-1][1]
print("the same loss:", abs(ours - theirs) < 1e-10)

# %% [markdown]
# What they add: Megatron cuts what travels over the nodes' wires into t parts, since all t
# tensor-parallel ranks of a stage have the same; DeepSpeed and Megatron run replicas of the pipeline
# beside each other and average after the last backward (what happens if they do so after each is a hunt
# of lab 16). Neither takes GPipe's order, for it holds m micro-batches: lab 16 has theirs.
#
# Sources: Huang et al., *GPipe*, 2018 (arXiv 1811.06965); Narayanan et al., 2021 (arXiv 2104.04473),
# section 2.2; Harlap et al., *PipeDream*, 2018 (arXiv 1806.03377), for cutting by measured cost; Brown et
# al., 2020 (arXiv 2005.14165), for the sizes of GPT-3.

# %% [markdown]
# **You can now** cut a model into stages and say where, predict a pipeline's bubble, bytes and memory
# before it runs, write its loop, and tell a schedule that cannot run from one that is only run wrong.
