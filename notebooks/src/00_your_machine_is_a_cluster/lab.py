# %% [markdown]
# # Lab 00: Your machine is a cluster
#
# You know PyTorch, but you have never run it on more than one device. In this lab you start several
# processes, make them communicate, see which process waits for which, make them hang on purpose,
# and build a broadcast from sends and receives.
#
# Every lab has the same eight sections. Run the cells from top to bottom. Where a cell says `your
# turn` or has `...`, fill in your own code or value.

# %%
import matplotlib.pyplot as plt
import psutil
import torch

from labkit import Comm, Link, World, listen, plot, record
from labkit.course import predict, report, show
from labkit.labs.lab_00 import checks as check

guess = predict()  # empty until section 3
# %load_ext labkit

# %% [markdown]
# ## 1. The question
#
# Training with Adam in mixed precision takes 16 bytes per parameter: 2 for the fp16 weight, 2 for
# its gradient, and 12 for three fp32 values: a copy of the weight (the *master weight*) and Adam's
# two moments. (Source: Rajbhandari et al., *ZeRO*, 2020, section 3.1.) Activations take additional
# memory.
#
# How much memory does this machine have?

# %%
gpus = range(torch.cuda.device_count())
memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]
here_gb = (sum(memory) or psutil.virtual_memory().total) / 1e9

rows = {"70 billion parameters": 16 * 70, "7 billion parameters": 16 * 7, "this machine": here_gb}
fig, axes = plt.subplots(figsize=(8, 1.7))
bars = axes.barh(list(rows), list(rows.values()), color=["#0072B2", "#0072B2", "#E69F00"])
axes.bar_label(bars, fmt="{:,.0f} GB", padding=4)
axes.set(xlim=(0, 1300), xlabel="GB to train a model with Adam, without activations")
axes.spines[["top", "right"]].set_visible(False)

# %%
print(f"70 billion parameters need {16 * 70 / here_gb:,.1f} machines like this one.")

# %% [markdown]
# This is why many devices have to train one model together. But each device can access only its own
# memory. **How can programs work together when none can read another program's memory?**

# %% [markdown]
# ## 2. The idea
#
# Start the *same program* several times, as separate processes, and number them: the number of a
# process is its **rank**. Each process has its own memory. Data moves between them as **messages**.
#
# ```
#      rank 0            rank 1            rank 2            rank 3
#   ┌───────────┐     ┌───────────┐     ┌───────────┐     ┌───────────┐
#   │ x = 0.0   │     │ x = 10.0  │     │ x = 20.0  │     │ x = 30.0  │
#   └─────┬─────┘     └─────┬─────┘     └─────┬─────┘     └─────┬─────┘
#         └─────────────────┴────messages─────┴─────────────────┘
# ```
#
# On a cluster the ranks run on many machines; here they all run on yours. The program is the same
# in both cases: your machine acts as the cluster.

# %% [markdown]
# `%%ranks 4` runs a cell on four ranks. The first such cell starts them and reports how they
# communicate: the library (here gloo) and how it moves data (on one machine, through shared
# memory). On every rank, the names `rank`, `size`, `comm`, `device` and `torch` are already
# defined.
#
# A rank is a separate process: a `%%ranks` cell does not see what you import or define in other
# cells, and its variables stay on the ranks. The notebook shows only the value of the last line on
# each rank; `%%ranks 4 -o values` also stores these values in the notebook, as a list.

# %%
# %%ranks 4
import os

x = torch.tensor([10.0 * rank], device=device)
f"process {os.getpid()} has x = {x.item()}"

# %% [markdown]
# Four processes, four different `x`. Ranks keep their variables from cell to cell, as a notebook
# does, even after an exception. But if a rank fails during a communication, labkit replaces all
# ranks with new ones, without your variables; then run the cells that define them again.
#
# `comm` is the rank's **communicator**, which exchanges tensors with other ranks. An
# **all-reduce** sums a tensor over all ranks and gives every rank the result, in place:

# %% tags=["nbval-check-output"]
# %%ranks 4
comm.all_reduce(x)
x.item()

# %% [markdown]
# No rank is in charge. Every rank called the same operation, and they completed it together: this
# is a **collective**. The other kind of operation is **point-to-point communication**: one rank
# sends, another receives.

# %% tags=["nbval-check-output"]
# %%ranks 4
note = torch.zeros(1, device=device)
if rank == 3:
    comm.send(torch.tensor([42.0], device=device), dst=0)
if rank == 0:
    comm.recv(note, src=3)
