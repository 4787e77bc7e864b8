from dataclasses import replace

from answers import Solution, right, wrong
from labkit import Layout

from .scenarios import JOBS

# ---- held_bytes(sizes, layout, global_batch, layer_bytes)

IN_FLIGHT = "min(m, p if v == 1 else p * (1 + (p - 1) / (p * v)))"

Solution("18.held_bytes").slips("""
by_the_library
    min(m, p if v == 1 else p * (1 + (p - 1) / (p * v))) ->
        formulas.interleaved(p, m, 1, 2, v).peak_microbatches
forgets_tp: shards each matrix over tp ranks
    / layout.tp ->
forgets_the_embedding: 12 w² parameters per layer and w v in the embedding
    + sizes.vocab * sizes.width ->
all_layers_on_each_stage: A stage has only 1/pp of the layers
    width**2 * layers -> width**2 * sizes.depth
forgets_the_master_copy: two moments and the master copy take 12 bytes
    12 * numbers -> 8 * numbers
never_shards: ZeRO-1 shards the optimizer state over the replicas
    layout.dp if layout.zero else 1 -> 1
always_shards: Without ZeRO, each replica holds the whole
    layout.dp if layout.zero else 1 -> layout.dp
shards_gradients: ZeRO-1 shards neither
    "gradients": 2 * numbers -> "gradients": 2 * numbers / (layout.dp if layout.zero else 1)
gpipe: GPipe holds all m micro-batches
    min(m, p if v == 1 else p * (1 + (p - 1) / (p * v))) -> m
one_microbatch: This is one micro-batch
    min(m, p if v == 1 else p * (1 + (p - 1) / (p * v))) -> 1
p_always: how many more are held with chunks
    min(m, p if v == 1 else p * (1 + (p - 1) / (p * v))) -> p
one_layer: This is one layer
    layers * in_flight -> in_flight
returns_nothing: held_bytes returned None
    return None
returns_the_sum: a dict of bytes: parameters, gradients
    return { -> return sum({
    } -> }.values())
""")

# ---- step_s(layout, global_batch, forward_s, tensor_s)

Solution("18.step_s").slips("""
no_bubble: Add the bubble
    (m + (layout.pp - 1) / layout.chunks) -> m
a_stage_too_many: The last stage starts p - 1 forwards after the first
    (layout.pp - 1) / layout.chunks -> layout.pp
forgets_chunks: Chunks make the bubble shorter
    / layout.chunks ->
forgets_replicas: A replica has only its own rows
    layout.microbatches(global_batch) -> global_batch / layout.microbatch
forgets_recompute: Recompute adds a forward
    backward += forward -> pass
recomputes_without_waiting: waits for its collectives again
    backward += forward -> backward += forward_s
twice_the_collectives: A backward waits for as many collectives as a forward
    2 * forward_s + tensor_s -> 2 * (forward_s + tensor_s)
hides_collectives: Add the time in which a stage waits for collectives
    forward = forward_s + tensor_s ->
        tensor_s = 0
        forward = forward_s + tensor_s
backward_never_waits: A backward waits for tensor parallelism, too
    2 * forward_s + tensor_s -> 2 * forward_s
any_string_is_true: compare it with "full"
    layout.recompute == "full" -> layout.recompute
no_return: a step takes None
    return None
one_percent_more: (m + (p-1)/v) times
    return -> return 1.01 *
by_the_formula_of_the_library
    (m + (layout.pp - 1) / layout.chunks) * (forward + backward) ->
        formulas.interleaved(layout.pp, m, forward, backward, layout.chunks).step_s
""")

# ---- mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens)

