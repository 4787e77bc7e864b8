# %% [markdown]
# # Lab 03: Bandwidth
#
# The same collective on the same number of devices can take ten times as long, depending on the
# links and on which ranks are neighbors. In this lab you measure bandwidth as the field does, find
# the bottleneck link, relieve it with a hierarchical all-reduce, and read what NCCL logs about its
# links.
#
# You need labs 00 to 02: ranks, groups, the ring all-reduce and its cost.

# %%
import time

import matplotlib.pyplot as plt
import torch

from labkit import Comm, Link, Mesh, TwoLevel, World, attach, listen, plot, read_nccl_log, record
from labkit.comm import paced_bytes
from labkit.comm.collectives.costs import cost, hierarchical_cost
from labkit.course import predict, report, show
from labkit.events import all_reduce_bus_bytes
from labkit.labs.lab_03 import checks as check
from labkit.labs.lab_03.scenarios import DGX1, bytes_by_pair, ring_in_order, rings_us
from labkit.trace.nccl_log import EXAMPLES
from labkit.trace.nccl_log.summary import table

guess = predict()  # empty until section 3

# %% [markdown]
# ## 1. The question
#
# Four ranks all-reduce 2 MiB with a ring. First, all links run at 1 Gb/s. Then the ranks are on two
# **nodes** (machines), 0 and 1 on the first and 2 and 3 on the second, and the links between nodes
# are ten times slower. (All links are *paced*, as in lab 02.)

# %%
FAST, SLOW = Link(gbps=1), Link(gbps=0.1)
S = 2_097_152  # bytes: 2 MiB

one_node = World(4, link=FAST)
cluster = TwoLevel(inside=FAST, between=SLOW, ranks_per_node=2)
two_nodes = World(4, link=cluster)


