# %% [markdown]
# # Lab 01: Ranks and groups
#
# In lab 00 a `World` gave you ranks. Here you start them by hand, watch them find each other, cut
# them into groups as Megatron does, and learn to read the six ways in which they get stuck.

# %%
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
import torch
import torch.distributed as dist

from labkit import Comm, Mesh, RankError, World, plot, record
from labkit.course import predict, report, show
from labkit.labs.lab_01 import checks as check
from labkit.labs.lab_01.clinic import clinic
from labkit.runtime.plain import LauncherStore

guess = predict()  # nothing yet: that is for you, in step 3
Path("../runs").mkdir(exist_ok=True)  # where the script of step 5 goes

# %% [markdown]
# ## 1. The question
#
# A job stands on many devices, and one of its ranks is not where the others are. How long do these
# wait before they say so? Torch's own answer, with NCCL, on which such a job runs: 10 minutes.

# %%
timeout_h = 10 / 60  # of NCCL; gloo's is 30 minutes
devices = [8, 1024, 16384]

fig, axes = plt.subplots(figsize=(8, 1.6))
labels = [f"{n:,} devices" for n in devices]
bars = axes.barh(labels, [n * timeout_h for n in devices], color="#D55E00")
axes.bar_label(bars, fmt="{:,.0f} h", padding=4)
axes.set(xlim=(0, 3_500), xlabel=f"device-hours lost in one hang of {60 * timeout_h:.0f} minutes")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# (Source: the documentation of `init_process_group`.) Then you get a message that names neither the
# rank nor its line. So: **how do processes that know nothing of each other become a group, and how
# do you find the one that went astray?**

# %% [markdown]
# ## 2. The idea
#
# Each process is told a few things by whoever starts it, in environment variables. Here for the
# second process on the second of two machines with 4 devices each:
#
# | variable | value | what it is |
# |---|---|---|
# | `RANK` | 5 | its number among all processes |
# | `WORLD_SIZE` | 8 | how many there are |
# | `LOCAL_RANK` | 1 | its number on this machine: the device it takes |
# | `MASTER_ADDR` | 10.0.0.1 | the machine where all can meet: that of rank 0 |
# | `MASTER_PORT` | 29500 | the port there |
#
# That is all a rank knows. Above all, it does not know where the others are.

# %% [markdown]
# They meet at a **store**, a small server that keeps keys and values:
#
# ```
#     rank 0                     rank 1                     rank 2
#        │ set "0" = 127.0.0.1:41    │ set "1" = 127.0.0.1:57    │ set "2" = ...
#        ▼                           ▼                           ▼
#   ┌──────────────────────────────────────────────────────────────────┐
#   │  store, at MASTER_ADDR:MASTER_PORT      key ──> value            │
#   └──────────────────────────────────────────────────────────────────┘
#        │ get "1", "2"              │ get "0", "2"              │ get "0", "1"
#        ▼                           ▼                           ▼
#     rank 0 ◄──────────────────► rank 1 ◄─────────────────► rank 2
#        ▲────────────── a socket for each pair ─────────────────▲
# ```
#
# This meeting is called **rendezvous**.

# %% [markdown]
# `init_process_group("gloo")` does it, step by step:
#
# 1. Find the store: connect to it, or be rank 0 and open it.
# 2. Open a socket of your own and write its address into the store, under your rank.
# 3. Wait for the addresses of the others. (Here a job stands still if a rank is missing.)
# 4. Connect to each of them: n - 1 sockets for a rank, n(n-1)/2 for all.
#
# From then on no byte of a tensor goes through the store. There are three ways to say where it is:
#
# | rendezvous | call | good for |
# |---|---|---|
# | environment | `init_process_group("gloo")` | launchers: torchrun, DeepSpeed, Slurm scripts |
# | TCP | `init_method="tcp://10.0.0.1:29500", rank=5, world_size=8` | your own starter |
# | file | `init_method="file:///shared/run7", rank=5, world_size=8` | a shared disk, a new file each run |

