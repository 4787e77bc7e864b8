# %% [markdown]
# # Lab 00: Your machine is a cluster
#
# You know PyTorch; you have never run it on more than one device. In an hour you will have started
# several processes, let them talk, seen who waited for whom, hung them on purpose, and built a
# collective of your own.
#
# Every lab has the same eight steps. Run the cells from top to bottom; where one says `your turn` or
# has `...` in the place of a number, write.

# %%
import matplotlib.pyplot as plt
import psutil
import torch

from labkit import Comm, Link, World, listen, plot, record
from labkit.course import predict, report, show
from labkit.labs.lab_00 import checks as check

guess = predict()  # nothing yet: that is for you, in step 3
# %load_ext labkit

# %% [markdown]
# ## 1. The question
#
# To train a model with Adam in mixed precision you hold 16 bytes for each of its parameters: 2 for
# the fp16 weight, 2 for its gradient, 12 for the fp32 copies that Adam needs. (Source:
# Rajbhandari et al., *ZeRO*, 2020, section 3.1.) Activations come on top.
#
# What does this machine have?

# %%
gpus = range(torch.cuda.device_count())
memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]
here_gb = (sum(memory) or psutil.virtual_memory().total) / 1e9

rows = {"70 billion parameters": 16 * 70, "7 billion parameters": 16 * 7, "this machine": here_gb}
fig, axes = plt.subplots(figsize=(8, 1.7))
bars = axes.barh(list(rows), list(rows.values()), color=["#0072B2", "#0072B2", "#E69F00"])
axes.bar_label(bars, fmt="{:,.0f} GB", padding=4)
axes.set(xlim=(0, 1300), xlabel="GB to hold a model while it is trained, without activations")
axes.spines[["top", "right"]].set_visible(False)

# %%
print(f"70 billion parameters need {16 * 70 / here_gb:,.1f} machines like this one.")

# %% [markdown]
# So many devices train one model together, and each sees only its own memory. **How do programs
# work on one thing when none can look into the memory of another?**

# %% [markdown]
# ## 2. The idea
#
# Start the *same program* several times, as processes, and give each a number: its **rank**. Each
# has its own memory. What one needs from another must travel as a **message**.
#
# ```
#      rank 0            rank 1            rank 2            rank 3
#   ┌───────────┐     ┌───────────┐     ┌───────────┐     ┌───────────┐
#   │ x = 0.0   │     │ x = 10.0  │     │ x = 20.0  │     │ x = 30.0  │
#   └─────┬─────┘     └─────┬─────┘     └─────┬─────┘     └─────┬─────┘
#         └─────────────────┴────messages─────┴─────────────────┘
# ```
#
# On a cluster the ranks are on many machines; here, all on yours. The program is the same: that is
# why your machine is a cluster.

# %% [markdown]
# `%%ranks 4` runs a cell on four ranks. The first one starts them and says what they run on. Each
# has the names `rank`, `size`, `comm`, `device` and `torch`.
#
# A rank is a process of its own: such a cell does not see the names of this notebook (what you
# import or define in other cells), and its names do not come back here. Only the value of its last
# line is shown; `%%ranks 4 -o values` brings the values here as a list.

# %%
# %%ranks 4
import os

x = torch.tensor([10.0 * rank], device=device)
f"process {os.getpid()} has x = {x.item()}"

# %% [markdown]
# Four processes, four different `x`. Ranks keep their variables from cell to cell, as a notebook
# does, also after an exception. Only an exception in the middle of an operation costs them: then all
# ranks are stopped, new ones start, and you run the cells that made your variables again.
#
# `comm` is each rank's door to the others. An **all-reduce** adds up the tensors of all ranks and
# gives everyone the sum, in place:

# %% tags=["nbval-check-output"]
# %%ranks 4
comm.all_reduce(x)
x.item()

# %% [markdown]
# Nobody sent a list of who does what. Every rank ran the same line, and the line means "all
# together": such an operation is a **collective**. The other kind is **point to point**: one rank
# sends, one other receives.

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
# | point-to-point communication | 点对点通信 | one rank sends, one other receives |
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
# Rank 0 has a tensor of 1 MiB, and three others want it. Simplest is to send it three times. But
# once rank 1 has it, rank 1 can send, too:
#
# ```
#   round 1     0 ──> 1
#   round 2     0 ──> 2     1 ──> 3
# ```
#
# In each round, all who have it send it to one who has not: a **tree**. After k rounds 2ᵏ ranks
# have it. Let S be the bytes of the tensor and n the ranks. Each rank but the first must receive S
# bytes once, whatever the algorithm. What follows for the bytes that all ranks send together? And
# how many of them does rank 0 send, in the picture?

