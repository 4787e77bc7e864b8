# %% [markdown]
# # Lab 12: Moving tensors
#
# A model need not be where it computes. Its weights can wait in CPU memory and come over a bus, at
# a price: the bus is a hundred times slower than the device's own memory. In this lab you find out
# which way over the bus is fastest and why, and hide what is left behind computing.
#
# You need lab 03 (bandwidth), lab 06 (the clock) and lab 09 (fp16). A GPU is not needed: where there
# is none, a **paced bus** stands for PCIe. It copies real bytes, and delivers them no sooner than a
# bus of its rate would.

# %%
import torch
from torch import nn

from labkit import Bus, Transfer, Waiting, load_then_run, plot, run_in_place, run_pipelined
from labkit import predict as formulas
from labkit.bench import show_stored
from labkit.course import predict, report, show
from labkit.labs.lab_12 import checks as check
from labkit.labs.lab_12.offload import models
from labkit.memory.timing import measure, rates_of
from labkit.memory.transfers import Rates

# %% [markdown]
# ## 1. The question
#
# Eight blocks of a model. Together they are too large for the device; its memory takes two. So the
# weights wait in CPU memory, and come over the bus when they are needed:

# %%
torch.manual_seed(0)
WIDTH, BLOCKS, TOKENS = 384, 8, 128


def block():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


bus = Bus(gbps=2)  # a quarter of a GB per second, paced
waiting = Waiting([block() for _ in range(BLOCKS)], bus)
x = torch.randn(TOKENS, WIDTH)


# %%
def seconds_of(run):
    """When it was over; and how long its blocks computed."""
    ended_s = max(span.ended_s for span in run.trace.ranks[0].spans)
    return ended_s, sum(span.ended_s - span.began_s for span in run.computed)


load_then_run(waiting, x)  # caches are cold
first = load_then_run(waiting, x)
all_s, computing_s = seconds_of(first)
print(f"{all_s * 1e3:.0f} ms, of which the device computes {computing_s / all_s:.0%}")

# %% [markdown]
# The rest of the time it stands still and waits for weights; and in the end it holds the whole model
# after all. **What does a tensor cost on its way, and how much of that must anybody wait for?**

# %% [markdown]
# ## 2. The idea
#
# Where can a number be, and how fast does it move? (One GPU server, bytes per second.)
#
# ```
#   CPU memory  ════════════ bus ════════════  GPU memory ═══ computes
#      │          PCIe 4.0, 16 lanes:  31.5 GB/s       3,350 GB/s (H100)
#      │          PCIe 5.0, 16 lanes:  63 GB/s
#      └── cast, copy: some 10 to 100 GB/s
# ```
#
# Only the bytes that cross the bus are dear. fp32 numbers that end as fp16 can cross as 4 bytes, and
# be cast after it, or be cast before it and cross as 2:
#
# ```
#   cast before    read 4, write 2 here  |  2 over the bus  |
#   cast after                           |  4 over the bus  |  read 4, write 2 there
# ```

# %% [markdown]
# **Pinned.** The system may move a page of memory to disk at any time, so a bus cannot read it by
# itself. Memory that is *pinned* (page-locked) stays. From *pageable* memory the driver copies
# piece by piece into a pinned buffer of its own:
#
# ```
#   pageable   memory ── copied by the CPU ──> pinned buffer ── bus ──> device
#   pinned     memory ───────────────────────────────────────── bus ──> device
# ```
#
# **Non-blocking.** From pinned memory the bus works alone, and the program can go on. It must then
# wait before it uses what it has asked for. From pageable memory it cannot go on: it is the one that
# copies.

# %% [markdown]
# **Pipelined.** Nobody needs block 5 before block 4 has computed. While one computes, load the next
# one; two buffers are enough:
#
# ```
#   load, then run   bus       | 0 | 1 | 2 | 3 |
#                    compute                   | 0 | 1 | 2 | 3 |
#
#   pipelined        bus       | 0 | 1 | 2 | 3 |
#                    compute       | 0 | 1 | 2 | 3 |
#                    buffer      A   B   A   B   is filled; the other one computes
# ```
#
# **In place.** A GPU's kernels can read pinned memory over the bus as they compute (*zero-copy*).
# Nothing is held; but what is read twice crosses twice.