# %% [markdown]
# Large models need more than one group. A tensor cut over 2 devices is summed by those 2, while
# gradients are averaged by others. So ranks stand in a **mesh** of named axes, and each line along
# an axis is a group of its own. Outermost axis first; the **last varies fastest**:

# %%
plot.mesh({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=4)

# %% [markdown]
# Ranks 0 and 1 are neighbours along `tp`: it sends most and stays inside a machine. `pp` sends least
# and crosses. What the three do comes in later labs; here only who talks to whom counts.
#
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | launcher | 启动器 | starts one process per device and sets its environment variables |
# | local rank | 本地进程编号 | the index of a process on its machine |
# | node | 节点 | one machine, with one or more GPUs |
# | rendezvous | 会合 | how ranks find each other at the start |
# | key-value store | 键值存储 | the server at which ranks exchange addresses in a rendezvous |
# | subgroup | 子进程组 | some of the ranks, with connections of their own |
# | device mesh | 设备网格 | ranks arranged in a grid with named axes |
# | data-parallel axis (dp) | 数据并行轴 | ranks along it have the same part of the model and different data |
# | tensor-parallel axis (tp) | 张量并行轴 | ranks along it have different shards of each layer |
# | pipeline-parallel axis (pp) | 流水线并行轴 | ranks along it have different layers |
# | timeout | 超时 | how long a rank waits before it raises an error |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Eight ranks, on gloo. How many sockets to others has each, once `init_process_group` is over?
#
# Then all make the mesh of the picture. Every line along every axis becomes a group: how many are
# there in all? And each new group connects its members **anew**: how many sockets has a rank then?

# %% stub="guess = predict(sockets=..., groups=..., sockets_with_mesh=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(sockets=8 - 1, groups=3 * 8 // 2, sockets_with_mesh=7 + 3 * (2 - 1))
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# This is how labkit's own ranks meet, in the file that each of them runs. The store is a file: all
# are on one machine, and torch's TCP store can be reached from other machines, too.

# %%
show("runtime/rank.py:_wake_up", since="dist.init_process_group(", until="except BaseException")

# %% [markdown]
# Such a file is a store like any other. Torch counts in it who uses it (`refcount`), and deletes it
# when the last one leaves. After a crash it stays, and the next run may find addresses of the dead:
# give each run a name of its own.

# %%
Path("../runs/store").unlink(missing_ok=True)
in_a_file = dist.FileStore("../runs/store")
in_a_file.set("rank 0", "127.0.0.1:4711")
Path("../runs/store").read_bytes()

# %% [markdown]
# Where a rank stands in a mesh is division with remainder, from the last axis on:

# %%
show("comm/mesh.py:coordinates")

# %% [markdown]
# The groups of one axis: fix the index on all other axes, and let this one run.

# %%
show("comm/mesh.py:lines")

# %% [markdown]
# And here they become groups. Look closely: **every rank makes every group**, also those that it is
# no member of, in the same order. torch's `new_group` wants that: it numbers groups by counting the
# calls. Of those it made, a rank keeps its own.

# %%
show("comm/mesh.py:Mesh._over")

# %% [markdown]
# ## 5. Run it
#
# ### Ranks by hand
#
# A script as any other. It knows no rank; it asks for it.

# %%
# %%writefile ../runs/hello.py
import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
x = torch.tensor([float(dist.get_rank())])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {x.item()}", flush=True)
dist.destroy_process_group()

# %% [markdown]
# Now this notebook plays the launcher. As torchrun does, it opens the store itself, so that you can
# look into it. (Started without torchrun, rank 0 opens it.) `LauncherStore` takes a free port, for
# this machine alone; its `variables` tell the ranks that the store is there, and that their sockets
# stay inside this machine, too.

# %%
meeting = LauncherStore()


def start(rank, world_size):
    told = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting.port}
    env = os.environ | meeting.variables | {name: str(value) for name, value in told.items()}
    command = [sys.executable, "../runs/hello.py"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def look(ranks):  # once so many of them are there
    for key, address in meeting.addresses(ranks).items():
        print(f"{key}  ->  {address}")


# %% [markdown]
# Start rank 0, alone:

# %%
first = start(0, world_size=2)
look(1)
sockets = psutil.Process(first.pid).net_connections("tcp")
print("it listens at", [one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN])
print("it has ended:", first.poll() is not None)

# %% [markdown]
# In the key are the group, the device and, last, the rank. Rank 0 has opened a socket, written down
# its port, and stands in step 3. It would wait there for 30 minutes. Rank 1 sets it free:

# %%
second = start(1, world_size=2)
for process in (first, second):
    print(process.communicate()[0], end="")
look(2)

# %% [markdown]
# **Your turn, in terminals.** Open two (File, New, Terminal) in the folder of these labs, then
# `source ../.venv/bin/activate` (or however you activate the Python of these labs). Now *you* are the
# launcher; `env` sets the variables of one call:
#
# ```sh
# env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 python ../runs/hello.py
# env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=1 python ../runs/hello.py
# ```
#
# The first waits until you start the second in the other terminal. Then let a launcher do it. (Its
# four lines about `OMP_NUM_THREADS` are no error: each rank gets one thread.)
#
# ```sh
# torchrun --nproc-per-node 4 ../runs/hello.py
# ```

# %% [markdown]
# Do it wrong, too. (Ctrl-C ends a rank that waits.)
#
# | you do | you see | because |
# |---|---|---|
# | rank 1 first, then rank 0 | the two sums, as before | rank 1 asks until somebody opens the store |
# | rank 0 twice | the second dies: `EADDRINUSE` | both want to open the store at port 29500 |
# | rank 1 twice, no rank 0 | nothing | there is no store, and both ask on |
# | `WORLD_SIZE=3` for two ranks | nothing | both wait for the address of rank 2 |
#
# The notebook also set `GLOO_SOCKET_IFNAME`. Without it, as here, gloo takes the network address that
# belongs to the machine's name. Do the ranks not connect? Then put `GLOO_SOCKET_IFNAME=lo` (macOS:
# `lo0`) behind `env`.

# %% [markdown]
# Last, meet in a file, without any variable. Copy the script to `../runs/by_file.py`, begin it with
# `import os, sys`, and have it call
#
# ```python
# place = f"file://{os.getcwd()}/meet-1"  # a name that no crashed run has left behind
# dist.init_process_group("gloo", init_method=place, rank=int(sys.argv[1]), world_size=2)
# ```
#
# Then `python ../runs/by_file.py 0` in one terminal, and with `1` in the other.

# %% [markdown]
# ### Groups
#
# Eight ranks of a world. Each counts its open sockets, makes the mesh, and counts again:

# %%
world = World(8)


# %% tags=["nbval-check-output"]
def open_sockets():
    mine = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in mine)