# %%
def seconds_of(op, nbytes=S, turns=2):
    """The time of the fastest of several repeats, on this rank."""
    comm, x, times_s = Comm(), torch.zeros(nbytes // 4), []
    for _ in range(turns):
        comm.barrier()
        began_s = time.monotonic()
        op(comm, x)
        times_s.append(time.monotonic() - began_s)
    return min(times_s)


def by_ring(comm, x):
    comm.all_reduce(x, algorithm="ring")


# %%
def bars(rows, xlabel, fmt="{:,.0f}", log=False, height=1.4):
    axes = plt.subplots(figsize=(8, height))[1]
    shown = axes.barh(list(rows), list(rows.values()), color="#0072B2")
    axes.bar_label(shown, fmt=fmt, padding=4)
    least, most = min(rows.values()), max(rows.values())
    axes.set_xscale("log" if log else "linear")
    axes.set(xlabel=xlabel, xlim=(least / 3, most * 4) if log else (0, most * 1.2))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


one_node_s = max(one_node.run(seconds_of, by_ring))
two_nodes_s = max(two_nodes.run(seconds_of, by_ring))
rows = {"one node": 1e3 * one_node_s, "two nodes": 1e3 * two_nodes_s}
bars(rows, "ms to all-reduce 2 MiB with a ring, paced")

# %% [markdown]
# Two of the ring's four *hops* (links between neighbors) are slow, and all four ranks wait for
# them. (By the formula of lab 02, the links alone take 25 ms and 252 ms, a factor of ten. The rest
# is the time that the processes need to copy, add and wait for each other, which matters more when
# the links are fast.) **Which link is the bottleneck, how many bytes must cross it, and can we
# reduce them?**

# %% [markdown]
# ## 2. The idea
#
# ```
#                 node 0                                 node 1
#    ┌───────────────────────────────┐      ┌───────────────────────────────┐
#    │  GPU 0 ═══ NVLink ═══ GPU 1   │      │  GPU 2 ═══ NVLink ═══ GPU 3   │
#    │    │ PCIe               │ PCIe│      │    │ PCIe               │ PCIe│
#    │  card 0               card 1  │      │  card 2               card 3  │
#    └────┬────────────────────┬─────┘      └────┬────────────────────┬─────┘
#         └────────────────────┴─── InfiniBand ──┴────────────────────┘
#                                   or Ethernet
# ```
#
# There are three kinds of links: NVLink, by far the fastest; PCIe, the machine's bus; and the
# network between nodes. Of the networks, InfiniBand is about as fast as PCIe, and Ethernet is often
# slower. A message to another node crosses PCIe, a network card (*card* above) and the network. The
# **topology** describes which links connect which devices. A collective is only as fast as the link
# that is busy longest, its **bottleneck**.

# %% [markdown]
# Data sheets use different units. Beware of two traps: network cards are rated in *bits* (8 per
# byte), and NVLink by the *sum of both directions*. For a ring, only bytes per second in **one
# direction** count:

# %%
LINKS = {  # GB/s, one direction
    "25 GbE": 25 / 8,
    "100 GbE": 100 / 8,
    "InfiniBand HDR": 200 / 8,
    "PCIe 4.0 x16": 16 * 16 * (128 / 130) / 8,  # 16 lanes, 128 of 130 bits are data
    "InfiniBand NDR": 400 / 8,
    "PCIe 5.0 x16": 32 * 16 * (128 / 130) / 8,
    "NVLink 3 (A100)": 600 / 2,
    "NVLink 4 (H100)": 900 / 2,
}
bars(LINKS, "GB/s per GPU or network card, one direction", "{:,.1f}", log=True, height=2.8)

# %% [markdown]
# The sources of these figures (they are peaks; programs reach less):
#
# | link | rated at | source |
# |---|---|---|
# | 25 and 100 gigabit Ethernet | 25, 100 Gb/s | IEEE 802.3by-2016, 802.3ba-2010 |
# | InfiniBand HDR, NDR | four lanes of 50, 100 Gb/s | NVIDIA, *DGX SuperPOD: cabling data centers*, "NDR Overview" |
# | PCIe 4.0, 5.0 | 16, 32 raw Gb/s per lane | PCI-SIG, PCI Express base specifications 4.0 and 5.0 |
# | NVLink 3 | 600 GB/s, both directions | NVIDIA, *A100 Tensor Core GPU* data sheet |
# | NVLink 4 | 900 GB/s, both directions | NVIDIA, *H100 Tensor Core GPU* data sheet |

# %% [markdown]
# Two bandwidths are used for collectives. The **algorithm bandwidth** is the obvious one:
#
# **algbw = S / t**
#
# It shows how fast the operation is, but not whether the links are saturated: with more ranks, an
# all-reduce sends more bytes for the same S. The **bus bandwidth** divides the bytes that each rank
# must send, whatever the algorithm, by the time. You can compare it with the speed of a link.
#
# **busbw = algbw × factor**, with one factor per operation

# %% [markdown]
# Three operations work on chunks, n per rank at the start or at the end.
#
# | operation | the result on rank r |
# |---|---|
# | reduce-scatter | chunk r, summed over all ranks |
# | all-gather | all chunks; chunk s comes from rank s |
# | all-to-all (new) | chunk r of every rank: each rank sends one of its n chunks to each rank |

# %% [markdown]
# The factors for n ranks:
#
# | operation | S is | each rank must send | factor |
# |---|---|---|---|
# | reduce-scatter | all n chunks | every chunk but the one it keeps | (n-1)/n |
# | all-gather | all n chunks | the bytes of every chunk but one | (n-1)/n |
# | all-reduce | the tensor | a reduce-scatter, then an all-gather | 2(n-1)/n |
# | all-to-all | all n chunks | every chunk but its own | (n-1)/n |
# | broadcast, reduce (a sum on one rank) | the tensor | the whole tensor once, over the busiest link | 1 |
#
# Source: nccl-tests, doc/PERFORMANCE.md, whose definitions the whole field uses.

# %% [markdown]
# To relieve the slow links, sum **inside** each node first. Then each rank sends only *its part* of
# that sum to the other nodes.
#
# ```
#                         node 0            node 1
#   at the start       0: a b   1: a b   2: a b   3: a b     two halves, a and b
#   reduce-scatter     0: A     1:   B   2: A     3:   B     inside:  A = sum of a so far
#   all-reduce         0: A <─────────────> 2: A             between: half of the bytes each
#                                1: B <─────────────> 3: B
#   all-gather         0: A B   1: A B   2: A B   3: A B     inside
# ```
#
# This is the **hierarchical** all-reduce (Jia et al., *Highly Scalable Deep Learning Training
# System with Mixed-Precision*, 2018).

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | bandwidth (1/β) | 带宽 | bytes per second over a link |
# | latency (α) | 延迟 | the time before the first byte of a message arrives |
# | algorithm bandwidth (algbw) | 算法带宽 | tensor size divided by time |
# | bus bandwidth (busbw) | 总线带宽 | bytes that each rank must send, divided by time |
# | topology | 拓扑 | which links connect which devices |
# | bottleneck | 瓶颈 | the resource that is busy longest and sets the total time |
# | node | 节点 | one machine, with one or more GPUs |
# | network card (NIC) | 网卡 | connects a node to the network |
# | hierarchical all-reduce | 分层全归约 | sums inside each node, then between nodes, then gathers inside |
# | channel | 通道 | one of several rings or trees that NCCL runs in parallel |
# | GPUDirect RDMA | GPU 直接远程内存访问 | the network card reads GPU memory directly, without a copy in host memory |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Data-parallel training sums the gradients of all ranks in every step. Take 7 billion parameters,
# 2-byte gradients and 8 ranks. How many bytes must each rank send for this all-reduce?

# %% stub="gradients = predict(sent_by_each_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
gradients = predict(sent_by_each_bytes=2 * 7 * 14_000_000_000 // 8)
### END SOLUTION
gradients

# %% [markdown]
# By your prediction, the all-reduce takes at least this many seconds if the slowest link of the
# ring is one of these:

# %%
sent_gb = gradients.numbers["sent_by_each_bytes"] / 1e9
times_s = {link: sent_gb / gb_per_s for link, gb_per_s in LINKS.items()}
bars(times_s, "seconds for one all-reduce, by your prediction", "{:,.2f} s", log=True, height=2.8)

# %% [markdown]
# Now predict the run of section 5: two nodes of two ranks, S bytes. *Ring*, 0 → 1 → 2 → 3 → 0: how
# many bytes pass over each hop? *Hierarchical*: how large is the part that a rank contributes to
# the all-reduce between nodes, how many ranks take part, and how many bytes does each send?
#
# For both algorithms, predict the bytes sent over the busiest **slow** link. (Every rank has its
# own link to the other node, although the ring uses only two of these four.)

# %% stub="guess = predict(ring_bytes=..., hierarchical_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
part = S // 2  # the 2 ranks of a node share the work
guess = predict(ring_bytes=2 * 3 * S // 4, hierarchical_bytes=2 * 1 * part // 2)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# Here the library counts these bytes. `chunk_bytes` lists the sizes of the n chunks, so the
# result is exact even if S is not divisible by n.

# %%
show("events.py:all_reduce_bus_bytes")

# %%
show("events.py:reduce_scatter_bus_bytes")

# %% [markdown]
# Apply the first function to 14 GB of gradients in 8 chunks. (If your prediction was different, put
# this number into section 3 and draw the bars again.)

# %% tags=["nbval-check-output"]
by_formula = all_reduce_bus_bytes([14_000_000_000 // 8] * 8, rank=0)
gradients.beside("by formula", sent_by_each_bytes=by_formula)

# %% [markdown]
# And here is the hierarchical all-reduce. `wire.nodes` lists the ranks of each node. `row` is the
# group of the ranks on this node, `column` the group of the ranks at the same position in each
# node.
#
# - `SubsetWire(wire, ranks)` sends only between these ranks, renumbered from 0.
# - `rings_all_reduce` is the ring of lab 02; a long tensor is split into pieces, each with its own
#   ring.
# - `divide_by` is the number of ranks for a mean, and 1 for a sum.
# - `fold` and `unfold` handle nodes of different sizes; for equal nodes they do nothing.

# %%
show("comm/collectives/hierarchical.py:hierarchical_all_reduce")

# %% [markdown]
# NCCL picks its rings and links itself, and logs them on request: with `NCCL_DEBUG=INFO`, each rank prints
# a few dozen lines. Here are *example lines, written for this lab* in the format of NCCL's logs,
# for two nodes with four GPUs each. (If you have GPUs, use your own log: section 8.)

# %%
lines = EXAMPLES["two_nodes"].read_text().splitlines()
for words in ["Using network", "Channel 01/04", "Trees", "via P2P", "[send] via NET"]:
    print(next(line for line in lines if words in line and not line.startswith("#"))[:112])

# %% [markdown]
# - Each line begins with host, process, thread and, in brackets, the GPU.
# - `Channel 01/04 : 0 3 2 5 ...`: the ring of channel 1 (of 4, counted from 0), as a list of ranks.
#   The channels run at once, each with a quarter of the bytes. (Here channels 0 and 2 use one ring,
#   1 and 3 another.)
# - `Trees [0] 5/-1/-1->4->0`: in tree 0, rank 4 has the child 5 and the parent 0.
# - `3[3] -> 4[0] [send] via NET/IB/3/GDRDMA`: rank 3 (GPU 3 of its node) sends to rank 4 over
#   InfiniBand card 3, which reads GPU memory directly. `P2P` means GPU to GPU, `SHM` through host
#   memory, `NET/Socket` plain TCP.

# %%
log = read_nccl_log(EXAMPLES["two_nodes"])
plot.nccl(log)

# %% [markdown]
# Look at the arrows that leave a node. The four channels use two different rings, each twice. On
# node 0, one ring leaves from GPU 3 and comes back to GPU 0, and the other leaves from GPU 2 and
# comes back to GPU 1. So all four cards are in use, and each channel carries only a quarter of the
# bytes. Compare this with a misconfigured cluster:

# %%
plot.nccl(read_nccl_log(EXAMPLES["sockets"]))

# %% tags=["nbval-check-output"]
table(read_nccl_log(EXAMPLES["sockets"]), "sockets")

# %% [markdown]
# ## 5. Run it
#
# First, bandwidth: a table with the columns of nccl-tests, for one node with links of 1 Gb/s =
# 0.125 GB/s.

# %%
sizes, busbws, times_s = [4**k for k in range(6, 13)], [], []
print(f"{'size (B)':>10} {'time (ms)':>10} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}")
for nbytes in sizes:
    turns = 20 if nbytes < 2**20 else 3  # the times of small messages vary the most
    times_s.append(max(one_node.run(seconds_of, by_ring, nbytes, turns)))
    algbw = nbytes / times_s[-1] / 1e9
    busbws.append(algbw * 2 * 3 / 4)
    print(f"{nbytes:>10,} {1e3 * times_s[-1]:>10.2f} {algbw:>13.4f} {busbws[-1]:>13.4f}")

# %%
fig, axes = plt.subplots(figsize=(8, 2.6))
axes.semilogx(sizes, busbws, "o-", color="#0072B2", label="busbw, measured, paced")
axes.set_xticks(sizes, ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"])
axes.minorticks_off()
axes.axhline(0.125, color="#D55E00", ls="--", label="the link")
axes.set(ylabel="GB/s", ylim=(0, 0.145))
axes.legend(frameon=False, loc="lower right")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# For small messages the time hardly depends on the size: it is almost entirely a fixed cost per
# step. For large messages busbw approaches the link's speed, and this is what busbw is for: once
# it is close, no algorithm can be much faster on these links. (`labkit bench collectives`
# measures this table for all collectives.)
#
# Now check your prediction. `paced_bytes(link)` counts the bytes that a rank has sent over a link
# of that speed.


# %%
def bytes_by_link(algorithm):
    comm, x = Comm(), torch.zeros(S // 4)
    before = [paced_bytes(link) for link in (FAST, SLOW)]
    comm.all_reduce(x, algorithm=algorithm)
    return [paced_bytes(link) - old for link, old in zip((FAST, SLOW), before)]


# %% tags=["nbval-check-output"]
ring = two_nodes.run(bytes_by_link, "ring")
hierarchical = two_nodes.run(bytes_by_link, "hierarchical")
print("          ring                     hierarchical")
print("rank      inside       between     inside       between")
for rank, (flat, two_level) in enumerate(zip(ring, hierarchical)):
    print(f"{rank:>4}  {flat[0]:>10,}  {flat[1]:>12,} {two_level[0]:>10,}  {two_level[1]:>12,}")

# %% tags=["nbval-check-output"]
slow_ring, slow_hierarchical = (max(b for _, b in sent) for sent in (ring, hierarchical))
guess.beside(ring_bytes=slow_ring, hierarchical_bytes=slow_hierarchical)

# %% [markdown]
# With the hierarchical algorithm, the busiest slow link carries a third of the bytes. And the time?
# As in lab 02, it is steps × α + bytes × β, with one β for each kind of link. Our links have no
# latency, so α is the time that the processes need for a step. We take it from the fastest of the
# small messages: 6 steps with almost no bytes.

# %%
alpha_s = min(times_s[:4]) / 6
beta = {link: link.seconds(1) for link in (FAST, SLOW)}
inside, between = hierarchical_cost(nodes=2, ranks_per_node=2, nbytes=S)
predicted_s = {
    "ring": cost("all_reduce", "ring", 4, S).seconds(alpha_s, beta[SLOW]),
    "hierarchical": inside.seconds(alpha_s, beta[FAST]) + between.seconds(alpha_s, beta[SLOW]),
}
print(f"alpha: {1e3 * alpha_s:.1f} ms per step")


def by_hierarchy(comm, x):
    comm.all_reduce(x, algorithm="hierarchical")


hierarchical_s = max(two_nodes.run(seconds_of, by_hierarchy, S, 5))
measured_s = {"ring": two_nodes_s, "hierarchical": hierarchical_s}

# %%
fig, axes = plt.subplots(figsize=(8, 1.8))
for i, (name, seconds) in enumerate({"by formula": predicted_s, "measured": measured_s}.items()):
    shown = axes.barh(
        [y + 0.36 * i for y in range(2)], [1e3 * s for s in seconds.values()], 0.34,
        color=["#B4BAC2", "#0072B2"][i], label=name,
    )  # fmt: skip
    axes.bar_label(shown, fmt="{:,.0f} ms", padding=4)
axes.set_yticks([0.18, 1.18], list(predicted_s))
axes.set(xlim=(0, 1.5e3 * max(measured_s.values())), xlabel="ms for 2 MiB on two nodes, paced")
axes.invert_yaxis()
axes.legend(frameon=False, loc="lower right")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Why is the difference so large? All ranks of a ring move in lockstep: in each of its 6 steps a
# chunk of S/4 crosses a slow link, and every rank waits for it. The hierarchical algorithm sends
# most bytes over fast links, and uses *all* slow links at once, each for half of the tensor.
#
# Formula and measurement may differ by a few milliseconds: α varies from run to run, and copying and
# adding 2 MiB takes time on cores that the ranks share. With `Link(gbps=1000)`, only this time is
# left.

# %% [markdown]
# ## 6. Break it
#
# A batch system may assign ranks round-robin: first node, second node, first, second. A ring in
# rank order then crosses between nodes at every hop. In our numbering (0 and 1 on the first node, 2
# and 3 on the second) this is the ring 0 → 2 → 1 → 3. The program and its sums are correct, but it
# sends too many bytes between nodes, and nothing warns you. Here is a ring through the ranks in any
# order:

# %%
show("labs/lab_03/scenarios.py:ring_in_order")


# %%
def events_of(order):
    comm, x = Comm(), torch.ones(S // 4)
    with listen() as events:
        ring_in_order(comm, x, order)
    assert (x == 4).all()
    return events


orders = [[0, 1, 2, 3], [0, 2, 1, 3]]
pairs = [bytes_by_pair(one_node.run(events_of, order)) for order in orders]

# %%
fig, panels = plt.subplots(1, 2, figsize=(8, 3))
for axes, order, sent in zip(panels, orders, pairs):
    axes.imshow(sent / 2**20, cmap="Blues", vmax=6)
    for a, b in sent.nonzero().tolist():
        axes.text(b, a, f"{sent[a, b] / 2**20:.0f} MiB", ha="center", va="center", fontsize=9)
    axes.axhline(1.5, color="#D55E00"), axes.axvline(1.5, color="#D55E00")
    axes.set(xticks=range(4), yticks=range(4), xlabel="to rank", ylabel="from rank")
    axes.set_title("ring " + " → ".join(map(str, order)), fontsize=10)
fig.tight_layout()

# %% [markdown]
# The red lines separate the nodes {0, 1} and {2, 3}: bytes in the upper right and lower left cross
# between nodes. The good ring crosses at two hops, the bad one at all four:

# %% tags=["nbval-check-output"]
for order, sent in zip(orders, pairs):
    crossing = sent[:2, 2:].sum() + sent[2:, :2].sum()
    print(f"ring {order}: {crossing:,} bytes between nodes")

# %% [markdown]
# The bad ring sends twice the bytes between nodes. On our two nodes each rank has its own card, so
# the extra bytes go over other cards, in parallel, and the time does not show them. If a node has
# only *one* card, the bad ring takes twice as long; with 8 GPUs per node, 8 hops leave each node
# instead of one. So the ranks of a node should be consecutive (as torchrun numbers them), and
# `Mesh` puts its last axis inside a node.

# %% [markdown]
# Another classic bug: each rank belongs to *two* groups and all-reduces in both. Either order gives
# the correct sum if all ranks use the same order. Here some ranks use the other order, at first
# only rank 0:

# %%
patient = World(4, timeout_s=2)


def sum_of_ones(confused):
    mesh, x = Mesh(node=2, local=2), torch.ones(4)
    groups = [mesh.local, mesh.node]
    if Comm().rank in confused:
        groups.reverse()
    for group in groups:
        group.all_reduce(x)
    return x[0].item()


# %% tags=["nbval-check-output"]
patient.run(sum_of_ones, [0])

# %% [markdown]
# The result should be 4 on every rank. Nothing hangs and no error is raised, but three sums are
# wrong. Within each group the calls match, but rank 0 joined its node's all-reduce with a value
# that had already changed.
#
# **And rank 0, whose metrics are usually logged, shows the correct 4.** It got each value
# once: first rank 2's sum of two values, then rank 1's value. The log looks fine, while three of
# four ranks train with wrong gradients.
#
# Now ranks 0 and 3:

# %% tags=["raises-exception"]
patient.run(sum_of_ones, [0, 3])

# %% [markdown]
# This time the waits form a cycle: follow it in the lines above. *All ranks must use their groups
# in the same order.* Frameworks ensure this, until you add a collective under an `if`.

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: The two bandwidths
#
# Return `(algbw, busbw)` in GB/s (1e9 bytes per second) for an operation on `nbytes` bytes that
# took `seconds`. `op` is `"all_reduce"`, `"all_gather"`, `"reduce_scatter"` or `"broadcast"`;
# `nbytes` is S, as in the table of section 2. The check compares busbw with the bytes that real
# ranks send.


# %%
def bandwidths(op, nbytes, ranks, seconds):
    ### BEGIN SOLUTION
    factors = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "broadcast": 1,
    }
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * factors[op]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.bandwidths(bandwidths)

# %% [markdown]
# ### Exercise 2: Order the ranks
#
# `node_of[rank]` is the node of a rank, as in `[0, 1, 0, 1]`. Return an order of the ranks whose
# ring sends the fewest bytes between nodes. The check runs a ring in your order.


# %%
def best_order(node_of):
    ### BEGIN SOLUTION
    return sorted(range(len(node_of)), key=lambda rank: node_of[rank])
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.best_order(best_order)

# %% [markdown]
# ### Exercise 3: A hierarchical all-reduce of your own
#
# `inside` is the `Comm` of the ranks on this rank's node, `between` that of the ranks at the same
# position in each node. Replace `x` (one dimension; its length is divisible by `inside.size`) with
# the sum over all ranks, and send no more bytes between nodes than needed. A group `c` has
# `c.reduce_scatter_tensor(out, x)`, which writes this rank's `x.numel() // c.size` elements of the
# sum into `out`, and `c.all_gather_into_tensor(x, part)`, which fills `x` with all ranks' parts. Make `out` a new tensor, not a view of `x`: NCCL allows an output to overlap its input only
# at the rank's own position.


# %%
def my_hierarchical(inside, between, x):
    ### BEGIN SOLUTION
    part = x.new_empty(x.numel() // inside.size)
    inside.reduce_scatter_tensor(part, x)
    between.all_reduce(part)
    inside.all_gather_into_tensor(x, part)
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_hierarchical(my_hierarchical)

# %% [markdown]
# Here is your all-reduce on the two nodes, as a timeline: which of its three operations takes the
# most time? (The numbers count each group's calls, the unrecorded run included. A bar that is too
# short shows only the number.)


# %%
def make_groups():
    attach().state.mesh = Mesh(node=2, local=2)  # a rank keeps its `state` from run to run


def play():
    mesh = attach().state.mesh
    my_hierarchical(mesh.local, mesh.node, torch.ones(S // 4))


two_nodes.run(make_groups)
two_nodes.run(play)  # once before recording, to connect all groups
with record() as trace:
    two_nodes.run(play)
plot.timeline(trace)

# %% [markdown]
# ### Exercise 4: Read a log
#
# `log` is a result of `read_nccl_log`. Return a tuple: the number of channels, the set of kinds of
# connections used inside nodes, and the set used between nodes, such as `(4, {"P2P"}, {"NET/IB"})`.
#
# | attribute | meaning |
# |---|---|
# | `log.main` | the communicator of all ranks |
# | `.channels` | its number of channels |
# | `.connections` | a list; each has `.source`, `.target` and `.kind`, such as `"SHM"` |
# | `.same_node(a, b)` | whether ranks a and b are on the same node |


# %%
def read_log(log):
    ### BEGIN SOLUTION
    group, kinds = log.main, {True: set(), False: set()}
    for one in group.connections:
        kinds[group.same_node(one.source, one.target)].add(one.kind)
    return group.channels, kinds[True], kinds[False]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.read_log(read_log)

# %% [markdown]
# ### Exercise 5, open: Channels for a DGX-1
#
# A DGX-1 has eight V100s, each with 6 NVLinks of 25 GB/s per direction. Some pairs are connected by
# two NVLinks, some by one, some by none. (Source: NVIDIA, *DGX-1 With Tesla V100 System
# Architecture*, 2017.) The number of NVLinks between each pair of GPUs:

# %% tags=["nbval-check-output"]
print("    " + "   ".join(map(str, range(8))))
for a in range(8):
    print(a, *[f"{DGX1.get((a, b), '·'):>3}" for b in range(8)])

# %% tags=["nbval-check-output"]
print(f"{rings_us([[0, 1, 2, 3, 4, 5, 6, 7]], DGX1):,.0f} µs to all-reduce 1 GB")

# %% [markdown]
# The ring 0, 1, ... 7 is this slow because no NVLink connects 3 and 4, or 7 and 0: these hops use
# PCIe 3.0 x16, 15.75 GB/s per direction. Find better rings: return a list of one or more rings,
# each a list of the 8 GPUs in order. The rings run at the same time, each with an equal share of
# the bytes; rings that use the same hop in the same direction share its NVLinks. Your score is the
# time to all-reduce 1 GB. `links[a, b]` is the number of NVLinks from a to b; pairs without an
# NVLink are not in the dict.


# %%
def rings(links):
    ### BEGIN SOLUTION
    double = [0, 3, 2, 1, 5, 6, 7, 4]  # every hop has two NVLinks
    single = [0, 1, 3, 7, 5, 4, 6, 2]  # every hop has one of the remaining NVLinks
    one_way = [double, double, single]
    return one_way + [ring[::-1] for ring in one_way]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.rings(rings)

# %% [markdown]
# This is what NCCL's channels are for: NCCL searches the topology for rings that use as many links
# as possible, and gives each channel a share of the bytes.

# %% tags=["nbval-check-output"]
report("03")

# %% [markdown]
# ## 8. In the wild
#
# Record your own log on a machine with GPUs:
#
# ```sh
# NCCL_DEBUG=INFO torchrun --nproc-per-node 8 train.py 2>&1 | tee nccl.log
# labkit nccl-log nccl.log            # a table, and nccl.png with rings and trees
# nvidia-smi topo -m                  # how GPUs and network cards are connected
# all_reduce_perf -b 8 -e 1G -f 2 -g 8    # from nccl-tests: algbw and busbw by size
# ```
#
# If busbw at 1 GB is far below the link's speed, look in the log for the links that the messages
# actually use.

# %% [markdown]
# The variables that matter most:
#
# | variable | what it changes |
# |---|---|
# | `NCCL_DEBUG` | the log level: VERSION, WARN, INFO or TRACE |
# | `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE` | the parts to log (INIT, GRAPH, NET, TUNING, ...), and the log file: `%h` is the host, `%p` the process |
# | `NCCL_SOCKET_IFNAME` | the network interfaces for start-up and TCP: `eth`, `=eth0`, `^docker` |
# | `NCCL_IB_HCA` | the InfiniBand or RoCE cards: `mlx5`, `=mlx5_0:1`, `^mlx5_3` |
# | `NCCL_IB_DISABLE=1` | uses TCP instead of InfiniBand or RoCE |
# | `NCCL_P2P_DISABLE=1`, `NCCL_P2P_LEVEL` | no direct GPU-to-GPU messages, or only up to a distance: NVL, PIX, PXB, PHB, SYS |
# | `NCCL_SHM_DISABLE=1` | no messages through host memory inside a node |
# | `NCCL_NET_GDR_LEVEL` | the largest distance between GPU and card for GPUDirect RDMA |

# %% [markdown]
# | variable | what it changes |
# |---|---|
# | `NCCL_CROSS_NIC` | whether one ring may use different cards on different nodes |
# | `NCCL_ALGO` | the allowed algorithms: Ring, Tree, NVLS, ... |
# | `NCCL_PROTO` | the allowed protocols: LL and LL128 (low latency), Simple (bandwidth) |
# | `NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE` | an XML file with a topology to load; where to save the detected one |
#
# Source of both tables: NVIDIA, *NCCL User Guide*, "Environment Variables". The guide warns against
# leaving debugging variables in production scripts, where they may slow NCCL down or make it hang.

# %% [markdown]
# Hierarchy elsewhere:
#
# | tool | hierarchical features |
# |---|---|
# | NCCL | several rings over several cards; trees that are chains inside a node and a tree between nodes |
# | torch | `init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("node", "local"))`: the groups of exercise 3 |
# | Megatron | orders its groups so that tensor parallelism, which sends the most bytes, stays inside a node |
# | FSDP | hybrid sharding: shards inside a node, all-reduces between nodes |
# | labkit | `comm.all_reduce(x, algorithm="hierarchical")`, `Mesh(node=2, local=4)` |
#
# **You can now** predict the time of an all-reduce on given links, find the bottleneck, and see in
# a log which links are used.
