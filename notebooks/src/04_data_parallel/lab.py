# %% [markdown]
# # Lab 04: Data parallel
#
# The first way to train one model on many ranks: each takes a share of the batch, and one of them,
# the **server**, gathers all gradients, takes the step and hands out the new weights. You measure
# where that ends, let the workers stop waiting for each other, see what *stale* gradients do to
# the loss, and build both servers yourself.
#
# You need labs 00 to 03: `comm.send` and `comm.recv`, handles, the ring's 2(n-1)/n, links.

# %%
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from labkit import (
    AsyncParameterServer,
    Comm,
    Link,
    NaiveDDP,
    ParameterServer,
    Text,
    World,
    attach,
    loss,
    plot,
    record,
)
from labkit.course import predict, report, show
from labkit.labs.lab_04 import checks as check
from labkit.plot.strategies import step_times

# %% [markdown]
# ## 1. The question
#
# Four layers, and a training loop as ever; three things are new:
#
# - `attach()` tells a process which rank it is; `.comm` is the `Comm` of all ranks;
# - all ranks draw the same **global batch** of 64 rows, and take their own share of it;
# - `wrap(module)` gives the strategy and the optimizer. The first one is a server on rank 0. With
#   `pull_after(optimizer)`, each `optimizer.step()` ends when everybody has the new weights.


