# %% [markdown]
# # Lab 02: Collectives
#
# An all-reduce gives every rank the sum of all ranks' tensors. You have already called it. This lab
# shows two algorithms for it: a ring for large tensors and a tree for small ones. You watch every
# step, build the ring and a tree broadcast from send and receive, and predict the time of an
# all-reduce for any size and any number of ranks.
#
# You need labs 00 and 01: ranks, `comm.send` and `comm.recv`, a first tree, a first deadlock.

# %%
import time
from math import ceil, log2

import matplotlib.pyplot as plt
import numpy as np
import torch

from labkit import Comm, Link, World, listen, plot, watch_collective
from labkit.comm.collectives.costs import cost
from labkit.course import predict, report, show
from labkit.labs.lab_02 import checks as check
from labkit.labs.lab_02.scenarios import ring_a, ring_b

guess = predict()  # empty until section 3

# %% [markdown]
# ## 1. The question
#
# The simplest algorithm is a **server**: every rank sends its tensor to rank 0, which sends the sum
# back. Another algorithm is a **ring**. labkit has both, under the names `naive` and `ring`.
#
# Here are four ranks, each with a link of 0.05 Gb/s and a latency (delay per message) of 10 ms. The
# link is **paced**: the bytes are real, and each message is delayed as on a link of that speed.

# %%
LINK = Link(gbps=0.05, latency_us=10_000)
slow = World(4, link=LINK)


