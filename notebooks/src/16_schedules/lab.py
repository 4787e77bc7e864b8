# %% [markdown]
# # Lab 16: Schedules
#
# A pipeline's stages, messages and results stay as they are in lab 15. In this lab you only change the
# **order** in which each stage works, and get half the memory, or half the bubble, or none. An order
# is data, a list: you can check it, draw it, score it before anything runs, and invent your own.
#
# You need lab 05 (DDP, `no_sync`), lab 11 (activations), labs 13 and 14 (tensor and sequence
# parallelism), and lab 15 (stages, micro-batches, GPipe and its bubble).

# %%
import re
from textwrap import fill

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from labkit import DDP, GPT, Mesh, PacedStage, Text, World, attach, cluster, plot, record
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_16 import checks as check
from labkit.memory.peak import PeakMemory
from labkit.parallel import Pipeline, split
from labkit.replaying import bubble, by_microbatch, pipeline_step_s, pipeline_trace

# %% [markdown]
# ## 1. The question
#
# GPT-3 on 8 stages of 12 layers, each stage on 8 tensor-parallel GPUs, scores computed again (lab 11).
# GPipe's bubble is (p-1)/(m+p-1) of the time, so take many micro-batches. But each stage keeps the
# activations of all m until the backwards come, beside its part of the state (lab 15's 16 bytes a
# parameter, here on 64 GPUs):

# %% tags=["nbval-check-output"]
LAYER = dict(sequence=2048, rows=1, width=12288, heads=96, recompute="selective")
layer = formulas.activation_bytes(**LAYER, tensor_parallel=8, sequence_parallel=True)
state = 16 * 96 * 12 * 12288**2 / 64 / 1e9
print(f"an H100 has {cluster('dgx-h100').device.memory_bytes / 1e9:.0f} GB; state {state:.1f} GB")
for m in (8, 16, 32, 64):
    gb = m * 12 * layer / 1e9
    both = f"activations {gb:4.1f} GB, with the state {gb + state:5.1f} GB"
    print(f"m = {m:>2}: bubble {7 / (m + 7):4.0%}, {both}")

# %% [markdown]
# A small bubble or room in memory. **Must we choose?** Nobody says that all forwards come first.

# %% [markdown]
# ## 2. The idea
#
# A schedule is a list of actions for each stage: F0 is the forward of micro-batch 0, B0 its backward.
# What travels follows from it. `labkit.schedules` has no torch in it, no ranks and no times:

# %%
from labkit.schedules import Action, ScheduleError, chunks_of, parse, parse_schedule, peak_in_flight
from labkit.schedules import check as check_rules
from labkit.schedules import schedule as make_schedule
from labkit.schedules import show as table

# %% tags=["nbval-check-output"]
print(table(make_schedule("1f1b", stages=3, microbatches=4)))
print(make_schedule("1f1b", stages=3, microbatches=4)[2][:2])

# %% [markdown]
# This is **1F1B**: after a warm-up each stage does one forward, one backward, in turns. As soon as a
# backward can come, it does, and frees its activations. Here it is beside GPipe, where a backward
# takes 2 forwards:

# %%
plot.schedules({name: make_schedule(name, 4, 8) for name in ("gpipe", "1f1b")})

# %% [markdown]
# The same work, the same bubble, (p-1)(F+B). But look at the right margin ("holds"): a stage holds
# p - stage micro-batches, **however many there are**.

# %% [markdown]
# ### Go round several times
#
# The bubble is filling and draining: p-1 stages, each as long as a stage takes. Smaller stages fill
# faster. **Interleaved** 1F1B gives each of p ranks v *chunks* of the model, and each micro-batch goes
# round v times. The bubble is (p-1)(F+B)/v. The price: (pv-1)/(p-1) times the messages, a little over v
# (most for the end stages), and more memory.
#
# ```
#   8 layers, 4 stages                    2 chunks: chunk c of stage r is piece c p + r
#   stage 0   layers 0 1                  stage 0   layers 0 and 4
#   stage 1   layers 2 3                  stage 1   layers 1 and 5
#   stage 2   layers 4 5                  stage 2   layers 2 and 6
#   stage 3   layers 6 7                  stage 3   layers 3 and 7
# ```

# %%
plot.schedule(make_schedule("interleaved", 4, 8, chunks=2), name="interleaved")