# %%
def served(module):
    model = ParameterServer(module)
    return model, model.pull_after(torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(wrap, steps=2, width=512):
    comm = attach().comm
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    model, optimizer = wrap(nn.Sequential(*layers))
    for _ in range(steps):
        x, y = torch.randn(64, width), torch.randn(64, width)  # the same on all ranks
        mine = x.tensor_split(comm.size)[comm.rank], y.tensor_split(comm.size)[comm.rank]
        optimizer.zero_grad()
        F.mse_loss(model(mine[0]), mine[1]).backward()
        optimizer.step()


# %% [markdown]
# The same 64 rows on 2 and on 4 ranks, where everybody has half as much to compute. Each rank has a
# wire of 0.5 gigabits per second (**paced**: real bytes, as late as such a wire would deliver them).
# How much of a step is waiting?

# %%
LINK = Link(gbps=0.5, latency_us=50)
worlds = {n: World(n, link=LINK) for n in (2, 4)}
runs = {}
for n, world in worlds.items():
    with record() as runs[n]:
        world.run(train, served)

# %%
waiting_ms = [1e3 * step_times(run).waiting_s for run in runs.values()]
fig, axes = plt.subplots(figsize=(8, 1.2))
bars = axes.barh([f"{n} ranks" for n in runs], waiting_ms, color="#0072B2")
axes.bar_label(bars, fmt="{:,.0f} ms", padding=4)
axes.set(xlabel="ms of waiting in a step, mean of the ranks, paced", xlim=(0, 1.2 * waiting_ms[-1]))
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Half to compute, and more to wait for. **What grows, and how far would you get with 64 ranks?**

# %% [markdown]
# ## 2. The idea
#
# Why it is right at all. The loss of a batch is the mean of the losses of its rows, and a gradient
# is linear. With n equal shares:
#
# ```
#   gradient of the whole batch  =  1/n · Σ (ranks)  gradient of the mean over this rank's rows
# ```
#
# So somebody has to add up n gradients and divide by n. Then one step with the mean is the step of a
# single process. This is **data parallelism**. Here rank 0 does the adding:
#
# ```
#   rank 1  forward | backward | push g --.               .--> pull w | forward ...
#   rank 2  forward | backward | push g --+               +--> pull w | forward ...
#   rank 3  forward | backward | push g --+               +--> pull w | forward ...
#   rank 0  forward | backward |          '-> Σ g / n | step          | forward ...
# ```
#
# Only the server needs an optimizer. The others have weights, and gradients until they are sent.

# %% [markdown]
# Look at the links. G bytes of gradients, as many of weights. Over the link of a worker go 2 G in
# each step: G out, G in. Over the link of the server go those of *all* workers:
#
# ```
#   server      2(n-1) · G           grows with every rank
#   ring        4(n-1)/n · G         out and in, on every link: less than 4 G for ever
# ```

# %% [markdown]
# The second idea: everybody waits for the slowest, twice in a step. Why wait? A worker that is ready
# pushes its gradient, the server steps **at once** with that one gradient, and the worker pulls the
# weights of that moment. That is **asynchronous**:
#
# ```
#   rank 1   [ made with w0 ]push [ made with w1     ]push
#   rank 2   [ made with w0              ]push [ made with w3 ...
#   rank 3   [ made with w0         ]push [ made with w2 ...
#   rank 0              w0 -> w1   -> w2 -> w3       -> w4
# ```
#
# Nobody waits. But rank 2's gradient was made with w0 and is applied to w2: its **staleness** is
# 2. It says how to go down from a place where the model no longer is.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | data parallelism (DP) | 数据并行 | every rank has the same model and different rows of the batch |
# | parameter server | 参数服务器 | a process that keeps the weights, collects gradients and runs the optimizer |
# | worker | 工作进程 | a process that computes gradients |
# | push, pull | 推送、拉取 | a worker sends gradients to the server; it fetches weights from it |
# | synchronous, asynchronous | 同步、异步 | all workers update together; each updates when it is ready |
# | stale gradient | 陈旧梯度 | computed with older weights than those it updates |
# | staleness | 陈旧度 | the number of updates between reading the weights and applying the gradient |
# | bounded staleness | 有界陈旧度 | no worker may be more than s steps ahead of the slowest |
# | bottleneck | 瓶颈 | the resource that is busy longest and sets the total time |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict

# %% tags=["nbval-check-output"]
G = 4 * 512 * 512 * 4  # bytes of all gradients, and of all weights: 4 layers, fp32
print(f"G = {G:,} bytes")

# %% [markdown]
# With 4 ranks, in one step: how many bytes go over the link of the server, in and out together? Over
# that of a worker? And over each link if a ring did it?

# %% stub="guess = predict(server=..., worker=..., ring=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(server=2 * (4 - 1) * G, worker=2 * G, ring=4 * (4 - 1) * G // 4)
### END SOLUTION
guess

# %% [markdown]
# And staleness: one server, three workers that take turns, 1, 2, 3, 1, 2, 3, ... How stale is a
# gradient, once it runs? (All begin with version 0.)

# %% stub="guess_stale = predict(staleness=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess_stale = predict(staleness=2)
### END SOLUTION
guess_stale

# %% [markdown]
# ## 4. Read it
#
# The synchronous server. First every gradient is divided, as autograd makes it:

# %%
show("parallel/parameter_server/synchronous.py:ParameterServer._divide")

# %% [markdown]
# When backward is over, all ranks call this for each parameter. (`own` is this rank's gradient; a
# rank whose rows did not need the parameter sends -0.0, which changes no sum.)

# %%
show(
    "parallel/parameter_server/synchronous.py:ParameterServer._gather_sum",
    since="if not self.is_server",
)

# %% [markdown]
# The others' `.grad` is then None, so that their `optimizer.step()` finds nothing to do. After the
# step, the weights:

# %%
show("parallel/parameter_server/synchronous.py:ParameterServer._pull")

# %% [markdown]
# Now the asynchronous one. A worker's `step()` sends its gradients, with the version that they were
# made with, and waits for newer weights. This is what the server does meanwhile:

# %%
show("parallel/parameter_server/asynchronous.py:AsyncParameterServer._serve", since="while steps")

# %% [markdown]
# `pushes.next` takes the next push as they come, or in an order that you give, so that a run can be
# repeated. `_may_continue` is where a bound on staleness would make a worker wait:

# %%
show("parallel/parameter_server/asynchronous.py:AsyncParameterServer._may_continue")

# %% [markdown]
# ## 5. Run it
#
# First the bytes of the run with 4 ranks. `wire_bytes` is what a rank really sent; what leaves the
# workers arrives at the server, and what leaves the server arrives at the workers.


# %%
def with_all_reduce(module):
    return NaiveDDP(module), torch.optim.AdamW(module.parameters(), lr=1e-3)


# %% tags=["nbval-check-output"]
def sent_in_step_1(trace):
    return [sum(e.wire_bytes for e in one.comms if e.step == 1) for one in trace.ranks.values()]


with record() as ring:
    worlds[4].run(train, with_all_reduce)

sent = sent_in_step_1(runs[4])
ring_bytes = sum(e.bus_bytes for one in ring.ranks.values() for e in one.comms if e.step == 1)
guess.beside(server=sum(sent), worker=sent[1] + sent[0] // 3, ring=2 * ring_bytes // 4)

# %% [markdown]
# (`NaiveDDP` sums each gradient with an all-reduce, and then every rank steps by itself. It is the
# beginning of lab 05.) Now see a step with the server:

# %%
plot.timeline(runs[4])

# %% [markdown]
# Green is the optimizer. Before it you see the push, after it the pull: three copies of all weights
# leave rank 0, one after the other. Ranks also leave step 0 one after the other, because rank 0
# sends to rank 1 first, so rank 1 begins this step first. The title's time is from the first rank's
# begin to the last rank's end; `plot.compare` below shows the mean step of the ranks. Our wires are
# slow on the way out only; on a real network card the push is as long as the pull.

# %%
plot.compare({"server": runs[4], "all-reduce": ring})

# %% [markdown]
# (The right side shows bus bytes. For operations with a root these are, as in nccl-tests, what
# passes the busiest link: the server's, 2(n-1) G. For the all-reduce they are what a rank sends,
# 2(n-1)/n · G; section 3 counted in and out, twice as much.)
#
# For 64 ranks we have no machine. But labkit can record a step without data (`dry_run`) and compute
# the times that it would have on a described cluster (`replay`); lab 06 is about how far to trust
# that. Here with wider layers, on the DGX A100 machines of *Selene*, one GPU of each:


# %%
from labkit import cluster, dry_run, replay, split_of


def step_ms(wrap, n):
    where = replace(cluster("selene"), nodes=n, devices_per_node=1)
    return 1e3 * split_of(replay(dry_run(train, wrap, width=1024, ranks=n), where)).step_s


counts = [4, 16, 64]
replayed = {
    "server": [step_ms(served, n) for n in counts],
    "ring": [step_ms(with_all_reduce, n) for n in counts],
}

# %%
fig, axes = plt.subplots(figsize=(8, 2.6))
for (name, ms), colour in zip(replayed.items(), ("#D55E00", "#0072B2")):
    axes.plot(counts, ms, "o-", color=colour)
    axes.text(66, ms[-1], name, va="center", color=colour)
axes.set(xlabel="ranks", ylabel="ms of a step, replayed", xlim=(0, 72), ylim=(-3, None))
axes.set_xticks(counts)
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
for name, ms in replayed.items():
    print(f"{name:>6}: from 16 to 64 ranks a step grows by {ms[2] / ms[1]:.1f} times")

# %% [markdown]
# A straight line: each rank brings its 2 G over the one link. The ring hardly grows.
#
# And memory? One step in detail. The server has what a single process has. A worker, at the end of
# the step, has weights alone: its gradients live from backward to push. (Grey on rank 0: the
# gradients that arrive, and their mean, which stays until the next `zero_grad`.)

# %%
with record(detail_step=1) as detail:
    worlds[2].run(train, served)
plot.memory(detail, predicted=0)

# %% [markdown]
# Now the asynchronous server, with three workers of which rank 3 is slow, and a small network that
# guesses the next letter. (`Text().batch(...)` has rows of letters in `.x`; `loss(output, batch)`
# compares with the letters that follow.) `model.run(work)` serves on rank 0, calls `work` on the
# others, and returns every update with the versions of its weights.


# %%
def letters():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256))