def times_s(algorithm, nbytes, repeats):
    comm, seconds = Comm(), []
    x = torch.ones(nbytes // 4)  # 4 bytes each
    for _ in range(repeats):
        comm.barrier()  # all ranks start together
        began_s = time.perf_counter()
        comm.all_reduce(x, algorithm=algorithm)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def measure_ms(algorithm, nbytes, repeats=1):
    """The time on the slowest rank, in the fastest repeat."""
    return 1000 * np.max(slow.run(times_s, algorithm, nbytes, repeats), axis=0).min()


# %%
first_ms = {"ring": measure_ms("ring", 2**19), "server": measure_ms("naive", 2**19)}
fig, axes = plt.subplots(figsize=(8, 1.2))
bars = axes.barh(list(first_ms), list(first_ms.values()), color="#0072B2")
axes.bar_label(bars, fmt="{:,.0f} ms", padding=4)
axes.set(
    xlim=(0, 1.2 * max(first_ms.values())), xlabel="ms to all-reduce 512 KiB on 4 ranks, paced"
)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The ring takes about half the time. Training sums gigabytes of gradients in every step, on up to
# thousands of ranks. **How long does an all-reduce of 1 GB take on 8 ranks, and on 8,000, and which
# algorithm is fastest?**

# %% [markdown]
# ## 2. The idea
#
# Look before you calculate. `watch_collective` runs an algorithm once on real ranks and records
# every message and every rank's tensor. (Shared memory sends no messages, so we use `backend="gloo"`.)
# Nothing in the picture is drawn by hand. Here is the server:

# %%
world = World(4, backend="gloo")
plot.movement(watch_collective(world, "all_reduce", "naive"))

# %% [markdown]
# How to read it:
#
# - a **column** is a rank; its tensor is split into four **chunks**, c0 to c3, from top to bottom;
# - a cell has one stripe for each rank, colored once that rank's values have been added: four
#   colored stripes are the complete sum;
# - an outline marks what a rank sends in this step, and an arrow the receiver;
# - each picture shows the state at the beginning of its step; the next picture shows the result.
#
# The whole tensor enters or leaves rank 0 six times. The other ranks are idle most of the time.

# %% [markdown]
# In the **ring**, every rank sends in every step, but only one chunk, and only to its right
# neighbor.

# %%
ring = watch_collective(world, "all_reduce", "ring")
plot.movement(ring)

# %% [markdown]
# The ring has two halves, which are collectives themselves:
#
# - steps 1 to 3 are a **reduce-scatter**: partial sums travel around the ring, and each rank adds
#   its own values. After n - 1 steps, rank r has chunk r of the sum;
# - steps 4 to 6 are an **all-gather**: the complete chunks travel around the ring.
#
# Follow c0 from step 1 to the end.

# %% [markdown]
# In the **tree**, partial sums travel up to rank 0, and the result travels back down. There are few
# steps, but each sends the whole tensor. Move the slider, or press play:

# %%
plot.steps(watch_collective(world, "all_reduce", "tree"))

# %% [markdown]
# Now the cost. A message of S bytes takes **α + S · β** seconds: α (alpha) is the latency, which
# even the smallest message pays; β (beta) is the time per byte. Steps run one after another, so
# their times add up. From the pictures, for n ranks:
#
# | all-reduce | steps | bytes per step | seconds |
# |---|---|---|---|
# | server | 2(n-1) | S | 2(n-1) · (α + S β) |
# | ring | 2(n-1) | S/n | 2(n-1) · α + 2(n-1)/n · S β |
# | tree | 2⌈log₂ n⌉ | S | 2⌈log₂ n⌉ · (α + S β) |
#
# The additions take time as well (γ, gamma, per byte), but little compared with a network. (By this
# table the server in the first plot needs 563 ms, but it took less: our paced links slow down only the
# sender, so rank 0 can receive three tensors at once. A real network card could not.)


# %%
def server_s(n, nbytes, alpha_s, beta_s_per_byte):
    return 2 * (n - 1) * (alpha_s + nbytes * beta_s_per_byte)


def ring_s(n, nbytes, alpha_s, beta_s_per_byte):
    return 2 * (n - 1) * alpha_s + 2 * (n - 1) / n * nbytes * beta_s_per_byte


def tree_s(n, nbytes, alpha_s, beta_s_per_byte):
    return 2 * ceil(log2(n)) * (alpha_s + nbytes * beta_s_per_byte)


# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | all-reduce | 全归约 | every rank gets the sum (or mean, maximum, ...) over all ranks |
# | reduce-scatter | 归约散播 | rank r gets chunk r of the sum over all ranks |
# | all-gather | 全收集 | every rank gets the chunks of all ranks |
# | chunk | 数据块 | one of n equal parts of a tensor |
# | ring | 环 | each rank sends only to its right neighbor |
# | binomial tree | 二项树 | in each step, every rank that has the data sends it to one more |
# | latency (α) | 延迟 | the time before the first byte of a message arrives |
# | bandwidth (1/β) | 带宽 | bytes per second over a link |
# | crossover | 交叉点 | the size at which two algorithms take the same time |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Four ranks all-reduce S = 1 MiB. How many bytes does **rank 0** send with each of the three
# algorithms? And how many steps does the ring take? Count the outlines in the pictures: an outline
# around one cell is S/4.

# %% stub="S = 2**20  # bytes\nguess = predict(server_bytes=..., ring_bytes=..., tree_bytes=..., ring_steps=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
S = 2**20  # bytes
guess = predict(server_bytes=3 * S, ring_bytes=3 * S // 2, tree_bytes=2 * S, ring_steps=6)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# This is the first half of labkit's ring. `chunks` are the n parts of the tensor; `out` receives
# chunk r of the sum on rank r.

# %%
show("comm/collectives/reduce_scatter.py:ring_reduce_scatter", since="n, rank")

# %% [markdown]
# - `irecv` and `isend` **start** a message and return at once; `yield` waits for it. So every rank
#   sends and receives at the same time.
# - `partial` is the tensor to send next: first this rank's values of chunk `rank - 1`, then the sum
#   that just arrived plus this rank's values of the same chunk (`share`).
# - `reduce(a, b)` adds b to a.
# - Messages arrive in a buffer, `staging`, with two halves that alternate: one partial sum is still
#   being sent while the next arrives.
# - In the last step the partial sum arrives in `out` itself, and adding the rank's own chunk
#   completes it. If `out` *is* that chunk (`in_place`, as in the all-reduce below), the message
#   arrives in `staging` and is added to `out`.

# %% [markdown]
# The second half, and the whole all-reduce:

# %%
show("comm/collectives/all_gather.py:ring_all_gather", since="n, rank")

# %%
show("comm/collectives/all_reduce.py:ring_all_reduce", since="own =")

# %% [markdown]
# The library also has the cost of each algorithm: steps, bytes through the busiest rank, and bytes
# summed.

# %% tags=["nbval-check-output"]
for name in ["naive", "ring", "tree"]:
    total = cost("all_reduce", name, n=4, nbytes=2**20)
    print(f"{name:6} steps={total.steps}  sent_bytes={total.sent_bytes:,.0f}", end="  ")
    print(f"reduced_bytes={total.reduced_bytes:,.0f}")

# %% [markdown]
# `sent_bytes` adds the busiest rank's bytes in *and* out, except where both flow at once, as in the
# ring. In the tree, 2S arrive at rank 0, then 2S leave it; rank 0 itself sends only the latter.

# %% [markdown]
# ## 5. Run it
#
# Bytes first. `wire_bytes` are the bytes that a rank actually sent:


# %%
def sent_bytes(algorithm):
    comm = Comm()
    with listen() as events:
        comm.all_reduce(torch.ones(2**18), algorithm=algorithm)
    return events[0].wire_bytes


# %% tags=["nbval-check-output"]
by_rank_0 = {name: world.run(sent_bytes, name)[0] for name in ["naive", "ring", "tree"]}
guess.beside(
    server_bytes=by_rank_0["naive"],
    ring_bytes=by_rank_0["ring"],
    tree_bytes=by_rank_0["tree"],
    ring_steps=len(ring.frames),
)

# %% [markdown]
# On 4 ranks, the tree's root sends 2S and receives 2S; ranks 2 and 3, S each way. In the ring, all
# ranks send the same: 2(n-1)/n · S, less than 2S for any number of ranks. If the ranks do the
# additions, no algorithm can send fewer bytes from its busiest rank (Patarasuk and Yuan, 2009).
#
# Now the times. We know α and β of the paced link, so the formulas can predict them. (We compare
# ring and tree only.)

# %%
ALPHA_S, BETA_S = 10e-3, 8 / 0.05e9  # of LINK: 10 ms; 8 bits per byte, 0.05e9 bits per second
sizes = [2**k for k in (12, 14, 17, 18)]
measured = {name: [measure_ms(name, size, 3) for size in sizes] for name in ["ring", "tree"]}

# %%
many = np.geomspace(2**11, 2**19)
fig, axes = plt.subplots(figsize=(8, 3))
for name, seconds, color in [("ring", ring_s, "#0072B2"), ("tree", tree_s, "#E69F00")]:
    axes.plot(many, [1000 * seconds(4, s, ALPHA_S, BETA_S) for s in many], color=color)
    axes.plot(
        sizes, measured[name], "o", color=color, label=f"{name} (line: formula, dots: measured)"
    )
axes.set(xscale="log", yscale="log", xlabel="tensor size in bytes", ylabel="ms, 4 ranks, paced")
axes.set_xticks(sizes, ["4 KiB", "16 KiB", "128 KiB", "256 KiB"], minor=False)
axes.set_yticks([50, 100, 200], ["50", "100", "200"])
axes.minorticks_off()
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
names = {True: "ring", False: "tree"}
print("The faster algorithm:")
for k in (0, -1):  # the smallest and the largest size
    by_formula = ring_s(4, sizes[k], ALPHA_S, BETA_S) < tree_s(4, sizes[k], ALPHA_S, BETA_S)
    in_fact = measured["ring"][k] < measured["tree"][k]
    print(f"{sizes[k] // 1024:3} KiB: {names[by_formula]} by formula, {names[in_fact]} measured")

# %% [markdown]
# The dots lie a few milliseconds above the lines, since the processes need some time for each step,
# which the formula leaves out. For small tensors latency dominates, and the tree has fewer steps.
# For large tensors bytes dominate, and the ring sends fewer. The lines cross.
#
# **Recursive doubling** is related to the tree but has no root: every rank exchanges its tensor
# with a partner at distance 1, 2, 4, ... It takes half the steps of the tree, each with all S
# bytes: log₂ n · (α + S β). (If n is not a power of two, it takes two more steps.)

# %%
plot.movement(watch_collective(world, "all_reduce", "recursive_doubling"))

# %% [markdown]
# A good library switches algorithms where the lines cross. labkit looks up the choice in a table,
# measured on links that are not paced, and explains it:

# %%
for nbytes in [2**10, 2**24]:
    choice = world.run(lambda s: Comm().explain("all_reduce", s), nbytes)[0]
    print(choice.why.partition(". ")[0], "->", choice.algorithm)

# %% [markdown]
# (`gloo` is the backend's own all-reduce, also a ring. Without `backend="gloo"` or a `link`, ranks
# on one machine use shared memory and send no messages.)

# %% [markdown]
# And now 1 GB. Assume two kinds of links: NVLink between the 8 GPUs of a node, say 450 GB/s,
# and InfiniBand, a fast network between nodes, with one card of 50 GB/s (400 Gb/s) per GPU.
# Latencies differ between clusters; we assume 2 µs and 10 µs. A **hierarchical** all-reduce has
# three stages: a reduce-scatter inside each node, after which each GPU has 1/8 of the node's sum;
# an all-reduce of this eighth with the GPUs at the same position in the other nodes; and an
# all-gather inside each node. In a **double tree**, two trees run at once, each with half of the tensor,
# split into many small pieces. All algorithms except the hierarchical one use InfiniBand only.

# %%
NVLINK, INFINIBAND = (2e-6, 1 / 450e9), (10e-6, 1 / 50e9)  # α in s, β in s per byte


def hierarchical_s(n, nbytes):
    between_s = ring_s(n // 8, nbytes / 8, *INFINIBAND) if n > 8 else 0.0
    return ring_s(8, nbytes, *NVLINK) + between_s


def two_trees_s(n, nbytes):
    """Each tree carries half of S in many small pieces; we ignore their latencies (a few ms)."""
    return 2 * ceil(log2(n)) * INFINIBAND[0] + 2 * nbytes * INFINIBAND[1]


ways = {
    "server": (lambda n, s: server_s(n, s, *INFINIBAND), "#5E6670"),
    "tree": (lambda n, s: tree_s(n, s, *INFINIBAND), "#E69F00"),
    "ring": (lambda n, s: ring_s(n, s, *INFINIBAND), "#0072B2"),
    "two trees": (two_trees_s, "#CC79A7"),
    "hierarchical": (hierarchical_s, "#009E73"),
}

# %%
counts = [8 * 2**k for k in range(11)]
fig, axes = plt.subplots(figsize=(8, 3.2))
for name, (seconds, color) in ways.items():
    y_ms = [1000 * seconds(n, 1e9) for n in counts]
    axes.plot(counts, y_ms, color=color)
    side = "bottom" if name == "two trees" else "top" if name == "hierarchical" else "center"
    axes.text(1.1 * counts[-1], y_ms[-1], name, va=side, color=color)
axes.set(
    xscale="log", yscale="log", xlabel="ranks", ylabel="ms for 1 GB, by formula", ylim=(2, 3e6)
)
axes.set_xticks([8, 64, 512, 8192], ["8", "64", "512", "8,192"])
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
print("ms for 1 GB " + "".join(f"{name:>14}" for name in ways))
for n in [8, 64, 8000]:
    print(f"{n:5,} ranks " + "".join(f"{1000 * f(n, 1e9):14,.0f}" for f, _ in ways.values()))

# %% [markdown]
# This answers the question: 1 GB takes 4 ms on 8 ranks, over NVLink, and 29 ms on 8,000 ranks with
# the hierarchical algorithm. A plain ring over InfiniBand takes 35 and 200 ms; the server is far
# too slow.
#
# From 8 to 8,000 ranks the *bytes* of the ring hardly grow: they take 35 to 40 ms. But the number
# of *steps* grows: 16,000 latencies are 160 ms. So with thousands of ranks, use algorithms with few
# steps **and** few bytes: the hierarchical one, or two trees (`double_tree` in labkit).

# %% [markdown]
# ## 6. Break it
#
# ### All ranks send first
#
# Here is a first attempt at a ring, with the calls of lab 00. Every rank sends to its right
# neighbor, then receives from its left neighbor:


# %%
def first_ring(comm, x):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = torch.empty_like(x)
    comm.send(x, right)
    comm.recv(arrived, left)
    return arrived


# %% tags=["raises-exception"]
short = World(3, timeout_s=2)
short.run(lambda: first_ring(Comm(), torch.ones(4)))

# %% [markdown]
# All ranks wait in `send`, and none receives. We need a send that does not block. `comm.isend`
# starts the message and returns a **handle**; do not write to the tensor until `handle.wait()` has
# returned.


# %%
def pass_on(comm, outgoing, incoming):
    """One step of a ring: `outgoing` to the right neighbor, `incoming` from the left one."""
    handle = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    handle.wait()


# %% [markdown]
# You may use `pass_on` from here on.
#
# ### Two rings with a bug
#
# Here are two faulty all-reduces. Neither hangs. You see only what they do, not their code. What is
# wrong with each, and from which step? A cell with an orange-red outline contains a wrong sum: `2×`
# means that it includes a rank's values twice. Not every error has this outline: missing values just
# stay gray. (The answer is in `solutions/02_collectives.ipynb`, section 6.)

# %%
plot.movement(watch_collective(world, "all_reduce", ring_a))

# %%
plot.movement(watch_collective(world, "all_reduce", ring_b))

# %% [markdown] tags=["answer"]
# - **ring_a** runs its reduce-scatter for one step too many, and has no all-gather. After n - 1
#   steps each chunk is complete on one rank. In step n this complete sum goes to the right
#   neighbor, which *adds* it to its own values, although the sum already includes them.
# - **ring_b** is correct up to step 3. Its all-gather then starts with the wrong chunk: not the
#   complete one, but the one each rank sent first. So the chunks that travel around the ring
#   hold only one rank's values.

# %% tags=["answer"]
show("labs/lab_02/scenarios.py:ring_b")

# %% [markdown]
# ## 7. Build it
#
# Your functions get `comm` and use `send`, `recv`, `isend` and `irecv` (or `pass_on`). Each check
# runs them on real ranks, checks values and bytes, and counts the steps of the recorded movement.
# To see what your function does, even if it is wrong:
#
# ```
# plot.movement(watch_collective(world, "reduce_scatter", my_reduce_scatter))
# ```

# %% [markdown]
# ### Exercise 1: Reduce-scatter
#
# `chunks` is a list of n one-dimensional tensors, which may differ in size. In n - 1 steps around
# the ring, make `chunks[comm.rank]` the sum of all ranks' chunks with this index. The other chunks
# may hold anything afterward. `torch.empty_like(chunk)` is a buffer for a message, with the same
# shape **and dtype** (the pictures use integers).
#
# Sum **in place**: write into the given tensors, as `chunks[i] += y` and `chunks[i].copy_(y)` do;
# `chunks[i] = ...` only puts a new tensor into the list.


# %%
def my_reduce_scatter(comm, chunks):
    n = comm.size
    ### BEGIN SOLUTION
    for step in range(1, n):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        incoming = torch.empty_like(take)
        pass_on(comm, give, incoming)
        take += incoming
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_reduce_scatter(my_reduce_scatter)

# %% [markdown]
# ### Exercise 2: All-gather
#
# Now `chunks[comm.rank]` is this rank's chunk. The other chunks hold arbitrary values: overwrite
# them, do not add to them. In n - 1 steps, give every rank all chunks, again in place.


# %%
def my_all_gather(comm, chunks):
    n = comm.size
    ### BEGIN SOLUTION
    for step in range(n - 1):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        pass_on(comm, give, take)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_all_gather(my_all_gather)

# %% [markdown]
# ### Exercise 3: The ring
#
# `x` has one dimension and any size, which need not be divisible by n. Replace it, in place, with
# the sum over all ranks. `list(x.tensor_split(n))` is a list of n views of `x`: writing to them
# writes to `x`.


# %%
def my_all_reduce(comm, x):
    ### BEGIN SOLUTION
    chunks = list(x.tensor_split(comm.size))
    my_reduce_scatter(comm, chunks)
    my_all_gather(comm, chunks)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_all_reduce(my_all_reduce)

# %% [markdown]
# Here are the steps of your ring, and its time compared with labkit's ring and the formula:

# %%
plot.movement(watch_collective(world, "all_reduce", my_all_reduce))


# %%
def my_time_s(nbytes=2**19):
    comm, x = Comm(), torch.ones(nbytes // 4)
    comm.barrier()
    began_s = time.perf_counter()
    my_all_reduce(comm, x)
    return time.perf_counter() - began_s


formula_ms = 1000 * ring_s(4, 2**19, ALPHA_S, BETA_S)
rows = {"formula": formula_ms, "labkit": first_ms["ring"], "yours": 1000 * max(slow.run(my_time_s))}
fig, axes = plt.subplots(figsize=(8, 1.5))
bars = axes.barh(list(rows), list(rows.values()), color=["#B4BAC2", "#0072B2", "#009E73"])
axes.bar_label(bars, fmt="{:,.0f} ms", padding=4)
axes.set(xlim=(0, 1.3 * max(rows.values())), xlabel="ms for 512 KiB on 4 ranks with a ring, paced")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ### Exercise 4: A tree with any root
#
# Write a binomial-tree broadcast. In the first step the root sends to one other rank, in the
# second both send to one rank each, then all four do: the number of ranks that have `x` doubles in
# each step. Any rank can be the root. On 4 ranks the tree takes 2 steps, on 7 ranks 3. To draw
# your tree (root 2):
#
# ```
# plot.movement(watch_collective(world, "broadcast", lambda comm, x: my_tree(comm, x, 2), root=2))
# ```


# %%
def my_tree(comm, x, root):
    n, position = comm.size, (comm.rank - root) % comm.size  # counted from the root
    ### BEGIN SOLUTION
    reach = 1
    while reach < n:
        if position < reach and position + reach < n:
            comm.send(x, (comm.rank + reach) % n)
        elif reach <= position < 2 * reach:
            comm.recv(x, (comm.rank - reach) % n)
        reach *= 2
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_tree(my_tree)

# %% [markdown]
# ### Exercise 5: The crossover
#
# At what size do ring and tree take the same time, on 4 ranks or more? Set the two formulas of
# section 2 equal and solve for S, in bytes.


# %%
def crossover_bytes(n, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    ring_steps, tree_steps = 2 * (n - 1), 2 * ceil(log2(n))
    more_bytes = tree_steps - 2 * (n - 1) / n  # of the tree, in units of S
    return (ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.crossover_bytes(crossover_bytes)

# %% [markdown]
# Does your function return the size at which the lines of section 5 cross? And what does it return
# for 8 and 8,000 ranks of a real cluster?

# %% tags=["nbval-check-output"]
print(f"4 ranks, paced:          {crossover_bytes(4, ALPHA_S, BETA_S) / 1024:8,.0f} KiB")
for n in [8, 8000]:
    print(f"{n:5,} ranks, InfiniBand: {crossover_bytes(n, *INFINIBAND) / 1024:8,.0f} KiB")

# %% [markdown]
# With more ranks the crossover moves up: the ring's latency grows with n, the tree's with log n.

# %% [markdown]
# ### Exercise 6, open: The best broadcast
#
# Rank 0 has 600,000 bytes that five other ranks need. The latency is 10 µs, the bandwidth 10 GB/s.
# Both algorithms so far are slow: the tree takes 3 · (10 + 60) = 210 µs, and sending one by one
# takes 350 µs. In each step, a rank can send one message and receive one. This function computes
# your score, in µs:

# %%
show("labs/lab_02/checks.py:modeled_us")

# %% [markdown]
# `comm.size` is 6. Split `x` into 2, 3 or 6 pieces. While one piece arrives, another can leave.
# (Your exercises 2 and 4 may help, too.)


# %%
def my_best_broadcast(comm, x):
    ### BEGIN SOLUTION
    handles = []  # a chain: each rank passes on a piece while the next arrives
    for piece in x.tensor_split(6):
        if comm.rank > 0:
            comm.recv(piece, comm.rank - 1)
        if comm.rank < comm.size - 1:
            handles.append(comm.isend(piece, comm.rank + 1))
    for handle in handles:
        handle.wait()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_best_broadcast(my_best_broadcast)

# %% [markdown]
# To improve your score: how many steps pass in your algorithm until every rank is busy? Could more
# ranks start earlier?

# %% tags=["nbval-check-output"]
report("02")

# %% [markdown]
# ## 8. In the wild
#
# | library | all-reduce algorithms | how to choose |
# |---|---|---|
# | NCCL | ring, double binary tree, reduction inside the network switches | by size and ranks; `NCCL_ALGO=Ring` |
# | HCCL (Ascend) | ring, halving and doubling, hierarchical ring | `HCCL_ALGO="level0:NA;level1:ring"` |
# | Open MPI | linear, recursive doubling, ring, Rabenseifner | `coll_tuned_use_dynamic_rules`, then `coll_tuned_allreduce_algorithm` |
# | MPICH | recursive doubling, Rabenseifner | `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM` |
# | gloo | ring, bcube | chosen by the caller; torch uses the ring |
# | labkit | ring, trees, recursive doubling, Rabenseifner, hierarchical | `algorithm="tree"`, `LABKIT_ALGO=all_reduce:tree` |

# %% [markdown]
# Three ideas behind these algorithms (labkit has the last two):
#
# - **many channels**: NCCL runs several rings at once, over different links, and splits chunks
#   further, so that additions and sends overlap;
# - **double binary trees** (NCCL 2.4, 2019): every rank is a leaf in one tree but not in the other,
#   so all ranks send nearly 2S, in 2⌈log₂ n⌉ steps plus one per piece. This makes 1 GB cheap
#   on 8,000 ranks;
# - **Rabenseifner's algorithm**: a reduce-scatter by halving and an all-gather by doubling. For
#   powers of two, it sends as few bytes as the ring, in as few steps as the tree. See
#   `watch_collective(world, "all_reduce", "halving_doubling")`.

# %% [markdown]
# Sources: Patarasuk and Yuan, 2009 (the ring); Thakur, Rabenseifner and Gropp, 2005 (MPICH);
# Sanders, Speck and Träff, 2009 (two trees); NVIDIA, *NCCL 2.4*, 2019; the documentation of NCCL,
# HCCL, Open MPI and MPICH; NVIDIA's H100 data sheet (NVLink: 900 GB/s for both directions
# together).

# %% [markdown]
# **You can now** read the steps of a collective, build it from messages, predict the time of an
# all-reduce on any number of ranks, and explain why large tensors use a ring and small ones a tree.
