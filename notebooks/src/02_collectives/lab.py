# %% [markdown]
# # Lab 02: Collectives
#
# An all-reduce gives every rank the sum of all ranks' tensors. You have called it; now you build it
# from send and receive, twice: a way that suits large tensors and one that suits small ones. You
# will see every step of it, and predict its time for any size and any number of ranks.
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

guess = predict()  # nothing yet: that is for you, in step 3

# %% [markdown]
# ## 1. The question
#
# Simplest is a **server**: everyone sends its tensor to rank 0, which adds them up and sends the sum
# to everyone. Another way is a **ring**. labkit has both, under the names `naive` and `ring`.
#
# Here are four ranks, each with a wire of 0.05 gigabits per second on which a message travels 10 ms
# longer than its bytes take. The bytes are real, and as late as on such a wire: **paced**.

# %%
LINK = Link(gbps=0.05, latency_us=10_000)
slow = World(4, link=LINK)


def times_s(algorithm, nbytes, repeats):
    comm, found = Comm(), []
    x = torch.ones(nbytes // 4)  # 4 bytes each
    for _ in range(repeats):
        comm.barrier()  # all begin together
        began_s = time.perf_counter()
        comm.all_reduce(x, algorithm=algorithm)
        found.append(time.perf_counter() - began_s)
    return found


def measure_ms(algorithm, nbytes, repeats=1):
    """On the slowest rank, in the best of the repeats."""
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
# The same sum, in about half the time. A model in training sums up gigabytes of gradients in every
# step, and on thousands of ranks. **What does an all-reduce of 1 GB cost on 8 ranks, what on 8,000, and
# which algorithm should carry it?**

# %% [markdown]
# ## 2. The idea
#
# First look. `watch_collective` runs an algorithm once on real ranks, and notes every message and what
# each rank holds. (So these ranks must send messages: `backend="gloo"`.) Nothing in the picture is
# drawn by hand. The server:

# %%
world = World(4, backend="gloo")
plot.movement(watch_collective(world, "all_reduce", "naive"))

# %% [markdown]
# How to read it:
#
# - a **column** is a rank; its tensor is cut into four **chunks**, c0 to c3, one below the other;
# - a cell has a stripe for each rank, coloured when that rank's numbers have been added: four
#   stripes are the finished sum;
# - what a rank sends in this step is framed, and the arrow shows to whom;
# - a picture shows what the ranks hold when the step begins; what it brings shows in the next.
#
# All of the tensor passes through rank 0, six times. The others do nothing most of the time.

# %% [markdown]
# The **ring**: every rank sends in every step, but only one chunk, and only to its neighbour.

# %%
ring = watch_collective(world, "all_reduce", "ring")
plot.movement(ring)

# %% [markdown]
# Two halves, with names of their own:
#
# - steps 1 to 3 are a **reduce-scatter**: a partial sum goes around, and each rank adds its share.
#   After n - 1 steps each rank has one chunk of the sum: rank r has chunk r;
# - steps 4 to 6 are an **all-gather**: the finished chunks go around.
#
# Follow c0 from step 1 to the end.

# %% [markdown]
# The **tree**: up to rank 0 and down again. Few steps, but the whole tensor in each. Move the slider, or
# press play:

# %%
plot.steps(watch_collective(world, "all_reduce", "tree"))

# %% [markdown]
# Now the price. A message of S bytes takes **α + S · β** seconds: α (alpha) is the latency, paid by
# the smallest message too; β (beta) is the time of one byte. Steps come one after the other, so add
# them up. For n ranks, counted from the pictures:
#
# | all-reduce | steps | bytes in each | seconds |
# |---|---|---|---|
# | server | 2(n-1) | S | 2(n-1) · (α + S β) |
# | ring | 2(n-1) | S/n | 2(n-1) · α + 2(n-1)/n · S β |
# | tree | 2⌈log₂ n⌉ | S | 2⌈log₂ n⌉ · (α + S β) |
#
# Adding the numbers takes time as well (γ, gamma, for each byte); it is small beside a network. (The
# server in step 1 was faster than this: our wires are slow on the way out only. More in step 5.)


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
# Four ranks all-reduce S = 1 MiB. How many bytes does **rank 0** send in each of the three ways? And
# in how many steps is the ring done? Count the frames in the pictures: a frame around one cell is S/4.

# %% stub="S = 2**20  # bytes\nguess = predict(server_bytes=..., ring_bytes=..., tree_bytes=..., ring_steps=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
S = 2**20  # bytes
guess = predict(server_bytes=3 * S, ring_bytes=3 * S // 2, tree_bytes=2 * S, ring_steps=6)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# The first half of labkit's ring, the function itself. `chunks` are the n parts of the tensor; `out`
# is chunk r on rank r.

# %%
show("comm/collectives/reduce_scatter.py:ring_reduce_scatter", since="n, rank")

# %% [markdown]
# - `irecv` and `isend` **start** a message and return at once; `yield` waits for it. So every rank
#   sends and receives at the same time.
# - `partial` is what is passed on: at first the rank's own numbers, then what has just arrived with
#   its own added.
# - `reduce(a, b)` adds b to a.
# - What arrives goes into `room`, a place apart. It has two halves, in turns: one partial sum is still
#   leaving while the next arrives.
# - In the last step the sum becomes complete. It arrives in `out` itself, and the rank's own is added
#   there. Where `out` *is* the rank's chunk (`in_place`: so in the all-reduce below), it is added to that.

# %% [markdown]
# The second half, and both together:

# %%
show("comm/collectives/all_gather.py:ring_all_gather", since="n, rank")

# %%
show("comm/collectives/all_reduce.py:ring_all_reduce", since="own =")

# %% [markdown]
# Each algorithm stands beside its cost: steps, bytes through the busiest rank, bytes that are added up.

# %% tags=["nbval-check-output"]
for name in ["naive", "ring", "tree"]:
    print(f"{name:6}", cost("all_reduce", name, n=4, nbytes=2**20))

# %% [markdown]
# `sent_bytes` are those that pass the busiest rank one after the other, in *or* out: in the tree 2S come
# to rank 0, then 2S leave it. What rank 0 itself sends is only the second part.

# %% [markdown]
# ## 5. Run it
#
# Bytes first. `wire_bytes` is what a rank really sent:


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
# In the tree rank 0 sends 2S and receives as much; a leaf sends S only. In the ring all send the same:
# 2(n-1)/n · S, less than 2S however many ranks there are. No algorithm in which the ranks do the adding
# can do with less on its busiest rank (Patarasuk and Yuan, 2009).
#
# Now time. Of the paced wire we know α and β, so the formulas say the milliseconds. (Those of the ring
# and the tree: there a rank receives one message at a time. A server receives n - 1 at once, and our
# wires are slow on the way out only, so it comes off better here than on a real network card.)

# %%
ALPHA_S, BETA_S = 10e-3, 8 / 0.05e9  # of LINK: 10 ms; 8 bits a byte, 0.05e9 bits a second
sizes = [2**k for k in (12, 14, 17, 18)]
measured = {name: [measure_ms(name, size, 3) for size in sizes] for name in ["ring", "tree"]}

# %%
many = np.geomspace(2**11, 2**19)
fig, axes = plt.subplots(figsize=(8, 3))
for name, seconds, colour in [("ring", ring_s, "#0072B2"), ("tree", tree_s, "#E69F00")]:
    axes.plot(many, [1000 * seconds(4, s, ALPHA_S, BETA_S) for s in many], color=colour)
    axes.plot(sizes, measured[name], "o", color=colour, label=f"{name}: line α-β, dots measured")
axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel="ms, 4 ranks, paced")
axes.set_xticks(sizes, ["4 KiB", "16 KiB", "128 KiB", "256 KiB"], minor=False)
axes.set_yticks([50, 100, 200], ["50", "100", "200"])
axes.minorticks_off()
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% tags=["nbval-check-output"]
names = {True: "ring", False: "tree"}
for k in (0, -1):  # the smallest and the largest
    by_formula = ring_s(4, sizes[k], ALPHA_S, BETA_S) < tree_s(4, sizes[k], ALPHA_S, BETA_S)
    really = measured["ring"][k] < measured["tree"][k]
    print(f"{sizes[k] // 1024:3} KiB: {names[by_formula]} by formula, {names[really]} measured")

# %% [markdown]
# Small tensors: latency counts, and the tree has fewer steps. Large ones: bytes count, and the ring has
# fewer of them. The lines cross.
#
# **Recursive doubling** is the tree's sister: no root, and everyone swaps with a partner 1, 2, 4, ...
# away. Half the steps of the tree, with all of S in each as there: log₂ n · (α + S β). (Where n is no
# power of two, two steps more.)

# %%
plot.movement(watch_collective(world, "all_reduce", "recursive_doubling"))

# %% [markdown]
# A good library changes over where the lines cross. labkit has a table for it, for messages that are not
# paced, and says why it chose:

# %%
for nbytes in [2**10, 2**24]:
    choice = world.run(lambda s: Comm().explain("all_reduce", s), nbytes)[0]
    print(choice.why.partition(". ")[0], "->", choice.algorithm)

# %% [markdown]
# (`gloo` is the backend's own all-reduce, a ring, too. All of this is for messages: ranks that share a
# machine can do without them. A world without `backend="gloo"` gives them common memory where it can.)

# %% [markdown]
# And now 1 GB. A cluster has two sorts of wires: inside a machine of 8 GPUs NVLink, say 450 GB/s; between
# machines one InfiniBand card for each GPU, 50 GB/s (400 Gbit/s). Latencies differ from place to place;
# we take 2 µs and 10 µs. **Hierarchical** means: the first half of a ring inside each machine
# (reduce-scatter), an all-reduce between machines of the 1/8 that each GPU then has, and the second half
# inside (all-gather). The others use InfiniBand alone.

# %%
NVLINK, INFINIBAND = (2e-6, 1 / 450e9), (10e-6, 1 / 50e9)  # α in s, β in s per byte


def hierarchical_s(n, nbytes):
    between_s = ring_s(n // 8, nbytes / 8, *INFINIBAND) if n > 8 else 0.0
    return ring_s(8, nbytes, *NVLINK) + between_s


def two_trees_s(n, nbytes):
    """Each carries half, in many small pieces, whose own latencies (a few ms) we leave out."""
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
for name, (seconds, colour) in ways.items():
    y_ms = [1000 * seconds(n, 1e9) for n in counts]
    axes.plot(counts, y_ms, color=colour)
    side = "bottom" if name == "two trees" else "top" if name == "hierarchical" else "center"
    axes.text(1.1 * counts[-1], y_ms[-1], name, va=side, color=colour)
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
# That is the answer to the question: 1 GB costs 4 ms on 8 ranks, over NVLink, and 29 ms on 8,000,
# hierarchically. A plain ring over InfiniBand takes 35 and 200 ms, the server is hopeless.
#
# From 8 to 8,000 ranks the *bytes* of the ring hardly grow: they take 35 to 40 ms. But its *steps* do:
# 16,000 latencies are 160 ms. So on thousands of ranks one uses algorithms with few steps **and** few
# bytes: hierarchical ones, or **two trees** at once, each with half of the tensor, cut into pieces (in
# labkit `double_tree`).

# %% [markdown]
# ## 6. Break it
#
# ### All send first
#
# A first ring, with the calls of lab 00. Every rank sends to the right, then receives from the left:


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
# All wait in `send`: nobody receives. It needs a send that does not wait. `comm.isend` starts the
# message and returns a **handle**; until `handle.wait()` has returned, do not write to what is sent.


# %%
def pass_on(comm, outgoing, incoming):
    """One step of a ring: `outgoing` to the right neighbour, `incoming` from the left one."""
    handle = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    handle.wait()


# %% [markdown]
# You may use `pass_on` from here on.
#
# ### Two rings with a bug
#
# Somebody wrote two all-reduces. Neither hangs. You do not get the code, only what it does: what is
# wrong with each, and from which step on? A vermilion cell holds what it should not: `2×` means that a
# rank's numbers are in it twice. Not every mistake is vermilion: what is only missing stays grey. (The
# answer is in `solutions/02_collectives.ipynb`, step 6.)

# %%
plot.movement(watch_collective(world, "all_reduce", ring_a))

# %%
plot.movement(watch_collective(world, "all_reduce", ring_b))

# %% [markdown] tags=["answer"]
# - **ring_a** takes one step too many, and then stops. After n - 1 steps each chunk is complete on one
#   rank; in step n the complete sum is *added* to a rank's own share once more.
# - **ring_b** is right up to step 3. Then its all-gather begins with the wrong chunk: not the complete
#   one, but the one that it gave first. What goes around are the numbers of a single rank.

# %% tags=["answer"]
show("labs/lab_02/scenarios.py:ring_b")

# %% [markdown]
# ## 7. Build it
#
# Your functions get `comm` and use `send`, `recv`, `isend` and `irecv` (or `pass_on`). Each check runs
# them on real ranks, compares numbers and bytes, and counts the steps in the recorded movement. To see
# what your function does, also when it is wrong:
#
# ```
# plot.movement(watch_collective(world, "reduce_scatter", my_reduce_scatter))
# ```

# %% [markdown]
# ### Exercise 1: Reduce-scatter
#
# `chunks` is a list of n tensors in one dimension, which may differ in size. Around the ring, in n - 1
# steps, make `chunks[comm.rank]` the sum of all ranks' chunks of that number. The others may hold
# anything afterwards. `torch.empty_like(chunk)` is a place for what arrives, of its shape **and dtype**
# (the pictures use whole numbers).
#
# Sum **in place**: write into the tensors that you are given. `chunks[i] += y` and `chunks[i].copy_(y)`
# do; `chunks[i] = ...` only puts another tensor into the list.


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
# Now `chunks[comm.rank]` is what this rank has. The others hold anything: overwrite them, do not add. In
# n - 1 steps, give everybody all chunks, again in place.


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
# `x` has one dimension and any size, also one that does not divide by n. Make it the sum over all ranks,
# in place. `list(x.tensor_split(n))` is a list of n parts that are views: writing to them writes to `x`.


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
# Your ring as it moves, and its time beside labkit's and the formula's:

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
axes.set(xlim=(0, 1.3 * max(rows.values())), xlabel="ms for 512 KiB on 4 ranks by a ring, paced")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ### Exercise 4: A tree with any root
#
# A broadcast by a binomial tree. In the first step the root sends to one other, in the second both send to
# one more each, then all four: each time twice as many have it. Any rank can be the root. On 4 ranks it
# takes 2 steps, on 7 it takes 3. To draw it, with root 2:
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
# At how many bytes do ring and tree take the same time? Set the two formulas of step 2 equal, and solve
# for S, in bytes. (For 4 ranks or more.)


# %%
def crossover_bytes(n, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    ring_steps, tree_steps = 2 * (n - 1), 2 * ceil(log2(n))
    more_bytes = tree_steps - 2 * (n - 1) / n  # that the tree sends, in units of S
    return (ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.crossover_bytes(crossover_bytes)

# %% [markdown]
# Does it say where the lines of step 5 cross? And on 8 and 8,000 ranks of a real cluster?

# %% tags=["nbval-check-output"]
print(f"4 ranks, paced:          {crossover_bytes(4, ALPHA_S, BETA_S) / 1024:8,.0f} KiB")
for n in [8, 8000]:
    print(f"{n:5,} ranks, InfiniBand: {crossover_bytes(n, *INFINIBAND) / 1024:8,.0f} KiB")

# %% [markdown]
# With more ranks the crossover moves up: the ring's latencies grow with n, those of the tree with its
# logarithm.

# %% [markdown]
# ### Exercise 6, open: The best broadcast
#
# Rank 0 has 600,000 bytes, five others want them. A message takes 10 µs, and its bytes at 10 GB/s. Both
# ways we know are poor: the tree takes 3 · (10 + 60) = 210 µs, one by one 350 µs. In a step a rank sends
# one message and receives one. Your score, in µs:

# %%
show("labs/lab_02/checks.py:modelled_us")

# %% [markdown]
# `comm.size` is 6. Cut `x` into as many pieces as there are ranks, or into 2 or 3. While one piece
# arrives, another can leave. (Your exercises 2 and 4 may be of use, too.)


# %%
def my_best_broadcast(comm, x):
    ### BEGIN SOLUTION
    handles = []  # a chain: each passes a piece on while the next arrives
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
# How long does it take before all ranks are busy? Could more of them begin earlier?

# %% tags=["nbval-check-output"]
report("02")

# %% [markdown]
# ## 8. In the wild
#
# | library | its all-reduces | how to choose |
# |---|---|---|
# | NCCL | ring, double binary tree, in the network's switches | by size and ranks; `NCCL_ALGO=Ring` |
# | HCCL (Ascend) | ring, halving and doubling, hierarchical ring | `HCCL_ALGO="level0:NA;level1:ring"` |
# | Open MPI | linear, recursive doubling, ring, Rabenseifner | `coll_tuned_use_dynamic_rules`, then `coll_tuned_allreduce_algorithm` |
# | MPICH | recursive doubling, Rabenseifner | `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM` |
# | gloo | ring, bcube | the caller says; torch takes the ring |
# | labkit | ring, trees, recursive doubling, Rabenseifner, hierarchical | `algorithm="tree"`, `LABKIT_ALGO=all_reduce:tree` |

# %% [markdown]
# What they add:
#
# - **many channels**: NCCL runs several rings at once, over different wires, and cuts chunks further,
#   so that adding and sending overlap;
# - **double binary trees** (NCCL 2.4, 2019): every rank is a leaf in one tree and not in the other, so all
#   send nearly 2S, in 2⌈log₂ n⌉ steps and one more for each piece. On 8,000 ranks that is what makes 1 GB
#   cheap;
# - **Rabenseifner's**: reduce-scatter by halving, all-gather by doubling: the ring's bytes in the tree's
#   steps, for powers of two. Look: `watch_collective(world, "all_reduce", "halving_doubling")`.
#
# %% [markdown]
# Sources: Patarasuk and Yuan, 2009 (the ring); Thakur, Rabenseifner and Gropp, 2005 (MPICH); Sanders,
# Speck and Träff, 2009 (two trees); NVIDIA, *NCCL 2.4*, 2019; the documentation of NCCL, HCCL, Open MPI
# and MPICH; NVIDIA's H100 data sheet (NVLink: 900 GB/s for both directions together).

# %% [markdown]
# **You can now** see what a collective moves, build it from messages, and say what an all-reduce costs on
# any number of ranks, and why a ring carries the large ones and a tree the small ones.