# %% [markdown]
# ### Backward in two halves
#
# Backward computes two things. Who waits for them?
#
# ```
#   y = x Aᵀ     I    dx = dy A      the stage before waits for it
#                W    dA = dyᵀ x     nobody waits for it, until the step ends
# ```
#
# So do I at once, and W **where the stage would idle**. That is *zero bubble*. ZB-H1 makes W a little
# late: all stages hold what the first of 1F1B does. ZB-H2 does more forwards first, in almost twice
# that memory, and no gap is left:

# %%
plot.schedules({name: make_schedule(name, 4, 8) for name in ("zb-h1", "zb-h2")})

# %% [markdown]
# H2's stages begin and end one after the other. Its bubble is 0: each stage works from its own first
# action to its own last. The next step follows at once, **if no stage waits for others between steps**;
# clipping by the norm of all gradients makes them wait, and so does a loss scale.

# %% [markdown]
# ### No flush at all
#
# All of these end a step empty: a *flush*. **PipeDream** has none, and pays its bubble once in a
# training. Each stage updates its weights (U) after each backward, and goes on. Look at stage 0: F3
# runs by weights that know of micro-batch 0 alone. 1 and 2 are still under way. Those weights are
# **stale**. And B1 comes after U0, but needs the weights of F1: so stage r keeps up to p - r versions
# (*weight stashing*).

# %% tags=["nbval-check-output"]
print(table(make_schedule("pipedream", stages=3, microbatches=4)))

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | schedule | 调度 | the order in which each stage runs its forwards and backwards |
# | 1F1B, PipeDream-flush | 一前一后 | a schedule that alternates one forward and one backward |
# | warm-up, steady state, cool-down | 预热、稳态、收尾 | the three parts of a pipeline schedule |
# | interleaved, virtual stages | 交错式、虚拟流水级 | each stage has several chunks of the model |
# | in flight | 在途 | a micro-batch between its forward and its backward |
# | zero bubble | 零气泡 | schedules that fill idle time with weight gradients |
# | input gradient, weight gradient | 输入梯度、权重梯度 | the two halves of a backward, I and W |
# | flush | 流水线排空 | waiting until no micro-batch is in flight |
# | stale weights | 过期权重 | weights from before the latest updates |
# | weight stashing | 权重暂存 | keeps the weights of each forward for its backward |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# p = 4 stages, m = 8 micro-batches, F = I = W = 1, so B = 2. For how many units does a stage idle in a
# step, and how many micro-batches does stage 0 hold?
#
# - 1F1B: (p-1)(F+B), that is (p-1)(F+I+W); it holds one for each stage from here to the last
# - interleaved, v = 2: the bubble / v; it holds p (1 + (p-1)/(p v))
# - ZB-H1: the way back is I and not B, so (p-1)(F+I) is left; late W fill
#   one W of that for each of p-1 stages: (p-1)(F+I-W)
# - ZB-H2: late W fill two for each, (p-1)(F+I-2W); it holds 2p - 1

# %% stub="guess = predict(gpipe_idle=..., gpipe_held=..., one_f_one_b_idle=..., one_f_one_b_held=..., interleaved_idle=..., interleaved_held=..., zb_h1_idle=..., zb_h1_held=..., zb_h2_idle=..., zb_h2_held=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
p, m, v = 4, 8, 2
F_, I_, W_ = 1, 1, 1
guess = predict(
    gpipe_idle=(p - 1) * (F_ + I_ + W_),
    gpipe_held=m,
    one_f_one_b_idle=(p - 1) * (F_ + I_ + W_),
    one_f_one_b_held=min(p, m),
    interleaved_idle=(p - 1) * (F_ + I_ + W_) / v,
    interleaved_held=p * (1 + (p - 1) / (p * v)),
    zb_h1_idle=(p - 1) * (F_ + I_ - W_),
    zb_h1_held=p,
    zb_h2_idle=(p - 1) * (F_ + I_ - 2 * W_),
    zb_h2_held=2 * p - 1,
)
### END SOLUTION
guess

# %% [markdown]
# And on the wire? A message is b·s·w numbers, one for each boundary, direction and micro-batch. The
# GPT below has w = 32 and s = 32 positions; m = 8 micro-batches of b = 1 row, in float64 (8 bytes). How
# many bytes does **stage 0** send in a step with 1F1B? With 2 chunks it has two pieces: the first
# sends forward only, the second in both directions.

# %% stub="sends = predict(one_f_one_b_bytes=..., interleaved_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
one_message = 1 * 32 * 32 * 8
sends = predict(one_f_one_b_bytes=8 * one_message, interleaved_bytes=8 * 3 * one_message)
### END SOLUTION
sends

# %% [markdown]
# ## 4. Read it
#
# What must have come before a stage can act? That is all that a schedule must respect:

# %%
show("schedules/actions.py:received", since="virtual = ")

# %% [markdown]
# `check_rules` asks for the rest, and names the first rule that is broken:

# %%
show("schedules/rules.py:check", since="_known_actions")

# %% [markdown]
# Deadlock is found without running: let each stage go as far as it can. Who does not reach the end
# waits for somebody who waits.

# %%
show("schedules/rules.py:_simulate", since="while ready")

# %% [markdown]
# One runner for all of them, lab 15's. It does its list; it knows no schedule by name:

# %%
show("parallel/pipeline/pipeline.py:Pipeline.step", since="self._begin")

# %% [markdown]
# The halves. A linear layer's backward computes dx, and puts the rest on a list, with its x and dy:

# %%
show("parallel/pipeline/deferred_weights.py:_InputHalf.backward")

# %% [markdown]
# And PipeDream's versions. A forward takes the newest weights and notes them for its micro-batch:

# %%
show("parallel/pipeline/virtual_stage.py:WeightVersions.forward")

# %% [markdown]
# ### A score
#
# A replay gives each action a cost, and each message a time. The score of a schedule: what a stage
# idles in a step, and how much it holds at most. (With v chunks, an action takes 1/v.)


# %%
def score(schedule, forward=1, input=1, weight=1, message=0):
    """(units idle in a step, its part of the step, micro-batches held at most)"""
    v = chunks_of(schedule)
    costs = dict(forward=forward, backward=input + weight, input=input, weight=weight)
    costs = {phase: units / v for phase, units in costs.items()}
    step = pipeline_step_s(pipeline_trace(schedule, costs, message))
    part = bubble(schedule, step, costs)
    return round(step * part, 6), part, max(peak_in_flight(schedule)) / v


