# %% [markdown]
# # Lab 08: ZeRO-3
#
# ZeRO-2 shares gradients and optimizer state, and still holds every parameter on every rank. In this
# lab the parameters are shared, too: a layer is whole only while it computes. You see the memory
# rise and fall like a saw, hide the messages that this costs, find two real mistakes by their bytes,
# and build gather, free and prefetch yourself.
#
# You need lab 05 (hooks, overlap), lab 06 (replay) and lab 07 (the flat partition, ZeRO-1 and 2).

# %%
from functools import partial

import torch
from torch import nn

from labkit import DDP, GPT, Link, Text, World, ZeRO3, ZeroOptimizer, attach, loss, plot, record
from labkit import predict as formulas
from labkit.course import predict, report, show
from labkit.labs.lab_08 import checks as check
from labkit.parallel.common.held import held

# %% [markdown]
# ## 1. The question
#
# A GPT of six layers, in a loop you know. `make(model)` gives the wrapped model and its optimizer:

# %%
SIZES = dict(vocab=256, width=128, depth=6, heads=8, context=64, tied=False)


def train(make, steps=3, rows=4, length=64, sizes=None, dtype=torch.float32):
    me = attach()
    torch.manual_seed(0)
    parallel, optimizer = make(GPT(**sizes or SIZES).to(me.device, dtype))
    text, losses = Text(), []
    for step in range(steps):
        batch = text.batch(step, rows=rows * me.size, length=length)
        batch = batch.slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        value = loss(parallel(batch.x), batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses, parallel, optimizer


# %%
def measured(make, **options):
    """The losses; bytes held after a step: parameters, the rest; gathered parameters at most."""
    losses, parallel, optimizer = train(make, **options)
    its = held(parallel, optimizer)
    counts_bytes = 4 * len(optimizer.state)  # Adam counts steps, 4 bytes a tensor: left out
    rest_bytes = int(its.gradient_bytes + its.optimizer_bytes) - counts_bytes
    gathered_bytes = getattr(parallel, "peak_gathered_bytes", 0)
    return losses, int(its.parameter_bytes), rest_bytes, gathered_bytes


# %%
def zero2(model):
    return model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3)


def zero3(model, **options):
    parallel = ZeRO3(model, **options)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-3)