def uneven(max_staleness=None, order=(), steps=7, slow_s=0.08):
    rank, sgd = Comm().rank, torch.optim.SGD
    model = AsyncParameterServer(letters(), sgd, max_staleness=max_staleness, order=order, lr=0.1)

    def work():
        for step in range(steps):
            time.sleep(slow_s if rank == 3 else slow_s / 10)
            batch = Text().batch(step, rows=2, length=16, seed=rank)
            model.zero_grad()
            loss(model(batch.x), batch).backward()
            model.step()

    return model.run(work)


free = worlds[4].run(uneven)[0]
bounded = worlds[4].run(uneven, max_staleness=1)[0]

# %%
COLOURS = {1: "#0072B2", 2: "#E69F00", 3: "#009E73"}
fig, panels = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True)
for axes, updates, name in zip(panels, (free, bounded), ("no bound", "at most 1 step ahead")):
    for worker, colour in COLOURS.items():
        its = [update for update in updates if update.worker == worker]
        x, y = [u.applied_to for u in its], [u.staleness for u in its]
        axes.vlines(x, 0, y, color=colour)
        axes.plot(x, y, "o", color=colour, label=f"rank {worker}" + " (slow)" * (worker == 3))
    axes.set(title=name, xlabel="update", ylim=(-0.5, None))
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set(ylabel="staleness")
panels[1].legend(frameon=False, loc="upper right")
fig.tight_layout()

