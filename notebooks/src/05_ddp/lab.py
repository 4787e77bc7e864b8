# %% [markdown]
# # Lab 05: DDP
#
# Data parallel training, as nearly everybody does it: every rank has the whole model, takes its
# share of the batch, and the gradients are averaged. Simple to write, and slow. In this lab you
# measure why, see how *distributed data parallel* hides the slow part behind computing, break it
# in the ways in which it breaks in real projects, and rebuild it.
#
# You need lab 00: ranks, `comm.all_reduce`, timelines.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from labkit import DDP, GPT, Link, NaiveDDP, Single, Text, World, attach, listen, loss, plot, record
from labkit.course import predict, report, show
from labkit.labs.lab_05 import checks as check
from labkit.plot.strategies import step_times

# %% [markdown]
# ## 1. The question
#
# A small GPT, trained on two ranks. The loop is the one you know; three things are new:
#
# - `attach()` tells a process which rank it is, and on which device it computes;
# - all ranks draw the same global batch of 32 rows, and `.slice(rank, size)` is this rank's share;
# - `wrap(model)` gives the strategy. The first one, `NaiveDDP`, computes all gradients, then
#   averages them over the ranks.


# %%
def train(wrap, steps=3, dtype=torch.float32, rows=32):
    me = attach()
    torch.manual_seed(0)
    model = GPT.preset("1M", vocab=256).to(me.device, dtype)
    parallel = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, losses = Text(), []
    for step in range(steps):
        batch = text.batch(step, rows=rows, length=64).slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        value = loss(parallel(batch.x), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# %% [markdown]
# Two processes of one machine talk faster than any network. So each rank gets a modelled wire, of
# 0.25 gigabits per second, on which a message travels 500 µs longer than its bytes take. The bytes
# are real, and arrive as late as such a wire would deliver them: the pictures say **paced**.

# %%
LINK = Link(gbps=0.25, latency_us=500)
world = World(2, link=LINK)

with record() as naive:
    world.run(train, NaiveDDP)

times = step_times(naive)
whole_s = times.alone_s + times.hidden_s + times.waiting_s + times.other_s
print(f"{times.waiting_s / whole_s:.0%} of a step is waiting for gradients.")

# %%
plot.timeline(naive)

# %% [markdown]
# Light, outlined in red: waiting. Two ranks, and much of the time neither computes. **Can the
# gradients travel without anyone waiting for them?**

# %% [markdown]
# ## 2. The idea
#
# First, why averaging is right. The loss of a batch of B rows is the mean of the losses of its
# rows, and a gradient is linear. Cut the batch into n equal shares:
#
# ```
#   ∇L  =  1/B · Σ (all rows) ∇ℓ            the gradient of a single process
#
#       =  1/n · Σ (ranks)  n/B · Σ (rows of this rank) ∇ℓ
#
#       =  1/n · Σ (ranks)  gradient of the mean over this rank's rows
# ```
#
# The mean of the ranks' gradients *is* the gradient of the whole batch. Replicas that start equal
# and take the same gradient stay equal. It holds for **equal** shares only: section 6 comes back
# to that.

# %% [markdown]
# Second, what the mean costs. Cut the S bytes of a tensor into n chunks, c0, c1, ... and let each
# rank send to its neighbour, around a **ring**:
#
# ```
#   n = 3     round 1   round 2        then has        round 3   round 4
#   rank 0    c2 (0)    c1 (2+0)       c0 (1+2+0)      c0        c2
#   rank 1    c0 (1)    c2 (0+1)       c1 (2+0+1)      c1        c0
#   rank 2    c1 (2)    c0 (1+2)       c2 (0+1+2)      c2        c1
# ```
#
# That is what each sends, with those whose share is in it. In n - 1 rounds each rank has one chunk
# of the sum; in n - 1 more rounds these go around. So each rank sends 2(n-1) messages of S/n bytes:
# **2(n-1)/n · S bytes**, less than 2S however many ranks there are.

# %% [markdown]
# Third, when they travel. Backward begins at the last layer, whose gradients are ready long before
# those of the first. Collect some in a **bucket**; when it is full it leaves, and backward goes on:
#
# ```
#   naive      forward | backward: g9 g8 g7 g6 g5 g4 g3 g2 g1 g0 | w9 w8 w7 ... w1 w0 | step
#
#   DDP        forward | backward: g9 g8 g7 | g6 g5 g4 | g3 g2 g1 g0 | wait | step
#                                          [ bucket 0 ][ bucket 1   ][ 2  ]
# ```
#
# Nothing less is sent. But few large messages pay the latency seldom, and all but the last travel
# while the rank computes: **overlap**.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | data parallelism (DP) | 数据并行 | every rank has the same model and different rows of the batch |
# | replica | 模型副本 | one complete copy of the model, on one rank or on the t · p ranks that share it |
# | ring all-reduce | 环形全归约 | chunks travel around a ring; each rank sends 2(n-1)/n · S bytes |
# | latency (α) | 延迟 | the time before the first byte of a message arrives |
# | gradient bucket | 梯度桶 | gradients that are sent in one message |
# | overlap | 通信与计算重叠 | communication that runs while the rank computes |
# | exposed communication | 未被掩盖的通信 | communication time that no computation hides |
# | hook | 钩子函数 | a function that autograd calls, here when a gradient is ready |
# | gradient accumulation | 梯度累积 | several backwards add up gradients before one optimizer step |
# | micro-batch | 微批次 | the rows of a batch that one forward and backward process together |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# What the model has:

# %% tags=["nbval-check-output"]
model = GPT.preset("1M", vocab=256)
P = sum(p.nbytes for p in model.parameters())  # bytes of all gradients, too
print(f"{len(list(model.parameters()))} parameters, P = {P:,} bytes")

# %% [markdown]
# For `NaiveDDP` on n = 2 ranks, in one step: how many all-reduces does a rank call? How many bytes
# does it send? And how long do these take on our wire, if α is the latency and β the seconds per
# byte? One all-reduce of S bytes is 2(n-1) messages of S/n bytes, one after the other:
#
# ```
#   T(S) = 2(n-1) · (α + S/n · β)
# ```
#
# Sum it over all parameters. (`LINK.seconds(nbytes)` is nbytes · β.)

# %% stub="guess = predict(all_reduces=..., sent_bytes=...)\nguess_waiting = predict(waiting_ms=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(all_reduces=68, sent_bytes=2 * (2 - 1) * P // 2)
alpha_s, beta_s = 500e-6, LINK.seconds(1)
guess_waiting = predict(waiting_ms=round(1e3 * (68 * 2 * alpha_s + P * beta_s), 1))
### END SOLUTION
guess

# %% [markdown]
# And with DDP, in buckets of at most 0.5 MiB? The bytes stay. At least P / 0.5 MiB = 7 messages; a
# parameter is never cut in two, so it may be some more. You will count them below.

# %% [markdown]
# ## 4. Read it
#
# The naive way, from the library. Autograd calls `_on_grad_ready` when a parameter's gradient is
# there; the first call has `_average` run at the end of this backward.

# %%
show("parallel/naive_ddp.py:NaiveDDP._on_grad_ready")

# %%
show("parallel/naive_ddp.py:NaiveDDP._average")

# %% [markdown]
# Divide, all-reduce: that is all. (`flagged_gradient` is the gradient, divided by n; of a parameter
# that this rank did not use it is -0.0, which changes no sum. You will miss it in section 6.)
#
# Now DDP. Parameters go into buckets, **last first**, since that is how backward makes their
# gradients:

# %%
show("parallel/common/flat.py:cut")

# %% [markdown]
# A bucket is one flat tensor with a place (`view`) for each of its gradients. `fill` calls this for
# each gradient, to divide it by n and put it there. Then one all-reduce starts: that is the `hook`,
# unless you give another.

# %%
show("parallel/common/flat.py:GradBuffer.put")

# %%
show("parallel/ddp/ddp.py:DDP._send")

# %%
show("parallel/ddp/comm_hooks.py:all_reduced")

# %% [markdown]
# With `async_op=True` an all-reduce returns a **handle** at once; the tensor belongs to the wire
# until `handle.wait()` returns.

# %% [markdown]
# Autograd calls this function at each finished gradient. Look at the `while`: a bucket that is full
# waits for its turn, so that all ranks send in the **same order**. (In the first step DDP also notes
# in which order gradients really come; from then on the buckets are filled in that order.)

# %%
show("parallel/common/data_parallel.py:GradReducer._on_grad_ready")

# %%
show("parallel/common/data_parallel.py:GradReducer._finish")

# %% [markdown]
# `_finish` runs when backward is over, before `loss.backward()` returns. So the training loop does
# not change at all.

# %% [markdown]
# ## 5. Run it
#
# First the prediction. The bytes must be equal, to the byte:


# %% tags=["nbval-check-output"]
def sent_in_a_step(trace):
    return [event.bus_bytes for event in trace.ranks[0].comms if event.step == 2]


guess.beside(all_reduces=len(sent_in_a_step(naive)), sent_bytes=sum(sent_in_a_step(naive)))

# %% [markdown]
# The time need not be equal. The formula is a lower bound: it knows nothing of a rank that is late,
# nor of a machine that has other things to do each time a message arrives.

# %%
guess_waiting.beside(waiting_ms=round(1e3 * times.waiting_s, 1))

# %% [markdown]
# Now one thing at a time: one bucket for everything, smaller buckets, smaller buckets that overlap.

# %%
ways = {
    "one bucket": partial(DDP, bucket_mb=25),
    "0.5 MiB buckets": partial(DDP, bucket_mb=0.5, overlap=False),
    "0.5 MiB, overlap": partial(DDP, bucket_mb=0.5),
}
runs = {"naive": naive}
for name, wrap in ways.items():
    with record() as runs[name]:
        world.run(train, wrap)
plot.compare(runs)

# %% [markdown]
# On the right nothing changes: the same bytes. On the left the purple part is communication that
# nobody notices.

# %%
plot.timeline(runs["0.5 MiB, overlap"])

# %% [markdown]
# Below the computing of each rank are its all-reduces; they begin soon after backward has begun.
# What is left of the waiting is what came last: the first layers' gradients, with nothing behind
# which they could hide. The last bucket has a row of its own: `_finish` sends it directly, while
# earlier buckets may still be in the queue of asynchronous operations. It may therefore end before
# them, and the ranks then wait for the queue, whose order is the same on all ranks. A rank that
# ends backward earlier than the other waits longer.

# %% tags=["nbval-check-output"]
for name, trace in runs.items():
    sent = sent_in_a_step(trace)
    print(f"{name:<18} {sum(sent):>10,} bytes in {len(sent):>2} messages")
print(f"{'predicted':<18} {DDP.predict(model, size=2).bus_bytes:>10,.0f} bytes")

# %% [markdown]
# Look around in it: choose the step, zoom, leave out a rank.

# %%
plot.view(runs["0.5 MiB, overlap"])

# %% [markdown]
# Is it still the same training? The oracle is a single process with the whole batch. In float64,
# where rounding is small, with and without ranks:


# %%
alone = World(1)


# %% tags=["nbval-check-output"]
def losses_of(ranks, wrap):
    shares = ranks.run(train, wrap, steps=2, dtype=torch.float64, rows=8)
    return torch.tensor(shares, dtype=torch.float64).mean(dim=0)  # over the ranks


single, ddp = losses_of(alone, Single), losses_of(world, partial(DDP, bucket_mb=0.5))
print("equal losses:", torch.allclose(single, ddp, rtol=1e-10))

# %% [markdown]
# And the memory? One step recorded **in detail** says what every byte is for. The dashed line is
# what the formula says a rank holds: parameters P, gradients P, Adam's two moments 2P.

# %%
with record(detail_step=1) as detail:
    world.run(train, ways["0.5 MiB, overlap"], steps=2)
plot.memory(detail, predicted=DDP.predict(model, size=2))

# %% [markdown]
# The three lowest layers end at the line. Every rank holds all of it, twice the ranks hold it
# twice: data parallelism saves time, never memory. (Lab 07 takes that up.) Buckets cost little
# more than one bucket in flight, since after backward the gradients *are* views of the buckets.

# %% [markdown]
# ## 6. Break it
#
# ### A division
#
# Somebody wrote the averaging by hand. It runs, the loss goes down. Read it, then look at the
# losses beside a single process:


# %%
def all_together(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.grad)


def by_hand(average, make_optimizer, steps=12):
    me = attach()
    torch.manual_seed(0)
    model = GPT.preset("tiny").to(me.device)
    optimizer = make_optimizer(model.parameters())
    text, losses = Text(), []
    for step in range(steps):
        batch = text.batch(step, rows=8, length=16).slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        value = loss(model(batch.x), batch)
        value.backward()
        average(me.comm, model)
        optimizer.step()
        losses.append(value.item())
    return losses


# %%
fig, panels = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
sgd, adam = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=1e-2)
for axes, make, name in zip(panels, (sgd, adam), ("SGD", "AdamW")):
    right = alone.run(by_hand, lambda comm, model: None, make)[0]
    ranks = torch.tensor(world.run(by_hand, all_together, make)).mean(dim=0)
    axes.plot(right, color="#0072B2", lw=4, alpha=0.5, label="single process")
    axes.plot(ranks, "--", color="#D55E00", label="all_together, 2 ranks")
    axes.set(title=name, xlabel="step")
    axes.spines[["top", "right"]].set_visible(False)
