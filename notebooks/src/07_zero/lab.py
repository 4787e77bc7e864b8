# %% [markdown]
# # Lab 07: ZeRO, stages 1 and 2
#
# Data parallelism makes training fast, and keeps everything once on every rank. In this lab you
# count what that is, find that most of it is used by nobody most of the time, and give each rank a
# share of it instead: first the optimizer's state (stage 1), then the gradients, too (stage 2). The
# bytes on the wire stay what they were.
#
# You need lab 02 (reduce-scatter, all-gather), lab 05 (DDP) and lab 06 (dry runs).

# %%
import hashlib
from dataclasses import replace
from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import nn

from labkit import DDP, GPT, Link, MasterWeights, Text, World, ZeroOptimizer, attach, loss, plot
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_07 import checks as check
from labkit.parallel.common.flat import FlatPartition
from labkit.replaying import dry_run
from labkit.trace import CATEGORIES
from labkit.trace.recording import record

# %% [markdown]
# ## 1. The question
#
# The loop of lab 05, as large models are trained: in **mixed precision**. The model is in bf16, a
# number of 2 bytes. With 7 fraction bits (8 with the leading 1), 1 + 0.001 is 1: a small step is lost.
# So the optimizer has an exact fp32 copy of each weight, the **master weights**, steps on that, and
# rounds.


# %%
SIZES = dict(vocab=256, width=192, depth=2, heads=6, context=64)