# %% tags=["nbval-check-output"]
ALL = {name: make_schedule(name, 4, 8) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")}
ALL["interleaved"] = make_schedule("interleaved", 4, 8, chunks=2)
found = {}
for name, schedule in ALL.items():
    short = name.replace("1f1b", "one_f_one_b").replace("-", "_")
    found[f"{short}_idle"], _, found[f"{short}_held"] = score(schedule)
guess.beside("replayed", **found)

# %% [markdown]
# Do others calculate so? The authors of zero bubble measured F, I, W and messages on 8 GPUs, for a
# model of 1.5 billion parameters, and calculated the bubble of 1F1B with 24 micro-batches from them:
# 0.2431. From the same four numbers:

# %% tags=["nbval-check-output"]
measured_ms = dict(forward=18.522, input=18.086, weight=9.337, message=0.601)
_, part, _ = score(make_schedule("1f1b", 8, 24), **measured_ms)
print(f"replayed: {part:.4f}")

# %% [markdown]
# The same four digits: two calculations agree. Whether ranks do, section 5 will show.
#
# ### Which is best?
#
# That depends on what things cost. On the left W changes, on the right the messages:


# %%
def curve(axes, option, values, label):
    styles = {"1f1b": "k-", "interleaved": "C0-", "zb-h1": "C1-", "zb-h2": "C3-"}
    for name, style in styles.items():
        parts = [score(ALL[name], **{option: value})[1] for value in values]
        axes.plot(values, [100 * part for part in parts], style, label=name)
    axes.set(xlabel=label, ylabel="bubble, % of the step", ylim=(-1, None))
    axes.spines[["top", "right"]].set_visible(False)


_, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
curve(left, "weight", [k / 5 for k in range(11)], "W, in forwards")
curve(right, "message", [k / 5 for k in range(11)], "a message, in forwards")
_ = left.legend(frameon=False)

# %% [markdown]
# Without W there is nothing to fill gaps with. Beyond W = F, H1 idles (p-1) I, no less: its first
# stage holds all that it may, and waits for the first I. (Its part falls on, as the step grows.)
# Interleaving has more messages to wait for: from about 1.4 forwards on, its lead over 1F1B is gone.

# %% [markdown]
# ## 5. Run it
#
# Four ranks on few cores would fight for them. So first with *paced* stages, which sleep where others
# compute:


# %%
def paced_step(name, chunks=1, unit_s=0.015):
    me = attach()
    each = dict(input_s=unit_s / chunks, weight_s=unit_s / chunks)
    paced = (PacedStage(unit_s / chunks, **each) for _ in range(me.size * chunks))
    stages = [stage.to(me.device) for stage in paced]
    pipeline = Pipeline(stages, me.comm, name, microbatches=8, loss_fn=lambda out, y: out.mean())
    x = torch.ones(8, 8, device=me.device)
    pipeline.step(x, x)


four = World(4)
_ = four.run(paced_step, "1f1b", 1, 0.0)  # what is slow only once

# %%
runs = {}
for name in ("1f1b", "interleaved", "zb-h1", "zb-h2"):
    with record() as trace:
        four.run(paced_step, name, chunks_of(ALL[name]))
    runs[f"{name}, paced"] = by_microbatch(trace, ALL[name])
plot.schedules(runs)


# %%
def idle_in(trace):
    """The part of a recorded step, of all stages, in which nothing was computed (lab 15)."""
    spans = [x for one in trace.ranks.values() for x in one.spans if x.kind == "microbatch"]
    busy_s = sum(x.ended_s - x.began_s for x in spans)
    return 1 - busy_s / (len(trace.ranks) * pipeline_step_s(trace))


print("bubble               formula    run")
for name, trace in runs.items():
    print(f"{name:<19} {score(ALL[name.split(',')[0]])[1]:>8.1%} {idle_in(trace):>6.1%}")

# %% [markdown]
# A run adds what messages and the runner take, and a busy machine more. The order and the shape are
# those of the plan: for them a replay can be trusted.

# %% [markdown]
# ### Is it the same training?
#
# A GPT of 8 layers, in float64, two steps, by each schedule:

# %%
SIZES = dict(vocab=256, width=32, depth=8, heads=4, context=32, tied=False)


def loss(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def train(schedule, chunks=1, steps=2, microbatches=8, edit=None):
    me = attach()
    torch.manual_seed(0)
    stages = split(GPT(**SIZES).to(me.device, torch.float64), me.size * chunks)
    pipeline = Pipeline(stages, me.comm, schedule, microbatches, loss)
    if edit:
        edit(pipeline)
    sgd, losses = torch.optim.SGD(pipeline.parameters(), lr=0.5), []
    for step in range(steps):
        batch = Text().batch(step, rows=microbatches, length=32).to(me.device)
        sgd.zero_grad()
        value = pipeline.step(batch.x, batch.y)
        sgd.step()
        losses += [] if value is None else [value.item()]  # the last stage has it
    return losses


# %%
def train_alone(steps=2):
    torch.manual_seed(0)
    model, losses = GPT(**SIZES).double(), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        batch = Text().batch(step, rows=8, length=32)
        losses.append(update(model, sgd, batch.x, batch.y, loss))
    return losses


def update(model, sgd, x, y, loss):
    sgd.zero_grad()
    value = loss(model(x), y)
    value.backward()
    sgd.step()
    return value.item()


# %%
alone, traces, trained = train_alone(), {}, {}
for name, schedule in ALL.items():
    with record() as traces[name]:
        trained[name] = four.run(train, name, chunks_of(schedule))[-1]
print("1 process", ", ".join(f"{value:.6f}" for value in alone))

# %% tags=["nbval-check-output"]
for name, losses in trained.items():
    ours, right = (torch.tensor(x, dtype=torch.float64) for x in (losses, alone))
    print(f"{name:<12} equal: {torch.allclose(ours, right, rtol=1e-10)}")

# %% [markdown]
# The order of a sum's parts is all that changes. Your bytes, of one step:


# %%
def sent_bytes(trace):
    events = trace.ranks[0].comms
    sends = [e for e in events if e.op == "send" and e.dtype == "float64"]
    return sum(e.bus_bytes for e in sends) // 2  # 2 steps


# %% tags=["nbval-check-output"]
sends.beside(
    "counted",
    one_f_one_b_bytes=sent_bytes(traces["1f1b"]),
    interleaved_bytes=sent_bytes(traces["interleaved"]),
)

# %% [markdown]
# And what the ranks held in real bytes, at the moment when it was most:


# %%
def held_bytes(schedule):
    me = attach()
    stages = split(GPT(**SIZES).to(me.device, torch.float64), me.size)
    pipeline = Pipeline(stages, me.comm, schedule, 8, loss)
    batch = Text().batch(0, rows=8, length=32).to(me.device)
    pipeline.step(batch.x, batch.y)  # gradients have their place now
    with PeakMemory() as memory:
        pipeline.step(batch.x, batch.y)
    return memory.peak_bytes


print("kB          " + "".join(f"  stage {stage}" for stage in range(4)))
for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
    print(f"{name:<12}" + "".join(f"{nbytes / 1e3:9,.0f}" for nbytes in four.run(held_bytes, name)))

# %% [markdown]
# That is activations, and what one backward needs beside them; the last stage has the logits, too.
# GPipe holds 8 micro-batches, 1F1B holds 4, 3, 2 and 1, H1 holds 4 everywhere, H2 holds 7.

# %% [markdown]
# ### PipeDream: another training
#
# Its stages update after each micro-batch, each by itself. Beside it one process that does the same
# updates one after the other, none of them stale. Four layers learn to reverse eight numbers; same
# start, same data, same learning rate. Each point is the mean over a batch of 8 micro-batches. (`step`
# returns when its 8 are through, so here the pipeline does drain, every 8 micro-batches.)


# %%
def four_layers():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()
    for layer in net:
        nn.init.orthogonal_(layer.weight)
    return net


def numbers(step, rows=64):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)).double()
    return x, x.flip(1)