note.item()

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | rank | 进程编号（秩） | the index of a process in its group, from 0 |
# | world size | 进程总数 | the number of ranks |
# | process group | 进程组 | ranks that communicate with each other |
# | point-to-point communication | 点对点通信 | one rank sends, another receives |
# | send, receive | 发送、接收 | the two ends of a point-to-point message |
# | collective communication | 集合通信 | an operation that all ranks of a group call together |
# | broadcast | 广播 | every rank gets a copy of one rank's tensor |
# | all-reduce | 全归约 | every rank gets the sum (or mean, maximum, ...) over all ranks |
# | backend | 通信后端 | the library that moves the bytes: gloo, NCCL, MPI |
# | deadlock | 死锁 | ranks wait for each other, so none can continue |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# Rank 0 has a tensor of 1 MiB that three other ranks need. The simplest way is to send it three
# times. But once rank 1 has the tensor, rank 1 can send it, too:
#
# ```
#   round 1     0 ──> 1
#   round 2     0 ──> 2     1 ──> 3
# ```
#
# In each round, every rank that has the tensor sends it to one that does not. This pattern is a
# **tree**: after k rounds, 2ᵏ ranks have the tensor. Let S be the size of the tensor in bytes.
# Every rank except rank 0 must receive S bytes, whatever the algorithm. In the tree above, with
# four ranks, how many bytes do all ranks send in total, and how many bytes does rank 0 send?

# %% stub="S = 2**20  # bytes\nguess = predict(sent_by_all_bytes=..., sent_by_rank_0_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
S = 2**20  # bytes
guess = predict(sent_by_all_bytes=3 * S, sent_by_rank_0_bytes=2 * S)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# This is the broadcast that labkit runs, read from its source file. All ranks run it. Each has a
# `wire`, an object that sends to and receives from the other ranks. `root` is the rank that has the
# tensor, `position` is this rank's distance from the root, and `reach` is the number of ranks that
# have the tensor. (Lab 02 explains the cost in the docstring.)

# %%
show("comm/collectives/broadcast.py:tree_broadcast")

# %% [markdown]
# - `position < reach`: this rank has the tensor and sends it to the rank at position + reach, if
#   there is one.
# - `reach <= position < 2 * reach`: this rank receives it from position - reach. All other ranks
#   are idle in this round.
# - `reach *= 2`: now twice as many ranks have the tensor.
#
# `isend` and `irecv` only start a message. `tag` is a label that distinguishes the messages of this
# call from those of the next. `yield` passes the message to the loop that drives this function
# (`run` in `steps.py`); the loop waits for the message, then resumes the function. In your own
# code, call `comm.send` and `comm.recv`, which do the waiting; you need no `yield`.

# %% [markdown]
# ## 5. Run it
#
# `%%ranks` is for experiments. In a program you create a `World`, a set of running ranks, and pass
# a function to its `run` method. Unlike a `%%ranks` cell, this function may use names from your
# notebook. `run` returns a list with one value per rank. `listen()` collects this rank's
# communication events; `wire_bytes` is the number of bytes that this rank sent for an event.
#
# `backend="gloo"` selects labkit's tree. (The default is shared memory on one machine, or NCCL,
# NVIDIA's library for GPUs, which has its own algorithms.) "gloo as asked" confirms the choice.


# %%
def by_tree():
    comm = Comm()
    x = torch.full((2**18,), float(comm.rank))  # 4 bytes each: 1 MiB
    with listen() as events:
        comm.broadcast(x, src=0)
    assert (x == 0).all()  # rank 0's values
    return events[0].wire_bytes


world = World(4, backend="gloo")

# %% tags=["nbval-check-output"]
sent = world.run(by_tree)
sent

# %% tags=["nbval-check-output"]
guess.beside(sent_by_all_bytes=sum(sent), sent_by_rank_0_bytes=sent[0])

# %% [markdown]
# A correct prediction matches the measurement to the byte. In total, the tree sends as many bytes
# as rank 0 would by sending three times. So why use a tree? **Time.** Inside one machine, messages
# are too fast to show the difference, so we give every rank a **paced** link of 0.1 Gb/s: the bytes
# are real, but each message is held back until it would have arrived over a link of that speed.
# Sending 1 MiB then takes 84 ms.


# %%
def one_by_one():
    comm = Comm()
    x = torch.full((2**18,), float(comm.rank))
    if comm.rank == 0:
        for other in range(1, comm.size):
            comm.send(x, dst=other)
    else:
        comm.recv(x, src=0)