# %% [markdown]
# ### Glossary
#
# | English | 中文 | definition |
# |---|---|---|
# | bus (PCIe) | 总线（PCIe） | the connection between CPU memory and a device |
# | host, device | 主机、设备 | the CPU with its memory; the GPU with its memory |
# | pinned (page-locked) memory | 锁页内存 | host memory that the system does not move, so that a GPU can copy it by DMA |
# | pageable memory | 可分页内存 | ordinary memory, which the operating system may move or swap |
# | DMA, copy engine | 直接内存访问、拷贝引擎 | hardware that copies memory while the processor computes |
# | non-blocking, asynchronous | 非阻塞、异步 | the call returns before the operation is complete |
# | stream, event | 流、事件 | a queue of work for a GPU; a marker in it |
# | cast | 类型转换 | conversion of a tensor to another dtype |
# | prefetch | 预取 | fetch data before it is needed |
# | double buffering | 双缓冲 | one buffer is filled while the other is in use |
# | zero-copy | 零拷贝 | the device reads host memory in place, over the bus |
# | offload | 卸载（到主机内存） | keep tensors in CPU memory until the device needs them |
#
# The terms of all labs: [GLOSSARY.md](../GLOSSARY.md).

# %% [markdown]
# ## 3. Predict
#
# A million fp32 numbers are wanted as fp16 on the other side: how many bytes cross the bus, cast
# before and cast after? And how many bytes of weights does the device hold at most, in the three
# ways to run our 8 blocks (`ahead` 1 when pipelined)? A block has this many bytes:

# %% tags=["nbval-check-output"]
B = waiting.nbytes[0]
print(f"{B:,} bytes a block, {sum(waiting.nbytes):,} in all")

# %% stub="crossing = predict(before_bytes=..., after_bytes=...)\nheld = predict(load_then_run_bytes=..., pipelined_bytes=..., in_place_bytes=...)" tags=["nbval-check-output"]
### BEGIN SOLUTION
N = 1_000_000
crossing = predict(before_bytes=2 * N, after_bytes=4 * N)
held = predict(load_then_run_bytes=BLOCKS * B, pipelined_bytes=2 * B, in_place_bytes=0)
### END SOLUTION
print(crossing, held, sep="\n")

# %% [markdown]
# And the time, for n blocks that load in L and compute in C? Load-then-run takes n L + n C. Pipelined,
# the first load and the last computing have nothing beside them; in between, the longer one counts:
#
# ```
#   L + (n - 1) max(L, C) + C
# ```

# %% [markdown]
# ## 4. Read it
#
# The paced bus. Its engine, a separate thread, copies chunk by chunk, no sooner than a bus would:

# %%
show("memory/bus.py:Bus._carry", since="event.began_s")

# %% [markdown]
# A way to move a tensor is data, a `Transfer`. What it goes through:

# %%
show("memory/transfers.py:Transfer.parts")

# %% [markdown]
# Each part is so many bytes in a memory or over a bus. Divide by what these reach, add up: that is
# the whole model.

# %%
show("memory/transfers.py:Rates.predict_s")

# %% [markdown]
# The pipeline. Look at the order: the load of block k + 1 is issued *before* block k computes, and
# *after* block k - 1 has computed, since it goes into its buffer.

# %%
show("memory/loading.py:run_pipelined", since="runner = _Runner(waiting, min")

# %% [markdown]
# ## 5. Run it
#
# ### The order of cast and copy
#
# 8 MB of fp32 inside the CPU's memory, over our bus, and back, all timed in turns. Some of these ways
# have one part only: they give the rates by which the model predicts the others.