def make_mesh():
    before = open_sockets()
    mesh = Mesh(pp=2, dp=2, tp=2)
    groups = [(axis, mesh[axis].ranks) for axis in mesh.sizes]
    return before, open_sockets(), groups


seen = world.run(make_mesh)
groups = {group for *_, its in seen for group in its}
guess.beside(sockets=seen[5][0], groups=len(groups), sockets_with_mesh=seen[5][1])

# %% [markdown]
# Equal? So a group is no label: it is sockets. On a GPU it is NCCL's channels and their buffers,
# which is why one does not make groups in a loop. Where does rank 5 stand, and with whom?

# %% tags=["nbval-check-output"]
seen[5][2]

# %% [markdown]
# Each axis is a `Comm` of its own, and collectives stay inside. Sum up the ranks along each:


# %% tags=["nbval-check-output"]
def sums():
    mesh = Mesh(pp=2, dp=2, tp=2)
    found = []
    for axis in mesh.sizes:
        x = torch.tensor([float(mesh.comm.rank)])
        mesh[axis].all_reduce(x)
        found.append(f"{axis} {x.item():.0f}")
    return mesh.coordinates(), ", ".join(found)


world.run(sums)

# %% [markdown]
# On one machine with 8 devices nothing crosses. With nodes of 4, `pp` crosses, four links in all
# (dashed above). What if `tp` stood first?