# %% [markdown]
# On the left the fast ones run away, and the slow one's gradients are old when they come; in the end
# it trains alone. On the right (`max_staleness=1`: *stale synchronous parallel*) the fast
# ones wait, but not for each step. In a fixed order nothing depends on speed:

# %% tags=["nbval-check-output"]
turns = worlds[4].run(uneven, order=[1, 2, 3] * 7, slow_s=0)[0]
print([update.staleness for update in turns])
guess_stale.beside(staleness=turns[-1].staleness)

# %% [markdown]
# **What does staleness cost?** The same 60 batches in the same order, dealt out to 1, 2 or 5 workers
# in turns: so the gradients have staleness 0, 1 and 4. Nothing else differs. (`subgroup` gives a
# `Comm` over some of the ranks, and None to the others.)


# %%
def dealt_out(stale, lr, batches=60):
    comm = Comm().subgroup(range(stale + 2))
    if comm is None:
        return []
    text, losses, workers = Text(), [], stale + 1
    order = [1 + k % workers for k in range(batches)]
    model = AsyncParameterServer(letters(), torch.optim.SGD, comm, order=order, lr=lr)

    def work():
        for k in range(comm.rank - 1, batches, workers):
            batch = text.batch(k, rows=8, length=16)
            model.zero_grad()
            value = loss(model(batch.x), batch)
            value.backward()
            model.step()
            losses.append((k, value.item()))

    model.run(work)
    return losses


# %%
curves = {}
with World(6) as six:
    for stale in (0, 1, 4):
        for lr in (0.3, 1.0):
            told = sorted(pair for its in six.run(dealt_out, stale, lr) for pair in its)
            curves[stale, lr] = [value for _, value in told]

# %%
fig, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
for axes, lr in zip(panels, (0.3, 1.0)):
    for stale, colour in ((0, "#0072B2"), (1, "#E69F00"), (4, "#D55E00")):
        axes.plot(curves[stale, lr], color=colour, label=f"staleness {stale}")
    axes.set(title=f"SGD, learning rate {lr}", xlabel="update", ylim=(2.5, 9))
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set(ylabel="loss")
panels[0].legend(frameon=False, loc="upper right")
fig.tight_layout()

# %% [markdown]
# At a small learning rate stale gradients make it slower; at a larger one, with which fresh gradients
# still train, staleness 4 flies off. Async makes *more updates per second*, and each is worth less.
# (Who has many workers and wants both must lower the learning rate.)

# %% [markdown]
# ## 6. Break it
#
# ### Three averages, each with a bug
#
# Three ways to get it wrong. Each function is called on all ranks after `loss.backward()`, and each
# rank has an `optimizer` of its own. Read them, say what is wrong, and only then run the next cells.


# %%
def a(comm, model, optimizer):
    optimizer.step()
    for p in model.parameters():
        comm.all_reduce(p.detach(), "mean")


def b(comm, model, optimizer):
    for p in model.parameters():
        p.grad /= comm.size
        comm.all_reduce(p.grad, "mean")
    optimizer.step()


def c(comm, model, optimizer):
    for p in model.parameters():
        comm.reduce(p.grad, dst=0, op="mean")
        comm.broadcast(p.detach(), src=0)
    if comm.rank == 0:
        optimizer.step()


# %%
def off_by(exchange, make_optimizer):
    """How far the weights of the last rank are from those of a single process, after 5 steps."""
    comm, weights = Comm(), []
    for rank, size in ((comm.rank, comm.size), (0, 1)):
        torch.manual_seed(0)
        model = nn.Linear(8, 4, dtype=torch.float64)
        x, y = torch.randn(5, 12, 8).double(), 9 * torch.randn(5, 12, 4).double()
        optimizer = make_optimizer(model.parameters())
        for step in range(5):
            optimizer.zero_grad()
            mine = x[step].tensor_split(size)[rank], y[step].tensor_split(size)[rank]
            F.mse_loss(model(mine[0]), mine[1]).backward()
            exchange(comm, model, optimizer) if size > 1 else optimizer.step()
        weights.append(model.weight.detach())
    return float((weights[0] - weights[1]).abs().max())