def train(build, steps=2, rows=2, dtype=torch.bfloat16, look=None):
    me = attach()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(me.device, dtype)
    parallel, optimizer = build(model)
    text, losses = Text(), []
    for step in range(steps):
        batch = text.batch(step, rows=rows * me.size, length=64)
        batch = batch.slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        value = loss(parallel(batch.x), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return (losses, look(model, optimizer)) if look else losses


def with_ddp(model, bucket_mb=0.25):
    adam = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return DDP(model, bucket_mb=bucket_mb), adam


# %% [markdown]
# Four ranks. What does each keep from one step to the next, and is it the same as on the others? Of
# every tensor we ask for its bytes, and for a fingerprint of them.


# %%
def kept(model, optimizer):
    things = list(model.parameters()) + [p.grad for p in model.parameters()]
    for master, state in optimizer.state.items():
        things += [master, state["exp_avg"], state["exp_avg_sq"]]
    raw = [x.detach().cpu().contiguous().view(torch.uint8).numpy() for x in things]
    return [(x.nbytes, hashlib.sha256(x).hexdigest()) for x in raw]


world = World(4)
with record(detail_step=1) as ddp:
    fingerprints = [found for _, found in world.run(train, with_ddp, look=kept)]

# %% tags=["nbval-check-output"]
P = formulas.parameters(**SIZES)
nbytes = sum(size for size, _ in fingerprints[0])
same = sum(every[0][0] for every in zip(*fingerprints) if len(set(every)) == 1)
print(f"{P:,} parameters, {nbytes:,} bytes on rank 0: {nbytes / P:g} for each parameter.")
print(f"The same on all 4 ranks: {same / P:g} of these {nbytes / P:g} bytes.")

# %%
plot.memory(ddp, ranks=[0], predicted=16 * P)

# %% [markdown]
# **16 bytes** for a parameter of 2. (Grey is what no formula counts: the text, and during the step the
# gradients once more, in fp32.) A model of 7.5 billion takes 120 GB on every rank, more than an H100
# has (80 GB), and more GPUs do not help: each has the same. **Must every rank keep what all the
# others keep, too?**

# %% [markdown]
# ## 2. The idea
#
# First: who needs these bytes, and when?
#
# ```
#                               forward   backward   step
#   weights         bf16   2       x          x        x
#   gradients       bf16   2                  x        x
#   master weights  fp32   4  }                        x
#   Adam's mean     fp32   4  }  K = 12                x
#   Adam's square   fp32   4  }                        x
# ```
#
# Twelve of sixteen are for the step alone. And Adam treats each number by itself: to step on half
# of the numbers it needs half of the state.
#
# So rank r of n keeps the optimizer for 1/n of all parameters: its **share**. It steps on that, and
# the others tell it the rest. That is **stage 1**.

# %% [markdown]
# Second: what must travel? Remember lab 02: a ring all-reduce is a reduce-scatter, then an
# all-gather. In between, each rank has the mean of one share. That is all it needs to step.
#
# ```
#   DDP    backward  | reduce-scatter of g, all-gather of g |  step on all of it
#
#   ZeRO   backward  | reduce-scatter of g |  step on a share  | all-gather of w |
# ```
#
# The step moves in between, and weights are gathered instead of gradients. The bytes are the same.
#
# Third: after the reduce-scatter, gradients of others' shares are of no use. Free them as soon as
# they have left, bucket after bucket, while backward runs: **stage 2**.

# %% [markdown]
# Fourth: whose is what? Tensors differ in size, shares should not. So lay all tensors of a bucket
# one after the other, add zeros until n divides, and cut:
#
# ```
#   tensors   | a a a a a a a a | b b | c c c c c c c c c c c |  zeros  |
#   shares    |     rank 0      |     rank 1      |     rank 2          |
# ```
#
# A cut may fall in the middle of a row. Adam does not mind. (An optimizer that looks at a matrix as
# a whole does; `ZeroOptimizer` tries yours before it begins, and refuses it.)

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | mixed precision | 混合精度 | training with several number formats, such as a 16-bit model and a 32-bit optimizer |
# | master weights | 主权重（FP32 副本） | fp32 copies of the weights, which the optimizer updates |
# | model states | 模型状态 | parameters, gradients and optimizer state |
# | optimizer state | 优化器状态 | tensors that an optimizer keeps between steps: moments, master weights |
# | ZeRO (zero redundancy optimizer) | 零冗余优化器 | each rank keeps only its share of the model states |
# | shard | 分片 | the part of a tensor that one rank keeps |
# | flat partition | 扁平化分区 | tensors laid out in one buffer and split into equal shares |
# | padding | 填充 | zeros added so that the size is divisible by n |
# | owner | 所有者 | the rank that holds and updates a share |
# | reduce-scatter | 归约散播 | rank r gets chunk r of the sum over all ranks |
# | all-gather | 全收集 | every rank gets the chunks of all ranks |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# For P parameters on n ranks, derive from the table of section 2: how many bytes does a rank hold
# for each parameter, with n = 4? And how many does it **send** in a step? (A reduce-scatter or an
# all-gather of S bytes sends (n-1)/n · S from each rank.)

# %% stub="held = predict(ddp=..., stage_1=..., stage_2=...)\nsent = predict(ddp_bytes=..., stage_1_bytes=..., stage_2_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
n = 4
held = predict(ddp=2 + 2 + 12, stage_1=2 + 2 + 12 / n, stage_2=2 + 2 / n + 12 / n)
all_reduce = 2 * (n - 1) * 2 * P // n  # of bf16 gradients
halves = (n - 1) * 2 * P // n + (n - 1) * 2 * P // n  # gradients, then weights
sent = predict(ddp_bytes=all_reduce, stage_1_bytes=halves, stage_2_bytes=halves)
### END SOLUTION
print(held, sent, sep="\n")

# %% [markdown]
# What would many ranks save at most? The same formulas for 7.5 billion parameters, as the library
# has them; they are Table 1 of the paper:

# %% tags=["nbval-check-output"]
print("  ranks      DDP  stage 1  stage 2   (GB)")
for dp in (1, 4, 16, 64, 256, 1024):
    row = [formulas.model_state_bytes(7.5e9, dp, stage) / 1e9 for stage in (0, 1, 2)]
    print(f"{dp:>7}" + "".join(f"{gb:>9.2f}" for gb in row))

# %% [markdown]
# With 64 ranks stage 2 is at 16.6 GB, and then it stays: the 2 P of the weights are still whole
# everywhere. (Lab 08 takes that up.)

# %% [markdown]
# ## 4. Read it
#
# The partition. Where does a tensor meet a share? From the later of both beginnings to the earlier
# of both ends:

# %%
show("parallel/common/flat.py:FlatPartition.pieces")

# %% [markdown]
# A bucket has one flat buffer for its weights, and the parameters become views of it. So nothing is
# copied to be gathered. `stepped` is what the optimizer gets: this rank's share in fp32.

# %%
show("parallel/zero/shares.py:ParamShare.__init__", since="self.partition", until="self._versions")

# %% [markdown]
# Autograd calls a hook at each finished gradient: it is `GradReducer._on_grad_ready` of lab 05, and
# says when a bucket leaves. The gradient is divided on its way to its place, by `put` of the same
# `GradBuffer`. First it is noted: **a gradient that comes twice is an error**. Section 6 shows why.

# %%
show("parallel/common/flat.py:GradBuffer.take")

# %% [markdown]
# What DDP does by an all-reduce, ZeRO does by a reduce-scatter, which stops halfway: each rank has
# the averages of its share.

# %%
show("parallel/zero/zero.py:ZeroOptimizer._send")

# %% [markdown]
# In stage 1 that share is a view of all the gradients, which stay:

# %%
show("parallel/zero/buckets.py:ZeroBucket.receive_buffer")

# %% [markdown]
# In stage 2 the share has memory of its own, and all the others lose their last reference: `p.grad`
# here, the flat buffer when it has been sent.

# %%
show(
    "parallel/zero/buckets.py:Stage2Bucket.receive_buffer",
    since="for p in self.parameters:",
)

# %%
show("parallel/zero/buckets.py:Stage2Bucket._on_averages_received")

# %% [markdown]
# No more than two buckets (`max_in_flight`) are under way in stage 2, or a slow wire would make them
# pile up. Then each rank steps on its share, and gathers, those first that forward needs first.

# %%
show("parallel/common/data_parallel.py:GradReducer._send_next")

# %%
show("parallel/zero/zero.py:ZeroOptimizer.step", since="for bucket in", until="return value")

# %% [markdown]
# ## 5. Run it
#
# `ZeroOptimizer` takes the place of the optimizer, and of DDP. The loop stays as it is.


# %%
def with_zero(model, stage, bucket_mb=0.25, **options):
    adam = torch.optim.AdamW
    optimizer = ZeroOptimizer(
        model.parameters(), adam, stage=stage, bucket_mb=bucket_mb, lr=1e-3, **options
    )
    return model, optimizer


ways = {
    "ZeRO-1": partial(with_zero, stage=1),
    "ZeRO-2": partial(with_zero, stage=2),
    "ZeRO-2, one bucket": partial(with_zero, stage=2, bucket_mb=25),
}
runs = {"DDP": ddp}
for name, build in ways.items():
    with record(detail_step=1) as runs[name]:
        world.run(train, build)

# %% [markdown]
# What a rank held when the step began, by what it was for; and what it sent:


# %%
def before_the_step(trace, rank=0):
    """Bytes of parameters, gradients and optimizer state when optimizer.step() begins."""
    one = trace.ranks[rank]
    (step,) = (x for x in one.spans if x.phase == "optimizer" and x.depth == 0 and x.step == 1)
    last = [point for point in one.memory if point.when_s <= step.began_s][-1]
    by_category = dict(zip(CATEGORIES, last.held_bytes))
    return [by_category[name] for name in ("parameters", "gradients", "optimizer state")]


def sent_in_a_step(trace, rank=0):
    return sum(event.bus_bytes for event in trace.ranks[rank].comms if event.step == 1)


# %% tags=["nbval-check-output"]
three = [runs["DDP"], runs["ZeRO-1"], runs["ZeRO-2"]]
in_all = [round(sum(before_the_step(trace)) / P, 3) for trace in three]
held.beside(ddp=in_all[0], stage_1=in_all[1], stage_2=in_all[2])

# %% tags=["nbval-check-output"]
sums = [sent_in_a_step(trace) for trace in three]
sent.beside(ddp_bytes=sums[0], stage_1_bytes=sums[1], stage_2_bytes=sums[2])

# %% [markdown]
# Rounded to three digits. To the byte there is a little more: Adam counts its steps, in 4 bytes for
# each tensor that it is given, here for each piece. With these, on every rank:

# %% tags=["nbval-check-output"]
model = GPT(**SIZES).to(torch.bfloat16)
for stage in (1, 2):
    for rank in range(4):
        its = ZeroOptimizer.predict(model, 4, stage, bucket_mb=0.25, rank=rank)
        predicted = [its.parameter_bytes, its.gradient_bytes, its.optimizer_bytes]
        measured = before_the_step(runs[f"ZeRO-{stage}"], rank)
        verdict = "equal" if measured == predicted else "NOT EQUAL"
        print(f"stage {stage}, rank {rank}: {measured} {verdict}")

# %% [markdown]
# Now the whole step, rank 0 of each. The dashed line is the formula:


# %%
def rank_0_of(runs, formula_bytes):
    first = next(iter(runs.values()))
    ranks = {i: replace(run.ranks[0], rank=i) for i, run in enumerate(runs.values())}
    picture = plot.memory(replace(first, ranks=ranks))
    for axes, name, nbytes in zip(picture.axes, runs, formula_bytes):
        axes.set_title(name, loc="left", fontsize=9, pad=16)
        axes.axhline(nbytes / 1e6, color="black", linestyle="--", linewidth=1.2)
    picture.suptitle("Memory of rank 0 of 4  ·  dashed: the formula", x=0.01, ha="left")
    return picture


rank_0_of(runs, [16 * P, 7 * P, 5.5 * P, 5.5 * P])

# %% [markdown]
# The optimizer's share shrinks to a quarter. In stage 2 gradients come and go: with buckets, a few
# are there at a time; with one bucket for everything, all of them wait for the last, and the rank's
# share takes memory beside them: in backward, stage 2 then holds more than stage 1. **The buckets
# decide the peak.** (On a CPU, grey is mostly the text, 1.9 MB, and the shared memory through which
# the ranks exchange buckets. It grows with the bucket, so the last run ends above ZeRO-1, although
# its model states take less.)
#
# When do they travel? On a paced link, as in lab 05, and in fp32, in which most CPUs compute
# faster:

# %%
LINK = Link(gbps=0.25, latency_us=500)
paced = World(2, link=LINK)
with record() as on_wire:
    paced.run(train, ways["ZeRO-2"], steps=3, rows=16, dtype=torch.float32)
plot.timeline(on_wire)

# %% [markdown]
# The reduce-scatters hide behind backward, as DDP's all-reduces do; where a third bucket would be
# under way, backward waits for the first. What is new is the all-gather at the end: the step has
# made the weights, and nothing is left to compute. Unless one begins the **next forward** meanwhile:
# its first layer needs the first bucket only.


# %%
def early(model):
    return with_zero(model, stage=2, gather_in=model)


with record() as early_gather:
    paced.run(train, early, steps=3, rows=16, dtype=torch.float32)

# %% [markdown]
# What waits for the all-gathers, the step or the next forward?


# %%
def waits_in(trace, phase, op="all_gather"):
    """How many operations of step 1 rank 0 waits for in that phase."""
    one = trace.ranks[0]
    spans = [(x.began_s, x.ended_s) for x in one.spans if x.phase == phase and x.depth == 0]
    waits = [(x.wait_began_s, x.wait_ended_s) for x in one.comms if x.op == op and x.step == 1]
    return sum(any(first < end and begin < last for begin, end in spans) for first, last in waits)


# %% tags=["nbval-check-output"]
for name, trace in {"ZeRO-2": on_wire, "ZeRO-2, gather_in": early_gather}.items():
    counts = [waits_in(trace, phase) for phase in ("optimizer", "forward")]
    print(f"{name:<18} {counts[0]} in the optimizer's step, {counts[1]} in the next forward")

# %% [markdown]
# Each module waits for its own weights. Is it still the same training? In float64 against one
# process with the whole batch:


# %%
def in_float64(ranks, build, rows):
    shares = ranks.run(train, build, rows=rows, dtype=torch.float64)
    return torch.tensor(shares, dtype=torch.float64).mean(dim=0)


def plain(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


alone = in_float64(World(1), plain, rows=8)

# %% tags=["nbval-check-output"]
for name in ("ZeRO-1", "ZeRO-2"):
    equal = torch.allclose(in_float64(world, ways[name], rows=2), alone, rtol=1e-10)
    print(f"{name} has the losses of one process: {equal}")

# %% [markdown]
# Last, the number of section 1 without the machines: 7.5 billion parameters on 64 ranks, as a dry
# run (lab 06). One layer, very wide, in one bucket, so that it is short: only
# the sum counts.

# %%
LARGE = dict(vocab=50257, width=22900, depth=1, heads=100, context=1024)


def train_large(build, steps=2):
    model, optimizer = build(GPT(**LARGE).to(attach().device, torch.bfloat16))
    tokens = torch.zeros(1, 64, dtype=torch.long, device=attach().device)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


# %%
zeros = [partial(with_zero, stage=stage, bucket_mb=20_000) for stage in (1, 2)]
builds = [partial(with_ddp, bucket_mb=20_000), *zeros]
on_paper = [dry_run(train_large, build, ranks=64) for build in builds]

# %% tags=["nbval-check-output"]
P_large = formulas.parameters(**LARGE)
for stage, trace in enumerate(on_paper):
    formula_gb = formulas.model_state_bytes(P_large, 64, stage) / 1e9
    counted_gb = sum(before_the_step(trace)) / 1e9
    print(f"stage {stage}: {counted_gb:6.2f} GB counted, {formula_gb:6.2f} GB by the formula")

# %% [markdown]
# ## 6. Break it
#
# ### One parameter is wrong
#
# Somebody wrote stage 1 by hand. A hook for every parameter of every module moves its gradient into
# the flat buffer. It runs, and the loss falls. Read it; do you see it?


# %%
class Tied(nn.Module):
    """The table of tokens is the head's weight, too, as in many language models."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.table(tokens)).tanh())


# %%
def flat_gradients(comm, model, backward):
    parameters = list(model.parameters())
    layout = FlatPartition([p.shape for p in parameters], comm.size)
    flat = torch.zeros(layout.padded)
    place = dict(zip(parameters, layout.views(flat)))

    def gradient_is_there(p):
        place[p] += p.grad / comm.size

    for module in model.modules():
        for p in module.parameters(recurse=False):
            p.register_post_accumulate_grad_hook(gradient_is_there)
    backward()
    comm.reduce_scatter_tensor(layout.share_of(flat, comm.rank), flat)
    comm.all_gather_into_tensor(flat, layout.share_of(flat, comm.rank).clone())
    return layout.views(flat)


# %% [markdown]
# Compare gradients, not losses (lab 05), each by its name:


# %%
def hunt():
    comm = attach().comm
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(8, (4 * comm.size, 6))

    def mean_loss(rows):
        return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten())

    right = torch.autograd.grad(mean_loss(tokens), list(model.parameters()))
    mine = tokens.chunk(comm.size)[comm.rank]
    found = flat_gradients(comm, model, lambda: mean_loss(mine).backward())
    names = [name for name, _ in model.named_parameters()]
    return {name: round(float(f.norm() / r.norm()), 3) for name, f, r in zip(names, found, right)}


# %% tags=["nbval-check-output"]
world.run(hunt)[0]

# %% [markdown] tags=["answer"]
# The tied weight belongs to two modules, so two hooks were registered, and each added the gradient.
# `model.parameters()` names a parameter once, however many modules have it: register there. With
# Adam no loss curve shows it, since a factor of 2 in a gradient cancels. With a bucket that counts
# down its parameters it is worse: it is "full" one gradient early, and leaves without it.
#
# That is what the error in `GradBuffer.take` is for. DeepSpeed asserts the same: a parameter that
# has been reduced must not come again.

# %% [markdown]
# ### Micro-batches
#
# In stage 2 nobody keeps whole gradients, so each **micro-batch** is reduced at once, and its share
# added up. Three ways to do it, each with one bug. Here every gradient of the first micro-batch is
# 1 on all ranks, of the second 10, of the third 100. The right share is full of 111.


# %%
def a(comm, parts):
    share = torch.zeros(len(parts[0]) // comm.size)
    for gradient in parts:
        comm.reduce_scatter_tensor(share, gradient / comm.size)
    return share


def b(comm, parts):
    whole = torch.zeros_like(parts[0])
    share = whole.chunk(comm.size)[comm.rank]  # a view: no more memory
    for gradient in parts:
        whole += gradient / comm.size
        comm.reduce_scatter_tensor(share, whole)
    return share


def c(comm, parts):
    share = torch.zeros(len(parts[0]) // comm.size)
    for gradient in parts:
        new = torch.empty_like(share)
        comm.reduce_scatter_tensor(new, gradient / comm.size, op="mean")
        share += new
    return share


# %%
def three_parts(accumulate):
    parts = [torch.full((8,), value) for value in (1.0, 10.0, 100.0)]
    return accumulate(attach().comm, parts)[0].item()


# %% tags=["nbval-check-output"]
{name: world.run(three_parts, way)[0] for name, way in {"a": a, "b": b, "c": c}.items()}

# %% [markdown] tags=["answer"]
# - **a** overwrites the share: only the last micro-batch is left.
# - **b** sends again what it has sent: the other shares of `whole` still hold the first micro-batch
#   when the second is reduced. labkit's stage 1 keeps whole gradients, too, and fills all shares but
#   its own with zeros after each reduce-scatter (`ZeroBucket._on_averages_received`).
# - **c** divides twice: 111 / 4. `op="mean"` divides, too.
#
# And one price that is no bug: stage 2 sends its gradients once for **each** micro-batch. Stage 1
# can wait for the last. So with many micro-batches stage 1 is often the faster one.

# %% [markdown]
# ## 7. Build it
#
# Partition, hook, step: stage 2 is these three. Each is checked on real ranks.
#
# ### Exercise 1: The partition
#
# Tensors of `numels` elements lie one after the other, cut into equal shares for `ranks` ranks; if
# they do not divide, the last shares end with padding. Return what lies in the share of `rank`, in
# order: `(index, start, numel)`, that is `numel` elements of tensor `index`, from its element
# `start` on. For `[8, 2, 11]` on 3 ranks, rank 1 has `[(0, 7, 1), (1, 0, 2), (2, 0, 4)]`.


# %%
def pieces(numels, ranks, rank):
    ### BEGIN SOLUTION
    share = -(-sum(numels) // ranks)  # rounded up
    found, begin = [], 0
    for index, numel in enumerate(numels):
        first = max(begin, rank * share)
        last = min(begin + numel, (rank + 1) * share)
        if first < last:
            found.append((index, first - begin, last - first))
        begin += numel
    return found
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.pieces(pieces)

# %% [markdown]
# ### Exercise 2: The hook
#
# `buckets` is a list of lists of parameters, in the order in which backward finishes them. Autograd
# calls `gradient_is_there(i, p)` when the gradient of `p`, in bucket `i`, is finished. When the
# bucket is full: put its gradients into one flat tensor, one after the other, divided by n, with
# zeros until n divides; start its reduce-scatter **without waiting**, into `self.shares[i]`; and let
# go of every `p.grad`. (`self.missing[i]` is the number of gradients that are not there yet.) `finish()` comes after each `loss.backward()`: wait, and be ready for the
# next one.
#
# Useful: `comm.reduce_scatter_tensor(share, flat, async_op=True)`, `torch.cat`, `nn.functional.pad`.


# %%
class Hooked:
    """Has autograd call gradient_is_there, and counts what each bucket misses."""

    def __init__(self, comm, buckets):
        self.comm, self.buckets = comm, buckets
        self.shares, self.handles = [None] * len(buckets), []
        self.missing = [len(bucket) for bucket in buckets]
        for i, bucket in enumerate(buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self.gradient_is_there, i))


# %%
class ToOwners(Hooked):
    def gradient_is_there(self, i, p):
        ### BEGIN SOLUTION
        self.missing[i] -= 1
        if self.missing[i]:
            return
        flat = torch.cat([p.grad.view(-1) for p in self.buckets[i]]) / self.comm.size
        flat = nn.functional.pad(flat, (0, -len(flat) % self.comm.size))
        self.shares[i] = flat.new_empty(len(flat) // self.comm.size)
        handle = self.comm.reduce_scatter_tensor(self.shares[i], flat, async_op=True)
        self.handles.append(handle)
        for p in self.buckets[i]:
            p.grad = None
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.ToOwners(ToOwners)

# %% [markdown]
# ### Exercise 3: The step
#
# `flat` has all weights in bf16, the same on all ranks, and n divides it. Make an AdamW for the
# share of this rank, with an fp32 master copy. `step(gradient)` gets the averaged gradient of the
# share, in bf16; afterwards `flat` has the new weights on all ranks. Beside `flat`, a rank
# may hold 12/n bytes for each parameter and nothing more.
#
# Useful: `flat.chunk(n)[r]` is a view, `x.copy_(y.detach())` rounds, `comm.all_gather_into_tensor`.


# %%
class ShardedAdam:
    def __init__(self, comm, flat, lr):
        self.comm, self.flat = comm, flat
        ### BEGIN SOLUTION
        self.share = flat.chunk(comm.size)[comm.rank]
        self.master = nn.Parameter(self.share.float())
        self.adam = torch.optim.AdamW([self.master], lr=lr)
        ### END SOLUTION

    def step(self, gradient):
        ### BEGIN SOLUTION
        self.master.grad = gradient.float()
        self.adam.step()
        self.master.grad = None
        self.share.copy_(self.master.detach())
        self.comm.all_gather_into_tensor(self.flat, self.share)
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.ShardedAdam(ShardedAdam)

# %% [markdown]
# ### Exercise 4: Clipping
#
# Somebody trains with `clip_grad_norm_(model.parameters(), 1.0)`. Under stage 2 there is no `.grad`,
# and each rank sees a part of the gradient only. `shares` are this rank's parts. Scale them **in
# place**, so that the norm of the *whole* gradient is at most `max_norm`, and return the norm that
# it had. Send as little as you can.


# %%
def clip(comm, shares, max_norm):
    ### BEGIN SOLUTION
    total = sum(share.square().sum() for share in shares)
    comm.all_reduce(total)
    norm = total.sqrt()
    for share in shares:
        share *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.clip(clip)

# %% [markdown]
# Each rank with its own norm would be a bug that nothing shows: the gathered weights are equal on
# all ranks, but every share was clipped by another factor.

# %% [markdown]
# ### Exercise 5, open: The least peak
#
# You have 10 messages. Which gradients does each take, so that a rank holds as little as possible
# at its worst moment? On paper, replayed on two clusters with 32 ranks: on one, the wire is slower
# than backward, on the other it is faster. `backward.nbytes[i]` is the size of the i-th gradient,
# `backward.ready_us[i]` says when it is there; return how many each bucket takes: `[2, 30, 36]`.
# Your score is the sum of both peaks, `backward.peak_bytes(counts)`:

# %%
show("labs/lab_07/buckets.py:Backward.held_bytes")

# %%
from labkit.labs.lab_07.buckets import MESSAGES, backwards, equal_counts


def draw(ways):
    _, panels = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    for axes, case in zip(panels, backwards()):
        looks = zip(("#D55E00", "#0072B2", "#009E73"), ["-", "-", "--"])  # yours may cover a line
        for (name, choose), (colour, dashes) in zip(ways.items(), looks):
            counts = choose(case, MESSAGES)
            when, held = zip((0, 0), *case.held_bytes(counts))
            label = f"{name}: {case.peak_bytes(counts) / 1e6:.1f} MB"
            x, y = [x / 1e3 for x in when], [y / 1e6 for y in held]
            axes.step(x, y, dashes, color=colour, where="post", label=label)
        axes.set(xlabel="ms", ylabel="MB of gradients", ylim=(0, 260))
        axes.set_title(f"{case.name}, 32 ranks", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)


examples = {
    "one bucket": lambda case, messages: [len(case.nbytes)],
    "equal counts": lambda case, messages: equal_counts(len(case.nbytes), messages),
}
draw(examples)


# %%
def choose_buckets(backward, messages):
    ### BEGIN SOLUTION
    total, cuts = sum(backward.nbytes), [equal_counts(len(backward.nbytes), messages)]
    for ratio in [0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2]:  # of a bucket to the one before
        weights = [ratio**i for i in range(messages)]
        ends, seen_bytes, goals = [], 0, [sum(weights[: i + 1]) for i in range(messages)]
        for i, size_bytes in enumerate(backward.nbytes):
            seen_bytes += size_bytes
            if len(ends) < messages - 1 and seen_bytes / total > goals[len(ends)] / goals[-1]:
                ends.append(i + 1)
        ends = [0, *ends, len(backward.nbytes)]
        counts = [j - i for i, j in pairwise(ends)]
        if min(counts) > 0:
            cuts.append(counts)
    return min(cuts, key=backward.peak_bytes)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose_buckets(choose_buckets)

# %%
draw(examples | {"yours": choose_buckets})

# %% [markdown]
# Ideas for more: what does a bucket hold while it waits for the wire? Which one decides the peak,
# and which of its neighbours could take something from it?

# %% tags=["nbval-check-output"]
report("07")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the call | stage 1 | stage 2 |
# |---|---|---|---|
# | DeepSpeed | `engine, *_ = deepspeed.initialize(model=..., config=...)` | `"zero_optimization": {"stage": 1}` | `{"stage": 2}` |
# | Accelerate | `Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=...))` | `zero_stage=1` | `zero_stage=2` |
# | Megatron | flags | `--use-distributed-optimizer` | `--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads` |
# | torch | `ZeroRedundancyOptimizer(parameters, optimizer_class=AdamW)`, DDP around the model | always | |
# | FSDP2 | `fully_shard(model, reshard_after_forward=False)` | | nearly: between steps weights are sharded, too |
# | labkit | `ZeroOptimizer(parameters, AdamW, stage=...)` | `stage=1` | `stage=2` |

# %% [markdown]
# Where to find each idea of this lab in DeepSpeed, `runtime/zero/stage_1_and_2.py`:
#
# | here | there |
# |---|---|
# | the loop: `model(x)`, `loss.backward()`, `optimizer.step()` | `engine(x)` (`forward`), `engine.backward(loss)`, `engine.step()` |
# | `FlatPartition` | `flatten_dense_tensors_aligned`, `initialize_gradient_partition` |
# | the hook, `take` | `reduce_ready_partitions_and_remove_grads` |
# | a bucket, `bucket_mb` | the "IPG" buffer, `"reduce_bucket_size"` (numbers, not bytes) |
# | filling it in place | `"contiguous_gradients": true` |
# | `send` | `reduce_ipg_grads`, then `average_tensor` |
# | at most two under way | `"overlap_comm": true`: two buffers, `ipg_index` |
# | `gather`, bucket by bucket | `all_gather_dp_groups`, `"allgather_bucket_size"` |
# | `gather_in=model` | Megatron: `--overlap-param-gather` |

# %% [markdown]
# What they add: DeepSpeed scales the loss for fp16 and skips steps that overflow; it can keep the
# shares in the CPU's memory (`"offload_optimizer"`). Megatron sums gradients in fp32, and its
# optimizer knows of tensor and pipeline parallelism.
#
# What they do otherwise: DeepSpeed by default all-reduces a bucket, and each rank copies its slices
# out of it (`"use_multi_rank_bucket_allreduce"`), since many small reduces are slow. That sends 1.5
# times the bytes of this lab. And its partition is one for all parameters, not one in each bucket.
#
# torch's `ZeroRedundancyOptimizer` runs here, beside ours, on the same data:


# %%
def with_torch(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = nn.parallel.DistributedDataParallel(model)
    return ddp, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


def state_bytes(model, optimizer):
    inner = getattr(optimizer, "optim", optimizer)  # torch's has the share inside
    return sum(x.nbytes for state in inner.state.values() for x in state.values())


# %% tags=["nbval-check-output"]
curves = []
for name, build in {"torch": with_torch, "labkit": ways["ZeRO-1"]}.items():
    found = world.run(train, build, dtype=torch.float32, look=state_bytes)
    curves.append(torch.tensor([losses for losses, _ in found]).mean(dim=0))
    held_kb = [nbytes // 1000 for _, nbytes in found]
    print(f"{name:<7} optimizer state of the 4 ranks: {held_kb} kB")
print("the same losses:", torch.allclose(*curves, rtol=1e-4))

# %% [markdown]
# Theirs gives whole tensors to ranks, so shares differ; with GPT-2's table of 50,257 tokens one of
# 64 ranks would hold 31 % of all state. And it adds to DDP's all-reduce a broadcast of the new
# weights from each rank: 1.5 times the bytes.
#
# Sources: Rajbhandari et al., *ZeRO*, 2020 (arXiv 1910.02054), sections 3, 5 and 7; Micikevicius et
# al., *Mixed Precision Training*, 2018 (arXiv 1710.03740); DeepSpeed, `stage_1_and_2.py`.

# %% [markdown]
# **You can now** say what every byte of a training rank is for, which of them more ranks make
# fewer, and write stages 1 and 2 yourself.