def replicas(model, strategy=DDP):
    return strategy(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


# %% [markdown]
# What does a rank hold after a step with ZeRO-2, measured? (On the CPU, where the peers of section 8
# run, too.)

# %%
worlds = {n: World(n) for n in (2, 4)}
found = {n: world.run(measured, zero2, steps=1, rows=1)[0] for n, world in worlds.items()}

# %% tags=["nbval-check-output"]
for n, (_, parameter_bytes, rest_bytes, _) in found.items():
    print(f"{n} ranks: {parameter_bytes:,} bytes of parameters, {rest_bytes:>10,} of the rest")

# %% [markdown]
# The rest shrinks with every rank. The parameters stay. With a model that is large:

# %% tags=["nbval-check-output"]
P = formulas.parameters(vocab=50257, width=12288, depth=96, heads=96, context=2048)  # GPT-3
for n in (64, 1024, 100_000):
    gb = formulas.model_state_bytes(P, dp=n, stage=2) / 1e9
    print(f"GPT-3 with ZeRO-2 on {n:>7,} GPUs: {gb:4.0f} GB on each; an H100 has 80")

# %% [markdown]
# However many GPUs you buy, it never fits: 2 bytes of each of 175 billion parameters are 350 GB.
# **Does a rank need all parameters all the time?**

# %% [markdown]
# ## 2. The idea
#
# No: while layer 3 computes, layer 7 only takes room. So cut the model into **units**, usually its
# layers. Each unit is a flat partition (lab 07), of which a rank keeps its **share** of 1/n. Just
# before the unit computes, an all-gather makes it whole; just after, it is freed:
#
# ```
#             forward                                  backward
#   unit 0    gather, compute, free                    gather, compute, free, reduce
#   unit 1      gather, compute, free              gather, compute, free, reduce
#   unit 2        gather, compute, free        gather, compute, free, reduce
#
#   memory       /|/|/|                            /|/|/|         a saw: one unit at a time,
#             __/     |___ ...               __ __/     |__       above the shares that stay
# ```
#
# Backward needs the weights again, and gathers them again. Each unit's gradients, whole for a moment,
# leave in one reduce-scatter: each rank keeps the gradient of its share, steps on its share, and is
# done. Nothing is gathered after the step: the next forward does it.

# %% [markdown]
# What does that cost? Each unit travels three times instead of twice, and somebody waits for it:
#
# ```
#   prefetch 0   gather 0 | compute 0 | gather 1 | compute 1 | gather 2 | compute 2
#
#   prefetch 1   gather 0 | compute 0 | compute 1 | compute 2
#                         [ gather 1 ][ gather 2 ]
# ```
#
# In every step the units come in the same order, so the one that comes next is known: **prefetch**
# it. Then most of the messages travel behind computing, and two units are in memory, not one.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | ZeRO-3, fully sharded data parallelism (FSDP) | ZeRO-3、全分片数据并行 | each rank keeps 1/n of parameters, gradients and optimizer state |
# | unit | 分片单元 | parameters that are gathered together, often those of a layer |
# | shard | 分片 | the part of a tensor that one rank keeps |
# | gather, free (reshard) | 聚合、释放（重新分片） | make a unit's parameters whole; release that memory again |
# | prefetch | 预取 | fetch data before it is needed |
# | working set | 工作集 | what must be in memory at one time |
# | persistence threshold | 常驻阈值 | parameters smaller than it stay whole on every rank |
# | activation recomputation (checkpointing) | 激活重计算（激活检查点） | drop activations in forward and compute them again in backward |
# | exposed communication | 未被掩盖的通信 | communication time that no computation hides |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# P elements in float32, n ranks. **Held** by each between steps: parameters 4, gradients 4, Adam's two
# moments 8 bytes for each of P/n elements. (In mixed precision, too: a float32 master copy 4, gradients
# 4, moments 8.)
#
# **Sent** by each: an all-gather or a reduce-scatter of S bytes sends (n-1)/n · S from each rank. Each
# unit is gathered in forward, gathered in backward, reduced once. An all-reduce is a reduce-scatter
# and an all-gather, so DDP does it twice, ZeRO-3 three times: **1.5 × the bytes of DDP**. With c bytes
# to compute with and g bytes of a gradient:
#
# ```
#   (2 c + g) · P · (n-1)/n
# ```
#
# **Gathered** at one time, with prefetch 1: the unit that computes, and the one that comes. At worst
# the two largest.

# %% tags=["nbval-check-output"]
model = GPT(**SIZES)
n, P = 4, sum(p.numel() for p in model.parameters())
layer = sum(p.numel() for p in model.blocks[0].parameters())
print(f"P = {P:,} elements, {layer:,} in each of {model.depth} layers, the largest units")

# %% [markdown]
# Three numbers for n = 4 ranks, in bytes:

# %% stub="guess = predict(held_bytes=..., sent_bytes=..., gathered_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(
    held_bytes=16 * P // n, sent_bytes=(2 * 4 + 4) * P * (n - 1) // n, gathered_bytes=2 * 4 * layer
)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# From the library. Memory that comes and goes is one flat tensor, whose storage is resized; the
# parameters are views of it, and stay the same objects for autograd:

# %%
show("parallel/zero3/flat.py:ResizableBuffer", since="def allocate")

# %% [markdown]
# Gathering is one all-gather, of this rank's share into all of it:

# %%
show("parallel/zero3/flat.py:Flat.gather")

# %% [markdown]
# A hook before each unit's forward, and one on the gradient of its output, call `_use`: have this
# unit here, and the next ones on their way. (`after` knows the order of the pass before.)

# %%
show("parallel/zero3/zero3.py:ZeRO3._use")

# %%
show("parallel/zero3/passes.py:Order.after")

# %% [markdown]
# After forward: free. The first two lines look odd; section 6 shows what happens without them.

# %%
show("parallel/zero3/zero3.py:ZeRO3._after_forward")

# %% [markdown]
# In backward autograd says when a gradient is there. With the last of a unit, its gradients leave in
# a reduce-scatter, and the unit is freed:

# %%
show("parallel/zero3/zero3.py:ZeRO3._on_grad_ready")

# %% [markdown]
# ## 5. Run it
#
# First the predictions.

# %%
with record(detail_step=1) as saw:
    found = worlds[4].run(measured, zero3, steps=2, rows=1, length=32)[0]


# %% tags=["nbval-check-output"]
def sent_in_step(trace, step=1):
    return sum(event.bus_bytes for event in trace.ranks[0].comms if event.step == step)