# %%
plot.mesh({"tp": 2, "dp": 2, "pp": 2}, ranks_per_node=4)

# %% [markdown]
# Now all of `tp` goes over the slow network. The order of the names is the whole difference.

# %%
world.close()  # eight processes less

# %% [markdown]
# ## 6. Break it: the hang clinic
#
# Six programs, each with one bug, each a classic. Three ranks run them. **Before you look**: what
# does plain `torch.distributed` do with each? It may
#
# - `hang`: a rank waits until the timeout;
# - `crash`: a rank dies, or raises an error at once;
# - `silent`: all return as if nothing were wrong.


# %%
def skips(comm):
    x = torch.ones(8)
    if comm.rank != 1:
        comm.all_reduce(x)
    return x


def other_order(comm):
    x, y = torch.ones(8), torch.ones(8)
    if comm.rank == 0:
        comm.all_reduce(x)
        comm.broadcast(y)
    else:
        comm.broadcast(y)
        comm.all_reduce(x)
    return x


# %%
def other_shape(comm):
    x = torch.ones(8 if comm.rank == 1 else 4)
    comm.all_reduce(x)
    return x


def other_dtype(comm):
    x = torch.ones(4, dtype=torch.int32 if comm.rank == 1 else torch.float32)
    comm.all_reduce(x)
    return x


# %%
def sends_to_nobody(comm):
    if comm.rank == 0:
        comm.send(torch.ones(4), dst=2)


def other_group(comm):
    pair = comm.subgroup([0, 1])
    x = torch.ones(4)
    if comm.rank == 0:
        pair.all_reduce(x)
    else:
        comm.all_reduce(x)
    return x


# %% stub="# each of them: \"hang\", \"crash\" or \"silent\"\nguesses = {\"skips\": ..., \"other_order\": ..., \"other_shape\": ..., \"other_dtype\": ...}\nguesses |= {\"sends_to_nobody\": ..., \"other_group\": ...}"
### BEGIN SOLUTION
guesses = {"skips": "hang", "other_order": "hang", "other_shape": "crash", "other_dtype": "silent"}
guesses |= {"sends_to_nobody": "hang", "other_group": "hang"}
### END SOLUTION

# %% [markdown]
# The clinic runs each program twice, on real ranks: with torch's functions as they are, and through
# labkit's door. Both wait for 2 s.

# %%
patients = [skips, other_order, other_shape, other_dtype, sends_to_nobody, other_group]
clinic(patients, guesses)

# %% [markdown]
# Read the table in three ways.
#
# - **Torch's hangs** all look alike: "timed out", or "closed by peer" where the other end timed out
#   first. Each rank knows only its own socket. In `skips` the one rank without a complaint is to blame.
# - **The crash** is told of the rank that died: not of the one whose tensor was too large.
# - **The silent one** is the worst. The sum of three ones is not 2: it lacks a rank, for rank 1's
#   whole numbers, read as floats, are nearly nothing. On rank 1 it is a billion, for floats were read
#   as whole numbers there. Nothing stops.

# %% [markdown]
# A hang is easy to see in a recording, too, which keeps what the ranks did until then. Ranks 0 and 2
# are still in their second collective: their bars end in arrows, since nobody saw them end. (The time
# in the title is the last moment that a rank noted.) Rank 1 has returned after the first, the barrier.
# From there on its row is empty.

# %%
three = World(3, timeout_s=2)
_ = three.run(lambda: None)  # all ranks are awake

# %%
with record() as stuck, suppress(RankError):  # the error is in the table above
    three.run(lambda: (Comm().barrier(), skips(Comm())))
plot.timeline(stuck)