Solution("18.mfu_and_days").slips("""
hardware: it is hardware utilization (HFU)
    (L * (24 -> (4 / 3 * L * (24
in_percent: not a percentage
    return mfu -> return 100 * mfu
hours: a day has 86,400 seconds
    / 86400 -> / 3600
in_whole_steps
    tokens / positions -> -(-tokens // positions)
forward_only: Backward takes twice the FLOPs of forward
    3 * positions -> positions
one_gpu: This is the peak of one GPU
    layout.ranks * ->
one_replica: Include the GPUs of the dp axis
    layout.ranks -> layout.tp * layout.pp
six_n_d: include attention's two matmuls
    (L * (24 * w**2 + 4 * s * w) + 2 * w * v) -> 24 * L * w**2
rows_of_a_replica: rows of all replicas
    tokens / positions -> tokens / (positions / layout.dp)
mfu_only: two numbers: (mfu, days)
    return mfu, tokens / positions * step_s / 86400 -> return mfu
""")

# ---- can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes)

Solution("18.can_run").slips("""
any_number_of_ranks: expected: False: the sizes do not match
    layout.ranks != gpus or ->
any_heads: 24 heads are not divisible by 16
    or sizes.heads % layout.tp ->
forgets_the_chunks: stages of 2 chunks
    (layout.pp * layout.chunks) -> layout.pp
any_rows: 480 rows over
    if global_batch % (layout.dp * layout.microbatch): -> if False:
any_groups: micro-batches for
    if layout.chunks > 1 and -> if False and
ignores_memory: False: it needs
    sum(held.values()) <= budget_bytes -> True
powers_of_two_only: any number of ranks that divides
    if layout.ranks != gpus ->
        if any(n & (n - 1) for n in (layout.tp, layout.pp, layout.dp)):
            return False
        if layout.ranks != gpus
at_least_p_microbatches: True: all sizes divide evenly, and the layout fits in memory
    if layout.ranks != gpus ->
        if layout.microbatches(global_batch) < layout.pp:
            return False
        if layout.ranks != gpus
as_an_int: True or False
    sum(held.values()) <= budget_bytes -> int(sum(held.values()) <= budget_bytes)
""")

# ---- choose(job)

Solution("18.choose").slips("""
replicas_only: at most the 80 GB of a GPU
    return Layout(dp=job.cluster.size)
always_the_authors: 8 x 8 x 24 ranks on 96 GPUs
    return Layout(tp=8, pp=8, dp=24)
tensor_parallel_everywhere: is the network fast enough for this tp?
    return Layout(tp=16, pp=2, dp=job.cluster.size // 32, zero=1)
""")


def best_of(job):
    return next(BEST[name] for name, known in JOBS.items() if known == job)


@right("18.choose")
def from_memory(job):
    return best_of(job)


BEST = {
    "an odd cluster": Layout(tp=1, pp=2, dp=48, microbatch=2, chunks=4, zero=1),
    "a slow network": Layout(tp=4, pp=4, dp=4, microbatch=2, zero=1),
    "half the memory": Layout(
        tp=4, pp=2, dp=16, microbatch=2, chunks=8, zero=1, sequence=True
    ),
}  # fmt: skip


@wrong("18.choose", "choose returned None")
def does_not_return(job):
    best_of(job)


@wrong("18.choose", "expected: a Layout")
def three_numbers(job):
    return best_of(job).tp, best_of(job).pp, best_of(job).dp


@wrong("18.choose", "36 blocks are not divisible by 8")
def eight_stages(job):
    eight = Layout(tp=2, pp=8, dp=job.cluster.size // 16, zero=1)
    return eight if job.sizes.depth == 36 else best_of(job)


@wrong("18.choose", "zero=3: choose 0 (DDP) or 1")
def zero_3(job):
    return replace(best_of(job), zero=3)


@wrong("18.choose", "Which choice reduces the largest category")
def without_zero(job):
    return replace(best_of(job), zero=0)


@wrong("18.choose", "The layout computes every forward twice")
def recomputes(job):
    return replace(best_of(job), recompute="full")


@wrong("18.choose", "gradients are sent once per step")
def no_stages(job):
    tp = 2 if job.sizes.width == 6144 else 8
    return Layout(tp=tp, dp=job.cluster.size // tp, microbatch=2, zero=1)