panels[0].legend(frameon=False)
panels[0].set(ylabel="loss")
fig.tight_layout()

# %% [markdown]
# With SGD the lines part, and the wrong one even looks better: its learning rate is twice what it
# says. With Adam they lie on each other: it divides each gradient by its own size, so a factor
# disappears. The bug is still there, and comes out when somebody clips gradients or changes the
# number of ranks. **A loss curve proves nothing; a gradient does:**


# %% tags=["nbval-check-output"]
def gradient(average):
    me = attach()
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(me.device, torch.float64)
    x = torch.arange(32.0, dtype=torch.float64).reshape(8, 4).to(me.device)
    model(x.tensor_split(me.size)[me.rank]).square().mean().backward()
    average(me.comm, model)
    return model.weight.grad.cpu()


right = alone.run(gradient, lambda comm, model: None)[0]
world.run(gradient, all_together)[0] / right

# %% [markdown]
# Twice the right one on 2 ranks, 1,000 times on 1,000. `all_reduce` sums; the division was
# forgotten.
#
# ### Accumulation: three bugs and a half
#
# A batch too large for memory is run as several **micro-batches**; their gradients add up in
# `.grad`, and then comes one step. Each of these has one bug. Find it before you run the next
# cell. (`no_sync`: backwards inside it do not send.)