# %%
fp32, fp16 = torch.float32, torch.float16
NUMEL = 2_000_000
alone = [Transfer("cpu", "cpu"), Transfer("cpu", "cpu", fp32, fp16)]
orders = [
    Transfer("cpu", "paced", fp32, fp32, pinned=True),
    Transfer("cpu", "paced", fp32, fp16, "before", pinned=True),
    Transfer("cpu", "paced", fp32, fp16, "after", pinned=True),
    Transfer("cpu", "paced", fp32, fp16, "before"),
    Transfer("cpu", "paced", fp32, fp32, pinned=True, non_blocking=True),
    Transfer("cpu", "paced", fp32, fp32, non_blocking=True),
]
back = [
    Transfer("paced", "cpu", fp32, fp32, pinned=True),
    Transfer("paced", "cpu", fp32, fp16, "before", pinned=True),
    Transfer("paced", "cpu", fp32, fp16, "after", pinned=True),
]
measured = measure(alone + orders + back, NUMEL, bus, turns=5)
rates = rates_of(measured, paced_gbps=2)

# %%
plot.transfers(measured, rates)

# %% [markdown]
# Cast before, and half of the bytes cross: the cast costs less than they do, since memory is so much
# faster than this bus. No way passes the black line: its bytes, at the rate of the bus.
#
# The diamond: a **pinned** non-blocking call is back at once. The row of the **pageable** one has no
# diamond: whatever it asked for, it returned only when the data had arrived; its program copied.