_, parameter_bytes, rest_bytes, gathered_bytes = found
guess.beside(
    held_bytes=parameter_bytes + rest_bytes,
    sent_bytes=sent_in_step(saw),
    gathered_bytes=gathered_bytes,
)

# %% [markdown]
# To the byte. And the same training? A single process is the oracle, in float64 (three layers are
# enough for that):

# %%
from labkit import Single

FEWER = SIZES | {"depth": 3}

one = partial(replicas, strategy=Single)
alone = World(1).run(measured, one, dtype=torch.float64, steps=2, rows=4, sizes=FEWER)
shares = worlds[4].run(measured, zero3, dtype=torch.float64, steps=2, rows=1, sizes=FEWER)

# %% tags=["nbval-check-output"]
single = torch.stack(alone[0][0])
ranks = torch.stack([torch.stack(losses) for losses, *_ in shares]).mean(dim=0)
print("equal losses:", torch.allclose(single, ranks, rtol=1e-10))

# %% [markdown]
# ### The saw
#
# The step in detail, on one of the four ranks. Dashed: what stays.

# %%
plot.memory(saw, ranks=[0], predicted=ZeRO3.predict(model, size=4))

# %% [markdown]
# Blue, below: the share, and on it one layer, two, one, two: the next is already there while one
# computes, and is freed behind it. In backward the gradients of a layer, whole, have the same saw,
# until they have been reduced. (Grey is mostly the text itself.)
#
# What if the whole model is one unit?

# %%
with record(detail_step=1) as one_unit:
    worlds[4].run(measured, partial(zero3, units=GPT), steps=2, rows=1, length=32)
plot.memory(one_unit, ranks=[0])

# %% [markdown]
# No teeth. Between steps it holds just as little; during a step it holds everything. The unit is what
# makes ZeRO-3 save memory *while it computes*.

# %% [markdown]
# ### Who waits?
#
# Two ranks, on a modelled wire of 1 gigabit per second (**paced**, as in lab 05). Without prefetch:

# %%
LINK = Link(gbps=1, latency_us=300)
paced = World(2, link=LINK)
ways = {
    "DDP": replicas,
    "ZeRO-3, prefetch 0": partial(zero3, prefetch=0),
    "ZeRO-3, prefetch 1": partial(zero3, prefetch=1),
}
runs = {}
for name, make in ways.items():
    with record() as runs[name]:
        paced.run(measured, make, steps=2, rows=8)

# %%
plot.timeline(runs["ZeRO-3, prefetch 0"])

# %% [markdown]
# Before each layer a pause, outlined in red, in forward and in backward. With the next layer on its
# way:

# %%
plot.timeline(runs["ZeRO-3, prefetch 1"])

# %%
plot.compare(runs)

# %% [markdown]
# On the right: half as much again as DDP, whatever the prefetch. On the left: what of it one notices.
#
# Times on a busy laptop tell little. Bytes do, and a replay does. First the bytes, by formula and
# measured, also for computing in bfloat16 with float32 shares (then c = g = 2):

# %% tags=["nbval-check-output"]
half = partial(zero3, compute_dtype=torch.bfloat16)
with record() as in_half:
    worlds[2].run(measured, half, steps=2, rows=1, length=16)

formulas.table(
    formula=dict(ddp_bytes=4 * P, zero3_bytes=6 * P, zero3_bf16_bytes=3 * P),
    measured=dict(
        ddp_bytes=sent_in_step(runs["DDP"]),
        zero3_bytes=sent_in_step(runs["ZeRO-3, prefetch 1"]),
        zero3_bf16_bytes=sent_in_step(in_half),
    ),
)

# %% [markdown]
# Then a cluster. A GPT with layers of 50 million parameters on 64 GPUs, recorded without data and
# replayed, as in lab 06:

# %%
from labkit import cluster, dry_run, replay, split_of

LARGE = dict(vocab=8192, width=2048, depth=3, heads=16, context=1024)
BF16 = partial(zero3, compute_dtype=torch.bfloat16)
dry = {
    ahead: dry_run(train, partial(BF16, prefetch=ahead), 2, 4, 1024, LARGE, ranks=64)
    for ahead in (0, 1)
}