# %%
def a(comm, model, parts):
    ddp = DDP(model, comm)
    for x, y in parts:
        (F.mse_loss(ddp(x), y) / len(parts)).backward()


def b(comm, model, parts):
    ddp = DDP(model, comm)
    with ddp.no_sync():
        for x, y in parts[:-1]:
            F.mse_loss(ddp(x), y).backward()
    x, y = parts[-1]
    F.mse_loss(ddp(x), y).backward()


def c(comm, model, parts):
    for x, y in parts:
        (F.mse_loss(model(x), y) / len(parts)).backward()
        for p in model.parameters():
            comm.all_reduce(p.grad)
    for p in model.parameters():
        p.grad /= comm.size


# %%
def measure(accumulate, rows):
    """Bytes sent, and the gradient, of 2 ranks with micro-batches of so many rows."""
    comm = attach().comm
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False, dtype=torch.float64)
    x = torch.randn(comm.size * sum(rows), 8, dtype=torch.float64)
    y = x.sum(dim=1, keepdim=True) * torch.arange(1.0, len(x) + 1)[:, None]
    right = torch.autograd.grad(F.mse_loss(model(x), y), model.weight)[0]
    mine = [part.split(sum(rows))[comm.rank].split(rows) for part in (x, y)]
    with listen() as events:
        accumulate(comm, model, list(zip(*mine)))
    sent_bytes = sum(event.bus_bytes for event in events if event.op == "all_reduce")
    error = (model.weight.grad - right).norm() / right.norm()
    return sent_bytes, f"{error:.0%}"