# %% tags=["nbval-check-output"]
moved = []
for cast in ("before", "after"):
    sent_before = bus.moved_bytes
    measure([Transfer("cpu", "paced", fp32, fp16, cast, pinned=True)], 1_000_000, bus, turns=1)
    moved.append((bus.moved_bytes - sent_before) // 2)  # of two turns
crossing.beside(before_bytes=moved[0], after_bytes=moved[1])

# %% [markdown]
# Is "before" always best? Not where the bus is fast and the CPU that casts is slow. The same model,
# for a CPU that casts at 20 GB/s, and a GPU's memory of 3,350 GB/s:


# %%
SERVER = {("cast", "cpu"): 20e9, ("cast", "cuda:0"): 3350e9}  # bytes per second


def on_paper(cast, bus_gb_per_s, numel=250_000_000):
    its = Rates({**SERVER, ("bus", "cpu → cuda:0"): bus_gb_per_s * 1e9})
    way = Transfer("cpu", "cuda:0", fp32, fp16, cast, pinned=True)
    return its.predict_s(way, numel) * 1e3


# %% tags=["nbval-check-output"]
print("bus, GB/s   before   after   (ms for 1 GB of fp32)")
for bus_gb_per_s in (1, 4, 6.7, 12, 25, 55):
    before_ms, after_ms = (on_paper(cast, bus_gb_per_s) for cast in ("before", "after"))
    best = "before" if before_ms < after_ms else "after"
    print(f"{bus_gb_per_s:>9} {before_ms:>8.0f} {after_ms:>7.0f}   cast {best}")

# %% [markdown]
# Before wins while 2 / bus > 6 / here - 6 / there: a bus slower than a third of what the CPU casts.
# On the way **back**, from GPU to CPU, the fast memory casts first *and* fewer bytes cross: there,
# before is always best. If weights cross often, cast them once, and keep the fp16 copy.

# %% [markdown]
# What `labkit bench transfers` has measured on machines with a GPU, for copies that block; and this
# machine's, if it has one. Where nothing is cast, pinned memory reaches the limit of the bus. Pageable
# memory takes several times as long; on the H100, copies to the GPU take three times what the model
# predicts (8.0 ms against 2.7). And the two bars that are cut off are casts left to torch on the way
# back: a copy that blocks brings fp32 into new CPU memory, and casts there.

# %%
show_stored("transfers")
if torch.cuda.is_available():
    ends = dict(source="cpu", target="cuda:0", dtype=fp32, pinned=True)
    inside = Transfer("cuda:0", "cuda:0", fp32, fp16)
    gpus = [Transfer(**ends), *(Transfer(**ends, to=fp16, cast=c) for c in ("before", "after"))]
    display(plot.transfers(measure([*alone, inside, *gpus], 16_000_000)))

# %% [markdown]
# ### Three ways to run a model that waits

# %%
runs = {
    "load, then run": load_then_run(waiting, x),
    "pipelined": run_pipelined(waiting, x),
    "in place": run_in_place(waiting, x),
}
plot.loading(runs)

# %% [markdown]
# Brown is the bus, blue computes, the pale bars are waits. Same numbers? And what did each hold?

# %% tags=["nbval-check-output"]
values = [run.value for run in runs.values()]
print("equal:", all(torch.equal(value, values[0]) for value in values))
names = ("load_then_run_bytes", "pipelined_bytes", "in_place_bytes")
held.beside(**dict(zip(names, (run.held_bytes for run in runs.values()))))

# %% [markdown]
# The times beside the formulas. L is what the bus says, C what a block computed in the first run (a
# machine that is busy with other things computes slower in one of them):

# %%
L, C = [bus.seconds(nbytes) for nbytes in waiting.nbytes], [computing_s / BLOCKS] * BLOCKS
formula = {
    "load_then_run_ms": formulas.load_then_run_s(L, C) * 1e3,
    "pipelined_ms": formulas.pipelined_loading_s(L, C) * 1e3,
    "in_place_ms": formulas.in_place_s(L, C) * 1e3,
}
times = [seconds_of(run)[0] * 1e3 for run in runs.values()]
formulas.table(formula=formula, measured=dict(zip(formula, times)))

# %% [markdown]
# With one pass, in place is as fast as pipelined, and holds nothing. What if a kernel comes back to
# the weights? A product of many rows does, once for each tile of rows that does not fit its caches.

# %% tags=["nbval-check-output"]
print("reads   in place   pipelined   (s; 8 blocks, L = 2 s, C = 3 s)")
for reads in (1, 2, 4):
    in_place_s = formulas.in_place_s([2.0] * 8, [3.0] * 8, reads=reads)
    pipelined_s = formulas.pipelined_loading_s([2.0] * 8, [3.0] * 8)
    print(f"{reads:>5} {in_place_s:>10.0f} {pipelined_s:>11.0f}")

# %% [markdown]
# And if the bus is slower than the computing, no pipeline helps: L is what each block takes. Then
# compute more with each load: more rows, more tokens at a time. That is how models larger than the
# GPU are served.

# %% [markdown]
# ## 6. Break it
#
# ### Read too early
#
# Means of three batches, as somebody wrote it for speed. All batches are full of one number: 1, 2
# and 3. Read it, guess, then run it.


# %%
def means(bus, batches):
    there, found = torch.zeros(100_000), []
    for batch in batches:
        bus.copy(there, batch)  # returns at once, as non_blocking=True does
        found.append(there.mean().item())
    return found


# %%
means(Bus(gbps=0.1), [torch.full((100_000,), k) for k in (1.0, 2.0, 3.0)])

# %% [markdown] tags=["answer"]
# Zeros, or numbers from a batch before: nothing waits. And no error, since `there` is a tensor like
# any other. With `x.to("cuda", non_blocking=True)` one gets away with it: whatever the GPU does next is
# queued behind the copy. With `x.to("cpu", non_blocking=True)` one does not: the *CPU* reads, and it
# is in no queue. Wait for an event, or call `torch.cuda.synchronize()`, before.

# %% [markdown]
# ### One buffer too few
#
# The pipeline, with one buffer of constant size for everything. It waits for each load. What is
# wrong?


# %%
def with_one_buffer(bus, blocks, x):
    buffer = torch.empty_like(blocks[0])
    arrivals = [bus.copy(buffer, blocks[0])]
    for k in range(len(blocks)):
        arrivals[k].wait()
        if k + 1 < len(blocks):
            arrivals.append(bus.copy(buffer, blocks[k + 1]))  # while block k computes
        for _ in range(50):  # computing takes a while
            x = x + buffer.mean() / 50
    return x.item()


# %%
weights = [torch.full((100_000,), float(k)) for k in (1, 2, 3, 4)]
print("1 + 2 + 3 + 4 =", round(with_one_buffer(Bus(gbps=4), weights, torch.zeros(())), 3))

# %% [markdown] tags=["answer"]
# The load of block k + 1 goes where block k still computes: its later products use weights of its
# neighbour. How wrong it is depends on who is faster. On a GPU the same happens between two streams,
# unless the copy's stream waits for the one that computes (`copy_stream.wait_stream(...)`).

# %% [markdown]
# ### The pin that got lost
#
# ```
# batch = batch.pin_memory()
# batch.half().to("cuda", non_blocking=True)
# ```
#
# Cast before, pinned, non-blocking: all three, and yet the program copies, piece by piece. Where is
# the pin?

# %% [markdown] tags=["answer"]
# `batch.half()` is a new tensor, in pageable memory. A cast keeps the pin only if it writes into a
# pinned buffer: `packed = torch.empty(n, dtype=torch.half, pin_memory=True)` once, then
# `packed.copy_(batch)`. labkit's `Rig` does that. And before you cast into `packed` again, the copy
# out of it must be over.

# %% [markdown]
# ## 7. Build it
#
# ### Exercise 1: The order
#
# Bring the fp32 numbers `x` over the bus, and return them as fp16 on the other side, in whichever
# order is sooner. The three rates are bytes per second: of the bus, and of a cast (bytes read and
# written) here and there. `bus.copy(there, x)` starts a copy into a tensor of the same dtype and
# shape, and returns an arrival, which has `wait()`.


# %%
def bring_half(bus, x, bus_rate, here_rate, there_rate):
    ### BEGIN SOLUTION
    before = 6 / here_rate + 2 / bus_rate
    after = 4 / bus_rate + 6 / there_rate
    if before < after:
        x = x.half()
    there = torch.empty_like(x)
    bus.copy(there, x).wait()
    return there.half()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.bring_half(bring_half)

# %% [markdown]
# ### Exercise 2: Prefetch
#
# A generator that yields the weights of blocks 0 to n - 1, in order. `load(k)` starts the load of
# block k; its `wait()` returns the weights. While the caller uses block k, the next `ahead` blocks
# are under way, as far as there are any. But there are only `ahead + 1` buffers: never more blocks
# at a time, loaded or under way. A block is given back when the caller asks for the next one.


# %%
def prefetched(load, n, ahead):
    ### BEGIN SOLUTION
    coming = [load(k) for k in range(min(ahead, n))]
    for k in range(n):
        if k + ahead < n:
            coming.append(load(k + ahead))
        yield coming.pop(0).wait()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.prefetched(prefetched)

# %% [markdown]
# ### Exercise 3: Double buffering
#
# Now with real bytes. `blocks` are flat fp32 tensors of **different** lengths in CPU memory.
# `compute(k, weights, x)` returns the x after block k; `weights` must be as long as block k, and stay
# as they are while it runs. Load the next block meanwhile, hold two buffers and no more, and return
# the last x.


# %%
def double_buffered(bus, blocks, compute, x):
    ### BEGIN SOLUTION
    largest = max(block.numel() for block in blocks)
    buffers = [torch.empty(largest), torch.empty(largest)]

    def load(k):
        part = buffers[k % 2][: blocks[k].numel()]
        return part, bus.copy(part, blocks[k])

    part, coming = load(0)
    for k in range(len(blocks)):
        mine, arrival = part, coming
        if k + 1 < len(blocks):
            part, coming = load(k + 1)
        arrival.wait()
        x = compute(k, mine, x)
    return x
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.double_buffered(double_buffered)

# %% [markdown]
# ### Exercise 4, open: What stays
#
# The device has room for about half of a model. Some blocks stay on it; the others come over the
# bus in every pass, in `ahead + 1` buffers as large as the largest of them. Return `(keep, ahead)`:
# a set of numbers of blocks, and how many are loaded ahead. `model.nbytes` and `model.compute_us`
# have an entry for each block; every fourth is large. `model.held_bytes(keep, ahead)` must not exceed
# `model.cap_bytes`. Your score is the time of a pass, for few tokens and for many:

# %%
show("labs/lab_12/offload.py:Offloaded.pass_us")

# %% [markdown]
# Where you begin, with nothing kept; and what no plan can go below:

# %% tags=["nbval-check-output"]
for model in models():
    begin_ms, computing_ms = model.pass_us(set(), 1) / 1e3, sum(model.compute_us) / 1e3
    size = f"{sum(model.nbytes) / 1e9:.1f} GB, of which {model.cap_bytes / 1e9:g} fit"
    print(f"{model.name:<12} {size}: {begin_ms:.0f} ms; computing alone {computing_ms:.0f} ms")


# %%
def plan(model):
    ### BEGIN SOLUTION
    found = []
    for ahead in (1, 2, 3):
        keep = set()
        while True:  # take in what helps most, as long as there is room
            more = [keep | {k} for k in range(len(model.nbytes)) if k not in keep]
            more = [one for one in more if model.held_bytes(one, ahead) <= model.cap_bytes]
            if not more:
                break
            keep = min(more, key=lambda one: model.pass_us(one, ahead))
        found.append((keep, ahead))
    return min(found, key=lambda one: model.pass_us(*one))
    ### END SOLUTION


# %% tags=["nbval-check-output"]
check.plan(plan)

# %% [markdown]
# Ideas for more: the largest block decides how large every buffer is. Where does the bus stand
# still, and which kept block would let it run on?

# %% tags=["nbval-check-output"]
report("12")

# %% [markdown]
# ## 8. In the wild
#
# | what | the call | what it is here |
# |---|---|---|
# | torch | `x.to("cuda", non_blocking=True)` after `x.pin_memory()` | `bus.copy`, an arrival that the stream waits for |
# | torch | `DataLoader(pin_memory=True)` | a thread that pins batches ahead of you |
# | torch | `with torch.cuda.stream(s): ...`, `s.wait_stream(t)`, `event.record()` | labkit's `StreamBus` |
# | torch | `torch.load(path, mmap=True)` | in place: pages come from the file when read |
# | Accelerate | `device_map="auto"`, `cpu_offload(model)` | load when needed, by hooks; nothing ahead |
# | DeepSpeed | ZeRO-Inference: stage 3, `"offload_param": {"device": "cpu", "pin_memory": true}` | pipelined; prefetch by `"stage3_prefetch_bucket_size"` |
# | FlexGen | `--percent` | exercise 4, for weights, caches and activations, as a linear program |
# | CUDA | unified memory, `cudaMallocManaged` | in place, and pages move to who touches them |

# %% [markdown]
# And where does torch cast, if you leave it to `x.to("cuda", torch.float16)`? Blocking on the CPU,
# before the copy; with `non_blocking=True` on the GPU, so that 4 bytes a number cross. Back to the
# CPU it is the other way round: blocking casts on the CPU, *after* 4 bytes crossed. Say the order
# yourself: `x.half().to("cpu")`.
#
# The same in labkit's words, for each direction:

# %% tags=["nbval-check-output"]
for ends in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
    for non_blocking in (False, True):
        way = Transfer(*ends, fp32, fp16, non_blocking=non_blocking)
        call = "non-blocking" if non_blocking else "blocking"
        print(f"{ends[0]:>6} → {ends[1]:<6}  {call:<12}  cast {way.casts}")

# %% [markdown]
# What they add: DeepSpeed and FlexGen also keep weights on disk, and overlap three levels at a time
# (lab 19 takes that up). Pinned memory is taken from all other programs, and pinning takes longer than
# a copy: pin once, and reuse.
#
# Sources: NVIDIA, *CUDA C++ Best Practices Guide*, "Data Transfer Between Host and Device"; PyTorch,
# `aten/src/ATen/native/cuda/Copy.cu`; Rajbhandari et al., *ZeRO-Infinity*, 2021 (arXiv 2104.07857),
# section 6.2; Sheng et al., *FlexGen*, 2023 (arXiv 2303.06865), section 4; PCI-SIG, PCI Express base
# specifications 4.0 and 5.0; NVIDIA H100 datasheet.

# %% [markdown]
# **You can now** say what a tensor's way costs before you send it, hide the rest behind computing in
# two buffers, and name the three calls that look asynchronous and are not.