# %% stub="S = 2**20  # bytes\nguess = predict(sent_by_all_bytes=..., sent_by_rank_0_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
S = 2**20  # bytes
guess = predict(sent_by_all_bytes=3 * S, sent_by_rank_0_bytes=2 * S)
### END SOLUTION
guess

# %% [markdown]
# ## 4. Read it
#
# This is how labkit broadcasts: the function itself, not a copy. All ranks run it, each with its
# `wire` to the others. `root` is the rank that has the tensor; `position` counts the ranks from
# there; `reach` is how many have it by now.

# %%
show("comm/collectives/broadcast.py:tree_broadcast")

# %% [markdown]
# - `position < reach`: I have it, so I send it `reach` places further, if somebody is there.
# - `reach <= position < 2 * reach`: it is my turn to receive, from `reach` places back.
# - `reach *= 2`: twice as many have it. All others do nothing in this round.
#
# `isend` and `irecv` only start a message; `tag` is a label that keeps the messages of one call
# apart from those of the next. `yield` hands the message to the loop that drives this function
# (`run`, in the same file), which waits for it and then goes on with the next line. In your own
# functions, call `comm.send` and `comm.recv`: they wait by themselves, no `yield`.

# %% [markdown]
# ## 5. Run it
#
# `%%ranks` is for trying things. In a program you make a `World` and give it a function; you get
# one value per rank. `listen()` collects what a rank does through its door; `wire_bytes` is what
# this rank itself sent for it.
#
# `backend="gloo"`, because there labkit's own tree does the work. NCCL, NVIDIA's library for GPUs,
# has an algorithm of its own. (The line "gloo as asked" below says that you got what you asked for.)


# %%
def by_tree():
    comm = Comm()
    x = torch.full((2**18,), float(comm.rank))  # 4 bytes each: 1 MiB
    with listen() as events:
        comm.broadcast(x, src=0)
    assert (x == 0).all()  # what rank 0 had
    return events[0].wire_bytes


world = World(4, backend="gloo")

# %% tags=["nbval-check-output"]
sent = world.run(by_tree)
sent

# %% tags=["nbval-check-output"]
guess.beside(sent_by_all_bytes=sum(sent), sent_by_rank_0_bytes=sent[0])

# %% [markdown]
# If you got it right, predicted and measured are equal to the byte. All ranks together send as much
# as if rank 0 sent three times. So why a tree? **Time.** Inside one machine messages are too fast
# to see it, so give every rank a wire of 0.1 gigabits per second: real bytes, delivered as late as
# such a wire would.


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
_ = slow.run(one_by_one)  # once before we record: now all ranks are up and connected

# %%
with record() as sent_in_turn:
    slow.run(one_by_one)
plot.timeline(sent_in_turn)

# %% [markdown]
# Time goes to the right. Each rank has two rows: above, what its program does (here it waits, rank 0
# too, since a send returns when the message has arrived); below, its messages, and with whom. The two
# greys only tell one message from the next. *Paced* means that the wires are slowed down.
#
# Rank 3 gets its message last, since all three leave by rank 0's wire. Now the tree:

# %%
with record() as sent_by_tree:
    slow.run(by_tree)
plot.timeline(sent_by_tree)

# %% [markdown]
# A bar is now a whole broadcast: its rounds are inside. The picture is as wide as before, but look at
# its milliseconds. Both beside each other:


# %%
def end_ms(trace):
    ranks = trace.from_zero().ranks.values()
    return 1000 * max(event.ended_s for one in ranks for event in one.comms)


fig, axes = plt.subplots(figsize=(8, 1.3))
ends_ms = [end_ms(sent_by_tree), end_ms(sent_in_turn)]
bars = axes.barh(["by tree", "one by one"], ends_ms, color="#0072B2")
axes.bar_label(bars, fmt="{:,.0f} ms", padding=4)
axes.set(xlim=(0, 1.2 * max(ends_ms)), xlabel="ms until all ranks have the tensor")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Two rounds instead of three. With 1,024 ranks it is 10 rounds instead of 1,023.

# %% [markdown]
# ## 6. Break it
#
# Sooner or later your ranks will stand still. On a cluster you then see nothing at all, for minutes.
# Here you are told who waits where. Two neighbours swap their numbers:


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
# Both send first. A send returns when the other end takes the message, and nobody does: both are
# still sending. That is a **deadlock**. Worse, some libraries buffer small messages: there the same
# program runs, until one day the tensors are larger. The MPI standard calls such a program
# *unsafe*.
#
# In the message, `group default` is the group of all ranks, `0->1` says from whom to whom, `tag 0` is
# the label that a message has if you give none, and `message 1` the first one of these.
#
# The second classic: ranks that call different collectives.