def pipedream(lr, steps):
    me = attach()

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=lr)

    stages = split(four_layers().to(me.device), me.size)
    pipeline = Pipeline(stages, me.comm, "pipedream", 8, F.mse_loss, optimizer=sgd)
    batches = ([part.to(me.device) for part in numbers(step)] for step in range(steps))
    return [pipeline.step(*batch) for batch in batches]


# %%
def one_after_the_other(lr, steps):
    net = four_layers()
    sgd, losses = torch.optim.SGD(net.parameters(), lr=lr), []
    for step in range(steps):
        pairs = zip(*(part.chunk(8) for part in numbers(step)))
        losses.append(sum(update(net, sgd, x, y, F.mse_loss) for x, y in pairs) / 8)
    return losses


STEPS = 20
fresh = {lr: one_after_the_other(lr, STEPS) for lr in (0.1, 0.8)}
stale = {lr: [float(value) for value in four.run(pipedream, lr, STEPS)[-1]] for lr in fresh}

# %%
_, both = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained", sharey=True)
for axes, lr in zip(both, fresh):
    axes.plot(fresh[lr], "k-", label="one after the other")
    axes.plot(stale[lr], "C3-", label="PipeDream, 4 stages")
    axes.set(title=f"learning rate {lr}", xlabel="batch of 8 updates", xticks=range(0, STEPS, 5))
    axes.spines[["top", "right"]].set_visible(False)
both[0].set_ylabel("loss")
_ = both[0].legend(frameon=False)

# %% tags=["nbval-check-output"]
for lr in fresh:
    means = [sum(losses[lr][-5:]) / 5 for losses in (fresh, stale)]
    print("learning rate {}: {:.3f} in order, {:.3f} with stale weights".format(lr, *means))

# %% [markdown]
# Stage r of p is up to p-1-r updates behind. With small steps the weights of three updates ago are
# nearly those of now; with large ones they are not. Pipelines for large models flush, since then the
# result does not depend on the number of stages.

# %% [markdown]
# ## 6. Break it
#
# ### Four schedules
#
# Somebody edited schedules by hand. One keeps all rules. What is wrong with the others, and which would
# **hang** on ranks?

# %%
EDITED = {
    "a": "F0 B0 F1 B1\nF0 F1 B0 B1",
    "b": "F0 F1 I0 W0 I1 W1\nF0 I0 F1 I1 W1",
    "c": "F1 F0 B0 B1\nF1 F0 B0 B1",
    "d": "F0 F1 I0 W0 B1 W1\nF0 B0 F1 B1",
}
for name, text in EDITED.items():
    print(f"{name}   stage 0  {text.splitlines()[0]}\n    stage 1  {text.splitlines()[1]}")

# %% [markdown]
# When you have said which, ask the rules:

# %% tags=["nbval-check-output"]
for name, text in EDITED.items():
    try:
        check_rules(parse_schedule(text))
        print(f"{name}  keeps all rules, and idles {score(parse_schedule(text))[0]:g}\n")
    except ScheduleError as error:
        print(fill(f"{name}  {error}", 100, subsequent_indent="   "), end="\n\n")

# %% [markdown] tags=["answer"]
# - **a** would hang: two actions are swapped on stage 1, and each stage waits for the other. On ranks
#   you would see nothing, then a time-out. The rules name the circle, before anything runs.
# - **b** would run to its end, and train. A weight gradient is missing on one stage: the error is in
#   the gradients alone.
# - **c** keeps all rules: it is GPipe, with its micro-batches in another order on all stages. It idles
#   as long as 1F1B. A swap need not be a fault.
# - **d** has W1 twice: B1 is both halves.

# %% [markdown]
# A `Pipeline` is held to the same rules, on every rank, before it sends anything:


# %%
def run_edited(text):
    stages = [nn.Linear(4, 4) for _ in range(2)]
    pair = Mesh(dp=2, pp=2).pp  # ranks 0 and 1, 2 and 3
    Pipeline(stages, pair, parse_schedule(text), loss_fn=F.mse_loss)


# %% tags=["nbval-check-output"]
try:
    four.run(run_edited, EDITED["a"])
except Exception as error:
    print(re.search(r"ScheduleError: (.*?);", str(error))[1])

# %% [markdown]
# ### A synchronisation on every micro-batch
#
# Pipelines and data parallelism together: 2 stages, and 2 replicas of each, in DDP. Both programs
# below end with the same gradients. What do they cost?


# %%
def replicated(wrap, microbatches=8):
    device = attach().device
    torch.manual_seed(0)
    mesh, model = Mesh(dp=2, pp=2), GPT(**SIZES).to(device, torch.float64)
    stages = [wrap(stage, mesh.dp) for stage in split(model, 2)]
    pipeline = Pipeline(stages, mesh.pp, "1f1b", microbatches, loss)
    batch = Text().batch(0, rows=2 * microbatches, length=32).slice(mesh.dp.rank, 2).to(device)
    pipeline.step(batch.x, batch.y)
    return sum(p.grad.square().sum().item() for p in pipeline.parameters())


def a(stage, replicas):
    return DDP(stage, replicas)


def b_(stage, replicas):
    return nn.Sequential(DDP(stage, replicas), nn.Identity())


# %%
synced = {}
for wrap in (a, b_):
    with record() as synced[wrap.__name__[0]]:
        squares = four.run(replicated, wrap)
    print(wrap.__name__[0], [f"{value:.6f}" for value in squares])

# %% tags=["nbval-check-output"]
for name, trace in synced.items():
    sums = [e for e in trace.ranks[0].comms if e.op.startswith("all_reduce")]
    megabytes = sum(e.bus_bytes for e in sums) / 1e6
    print(f"{name}: {len(sums)} all-reduces of gradients, {megabytes:.2f} MB")

# %% [markdown] tags=["answer"]
# DDP averages when a backward ends, and a pipeline has m backwards in a step. `Pipeline` tells a DDP
# stage to be quiet until the last one (`no_sync`, lab 05). In **b** something stands around the DDP, so
# nobody tells it: m times the bytes, between the backwards for which other stages wait. (And what is
# averaged is the sum so far: an average of averages stays one, so the gradients are the same, and only
# the bill tells.)

# %% [markdown]
# ### The step is over
#
# A colleague's zero-bubble program calls the optimizer when the last I is done: all stages have sent what
# others wait for. Below are 8 steps with ZB-H1, right and so. Would you see it in the loss?


# %%
def ends_with_the_last_input(pipeline):
    program = pipeline._program
    last = max(i for i, (action, _, _) in enumerate(program) if action.phase == "input")
    del program[last + 1 :]


losses = {"right": four.run(train, "zb-h1", 1, 8)[-1]}
losses["early"] = four.run(train, "zb-h1", 1, 8, edit=ends_with_the_last_input)[-1]

# %%
_, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
for (name, its), style in zip(losses.items(), ("k-", "C3--")):
    axes.plot(its, style, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False)

# %% [markdown]
# And the gradient of one step, of all weights in the blocks of a stage: how much of the right one is there?


# %%
def unchanged(pipeline):
    pass


def gradients_of(edit):
    found = []

    def keep(pipeline):
        edit(pipeline)
        found.append(pipeline)

    train("zb-h1", steps=1, edit=keep)
    named = found[0].named_parameters()
    weights = [p for name, p in named if "blocks" in name and p.ndim == 2]
    halves = sum(action.phase == "weight" for action, _, _ in found[0]._program)
    return halves, torch.cat([p.grad.flatten() for p in weights])


runs_of = [four.run(gradients_of, edit) for edit in (unchanged, ends_with_the_last_input)]

# %%
for stage, ((_, whole), (_, early)) in enumerate(zip(*runs_of)):
    part = float((whole * early).sum() / whole.square().sum())
    print(f"stage {stage}: {part:.2f} of the gradient")

# %% tags=["nbval-check-output"]
for stage, (halves, early) in enumerate(runs_of[1]):
    whole = torch.allclose(early, runs_of[0][stage][1])
    print(f"stage {stage}: {halves} of 8 halves W, the whole gradient: {whole}")