# %% tags=["nbval-check-output"]
for name, accumulate in {"a": a, "b": b, "c": c}.items():
    sent_bytes, error = world.run(measure, accumulate, [4, 4])[0]
    print(f"{name}: {sent_bytes} bytes sent, the gradient is {error} off")
print(f"a with parts of 6 and 2 rows: {world.run(measure, a, [6, 2])[0][1]} off")

# %% [markdown] tags=["answer"]
# - **a** forgot `no_sync`. The gradient is right, and everything is sent twice: k micro-batches,
#   k times the bytes. No test of the numbers ever finds it.
# - **b** forgot to divide by the number of micro-batches: twice the gradient, 100 % off.
# - **c** synchronises twice: at the second time, what was summed already is summed again.
# - The half: **a** divides by the *number* of parts. Where the last one is smaller, its rows count
#   too much: a mean of means is the mean for equal parts only. With language models this happens
#   at every step, since texts differ in length. (Hugging Face Transformers mended it in October 2024.)

# %% [markdown]
# ### Ranks that disagree
#
# Two experts; each row of the data says which one it wants. An expert that had no row has no
# gradient, "so there is nothing to send":


# %%
def two_experts(widths):
    comm = attach().comm
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(width, 1, bias=False) for width in widths)
    mine = experts[comm.rank]  # rank 0 happens to need the first one, rank 1 the second
    mine(torch.ones(1, mine.in_features)).sum().backward()
    for p in experts.parameters():
        if p.grad is not None:
            comm.all_reduce(p.grad.div_(comm.size))
    return [None if p.grad is None else p.grad[0].tolist() for p in experts.parameters()]