# %% tags=["nbval-check-output"]
for name in ("selene", "dgx-h100"):
    for ahead, trace in dry.items():
        print(f"{name:<8} prefetch {ahead}: {split_of(replay(trace, cluster(name)))}")

# %%
plot.timeline(replay(dry[1], cluster("selene")))

# %% [markdown]
# One unit ahead hides most of it. Why not all? The first gather has nothing before it, and the last
# reduce-scatter nothing behind it. Backward begins with nothing in flight, so it waits for the unit
# of `head`; then it waits for the last layer, whose gather can only hide behind the small final
# norm. (And two ahead? Exercise 4.)

# %% [markdown]
# ### A model that is never whole
#
# `GPT(...)` by itself holds the whole model, on every rank, before `ZeRO3` can shard it. In the block
# below each parameter is cut into shares as soon as the next one is made:


# %%
def build():
    me = attach()
    with ZeRO3.init(me.comm):
        model = GPT(**SIZES)
    told = repr(model.blocks[0].mlp.up.weight)
    held_bytes = sum(p.elements.share.nbytes for p in model.parameters())
    ZeRO3(model, me.comm)
    return told, held_bytes


# %% tags=["nbval-check-output"]
told, held_bytes = worlds[2].run(build)[0]
print(told)
print(f"{held_bytes:,} of {4 * P:,} bytes on each of 2 ranks, and one parameter more for a moment")

# %% [markdown]
# ## 6. Break it
#
# ### A unit by hand
#
# ZeRO-3 in a few lines: four hooks that gather and free. (Gradients stay whole here, to keep it
# short.) It works; read it once more before you go on.


# %%
from labkit.parallel.common.flat import FlatPartition


def unit_by_hand(comm, module):
    parameters = list(module.parameters())
    cut = FlatPartition([p.shape for p in parameters], comm.size)
    full = torch.zeros(cut.padded)
    for p, view in zip(parameters, cut.views(full)):
        view.copy_(p.data)
        p.data = view
    share, memory = cut.share_of(full, comm.rank).clone(), full.untyped_storage()

    def gather(*_):
        if not memory.nbytes():
            memory.resize_(4 * cut.padded)
            comm.all_gather_into_tensor(full, share)

    def free(*_):
        memory.resize_(0)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free)
    module.register_full_backward_pre_hook(gather)
    module.register_full_backward_hook(free)
    free()


# %% [markdown]
# Somebody runs out of memory for activations and turns on **recompute**: `checkpoint(block, x)` keeps
# x alone, and runs the block again in backward. Torch has two ways of doing that.


# %%
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from labkit import listen


def with_recompute(make_unit, run_block):
    comm = attach().comm
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    for block in blocks:
        make_unit(comm, block)
    x = torch.ones(2, 8, requires_grad=True)
    # torch may end a recompute early, which would hide what we look for
    with listen() as events, set_checkpoint_early_stop(False):
        for block in blocks:
            x = run_block(block, x)
        x.square().sum().backward()
    gathers = [event for event in events if event.op == "all_gather"]
    return f"{len(gathers)} gathers, gradient {blocks[0][0].weight.grad.sum():.4f}"


# %%
def kept(block, x):
    return block(x)


reentrant, other = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
short = World(2, timeout_s=5)

# %% tags=["nbval-check-output"]
print("activations kept:  ", short.run(with_recompute, unit_by_hand, kept)[0])
print("use_reentrant=True:", short.run(with_recompute, unit_by_hand, reentrant)[0])

# %% [markdown]
# Three blocks, gathered for forward and for backward: 6 gathers. With recompute 9, and every number is
# right: half as many bytes again, which no loss shows. And the other way:

# %%
from textwrap import fill

from labkit import RankError

try:
    short.run(with_recompute, unit_by_hand, other)
except RankError as error:
    print(fill(str(error).splitlines()[0], 100))

# %% [markdown]
# `storage of size 0`. One mistake with two faces: what is freed when? In backward,
# `torch._C._current_graph_task_id()` is not -1. Write `unit_by_hand` again, as `mended`, so that both
# ways need 6 gathers.


# %% stub="mended = unit_by_hand  # yours: change what the hook behind forward does" tags=["nbval-check-output"]
### BEGIN SOLUTION
def mended(comm, module):
    unit_by_hand(comm, module)
    ((key, free),) = module._forward_hooks.items()

    def free_unless_in_backward(*args):
        if torch._C._current_graph_task_id() == -1:
            free(*args)

    module._forward_hooks[key] = free_unless_in_backward