# %% [markdown] tags=["answer"]
# W is r micro-batches late on stage r, and behind its I. Who stops after the last I loses r + 1 of
# them: 1 of 8 on the first stage, 4 on the last. The loss falls, at first more slowly, by gradients that are
# too small, most of all on the last stages. The rules know it as *exactly once*, if they see what runs;
# else compare one step's gradients with a single process, in float64.

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: 1F1B
#
# Return the list of one stage: warm-up, pairs of one forward and one backward, and the backwards that
# are left. A stage holds no more than min(p - stage, m) micro-batches. There may be fewer micro-batches
# than stages.
#
# An action is `Action("forward", k)` or `Action("backward", k)`.


# %%
def my_1f1b(stage, stages, microbatches):
    ### BEGIN SOLUTION
    warm_up = min(stages - 1 - stage, microbatches)
    actions = [Action("forward", k) for k in range(warm_up)]
    for k in range(microbatches):
        if warm_up + k < microbatches:
            actions.append(Action("forward", warm_up + k))
        actions.append(Action("backward", k))
    return actions
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_1f1b(my_1f1b)

# %% [markdown]
# ### Exercise 2: How long to warm up?
#
# With v chunks micro-batches go in groups of p: a group goes through chunk 0, then through chunk 1,
# ...; then the next group comes. Return how many forwards a stage does **before its first pair** of
# one forward and one backward.
#
# Think of the last stage first: its first backward is that of micro-batch 0 on its last chunk. Then go
# back: each stage needs a forward more than the one that follows, or it stands still. And one more for
# each stage that follows, **in hand**, to be computed while messages travel. A stage has only m v
# forwards.


# %%
def warm_up(stage, stages, microbatches, chunks):
    ### BEGIN SOLUTION
    last = (chunks - 1) * stages
    return min(last + 2 * (stages - 1 - stage), microbatches * chunks)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.warm_up(warm_up)

# %% [markdown]
# Without those in hand the bubble is the same **if messages cost nothing**, and less is held. Your
# warm-ups, then fewer:

# %% tags=["nbval-check-output"]
from labkit.labs.lab_16.scenarios import interleaved_after

yours = [warm_up(stage, 4, 8, 2) for stage in range(4)]
fewer = [count - (3 - stage) for stage, count in enumerate(yours)]
for counts in (yours, fewer):
    lists = interleaved_after(counts, microbatches=8, chunks=2)
    for message in (0, 0.1):
        units, part, most = score(lists, message=message)
        print(f"{counts}, messages {message}: idle {units:g}, {part:.1%}, held {most:g}")

# %% [markdown]
# ### Exercise 3: ZB-H1
#
# One stage of ZB-H1: actions `"forward"`, `"input"`, `"weight"`. Stage r does p - r forwards first, then
# I, W and F in turns, as long as there are any. A micro-batch is held until its W, and no stage may hold
# more than p: within that bound, W comes as late as it can. There are at least as many micro-batches as
# stages.


# %%
def zb_h1(stage, stages, microbatches):
    ### BEGIN SOLUTION
    ahead = stages - stage
    actions = [Action("forward", k) for k in range(ahead)]
    for k in range(microbatches + stage):
        if k < microbatches:
            actions.append(Action("input", k))
        if k >= stage:
            actions.append(Action("weight", k - stage))
        if ahead + k < microbatches:
            actions.append(Action("forward", ahead + k))
    return actions
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.zb_h1(zb_h1)

# %% [markdown]
# ### Exercise 4, open: Invent one
#
# H1 holds p micro-batches, H2 2p - 1. What if there is room for a number between them? Return lists for
# all stages, any that keep the rules, for jobs that differ in room and costs. No stage may hold more
# than `job.held` micro-batches. You must idle less than 1F1B; your score is the idle part of the time,
# a mean over the jobs. Then your schedules run on 4 ranks, and must train as one process does.

# %%
from labkit.labs.lab_16.scenarios import JOBS

for name, job in JOBS.items():
    print(f"{name}: {job}")

# %% [markdown]
# You may use halves, chunks (1 or 2), text and `parse`, a formula, a search with `score`. Draw what you
# have: `plot.schedule(lists)`; print it: `print(table(lists))`.


# %%
def invent(job):
    ### BEGIN SOLUTION
    p, m, room = job.stages, job.microbatches, job.held
    schedule = []
    for stage in range(p):
        ahead = min(2 * (p - stage) - 1, p - stage + room - p)  # between H1 and H2
        late = room - ahead  # W may be so late, in the room that is left
        letters = [f"F{k}" for k in range(ahead)]
        for k in range(m + late):
            letters += [f"I{k}"] * (k < m)
            letters += [f"W{k - late}"] * (k >= late)
            letters += [f"F{ahead + k}"] * (ahead + k < m)
        schedule.append(parse(" ".join(letters)))
    return schedule
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.invent(invent)