# %%
def disagree():
    comm = Comm()
    x = torch.ones(3)
    if comm.rank == 0:
        comm.broadcast(x)  # "only rank 0 has to send, has it not?"
    else:
        comm.all_reduce(x)


# %% tags=["raises-exception"]
pair.run(disagree)

# %% [markdown]
# Every rank of a group must call the same collectives, in the same order, with the same shapes. An
# `if rank == 0:` around a collective is the commonest bug in distributed code. Look at the message:
# each rank, its operation, its line.

# %% [markdown]
# ## 7. Build it
#
# Your functions get `comm`, this rank's door. It knows `comm.rank` and `comm.size`, and it moves
# tensors, nothing else. A check runs your function on real ranks and tells you what is wrong. Try a
# wrong answer, too.
#
# | call | what it does |
# |---|---|
# | `comm.send(x, dst)`, `comm.recv(x, src)` | `x` of one rank goes into `x` of another |
# | `comm.all_reduce(x)` | `x` becomes the sum of all ranks' `x` |
# | `comm.all_reduce(x, op="max")` | the same with the largest, element by element |
# | `comm.broadcast(x, src)` | the `x` of rank `src` becomes everybody's |
# | `comm.all_gather(outs, x)` | `outs`, a list of n tensors, becomes the `x` of rank 0, 1, ... |
#
# `help(Comm)` lists all of them.

# %% [markdown]
# ### Exercise 1: The average
#
# Each rank has a number, a Python float. Put it into a tensor first. Return the mean of all of them,
# on every rank, with a single all-reduce.


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
# Ranks 0 and 1, 2 and 3, ... exchange a tensor. Return your partner's. Nobody may hang: who sends
# first, and who receives first?


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
# The `x` of rank 0 becomes everybody's, in place, for any number of ranks. Use `send` and `recv`
# alone, and send no byte too many. One by one is enough. Bonus: a tree.


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
# Your broadcast on the slow wires. One by one it takes three rounds, with a tree two, and here the
# rounds show, since each message is a call of its own:

# %%
slow.run(lambda: Comm().barrier())  # all ranks are awake
with record() as of_mine:
    slow.run(lambda: my_broadcast(Comm(), torch.ones(2**18)))
plot.timeline(of_mine)

# %% [markdown]
# ### Exercise 4, open: Where is the maximum?
#
# Each of 4 ranks has 1,000 values. Return `(rank, index)` of the largest of all, on every rank. Two
# values may lie as close as float32 can.
#
# The score is the bytes that all ranks really send, together: fewer is better. A number of
# `torch.uint8` takes 1 byte, of `torch.int16` 2, of `torch.float32` 4. What the operations send on
# 4 ranks, if `x` has S bytes:
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
# What you called a world is started by a *launcher* elsewhere. It starts one process per device
# and tells each its rank, mostly by environment variables.
#
# | tool | start 4 ranks | a rank asks |
# |---|---|---|
# | torchrun | `torchrun --nproc-per-node 4 train.py` | `dist.get_rank()`, or `RANK`, `WORLD_SIZE` |
# | DeepSpeed | `deepspeed --num_gpus 4 train.py` | `deepspeed.comm.get_rank()` |
# | Accelerate | `accelerate launch --num_processes 4 train.py` | `accelerator.process_index` |
# | MPI | `mpirun -np 4 program` | `MPI_Comm_rank`, `MPI_Comm_size` |
# | labkit | `World(4)`, or any of these | `Comm().rank`, `Comm().size` |

# %% [markdown]
# The operations have nearly the same names everywhere, since all follow MPI:
#
# | here | torch.distributed | MPI |
# |---|---|---|
# | `comm.send`, `comm.recv` | `dist.send`, `dist.recv` | `MPI_Send`, `MPI_Recv` |
# | `comm.broadcast` | `dist.broadcast` | `MPI_Bcast` |
# | `comm.all_reduce` | `dist.all_reduce` | `MPI_Allreduce` |
#
# What the tools add: machines that are found and watched, ranks that are started again when one
# dies, logs of a thousand ranks. What they lack: a hang there is silence until a timeout, 10
# minutes with NCCL in torch.

# %% [markdown]
# **You can now** start ranks, let them talk in both ways, count what they send, and read a hang.
