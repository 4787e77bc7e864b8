# %% [markdown]
# # Lab 01: Ranks and groups
#
# In lab 00 a `World` started your ranks. Here you start them by hand, watch them find each other,
# arrange them in groups along axes, and learn to diagnose six classic hangs.

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

guess = predict()  # empty until section 3
Path("../runs").mkdir(exist_ok=True)  # for the script of section 5

# %% [markdown]
# ## 1. The question
#
# A job runs on many devices, and one rank falls out of step. How long do its peers wait before
# they report an error? For torch with NCCL, the usual choice on GPUs, the answer is 10 minutes.

# %%
timeout_h = 10 / 60  # NCCL's default; gloo's is 30 minutes
devices = [8, 1024, 16384]

fig, axes = plt.subplots(figsize=(8, 1.6))
labels = [f"{n:,} devices" for n in devices]
bars = axes.barh(labels, [n * timeout_h for n in devices], color="#D55E00")
axes.bar_label(bars, fmt="{:,.0f} h", padding=4)
axes.set(xlim=(0, 3_500), xlabel=f"device-hours lost in one hang of {60 * timeout_h:.0f} minutes")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# (Source: the documentation of `init_process_group`.) The error you then get names the ranks that
# waited, but neither the rank at fault nor its line of code. So: **how do processes that know
# nothing about each other form a group, and how do you find the rank that fell out of step?**

# %% [markdown]
# ## 2. The idea
#
# The launcher passes each process a few environment variables. Here are those of the second process
# on the second of two nodes (machines) with 4 devices each:
#
# | variable | value | meaning |
# |---|---|---|
# | `RANK` | 5 | the index of the process among all processes |
# | `WORLD_SIZE` | 8 | the number of processes |
# | `LOCAL_RANK` | 1 | the index of the process on this node, which selects its device |
# | `MASTER_ADDR` | 10.0.0.1 | the address where all processes meet: the node of rank 0 |
# | `MASTER_PORT` | 29500 | the port there |
#
# That is all a rank knows. In particular, it does not know the other ranks' addresses.

# %% [markdown]
# The ranks meet at a **store**, a small key-value server:
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
#        ▲─────────────── one connection per pair ───────────────▲
# ```
#
# This is called **rendezvous**.

# %% [markdown]
# `init_process_group("gloo")` performs the rendezvous step by step:
#
# 1. Rank 0 opens the store; the other ranks connect to it.
# 2. Each rank opens a socket and writes its address into the store, with its rank as the key.
# 3. Each rank waits for the other ranks' addresses. (A job hangs here if a rank is missing.)
# 4. Each rank connects to every other rank: this opens n - 1 sockets on each rank, and n(n-1)/2
#    connections in total.
#
# Tensors never go through the store. There are three ways to specify the store's address:
#
# | rendezvous | call | suited to |
# |---|---|---|
# | environment | `init_process_group("gloo")` | launchers: torchrun, DeepSpeed, Slurm scripts |
# | TCP | `init_method="tcp://10.0.0.1:29500", rank=5, world_size=8` | your own launcher |
# | file | `init_method="file:///shared/run7", rank=5, world_size=8` | a shared disk; a new file for each run |

# %% [markdown]
# Large models need more than one group. If a layer is split over two devices, these two sum their
# partial results, while other groups average gradients. So ranks are arranged in a **mesh** with
# named axes, and each line of ranks along an axis forms a group. Ranks are numbered as in nested
# loops, outermost axis first: the **last axis varies fastest**:

# %%
plot.mesh({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=4)

# %% [markdown]
# The axes are called pipeline (`pp`), data (`dp`) and tensor (`tp`) parallel, as in Megatron-LM,
# NVIDIA's library for training large models. Ranks 0 and 1 are neighbors along `tp`. This axis
# sends the most bytes, so it stays inside a node; `pp` sends the fewest, so it may cross nodes.
# Later labs explain what the three axes do; here it only matters which ranks communicate.
#
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | launcher | 启动器 | starts one process per device and sets its environment variables |
# | local rank | 本地进程编号 | the index of a process on its node |
# | node | 节点 | one machine, with one or more GPUs |
# | rendezvous | 会合 | how ranks find each other at the start |
# | key-value store | 键值存储 | the server where ranks exchange addresses at rendezvous |
# | subgroup | 子进程组 | some of the ranks, with their own connections |
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
# Eight ranks use gloo. How many sockets to other ranks does each have after `init_process_group`?
#
# Then they create the mesh in the picture above. Every line of ranks along every axis becomes a
# group: how many groups is that? Each new group opens **new** sockets between its
# members: how many sockets does a rank have then?

# %% stub="guess = predict(sockets=..., groups=..., sockets_with_mesh=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
guess = predict(sockets=8 - 1, groups=3 * 8 // 2, sockets_with_mesh=7 + 3 * (2 - 1))
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# This is how labkit's ranks rendezvous. Their store is a file, since all ranks run on one machine
# and torch's TCP store would also accept connections from other machines. (Section 6 explains the
# board in the comment.)

# %%
show("runtime/rank.py:_start_up", since="store = dist", until="except BaseException")

# %% [markdown]
# A file works like any other store. torch counts the store's users in the file (`refcount`) and
# deletes it when the last user exits. After a crash the file stays, and the next run may read stale
# addresses: use a new file name for each run.

# %%
Path("../runs/store").unlink(missing_ok=True)
in_a_file = dist.FileStore("../runs/store")
in_a_file.set("rank 0", "127.0.0.1:4711")
Path("../runs/store").read_bytes()

# %% [markdown]
# The coordinates of a rank in a mesh follow from repeated division with remainder, starting at the
# last axis:

# %%
show("comm/mesh.py:coordinates")

# %% [markdown]
# For the groups along one axis, fix the index on all other axes and vary the index on this one:

# %%
show("comm/mesh.py:lines")

# %% [markdown]
# Here the lines become groups. Note that **every rank creates every group**, in the same order,
# even groups to which it does not belong. torch's `new_group` requires this, since it numbers
# groups by counting calls. `comm.subgroup(ranks)` creates a group and returns its `Comm`, or `None`
# on a rank outside the group. (You can ignore `shared` and `parallel`.)

# %%
show("comm/mesh.py:Mesh._over")

# %% [markdown]
# ## 5. Run it
#
# ### Ranks by hand
#
# All ranks run this same ordinary script: each process asks for its rank at run time.

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
# Now this notebook acts as the launcher. Like torchrun, it opens the store itself, so you can read
# what is in it. (Otherwise rank 0 opens the store.) `LauncherStore` listens on a free port
# of this machine. Its attribute `variables` adds two environment variables: one says that the
# store already exists, and `GLOO_SOCKET_IFNAME` keeps the ranks' sockets on this machine.

# %%
store = LauncherStore()


def start(rank, world_size):
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    env = os.environ | store.variables | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "../runs/hello.py"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def show_store(ranks):  # waits until this many ranks have written their addresses
    for key, address in store.addresses(ranks).items():
        print(f"{key}  ->  {address}")


# %% [markdown]
# Start rank 0, alone:

# %%
first = start(0, world_size=2)
show_store(1)
sockets = psutil.Process(first.pid).net_connections("tcp")
print("listens at", [x.laddr.port for x in sockets if x.status == psutil.CONN_LISTEN])
print("has ended:", first.poll() is not None)

# %% [markdown]
# The key names the group and the device, and ends with the rank. Rank 0 has opened a socket and
# written its address into the store. Now it waits for the other addresses (item 3 of the list in
# section 2), for up to 30 minutes. Rank 1 ends the wait:

# %%
second = start(1, world_size=2)
for process in (first, second):
    print(process.communicate()[0], end="")
show_store(2)

# %% [markdown]
# **Your turn, in terminals.** Open two terminals (File, New, Terminal) in the folder of these labs
# and run `source ../.venv/bin/activate` (or activate your Python environment in your own way). Now
# *you* are the launcher; `env` sets the variables for one command:
#
# ```sh
# env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 python ../runs/hello.py
# env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=1 python ../runs/hello.py
# ```
#
# The first waits until you start the second in the other terminal. Then use a launcher. (Its
# four-line warning about `OMP_NUM_THREADS` is not an error: each rank gets one thread.)
#
# ```sh
# torchrun --nproc-per-node 4 ../runs/hello.py
# ```

# %% [markdown]
# Now make mistakes on purpose. (Ctrl-C ends a waiting rank.)
#
# | you start | you see | because |
# |---|---|---|
# | rank 1 first, then rank 0 | the two sums, as before | rank 1 retries until the store is open |
# | rank 0 twice | the second dies: `EADDRINUSE` | both try to open the store on port 29500 |
# | rank 1 twice, no rank 0 | nothing | there is no store, and both keep trying |
# | two ranks with `WORLD_SIZE=3` | nothing | both wait for the address of rank 2 |
#
# The notebook also set `GLOO_SOCKET_IFNAME`. In your terminals it is not set, so gloo uses the
# address of the machine's host name. If the ranks do not connect, put `GLOO_SOCKET_IFNAME=lo`
# (macOS: `lo0`) after `env`.

# %% [markdown]
# Finally, use a file as the store, without any environment variables. Copy the script to
# `../runs/by_file.py`, add `import os, sys` at the top, and change the call to
#
# ```python
# store = f"file://{os.getcwd()}/store-1"  # a new name for each run
# dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2)
# ```
#
# Then run `python ../runs/by_file.py 0` in one terminal, and with `1` in the other.

# %% [markdown]
# ### Groups
#
# Each of eight ranks counts its open sockets, creates the mesh, and counts again:

# %%
world = World(8)


# %% tags=["nbval-check-output"]
def open_sockets():
    sockets = psutil.Process().net_connections("tcp")
    return sum(socket.status == psutil.CONN_ESTABLISHED for socket in sockets)


def make_mesh():
    before = open_sockets()
    mesh = Mesh(pp=2, dp=2, tp=2)
    groups = [(axis, mesh[axis].ranks) for axis in mesh.sizes]
    return before, open_sockets(), groups


seen = world.run(make_mesh)
groups = {group for *_, of_rank in seen for group in of_rank}
guess.beside(sockets=seen[5][0], groups=len(groups), sockets_with_mesh=seen[5][1])

# %% [markdown]
# The counts show that a group is more than a label: it has its own sockets. On GPUs it has its own
# NCCL connections and buffers, so do not create groups in a loop. Which groups does rank 5 belong
# to?

# %% tags=["nbval-check-output"]
seen[5][2]

# %% [markdown]
# A rank has a `Comm` per axis, whose collectives stay inside its group. Sum the rank numbers along
# each axis:


# %% tags=["nbval-check-output"]
def sums():
    mesh = Mesh(pp=2, dp=2, tp=2)
    lines = []
    for axis in mesh.sizes:
        x = torch.tensor([float(mesh.comm.rank)])
        mesh[axis].all_reduce(x)
        lines.append(f"{axis} {x.item():.0f}")
    return mesh.coordinates(), ", ".join(lines)


world.run(sums)

# %% [markdown]
# On one node with 8 devices, no message leaves the node. With nodes of 4, the four `pp` groups
# cross nodes (dashed in the picture of section 2). What if `tp` came first?

# %%
plot.mesh({"tp": 2, "dp": 2, "pp": 2}, ranks_per_node=4)

# %% [markdown]
# Now all `tp` traffic crosses the slow network. Only the order of the axes has changed.

# %%
world.close()  # ends its eight processes

# %% [markdown]
# ## 6. Break it: the hang clinic
#
# Here are six programs for three ranks, each with one classic bug. **Before you run them**: how
# does each end with plain `torch.distributed`?
#
# - `hang`: a rank waits until the timeout;
# - `crash`: a rank dies or raises an error at once;
# - `silent`: all ranks return as if nothing were wrong.


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


# %% stub="# each is \"hang\", \"crash\" or \"silent\"\nguesses = {\"skips\": ..., \"other_order\": ..., \"other_shape\": ..., \"other_dtype\": ...}\nguesses |= {\"sends_to_nobody\": ..., \"other_group\": ...}"
### BEGIN SOLUTION
guesses = {"skips": "hang", "other_order": "hang", "other_shape": "crash", "other_dtype": "silent"}
guesses |= {"sends_to_nobody": "hang", "other_group": "hang"}
### END SOLUTION

# %% [markdown]
# The clinic runs each program twice on real ranks: with torch's own functions, and with labkit's
# communicator. Both runs have a timeout of 2 s.

# %%
patients = [skips, other_order, other_shape, other_dtype, sends_to_nobody, other_group]
clinic(patients, guesses)

# %% [markdown]
# Note three points in this table.
#
# - **Torch's hangs** all look alike: "timed out", or "closed by peer" where the peer timed out
#   first. Each rank knows only its own sockets. In `skips`, the rank at fault is the only one
#   without an error.
# - **The crash** is reported for the rank that died, not for the rank whose tensor was too large.
# - **The silent bug** is the worst. The sum of three ones should be 3, but ranks 0 and 2 get 2:
#   rank 1's integers, read as floats, are almost zero. On rank 1 the sum is about a billion, since
#   floats are read as integers there. No rank reports an error.

# %% [markdown]
# A recording outlives a hang and shows what the ranks did before it. Ranks 0 and 2 are still
# in their second collective: their bars end in arrows, since it never completed. (The time in the
# title is that of the last recorded event.) Rank 1 returned after the first collective, a
# barrier (each rank waits there until all have arrived); from then on its row is empty. The ranks
# enter the barrier a few milliseconds apart, so its bars begin at different times.

# %%
three = World(3, timeout_s=2)
_ = three.run(lambda: None)  # all ranks are ready

# %%
with record() as stuck, suppress(RankError):  # the table above shows the error
    three.run(lambda: (Comm().barrier(), skips(Comm())))
plot.timeline(stuck)

# %% [markdown]
# How does labkit detect this? Before a rank sends anything, it writes the operation to a **board**,
# a page of shared memory that all ranks can read. A rank that arrives later compares its own
# operation with the board's entries. A `note` describes one operation. Its `key` is the group and
# the sequence number, equal on all ranks; its `signature` is a checksum of operation, shape and
# dtype:

# %%
show("runtime/board.py:Board.enter", since="key, signature =")

# %% [markdown]
# While ranks wait, the `World` checks which of them can still continue. `waits` maps each waiting
# rank to the note of its operation, and `needs` maps it to the ranks that have not reached this
# operation; `targets` are the ranks of this run. A rank that has returned will never reach the
# operation (`gone`), and neither will a rank in a cycle of ranks that wait for each other
# (`stuck`):

# %%
show("runtime/diagnose.py:Watch._hopeless", since="needs = {")

# %% [markdown]
# labkit cannot know what you *meant*. If one rank swaps two all-reduces of the same shape, every
# rank still calls the same operation twice. What is the result, and what should it be?


# %% tags=["nbval-check-output"]
def swapped_all_reduces():
    comm = Comm()
    gradient, loss = torch.full((2,), 1.0), torch.full((2,), 100.0)
    for x in (gradient, loss) if comm.rank == 0 else (loss, gradient):
        comm.all_reduce(x)
    return gradient.tolist(), loss.tolist()


three.run(swapped_all_reduces)

# %% [markdown]
# The gradients should be 3 and the loss 300. No tool catches this bug. Loop over tensors in an
# order that is the same on all ranks (a list, never a set).
#
# One more bug: only the members create a group, "since other ranks don't need it":


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
# ### Exercise 1: The coordinates of a rank
#
# Try this without looking at section 4 again. `sizes` maps axis names to sizes, outermost axis
# first, such as `{"pp": 2, "dp": 2, "tp": 2}`; names and sizes vary. Return the index of `rank` on
# each axis, such as `{"pp": 1, "dp": 0, "tp": 1}`.


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
# Return the groups along `axis`, each a list of ranks in ascending order. For `dp` in the mesh of
# section 2: `[[0, 2], [1, 3], [4, 6], [5, 7]]`. The check creates the groups. Hint: how far
# apart are neighbors along an axis?


# %%
def groups_along(axis, sizes):
    ### BEGIN SOLUTION
    total = 1
    for size in sizes.values():
        total *= size
    groups = {}
    for rank in range(total):
        others = where(rank, sizes) | {axis: 0}  # a group's ranks agree on all other axes
        groups.setdefault(tuple(others.values()), []).append(rank)
    return list(groups.values())
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.groups_along(groups_along)

# %% [markdown]
# ### Exercise 3: A barrier from a store
#
# Before there are sockets, there is only the store. Build a barrier from it: no rank returns before
# all `size` ranks have called it. `name` is a different string for each barrier.
#
# | call | what it does |
# |---|---|
# | `store.set(key, "text")` | sets a value; the key still exists in the next barrier |
# | `store.get(key)` | waits until the key exists and returns its value as bytes, such as `b"4"` after four `add` calls |
# | `store.add(key, 1)` | adds to a counter, 0 at first, and returns the new value, an `int` |
# | `store.wait([key, ...])` | waits until all these keys exist |


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
# ### Exercise 4: Uneven data
#
# A very common cause of hangs: the data does not divide evenly. Each rank has a list, `batches`, of
# one-element tensors; these lists differ in length. In each round, the ranks all-reduce one batch
# each.


# %% tags=["raises-exception"]
def hangs(comm, batches):
    found = []
    for x in batches:
        comm.all_reduce(x)
        found.append(x.item())
    return found


three.run(lambda: hangs(Comm(), [torch.ones(1)] * (1 + Comm().rank)))

# %% [markdown]
# Rank 0 is done after one batch, while ranks 1 and 2 still have batches left and wait for rank 0.
# Rewrite `hangs` as `totals` so that **all** batches count: run as many rounds as the longest list
# has batches; a rank without a batch adds zero. Return the total of each round, the same list on
# every rank. Use one operation to agree on the round count, then one per round.


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
# ### Exercise 5, open: Rank placement
#
# Twelve ranks run on three nodes of 4: ranks 0 to 3, 4 to 7, 8 to 11. They form a mesh with dp=3,
# pp=2, tp=2. In each step:
#
# | axis | each rank sends |
# |---|---|
# | `tp` | 8,000 bytes to the other rank of its `tp` line |
# | `dp` | 3,000 bytes to the next rank of its `dp` line, around a ring of three |
# | `pp` | 1,000 bytes to the other rank of its `pp` line |
#
# Write `place(rank)`, which returns the coordinates `(dp, pp, tp)` of one rank. Over all 12 ranks,
# each combination must occur exactly once. The check sends all these messages on 12 real ranks.
# Your score is the number of **bytes between nodes**: fewer is better. A good order of the axes is
# a start. Can you do better?


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
# | tool | launching and groups |
# |---|---|
# | torchrun | an agent on each node opens or joins the store, sets the variables, starts the ranks, and restarts all ranks when one dies (`--max-restarts`) |
# | DeepSpeed | `deepspeed --hostfile hosts train.py` logs in to each node by ssh and sets the same variables |
# | Accelerate | `accelerate config` asks for the settings once; `accelerate launch train.py` then runs torchrun's code |
# | Slurm | `srun` sets `SLURM_PROCID` and `SLURM_NTASKS`; your script sets `RANK` and `WORLD_SIZE` from them |
# | Megatron | `initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)`; the remaining factor is data parallelism; with `order="tp-cp-ep-dp-pp"` the **first** axis varies fastest |
# | torch | `init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))`: the last axis varies fastest, as here |
# | DeepSpeed | `PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)`: axes pipe, data, model; the last varies fastest |
#
# (Sources: the tools' documentation; Megatron-LM, `megatron/core/parallel_state.py`; DeepSpeed,
# `deepspeed/runtime/pipe/topology.py`.)

# %% [markdown]
# torch can report more about hangs than it does by default:
#
# - `TORCH_DISTRIBUTED_DEBUG=DETAIL`, set **before** torch is imported, makes ranks compare
#   operation and shapes over gloo before each collective. It is slow: use it to find a bug, not to
#   train.
# - `dist.monitored_barrier(timeout=...)`, for gloo only, is a barrier at which rank 0 names the
#   missing rank: "Rank 1 failed to pass monitoredBarrier". Put it before the line that hangs.
# - The *flight recorder* keeps the most recent NCCL operations of each rank, 2,000 by default in
#   recent versions (`TORCH_FR_BUFFER_SIZE`, formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`);
#   `TORCH_NCCL_DUMP_ON_TIMEOUT=1` saves them on a timeout.
# - `py-spy dump --pid ...` shows the current line of a rank, as `Where each rank was` did above.

# %% [markdown]
# **You can now** start ranks in three ways, explain the rendezvous, arrange ranks in a mesh, and
# find the rank behind a hang.