# %% tags=["raises-exception"]
short = World(2, timeout_s=2)
short.run(two_experts, [3, 5])

# %% [markdown]
# You are lucky: the shapes differ, and the message shows which line sends what. NCCL would not
# compare; it would hang, or mix up memory. Now with experts of the **same** shape:

# %% tags=["nbval-check-output"]
short.run(two_experts, [3, 3])

# %% [markdown]
# No error. The right gradients are 0.5 for both experts on both ranks; here each rank has one of
# them 1.0 and the other not at all, because the gradient of expert 0 was added to that of expert 1.
#
# Every rank must call the same all-reduces, in the same order, whatever its data. So labkit's DDP
# sends -0.0 for what a rank did not use. In torch you ask for it: `find_unused_parameters=True`.

# %% [markdown]
# ## 7. Build it
#
# Each check runs your code on real ranks and compares gradients with a single process, and bytes
# with the formula.

# %% [markdown]
# ### Exercise 1: The naive way
#
# `loss.backward()` has run on every rank. Make each `p.grad` the mean over the ranks, with one
# all-reduce per parameter.


# %%
def average_gradients(comm, model):
    ### BEGIN SOLUTION
    for p in model.parameters():
        p.grad.div_(comm.size)
        comm.all_reduce(p.grad)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.average_gradients(average_gradients)

# %% [markdown]
# ### Exercise 2: Buckets
#
# The same gradients in fewer messages. Go through the parameters from the **last to the first**.
# Put gradients into a bucket as long as it has at most `bucket_bytes`; one that is larger by itself
# gets its own. Each bucket is one flat tensor and one all-reduce; afterwards its parts go back into
# `p.grad`.
#
# Useful: `torch.cat([g.view(-1) for g in gradients])`, `flat.split(sizes)`, `g.nbytes`.


# %%
def average_in_buckets(comm, model, bucket_bytes):
    ### BEGIN SOLUTION
    buckets = [[]]
    for p in reversed(list(model.parameters())):
        if buckets[-1] and sum(g.nbytes for g in buckets[-1]) + p.grad.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(p.grad)
    for gradients in buckets:
        flat = torch.cat([g.view(-1) for g in gradients]) / comm.size
        comm.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.average_in_buckets(average_in_buckets)

# %% [markdown]
# ### Exercise 3: Overlap
#
# Without buckets, to see the one new thing: autograd calls `gradient_is_there(p)` while backward
# runs, as soon as `p.grad` is finished. Start its all-reduce there, and do not wait. The training
# loop calls `finish()` after each `loss.backward()`.
#
# The check looks at what was asked for when backward comes to the first layer.


# %%
class Overlapped:
    def __init__(self, comm, model):
        self.comm, self.handles = comm, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.gradient_is_there)

    def gradient_is_there(self, p):
        ### BEGIN SOLUTION
        p.grad.div_(self.comm.size)
        self.handles.append(self.comm.all_reduce(p.grad, async_op=True))
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.Overlapped(Overlapped)

# %% [markdown]
# Your class on the paced wire. It overlaps; what does it lack, compared with DDP?