# %%
gallery = {name: invent(job) for name, job in JOBS.items() if job.forward == 1}
plot.schedules({"1F1B": ALL["1f1b"], **gallery})

# %% [markdown]
# Ideas for more: chunks and halves together. A V of two chunks, in which the last stage's second chunk
# follows its first at once, has almost no bubble in the memory of 1F1B (ZB-V); why can a list with
# chunk c of stage r at place c p + r not be one?

# %% tags=["nbval-check-output"]
report("16")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the flag or call |
# |---|---|
# | Megatron-LM | `--pipeline-model-parallel-size 8`; 1F1B is what you get |
# | Megatron-LM, interleaved | `--num-layers-per-virtual-pipeline-stage 4` or `--num-virtual-stages-per-pipeline-rank 2` |
# | torch | `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, of `torch.distributed.pipelining` |
# | torchtitan | `--parallelism.pipeline_parallel_schedule 1F1B` |
# | DeepSpeed | `PipelineModule(layers, num_stages=8)`: 1F1B, `TrainSchedule` in `deepspeed/runtime/pipe/schedule.py` |
# | labkit | `Pipeline(stages, comm, schedule="1f1b")`, or your own lists |

# %% [markdown]
# Where to find each idea:
#
# | here | there |
# |---|---|
# | 1F1B | Megatron's `pipeline_parallel/schedules.py`, `forward_backward_pipelining_without_interleaving` |
# | interleaved | the same file, `forward_backward_pipelining_with_interleaving` |
# | `deferred_weights.py` | `WeightGradStore`, of the authors of zero bubble, in their fork of Megatron |
# | schedules as lists | torch's `_PipelineScheduleRuntime`, which reads a table in CSV, a row for each rank |
# | PipeDream's versions | `msr-fiddle/pipedream`, `runtime/optimizer.py` |
#
# In Megatron a schedule **is** code: warm-up, steady state and cool-down are loops with sends and
# receives between. torch keeps lists like ours, with `None` for waiting, for most of its schedules.

# %% [markdown]
# torch's list beside ours. An action has the number of its stage first: `5F0` is chunk 1 of rank 1.


# %%
def torch_rows(name, stages, microbatches):
    """torch's actions of each rank, as text; a private part of torch, so it may be elsewhere."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, stages, microbatches)
    return [[str(action) for action in row if action is not None] for row in rows]


def as_ours(row, stages):
    """0F3 -> F3; without what torch does beside computing (REDUCE_GRAD)."""
    found = [re.fullmatch(r"(\d+)([FBIW])(\d+)", word) for word in row]
    words = [f"{one[2]}{one[3]}.{int(one[1]) // stages}" for one in found if one]
    return parse(" ".join(words))


# %%
theirs = torch_rows("Interleaved1F1B", 4, 8)
print("rank 1 of torch's:", *theirs[1][:16], "...")
print("stage 1 of ours:  ", *ALL["interleaved"][1][:16], "...")
equal = [as_ours(row, 4) for row in theirs] == ALL["interleaved"]
print("all the same:", equal)

# %% [markdown]
# Their 1F1B, of torch 2.13, against our rules:

# %%
theirs = torch_rows("1F1B", 4, 8)
print("rank 3:", *theirs[3])
try:
    check_rules([as_ours(row, 4) for row in theirs], microbatches=8)
except ScheduleError as error:
    print(error)

# %% [markdown]
# The last stage begins with micro-batch 1 and ends with a micro-batch 8, which there is not. It does no
# harm there: torch *runs* this schedule by a loop of its own, which is right, and the table is only
# drawn. Two descriptions of one thing differ one day. With schedules as data, what is checked is what
# runs.
#
# Sources: Huang et al., *GPipe*, 2018 (arXiv 1811.06965); Harlap et al., *PipeDream*, 2018 (arXiv
# 1806.03377); Narayanan et al., with a flush, 2020 (arXiv 2006.09503), and 2021 (arXiv 2104.04473),
# section 2.2; Qi et al., *Zero Bubble*, 2023 (arXiv 2401.10241), Tables 5 and 9 for F, I, W, messages
# and the calculated bubble; *Controllable Memory*, 2024 (arXiv 2405.15362), for schedules between.

# %% [markdown]
# **You can now** read and write any pipeline schedule, say whether it can run and what it idles and
# holds, fill a bubble with weight gradients, and tell when an asynchronous pipeline trains another
# model.