slow = World(4, link=Link(gbps=0.1))
_ = slow.run(one_by_one)  # once before recording, to connect all ranks

# %%
with record() as sent_in_turn:
    slow.run(one_by_one)
plot.timeline(sent_in_turn)

# %% [markdown]
# Time runs to the right. Each rank has two rows. The upper row shows what the program does: here
# every rank only waits, even rank 0, since a send returns only when its message has arrived. The
# lower row shows messages and their peers; the two shades of gray only separate one message from
# the next.
#
# Rank 3 gets its message last, since rank 0 sends the three messages one after another. Now the
# tree:

# %%
with record() as sent_by_tree:
    slow.run(by_tree)
plot.timeline(sent_by_tree)

# %% [markdown]
# Here the lower row is labeled with the group (*all ranks*), and each bar is a whole broadcast with
# all its rounds; the bar's number is its place among the group's collectives. The plot is as
# wide as before but spans less time. Compare the two times directly:


# %%
def end_ms(trace):
    ranks = trace.from_zero().ranks.values()
    events = [event for rank in ranks for event in rank.comms]
    return 1000 * max(max(event.ended_s, event.wait_ended_s) for event in events)


fig, axes = plt.subplots(figsize=(8, 1.3))
ends_ms = [end_ms(sent_by_tree), end_ms(sent_in_turn)]
bars = axes.barh(["by tree", "one by one"], ends_ms, color="#0072B2")
axes.bar_label(bars, fmt="{:,.0f} ms", padding=4)
axes.set(xlim=(0, 1.2 * max(ends_ms)), xlabel="ms until all ranks have the tensor")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The tree takes two rounds instead of three. With 1,024 ranks, it takes 10 instead of 1,023.

# %% [markdown]
# ## 6. Break it
#
# Sooner or later your ranks will hang. On a cluster you then see nothing at all, for minutes.
# labkit reports which rank waits where. Here, two neighbors exchange their values:


# %%
def careless_swap():
    comm = Comm()
    partner = comm.rank ^ 1  # 0 and 1, 2 and 3
    mine, theirs = torch.tensor([float(comm.rank)]), torch.empty(1)
    comm.send(mine, dst=partner)
    comm.recv(theirs, src=partner)
    return theirs.item()


# %% tags=["raises-exception"]
pair = World(2, timeout_s=2)
pair.run(careless_swap)

# %% [markdown]
# Both ranks send first. A send returns only once the peer receives it, but neither rank gets to
# its receive: both are still sending. This is a **deadlock**. Worse, some libraries buffer small
# messages: the program then works until one day the tensors are larger. The MPI standard calls
# such programs *unsafe*.
#
# In the error message, `group default` is the group of all ranks, `0->1` names sender and receiver,
# `tag 0` is the default tag, and `message 1` is the first message with this tag.
#
# The second classic hang: ranks call different collectives.


# %%
def disagree():
    comm = Comm()
    x = torch.ones(3)
    if comm.rank == 0:
        comm.broadcast(x)  # "only rank 0 has to send, doesn't it?"
    else:
        comm.all_reduce(x)


# %% tags=["raises-exception"]
pair.run(disagree)

# %% [markdown]
# Every rank of a group must call the same collectives, in the same order, with the same shapes and
# dtypes. An `if rank == 0:` around a collective is a classic bug. The message names each rank's
# operation and the line that called it.

# %% [markdown]
# ## 7. Build it
#
# Your functions get `comm`, this rank's communicator, with `comm.rank` and `comm.size`. It sends
# only tensors. A check runs your function on real ranks and reports what is wrong. Try a wrong
# answer, too.
#
# | call | what it does |
# |---|---|
# | `comm.send(x, dst)`, `comm.recv(x, src)` | copies one rank's `x` into another rank's `x` |
# | `comm.all_reduce(x)` | replaces `x` with the sum over all ranks |
# | `comm.all_reduce(x, op="max")` | puts the element-wise maximum into `x` |
# | `comm.broadcast(x, src)` | replaces every rank's `x` with that of rank `src` |
# | `comm.all_gather(outs, x)` | copies the `x` of rank i into the tensor `outs[i]` |
#
# `help(Comm)` lists all operations.

# %% [markdown]
# ### Exercise 1: The mean
#
# Each rank has a Python float, `value`. Put it into a tensor and return the mean over all ranks, on
# every rank, with a single all-reduce.


# %%
def average(comm, value):
    ### BEGIN SOLUTION
    x = torch.tensor([value])
    comm.all_reduce(x)  # the sum
    return x.item() / comm.size
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.average(average)