# %%
def train_overlapped(steps=2):
    me = attach()
    torch.manual_seed(0)
    model = GPT.preset("1M", vocab=256).to(me.device)
    overlapped = Overlapped(me.comm, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Text()
    for step in range(steps):
        batch = text.batch(step, rows=32, length=64).slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        loss(model(batch.x), batch).backward()
        overlapped.finish()
        optimizer.step()


with record() as mine:
    world.run(train_overlapped)
plot.timeline(mine)

# %% [markdown] tags=["answer"]
# 68 messages, each with its own latency: the wire is still busy when backward has long ended. It
# lacks buckets.

# %% [markdown]
# ### Exercise 4: Accumulation, without the bugs
#
# `ddp` is labkit's DDP, `parts` a list of micro-batches `(x, y)`; the last one may have fewer rows.
# Leave in `.grad` the gradient of `F.mse_loss` over the **whole** batch, and send it once.


# %%
def accumulate(ddp, parts):
    ### BEGIN SOLUTION
    rows = sum(len(x) for x, _ in parts)
    with ddp.no_sync():
        for x, y in parts[:-1]:
            (F.mse_loss(ddp(x), y) * len(x) / rows).backward()
    x, y = parts[-1]
    (F.mse_loss(ddp(x), y) * len(x) / rows).backward()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.accumulate(accumulate)

# %% [markdown]
# ### Exercise 5, open: The best buckets
#
# Too small, and you pay the latency often; too large, and they leave late. On paper there is no
# noise: `nbytes[i]` is the size of the i-th gradient in backward's order, `ready_us[i]` when
# backward has made it. Return how many gradients each bucket takes: `[2, 30, 36]`. Your score is
# the waiting that is left, by this formula, on a slow and on a fast machine:

# %%
show("labs/lab_05/buckets.py:exposed_us")

# %%
from labkit.labs.lab_05.buckets import FAST, SLOW, exposed_us, gradients_of

for name, speed in [("slow", SLOW), ("fast", FAST)]:
    nbytes, ready_us = gradients_of(speed)
    one_ms = exposed_us([len(nbytes)], nbytes, ready_us) / 1e3
    each_ms = exposed_us([1] * len(nbytes), nbytes, ready_us) / 1e3
    print(f"{name} machine: backward takes {ready_us[-1] / 1e3:.0f} ms, then the ranks wait")
    print(f"    {one_ms:.1f} ms with one bucket, {each_ms:.1f} ms with one for each gradient")


# %%
def choose_buckets(nbytes, ready_us):
    ### BEGIN SOLUTION
    def cut(bucket_bytes):
        counts, filled_bytes = [], bucket_bytes
        for size_bytes in nbytes:
            if filled_bytes + size_bytes > bucket_bytes:
                counts.append(0)
                filled_bytes = 0
            counts[-1] += 1
            filled_bytes += size_bytes
        return counts

    cuts = [cut(bucket_bytes) for bucket_bytes in range(20_000, 2_000_000, 20_000)]
    return min(cuts, key=lambda counts: exposed_us(counts, nbytes, ready_us))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose_buckets(choose_buckets)

# %% [markdown]
# Ideas for more: must all buckets be of one size? Which of them does nobody hide?

# %% tags=["nbval-check-output"]
report("05")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the call | size of a bucket | accumulate, send once |
# |---|---|---|---|
# | torch | `DistributedDataParallel(model)` | `bucket_cap_mb=25` | `with model.no_sync():` |
# | Accelerate | `accelerator.prepare(model)` | `DistributedDataParallelKwargs(bucket_cap_mb=25)` | `with accelerator.accumulate(model):` |
# | DeepSpeed | `deepspeed.initialize(...)`, `engine.backward(loss)` | `"reduce_bucket_size"` (numbers, not bytes), `"overlap_comm"` | `"gradient_accumulation_steps"` |
# | Horovod | `hvd.DistributedOptimizer(optimizer)` | `HOROVOD_FUSION_THRESHOLD` (128 MB) | `backward_passes_per_step=k` |
# | labkit | `DDP(model)` | `bucket_mb=25` | `with ddp.no_sync():`, `for x, y in ddp.accumulate(parts):` |

# %% [markdown]
# What they add:
#
# - **torch**: a first bucket of 1 MiB, so that sending begins early. Much else that it has, labkit's
#   DDP has, too: buckets rearranged after the first step, in the order in which gradients really
#   came; `static_graph=True`; hooks that send half the bytes (torch: `register_comm_hook`, here
#   `DDP(model, hook=compressed(torch.bfloat16))`); `join()` for ranks whose data ends early.
# - **Horovod**: fuses whatever is ready within a cycle of 1 ms (`HOROVOD_CYCLE_TIME`). Its ranks
#   first agree on what all have ready, so the order may differ between them.
# - **DeepSpeed** and **Accelerate**: they count micro-batches for you. How they weigh uneven ones
#   is still for you to check.
#
# Sources: Li et al., *PyTorch Distributed*, 2020 (arXiv 2006.15704); Sergeev and Del Balso,
# *Horovod*, 2018 (arXiv 1802.05799).

# %% [markdown]
# **You can now** say what data parallelism costs before you run it, see how much of it is hidden,
# find the classic bugs by a gradient instead of a loss curve, and write DDP yourself.