### END SOLUTION
for way in (reentrant, other):
    print(short.run(with_recompute, mended, way)[0])

# %% [markdown] tags=["answer"]
# Recompute runs the block's *forward* in the middle of its *backward*, and the hook behind forward
# frees what backward is about to use. Reentrant recompute has a backward of its own, whose hook gathers
# a third time; in the other way nobody does. Hence the first two lines of `_after_forward` in section
# 4; FSDP's hooks look at the same. (Torch since 2.1 ends a recompute as soon as it has what it needs,
# often before that hook, and so hides the mistake: here that is turned off.)

# %% [markdown]
# ### A projection that nobody sharded
#
# Here somebody chooses by name what to shard:


# %%
def by_names(names):
    comm = attach().comm
    torch.manual_seed(0)
    model, batch = GPT(**SIZES), Text().batch(0, rows=2, length=64)
    before = loss(model(batch.x), batch)
    for name, module in model.blocks.named_modules():
        if name.split(".")[-1] in names:
            unit_by_hand(comm, module)
    after = loss(model(batch.x), batch)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.blocks.parameters()}
    return torch.equal(before, after), sum(memory.nbytes() for memory in held.values())


# %% tags=["nbval-check-output"]
NAMES = ("norm1", "q", "k", "v", "norm2", "up", "down")
same_loss, left_bytes = short.run(by_names, NAMES)[0]
print(
    f"the same loss: {same_loss}; whole in the layers, while nothing computes: {left_bytes:,} bytes"
)

# %% [markdown]
# The loss is the same. The bytes should be 0: every weight of the layers freed. Which one is not? Divide
# by 4 bytes and by 6 layers, and look for it:

# %% tags=["nbval-check-output"]
print(f"{left_bytes / 4 / 6:,.0f} elements of each layer")
for name, p in model.blocks[0].named_parameters():
    if p.ndim > 1:
        print(f"  {name:<16} {p.numel():>7,} and {p.shape[0]} in the bias")

# %% [markdown] tags=["answer"]
# 16,512 = 128 · 128 + 128: a square projection and its bias. q, k and v are in the list; `attn.out` is
# not. A teaching project on tensor parallelism once shipped just this: an attention projection that was
# silently not sharded. The loss can never show it. **Count what is held**, in a test, to the byte.

# %% [markdown]
# ### Three ways to waste
#
# All four train the model of three layers, with the same loss. What do a, b and c waste? Think first,
# then run the next cell.

# %%
wasteful = {
    "right": zero3,
    "a": partial(zero3, persist_below=100_000),
    "b": partial(zero3, units=nn.Linear),
    "c": partial(zero3, prefetch=100),
}
rows = {}
for name, make in wasteful.items():
    with record() as trace:
        found = worlds[2].run(measured, make, steps=2, rows=1, length=16, sizes=FEWER)[0]
    losses, *held_bytes, most = found
    messages = sum(event.step == 1 for event in trace.ranks[0].comms)
    rows[name] = losses[-1].item(), sum(held_bytes), most, messages

# %% tags=["nbval-check-output"]
print("       same loss   held, MB   gathered, MB   messages")
for name, (value, held_bytes, most, messages) in rows.items():
    same = abs(value - rows["right"][0]) < 1e-3
    print(f"{name:<6} {same!s:<9} {held_bytes / 1e6:9.1f} {most / 1e6:14.1f} {messages:10}")

# %% [markdown] tags=["answer"]
# - **a** shards nothing, so nothing is gathered: every matrix here has fewer than 100,000 elements. That is DeepSpeed's default
#   (`stage3_param_persistence_threshold`), right for large models, and a trap for small ones.
# - **b** has a unit for each matrix and each norm: the same bytes in many small messages, and each pays
#   the latency. Units are layers for a reason.
# - **c** gathers all that comes, at once. Between steps it holds 16 P/n; during a step, the whole model.

# %% [markdown]
# ## 7. Build it
#
# Each check runs your code on real ranks, and looks at numbers, bytes and memory.

# %% [markdown]
# ### Exercise 1: Gather a unit
#
# `share` is this rank's share of a unit, flat: 1/n of all its tensors, which lie one after the other,
# then zeros until n divides. Return the whole tensors, in these `shapes`, from one all-gather and
# without a copy: each is a view.
#
# Useful: `comm.all_gather_into_tensor(out, x)`, `shape.numel()`, `flat[a:b].view(shape)`.