# %% [markdown]
# How does labkit know? Each rank writes what it begins on a **board**, a page of memory that all of
# them see, before it sends anything. Who comes second compares. A `note` is one operation; its `key`
# is group and number, the same on all ranks; its `signature` a checksum of operation, shape and dtype:

# %%
show("runtime/board.py:Board.enter", since="key, signature =")

# %% [markdown]
# And when ranks wait, the world asks who of them can still come. `waits` has the note that each rank
# waits for, `needs` the ranks that have not begun it; `targets` are the ranks of this run. A rank that
# has returned never will come (`gone`); nor will one in a circle of waiting ranks (`stuck`):

# %%
show("runtime/diagnose.py:Watch._hopeless", since="needs = {")

# %% [markdown]
# It cannot know what you *meant*. Two all-reduces of the same shape, in another order: every rank
# calls the same thing, twice. What comes out, and what would be right?


# %% tags=["nbval-check-output"]
def nobody_can_see():
    comm = Comm()
    gradient, loss = torch.full((2,), 1.0), torch.full((2,), 100.0)
    for x in (gradient, loss) if comm.rank == 0 else (loss, gradient):
        comm.all_reduce(x)
    return gradient.tolist(), loss.tolist()


three.run(nobody_can_see)

# %% [markdown]
# Gradients of 3 and a loss of 300 are right. Against this only discipline helps: loop over things
# in an order that is the same on all ranks (a list, never a set).
#
# One more, from the making of groups. Only the members make it, since "the others do not need it":


# %% tags=["raises-exception"]
def members_only():
    comm = Comm()
    if comm.rank < 2:
        comm.subgroup([0, 1])
    comm.barrier()


three.run(members_only)

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: Where does a rank stand?
#
# Without looking at step 4 again: `sizes` is `{"pp": 2, "dp": 2, "tp": 2}`, outermost axis first, any
# names and sizes. Return the index of `rank` on each axis, as `{"pp": 1, "dp": 0, "tp": 1}`.


# %%
def where(rank, sizes):
    ### BEGIN SOLUTION
    found = {}
    for axis in reversed(sizes):
        rank, found[axis] = divmod(rank, sizes[axis])
    return {axis: found[axis] for axis in sizes}
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.where(where)

# %% [markdown]
# ### Exercise 2: Megatron's groups
#
# Return the groups along `axis`, each a list of ranks in ascending order. In the mesh above, along
# `dp`: `[[0, 2], [1, 3], [4, 6], [5, 7]]`. The check makes them on real ranks. How far is a rank from
# its neighbour on an axis?


# %%
def groups_along(axis, sizes):
    ### BEGIN SOLUTION
    total = 1
    for size in sizes.values():
        total *= size
    groups = {}
    for rank in range(total):
        others = where(rank, sizes) | {axis: 0}  # those of one group agree on all other axes
        groups.setdefault(tuple(others.values()), []).append(rank)
    return list(groups.values())
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.groups_along(groups_along)

# %% [markdown]
# ### Exercise 3: A barrier out of a store
#
# Before there are sockets, there is the store. Build a barrier from it: nobody returns before all
# `size` ranks have called it. `name` is another text for each barrier.
#
# | call | what it does |
# |---|---|
# | `store.set(key, "text")` | writes a text; the key stays, for the next barrier, too |
# | `store.get(key)` | its bytes, `b"4"` after four times `add`; waits until the key is there |
# | `store.add(key, 1)` | adds to a number (0 at first) and returns the new one, an `int` |
# | `store.wait([key, ...])` | sleeps until all these keys are there |


# %%
def my_barrier(store, rank, size, name):
    ### BEGIN SOLUTION
    if store.add(f"{name}/arrived", 1) == size:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_barrier(my_barrier)

# %% [markdown]
# ### Exercise 4: Repair it
#
# The commonest hang of all: data that does not divide. Each rank has a list of `batches`, tensors of
# one number, and their numbers differ. In each round the ranks sum up one batch each.