# %% tags=["nbval-check-output"]
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
}
for name, make in OPTIMIZERS.items():
    far = {bug.__name__: worlds[2].run(off_by, bug, make)[-1] > 1e-5 for bug in (a, b, c)}
    print(f"{name:18}", {bug: "differs" if off else "equal" for bug, off in far.items()})

# %% [markdown]
# Every bug but one hides behind some optimizer. **Test with two optimizers, against a single
# process, on every rank.**

# %% [markdown] tags=["answer"]
# - **a** averages the *weights* instead of the gradients. With SGD that is the same, also with
#   momentum: all is linear. Adam divides by the size of its own rank's gradient, and the mean of
#   quotients is not the quotient of means. One way into it: `register_hook` hands a function the
#   gradient, `register_post_accumulate_grad_hook` the *parameter*. Who swaps one for the other, and
#   leaves the function as it was, all-reduces weights.
# - **b** divides twice: by hand, and in `op="mean"`. SGD takes steps of 1/n; Adam does not notice,
#   since it divides each gradient by its own size.
# - **c** sends the weights before the step. The others train with weights that are one step old:
#   asynchronous by accident. The last rank is always one behind.

# %% [markdown]
# ### A server that waits for everybody
#
# Somebody's synchronous server takes one gradient of each worker, in turns. The data of worker 2 ends
# one batch earlier:


# %%
def in_turns(batches):
    comm, g = attach().comm, torch.ones(4)
    if comm.rank == 0:
        for _ in range(max(batches.values())):
            for worker in batches:
                comm.recv(g, worker)
    else:
        for _ in range(batches[comm.rank]):
            comm.send(g, 0)


# %% tags=["raises-exception"]
short = World(3, timeout_s=2)
short.run(in_turns, {1: 3, 2: 2})

# %% [markdown]
# A worker that is done has to *say* so. labkit's asynchronous workers do, with the version -1; of the
# synchronous strategies you will see in lab 05 how they join a rank whose data has ended.

# %% [markdown]
# ## 7. Build it
#
# Each check runs your code on real ranks.

# %% [markdown]
# ### Exercise 1: One step with a server
#
# `loss.backward()` has run on every rank, on equal shares. Bring the gradients to rank 0, take one
# step there with their mean, and bring the new weights to everybody. Nobody but rank 0 steps. A worker
# sends each gradient once, the server each weight once to every worker.
#
# Useful: `comm.recv(p.detach(), 0)` writes into a parameter; or `comm.gather` and `comm.scatter`.


# %%
def server_step(comm, model, optimizer):
    ### BEGIN SOLUTION
    for p in model.parameters():
        if comm.rank == 0:
            theirs = torch.empty_like(p.grad)
            for worker in range(1, comm.size):
                comm.recv(theirs, worker)
                p.grad += theirs
            p.grad /= comm.size
        else:
            comm.send(p.grad, 0)
    if comm.rank == 0:
        optimizer.step()
    for p in model.parameters():
        if comm.rank == 0:
            for worker in range(1, comm.size):
                comm.send(p, worker)
        else:
            comm.recv(p.detach(), 0)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.server_step(server_step)

# %% [markdown]
# ### Exercise 2: How stale?
#
# `order` are the workers in the order in which an asynchronous server takes their pushes: `[1, 2, 1]`.
# All begin with version 0; each pulls right after its own push was applied. Return the staleness of
# each update, as a list.


# %%
def staleness(order):
    ### BEGIN SOLUTION
    pulled, found = {}, []
    for version, worker in enumerate(order):
        found.append(version - pulled.get(worker, 0))
        pulled[worker] = version + 1
    return found
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.staleness(staleness)

# %% [markdown]
# ### Exercise 3: Serve
#
# An asynchronous server, on rank 0. Each of the ranks 1 to `comm.size - 1` sends a gradient as large
# as `w` and then receives the weights, `pushes` times. Take the pushes **as they come**: one worker
# may be late, and you do not know which. For each, change `w` in place by `-lr * gradient`, and
# answer that worker with `w`. Return the workers in the order in which you took them.
#
# Useful: `handle = comm.irecv(room, worker)` starts a receive and returns at once;
# `handle.is_completed()` says whether it is there. Then call `handle.wait()`.