# %%
def gather_unit(comm, share, shapes):
    ### BEGIN SOLUTION
    full = share.new_empty(comm.size * share.numel())
    comm.all_gather_into_tensor(full, share)
    tensors, start = [], 0
    for shape in shapes:
        tensors.append(full[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return tensors
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.gather_unit(gather_unit)

# %% [markdown]
# ### Exercise 2: Whole only while it computes
#
# A layer without bias, y = x · weightᵀ, whose `weight` [out, in] exists in shares only. Nothing whole may
# live from forward to backward: save `x` and the share, and gather again.
#
# In backward, with dy [rows, out]: **dx = dy · weight**, and **dw = dyᵀ · x**, whole. Its mean over the
# ranks belongs to the owners of the shares: lay dw flat into zeros [n · share], divide, reduce-scatter.


# %%
class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, share, comm, shape):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, share)
        ctx.comm, ctx.shape = comm, shape
        (weight,) = gather_unit(comm, share, [shape])
        return x @ weight.T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):  # returns dx, the gradient of the share, None, None
        ### BEGIN SOLUTION
        x, share = ctx.saved_tensors
        (weight,) = gather_unit(ctx.comm, share, [ctx.shape])
        flat = share.new_zeros(ctx.comm.size * share.numel())
        torch.mm(dy.T, x, out=flat[: weight.numel()].view(ctx.shape))
        mine = torch.empty_like(share)
        ctx.comm.reduce_scatter_tensor(mine, flat.div_(ctx.comm.size))
        return dy @ weight, mine, None, None
        ### END SOLUTION


# %% tags=["nbval-check-output"]
check.GatheredLinear(GatheredLinear)

# %% [markdown]
# ### Exercise 3: Prefetch
#
# `shares[i]` is this rank's share of unit i. Call `x = layer(i, flat, x)` for each unit in order, where
# `flat` has the shares of all ranks, gathered; return the last x.
#
# While unit i computes, exactly the next `ahead` gathers are on their way, and nobody has waited for
# them. Behind each layer its memory goes: nothing may refer to `flat` any more.
#
# Useful: `handle = comm.all_gather_into_tensor(out, x, async_op=True)`, `handle.wait()`.


# %%
def forward_with_prefetch(comm, shares, layer, x, ahead=1):
    ### BEGIN SOLUTION
    under_way = {}
    for i in range(len(shares)):
        for j in range(i, min(i + ahead + 1, len(shares))):
            if j not in under_way:
                flat = shares[j].new_empty(comm.size * shares[j].numel())
                handle = comm.all_gather_into_tensor(flat, shares[j], async_op=True)
                under_way[j] = flat, handle
        flat, handle = under_way[i]
        under_way[i] = None
        handle.wait()
        x = layer(i, flat, x)
        del flat, handle
    return x
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.forward_with_prefetch(forward_with_prefetch)

# %% [markdown]
# ### Exercise 4, open: Units and prefetch
#
# A GPT of 1.5 billion parameters, on 16 nodes. `layers[i]` has its `nbytes`, `forward_s` and
# `backward_s`; `link` its `latency_s` and `bytes_per_s`. Return how many layers each unit takes, and the
# prefetch: `([1, 2, 31], 1)`. This must never be more than `limit_bytes`:

# %%
show("labs/lab_08/prefetch.py:most_held_bytes")

# %% [markdown]
# Your score is the waiting in a step, by the virtual clock of lab 06, over a short and over a long
# latency:

# %%
from labkit.labs.lab_08.prefetch import LINKS, exposed_us, layers_of, most_held_bytes

layers = layers_of()
for name, link in LINKS.items():
    each_ms = [exposed_us([1] * len(layers), ahead, layers, link) / 1e3 for ahead in (0, 1)]
    print(f"{name} latency, a unit for each layer: {each_ms[0]:.0f} ms of waiting,", end=" ")
    print(f"{each_ms[1]:.0f} ms with prefetch 1")