# %% tags=["raises-exception"]
def hangs(comm, batches):
    found = []
    for x in batches:
        comm.all_reduce(x)
        found.append(x.item())
    return found


three.run(lambda: hangs(Comm(), [torch.ones(1)] * (1 + Comm().rank)))

# %% [markdown]
# Rank 2 has a batch left when the others are done. Write it so that **all** batches count: as many
# rounds as the longest list has, and a rank without a batch adds nothing. Return the total of each
# round, the same list on every rank. One operation to agree on the number of rounds, then one for
# each round.


# %%
def totals(comm, batches):
    ### BEGIN SOLUTION
    rounds = torch.tensor([len(batches)])
    comm.all_reduce(rounds, op="max")
    found = []
    for i in range(int(rounds)):
        x = batches[i] if i < len(batches) else torch.zeros(1)
        comm.all_reduce(x)
        found.append(x.item())
    return found
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.totals(totals)

# %% [markdown]
# ### Exercise 5, open: Who sits where?
#
# Twelve ranks on three nodes of 4: ranks 0 to 3, 4 to 7, 8 to 11. They form `dp` = 3, `pp` = 2,
# `tp` = 2, and in a step
#
# | axis | each rank sends |
# |---|---|
# | `tp` | 8,000 bytes to its partner |
# | `dp` | 3,000 bytes to the next of its three, around |
# | `pp` | 1,000 bytes to the other stage |
#
# Give each rank its place `(dp, pp, tp)`, every place once. The check sends all these messages on 12
# real ranks. The score is the **bytes between nodes**: fewer is better. The order of the axes is a good
# start. Is it the best?


# %%
def place(rank):
    ### BEGIN SOLUTION
    found = where(rank, {"dp": 3, "pp": 2, "tp": 2})
    return found["dp"], found["pp"], found["tp"]
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.place(place)

# %% tags=["nbval-check-output"]
report("01")

# %% [markdown]
# ## 8. In the wild
#
# | tool | what it does here |
# |---|---|
# | torchrun | an agent on each node opens or joins the store, starts the ranks, sets the variables, starts all again when one dies (`--max-restarts`) |
# | DeepSpeed | `deepspeed --hostfile hosts train.py`: logs in to each node by ssh and sets the same variables |
# | Accelerate | `accelerate config` asks once; `accelerate launch train.py` then runs torchrun's code |
# | Slurm | `srun` gives `SLURM_PROCID` and `SLURM_NTASKS`; a line of your script makes `RANK` and `WORLD_SIZE` of them |
# | Megatron | `initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)`; data parallel is what is left; `order="tp-cp-ep-dp-pp"`: there the **first** varies fastest |
# | torch | `init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))`: the last varies fastest, as here |
# | DeepSpeed | `PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)`: pipe, data, model, the last fastest |
#
# (Sources: the tools' documentation; Megatron-LM, `megatron/core/parallel_state.py`; DeepSpeed,
# `deepspeed/runtime/pipe/topology.py`.)

# %% [markdown]
# For hangs, torch can say more than it does by default:
#
# - `TORCH_DISTRIBUTED_DEBUG=DETAIL`, set **before** torch is imported, has ranks compare operation
#   and shapes before each collective, over gloo. It is slow: for a hunt, not for a run.
# - `dist.monitored_barrier(timeout=...)`, on gloo alone: a barrier at which rank 0 names the rank
#   that is missing, "Rank 1 failed to pass monitoredBarrier". Put it before the line that hangs.
# - `TORCH_FR_BUFFER_SIZE=2000` (before: `TORCH_NCCL_TRACE_BUFFER_SIZE`) keeps the last operations of
#   each rank on NCCL, the *flight recorder*; `TORCH_NCCL_DUMP_ON_TIMEOUT=1` has them written down.
# - `py-spy dump --pid ...` shows the line at which a rank is, as `Where each rank was` did.

# %% [markdown]
# **You can now** start ranks in three ways, say what happens until they are a group, cut them into a
# mesh, and name the rank behind a hang.