# %%
def serve(comm, w, lr, pushes):
    ### BEGIN SOLUTION
    room = {worker: torch.empty_like(w) for worker in range(1, comm.size)}
    coming = {worker: comm.irecv(room[worker], worker) for worker in room}
    taken = []
    while coming:
        for worker, handle in list(coming.items()):
            if not handle.is_completed():
                continue
            handle.wait()
            w -= lr * room[worker]
            comm.send(w, worker)
            taken.append(worker)
            del coming[worker]
            if taken.count(worker) < pushes:
                coming[worker] = comm.irecv(room[worker], worker)
    return taken
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.serve(serve)

# %% [markdown]
# ### Exercise 4, open: Many servers
#
# One link is the bottleneck: then let every rank serve a part. `nbytes[i]` are the bytes of parameter
# i, `servers` is how many ranks there are; all of them are workers, too. Return for each parameter the
# rank that serves it. Your score: the bytes over the busiest link, in and out, in one step.

# %%
show("labs/lab_04/scenarios.py:busiest_link_bytes")


# %%
def place(nbytes, servers):
    ### BEGIN SOLUTION
    load, chosen = [0] * servers, [0] * len(nbytes)
    for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):  # the largest first
        chosen[i] = load.index(min(load))
        load[chosen[i]] += nbytes[i]
    return chosen
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.place(place)

# %% [markdown]
# If parameters could be split, every rank would serve exactly G/n, and each link would carry
# 4(n-1)/n · G in a step (the 10,628,640 above). Have you seen this number before?

# %% [markdown] tags=["answer"]
# It is the ring's. With n servers of G/n each, the push is a reduce-scatter and the pull an all-gather:
# together an all-reduce. Data parallelism without a server is a server on every rank. (And if each rank
# keeps the optimizer's state of its own part only, it is ZeRO, lab 07.)

# %% tags=["nbval-check-output"]
report("04")

# %% [markdown]
# ## 8. In the wild
#
# | tool | the call | what it is |
# |---|---|---|
# | torch | `nn.DataParallel(model)` | rank 0's role played by the first GPU, the workers are threads of one process; the model is copied to all GPUs in every forward |
# | TensorFlow | `tf.distribute.ParameterServerStrategy` | many servers, asynchronous workers |
# | BytePS | `bps.DistributedOptimizer(optimizer)` | spare CPU machines as servers beside the GPUs |
# | torch | `DistributedDataParallel(model)` | no server: an all-reduce in buckets, lab 05 |
# | labkit | `ParameterServer(module)`, `AsyncParameterServer(module, torch.optim.SGD, lr=0.1)` | this lab |

# %% [markdown]
# Why the server lost, for dense models on GPUs:
#
# - one link carries 2(n-1) G; with many servers one buys machines for what a ring does for nothing;
# - stale gradients need smaller learning rates, and a run cannot be repeated. Google's own comparison
#   (Chen et al., 2016) found synchronous training with a few spare workers better than asynchronous;
# - GPUs of one cluster are equally fast: there is little waiting that could be saved.
#
# `nn.DataParallel` still works; its own documentation tells you to use DDP, on a single machine, too.

# %% [markdown]
# Where it lives on: recommenders whose embedding tables fit no GPU and of which a batch touches a
# few rows; machines of unequal speed, or that come and go; reinforcement learning, where what is
# generated with old weights is a stale gradient by another name.

# %% [markdown]
# Sources: Dean et al., *Large Scale Distributed Deep Networks*, NIPS 2012 (asynchronous SGD at scale);
# Li et al., *Scaling Distributed Machine Learning with the Parameter Server*, OSDI 2014; Ho et al., *Stale
# Synchronous Parallel Parameter Server*, NIPS 2013; Chen et al., *Revisiting Distributed Synchronous
# SGD*, 2016 (arXiv 1604.00981); Jiang et al., *BytePS*, OSDI 2020.

# %% [markdown]
# **You can now** say what a server's link carries and why a ring took its place, tell a stale gradient
# from a fresh one and bound it, and find a wrong average that an optimizer hides.