# %%
def choose_units(layers, link, limit_bytes):
    ### BEGIN SOLUTION
    def cut(unit_bytes):
        counts, filled_bytes = [], unit_bytes
        for layer in layers:
            if filled_bytes + layer.nbytes > unit_bytes:
                counts.append(0)
                filled_bytes = 0
            counts[-1] += 1
            filled_bytes += layer.nbytes
        return counts

    sizes = [layers[1].nbytes * k for k in range(1, 7)]
    plans = [(cut(unit_bytes), ahead) for unit_bytes in sizes for ahead in range(4)]
    fitting = [plan for plan in plans if most_held_bytes(*plan, layers) <= limit_bytes]
    return min(fitting, key=lambda plan: exposed_us(*plan, layers, link))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.choose_units(choose_units)

# %% [markdown]
# Ideas for more: must all units be of one size? Which gather does nobody hide?

# %% tags=["nbval-check-output"]
report("08")

# %% [markdown]
# ## 8. In the wild
#
# | labkit | DeepSpeed, stage 3 | torch, FSDP2 |
# |---|---|---|
# | `ZeRO3(model)` | `deepspeed.initialize(...)`, `"stage": 3` | `fully_shard(layer)` for each, then `fully_shard(model)` |
# | `ZeRO3.init(comm)` | `deepspeed.zero.Init()` | build on `"meta"`, then `to_empty` |
# | `units=Block` | each module with parameters; `set_z3_leaf_modules` | what `fully_shard` was called on |
# | `Order`, `_use` | `partitioned_param_coordinator.py`: `fetch_sub_module` | `FSDPParamGroup.unshard` |
# | `prefetch=1` | `"stage3_prefetch_bucket_size"`, in elements | implicit; `set_modules_to_forward_prefetch` |
# | `persist_below` | `"stage3_param_persistence_threshold"` | `ignored_params` |
# | the working set | `"stage3_max_live_parameters"` | two units |
# | `compute_dtype` | `"bf16": {"enabled": true}` | `MixedPrecisionPolicy(param_dtype=...)` |

# %% [markdown]
# What they add. **DeepSpeed** notes the order of modules in the first step, as `Order` does, prefetches
# by elements and not by units, keeps what is used again soon (`stage3_max_reuse_distance`), and moves
# shares to CPU or NVMe. **FSDP2** shards each parameter by its first dim, as a `DTensor`, so that it has
# a meaning of its own; copies all of a unit into one buffer; keeps what belongs to no layer whole from
# forward to backward (`reshard_after_forward`). **Accelerate** configures either of them.
#
# Side by side, on the same data. (Accelerate shards on accelerators only; the two lines with `state`
# tell it that a CPU will do.)


# %%
def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# %%
def accelerated(model):
    import os

    me = attach()
    for name, value in dict(RANK=me.rank, WORLD_SIZE=me.size).items():
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ["OMP_NUM_THREADS"] = "1"
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    layers = dict(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(2, **layers)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


# %%
from importlib.util import find_spec

peers = {"labkit, ZeRO3": zero3, "torch, fully_shard": fsdp2, "Accelerate, FSDP2": accelerated}
if not find_spec("accelerate"):
    peers.pop("Accelerate, FSDP2")
    print("Accelerate is not installed; pip install accelerate adds its line to these:")


def losses_of(make):
    me = attach()
    torch.manual_seed(0)
    parallel, optimizer = make(GPT(**FEWER).to(me.device))
    text, losses = Text(), []
    for step in range(3):
        batch = text.batch(step, rows=4, length=32).slice(me.rank, me.size).to(me.device)
        optimizer.zero_grad()
        value = loss(parallel(batch.x), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# %%
curves = {name: worlds[2].run(losses_of, make)[0] for name, make in peers.items()}
for name, values in curves.items():
    print(f"{name:<18}", "  ".join(f"{value:.5f}" for value in values))

# %% tags=["nbval-check-output"]
ours = torch.tensor(curves["labkit, ZeRO3"])
same = [torch.allclose(torch.tensor(values), ours, rtol=1e-5) for values in curves.values()]
print("the same losses:", all(same))

# %% [markdown]
# Sources: Rajbhandari et al., *ZeRO*, 2020 (arXiv 1910.02054); Rajbhandari et al., *ZeRO-Infinity*, 2021
# (arXiv 2104.07857), prefetch and sharded construction; Zhao et al., *PyTorch FSDP*, 2023 (arXiv
# 2304.11277), units and hooks.

# %% [markdown]
# **You can now** say what a rank of ZeRO-3 holds, sends and gathers before you run it, read the saw of
# its memory, choose units and prefetch, find what was not sharded or freed too early by its bytes, and
# write gather, free and prefetch yourself.