# %% [markdown]
# ### Exercise 2: Repair the swap
#
# Ranks 0 and 1, 2 and 3, ... exchange tensors. Return the partner's tensor. No rank may hang:
# which rank must send first, and which must receive first?


# %%
def swap(comm, x):
    partner = comm.rank ^ 1
    ### BEGIN SOLUTION
    theirs = torch.empty_like(x)
    if comm.rank < partner:
        comm.send(x, partner)
        comm.recv(theirs, partner)
    else:
        comm.recv(theirs, partner)
        comm.send(x, partner)
    return theirs
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.swap(swap)

# %% [markdown]
# ### Exercise 3: A broadcast of your own
#
# Copy the `x` of rank 0 into every rank's `x`, in place, for any number of ranks. Use only `send`
# and `recv`, and send no more bytes than needed. Sending to one rank after another is enough.
# Bonus: a tree.


# %%
def my_broadcast(comm, x):
    ### BEGIN SOLUTION
    reach = 1
    while reach < comm.size:
        if comm.rank < reach and comm.rank + reach < comm.size:
            comm.send(x, comm.rank + reach)
        elif reach <= comm.rank < 2 * reach:
            comm.recv(x, comm.rank - reach)
        reach *= 2
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.my_broadcast(my_broadcast)

# %% [markdown]
# Now run your broadcast over the slow links. Sending one by one takes three rounds, a tree two.
# You can see the rounds, since each message is now a separate call:

# %%
slow.run(lambda: Comm().barrier())  # wait for all ranks
with record() as own_broadcast:
    slow.run(lambda: my_broadcast(Comm(), torch.ones(2**18)))
plot.timeline(own_broadcast)

# %% [markdown]
# ### Exercise 4, open: Where is the maximum?
#
# Each of 4 ranks has 1,000 values. On every rank, return the `(rank, index)` of the global maximum.
# The two largest may differ by only one float32 step.
#
# Your score is the number of bytes that all ranks send in total: fewer is better. An element takes
# 1 byte in `torch.uint8`, 2 in `torch.int16`, 4 in `torch.float32`. If `x` has S bytes, 4 ranks
# send in total:
#
# | operation | bytes sent by all ranks |
# |---|---|
# | `send` | S |
# | `broadcast` | 3 S |
# | `all_reduce` | 6 S |
# | `all_gather` | 12 S: each of 4 tensors goes to 3 ranks |


# %%
def find_max(comm, values):
    ### BEGIN SOLUTION
    mine = values.max().reshape(1)
    largest = [torch.empty(1) for _ in range(comm.size)]
    comm.all_gather(largest, mine)
    winner = int(torch.cat(largest).argmax())
    index = values.argmax().to(torch.int16).reshape(1)
    comm.broadcast(index, src=winner)
    return winner, index.item()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.find_max(find_max)

# %% tags=["nbval-check-output"]
report("00")

# %% [markdown]
# ## 8. In the wild
#
# Other tools start the ranks with a *launcher*: a program that starts one process per device and
# passes each its rank, usually in an environment variable.
#
# | tool | start 4 ranks | get the rank |
# |---|---|---|
# | torchrun | `torchrun --nproc-per-node 4 train.py` | `dist.get_rank()`, or `RANK`, `WORLD_SIZE` |
# | DeepSpeed | `deepspeed --num_gpus 4 train.py` | `deepspeed.comm.get_rank()` |
# | Accelerate | `accelerate launch --num_processes 4 train.py` | `accelerator.process_index` |
# | MPI | `mpirun -np 4 program` | `MPI_Comm_rank`, `MPI_Comm_size` |
# | labkit | `World(4)`, or any of these | `Comm().rank`, `Comm().size` |

# %% [markdown]
# The operations have nearly the same names everywhere, since all libraries follow MPI:
#
# | here | torch.distributed | MPI |
# |---|---|---|
# | `comm.send`, `comm.recv` | `dist.send`, `dist.recv` | `MPI_Send`, `MPI_Recv` |
# | `comm.broadcast` | `dist.broadcast` | `MPI_Bcast` |
# | `comm.all_reduce` | `dist.all_reduce` | `MPI_Allreduce` |
#
# Launchers also find and monitor machines, restart the job when a rank fails, and collect the logs
# of a thousand ranks. They do not explain a hang: the job is silent until the timeout, 10 minutes for
# NCCL in torch.

# %% [markdown]
# **You can now** start ranks, use collectives and point-to-point communication, count the bytes
# that ranks send, and read the report of a hang.
